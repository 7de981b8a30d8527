"""Records of texts and of token ids: a raw value becomes a record, or is dropped for a reason."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32

from data.clean import own_id
from data.conversation import Text, Tokens
from data.fields import is_undesirable, shown_fields, unread_of
from data.reasons import UNDESIRABLE, Drop

EMPTY_TEXT = "empty text"
NO_TEXT = "no `text`, nor `prompt` and `completion`"
NO_TOKENS = "no list of integers in `tokens` or `input_ids`"
BAD_MASK = "`loss_mask` or `labels` do not match the tokens"
SHIFTED_LABELS = "`labels` that differ from the tokens (shifted by one?)"
NOT_A_MASK = "`loss_mask` with numbers other than 0 and 1"
MASKS = ("loss_mask", "labels")
"""Fields that say which tokens are trained on; the first one given is read."""
_PART = 1 << 22  # tokens of an array in memory at a time
IGNORED_LABEL = -100  # transformers' label for a token that is not trained on


def parse_text(raw: object, source: int, number: int) -> tuple[Text, set[str]]:
    """Reads a text, or a prompt and its completion; also returns unread fields."""
    fields: dict[str, Any] = raw if isinstance(raw, dict) else {"text": raw}
    text, prompt, read = fields.get("text"), "", {"text"}
    if (
        text is None
        and isinstance(fields.get("prompt"), str)
        and isinstance(fields.get("completion"), str)
    ):
        if not fields["completion"].strip():
            raise Drop(EMPTY_TEXT)
        if is_undesirable(fields):
            raise Drop(UNDESIRABLE)
        prompt = _unicode(fields["prompt"])
        text, read = prompt + fields["completion"], {"prompt", "completion"}
    if not isinstance(text, str):
        raise Drop(NO_TEXT + (f": it has {shown_fields(fields)}" if isinstance(raw, dict) else ""))
    if not text.strip():
        raise Drop(EMPTY_TEXT)
    text = _unicode(text)
    record_id, unread = _record_id(raw, text.encode()), _unread(raw, read)
    return Text(record_id, text, source, number, len(prompt)), unread


def _unicode(text: str) -> str:
    """Returns a text with lone surrogates, which no tokenizer accepts, replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def parse_tokens(raw: object, source: int, number: int) -> tuple[Tokens, set[str]]:
    """Reads token ids with loss mask or labels; also returns unread fields."""
    if isinstance(raw, np.memmap):
        return _parse_array(raw, source, number), set()
    fields = raw if isinstance(raw, dict) else {"tokens": raw}
    name = "tokens" if "tokens" in fields else "input_ids"
    tokens = _int32(fields.get(name))
    if tokens is None:
        raise Drop(
            NO_TOKENS
            + (
                f": it has {shown_fields(fields)}"
                if isinstance(raw, dict) and name not in raw
                else ""
            )
        )
    mask_name = next((each for each in MASKS if fields.get(each) is not None), None)
    mask = np.ones(len(tokens), bool) if mask_name is None else _mask(fields, mask_name, tokens)
    return Tokens(_record_id(raw, tokens.tobytes()), tokens, mask, source, number), _unread(
        raw, {name, mask_name or name}
    )


def _mask(fields: Mapping[str, Any], name: str, tokens: Int32[np.ndarray, " n"]) -> np.ndarray:
    """Returns which tokens are trained on [n], by the record's field of this name, one of MASKS."""
    values = _int32(fields[name], allow_bool=name == "loss_mask")
    if values is None or len(values) != len(tokens):
        raise Drop(BAD_MASK)
    if name == "loss_mask":
        if not np.isin(values, (0, 1)).all():
            raise Drop(NOT_A_MASK)
        return values.astype(bool)
    mask = values != IGNORED_LABEL
    # transformers shifts labels in the model: in a record each is the token at its own place.
    if (values[mask] != tokens[mask]).any():
        raise Drop(SHIFTED_LABELS)
    return mask


def _parse_array(array: np.memmap, source: int, number: int) -> Tokens:
    """Returns the tokens of an array that stays on disk, all in the loss."""
    if not _is_int32(array):
        raise Drop(NO_TOKENS)
    digest = hashlib.sha256()
    for start in range(0, len(array), _PART):
        digest.update(array[start : start + _PART].astype(np.int32).tobytes())
    return Tokens(
        digest.hexdigest()[:16], array, np.broadcast_to(np.True_, len(array)), source, number
    )


def _unread(raw: object, read: set[str]) -> set[str]:
    """Returns a record's unread fields; `id` is read if it is an id."""
    if not isinstance(raw, dict):
        return set()
    return unread_of(raw, read | ({"id"} if own_id(raw) is not None else set()), "record")


def _int32(values: object, allow_bool: bool = False) -> Int32[np.ndarray, " n"] | None:
    """Returns a non-empty list or array of 32-bit integers as an array; None for anything else."""
    if not isinstance(values, list | np.ndarray) or len(values) == 0:
        return None
    if (
        not allow_bool
        and isinstance(values, list)
        and any(isinstance(value, bool) for value in values)
    ):
        return None  # among integers, numpy would convert them to 0 and 1
    try:
        array = np.asarray(values)
    except ValueError:
        return None
    return array.astype(np.int32) if _is_int32(array, allow_bool) else None


def _is_int32(array: np.ndarray, allow_bool: bool = False) -> bool:
    """Returns whether an array holds at least one number, and only 32-bit integers."""
    if array.ndim != 1 or not len(array) or array.dtype.kind not in ("iub" if allow_bool else "iu"):
        return False
    # Not abs(), whose value for the lowest int64 is negative.
    return array.min() >= -(2**31) and array.max() < 2**31


def _record_id(raw: object, content: bytes) -> str:
    """Returns the record's id or a hash of its content; never a path, since files may move."""
    return (own_id(raw) if isinstance(raw, dict) else None) or hashlib.sha256(content).hexdigest()[
        :16
    ]
