"""Records of texts and of token ids: a raw value becomes a record, or is dropped for a reason."""

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from data.clean import own_id
from data.conversation import Text, Tokens
from data.fields import (
    LABEL_FIELDS,
    TOKEN_FIELDS,
    check_media,
    first_present,
    has_value,
    is_undesirable,
    names_in_capitals,
    renamed,
    shown_fields,
    unread_of,
    without_surrogates,
)
from data.printable import printable
from data.reasons import LONE_SURROGATE, UNDESIRABLE, Drop
from data.untrusted_files import is_text

EMPTY_TEXT = "empty text"
NO_TEXT = "no `text`, nor `prompt` and `completion`"
NO_TOKENS = "no list of integers in `tokens` or `input_ids`"
PADDING = "padding cut off, by `attention_mask`"
PACKED = "several packed documents in a record (the data before packing would work): "
SHIFTED_LABELS = "`labels` that differ from the tokens (shifted by one?)"
OTHER_MASK = (
    "a field that may say which tokens are trained on (`fields: {NAME: loss_mask}` would read one "
    "with 1 for those that are): "
)
# What is trained on; the first one given is read (the last is OLMo's), otherwise:
_MASKS = ("loss_mask", "labels", "label_mask")
_TRL_MASKS = ("completion_mask", "assistant_masks")  # all are read, as in TRL
# Other names of masks, some of which (torchtune's `mask`) have 1 where a token is not trained on.
_MAYBE_MASK = re.compile(
    r"(?!.*attention|special_tokens_mask)(.*mask.*|loss_weights?|loss_scale)", re.IGNORECASE
)
# Where padding and documents are: by the positions, lengths, beginnings, ends and numbers of the
# documents, as TRL, torchtune, NeMo and transformers name them.
_POSITIONS = ("position_ids", "input_pos")
_LENGTHS = ("seq_lengths", "seq_lens")
_STARTS = ("seq_start_id",)
_BORDERS = ("cu_seqlens", "cu_seq_lens_q")
_NUMBERS = ("segment_ids", "seq_idx")
_PACKING = ("attention_mask", *_POSITIONS, *_LENGTHS, *_STARTS, *_BORDERS, *_NUMBERS)
_MISFITS = dict.fromkeys(_POSITIONS, "that are not consecutive")
_MISFITS |= dict.fromkeys(_LENGTHS, "that do not add up to the number of tokens")
_TEXT_FIELDS = ("text", "prompt", "completion", *LABEL_FIELDS)
_PART = 1 << 22  # tokens of an array in memory at a time
IGNORED_LABEL = -100  # transformers' label for a token that is not trained on


def parse_text(raw: object) -> tuple[Text, set[str], set[str]]:
    """Reads a text, or a prompt and its completion; also returns the changes and unread fields."""
    fields, written = _fields(raw, "text", _TEXT_FIELDS)
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
        prompt = without_surrogates(fields["prompt"])
        text, read = prompt + fields["completion"], {"prompt", "completion"}
    if not isinstance(text, str):
        raise Drop(NO_TEXT + _found_instead(raw, fields, written))
    if not text.strip():
        raise Drop(EMPTY_TEXT)
    changes = set() if all(is_text(fields[name]) for name in read) else {LONE_SURROGATE}
    text = without_surrogates(text)
    record_id, unread = _record_id(raw, text.encode()), _unread(raw, read, written)
    return Text(record_id, text, prompt=len(prompt)), changes, unread


def _found_instead(raw: object, fields: Mapping[str, Any], written: Mapping[str, Any]) -> str:
    """Returns what a record without a text has, for a message; see `_fields`."""
    if not isinstance(raw, dict):
        return ""
    if "text" in fields:
        kind = "null" if fields["text"] is None else f"of type {type(fields['text']).__name__}"
        return f": its `{written.get('text', 'text')}` is {kind}"
    return f": it has {shown_fields(raw)}"


def parse_tokens(raw: object) -> tuple[Tokens, set[str], set[str]]:
    """Reads token ids with loss mask or labels; also returns the changes and unread fields."""
    if isinstance(raw, np.memmap):
        return _parse_array(raw), set(), set()
    if isinstance(raw, dict):
        check_media(raw)
    fields, written = _fields(raw, "tokens", (*TOKEN_FIELDS, *_MASKS, *_TRL_MASKS, *_PACKING))
    name = first_present(fields, TOKEN_FIELDS) or TOKEN_FIELDS[0]
    tokens = _int32(fields.get(name))
    if tokens is None:
        if isinstance(raw, dict) and fields.keys().isdisjoint(TOKEN_FIELDS):
            raise Drop(f"{NO_TOKENS}: it has {shown_fields(raw)}")
        raise Drop(NO_TOKENS)
    first = first_present(fields, _MASKS)
    candidates = _TRL_MASKS if first is None else (first,)
    masks = [field for field in candidates if fields.get(field) is not None]
    mask = np.ones(len(tokens), bool)
    for field in masks:
        mask &= _mask(fields[field], field, tokens)
    if not masks:
        _check_other_masks(fields, len(tokens))
    kept = _without_padding(fields.get("attention_mask"), len(tokens))
    packing = {"attention_mask", *_read_packing(fields, kept, len(tokens))}
    changes = {PADDING} if kept != slice(0, len(tokens)) else set()
    tokens, mask = tokens[kept], mask[kept]
    unread = _unread(raw, {name, *masks, *packing}, written)
    return Tokens(_record_id(raw, tokens.tobytes()), tokens, mask), changes, unread


def _fields(raw: object, alone: str, known: Collection[str]) -> tuple[dict[str, Any], dict]:
    """Returns the fields of a record under the names in `known`, or a bare value as the field
    `alone`; and, by these names, how the record writes those that it has in capitals."""
    if not isinstance(raw, dict):
        return {alone: raw}, {}
    written = names_in_capitals(raw, known)
    return renamed(raw, {name: read for read, name in written.items()}), written


def _mask(value: object, name: str, tokens: Int32[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Returns which tokens are trained on, by the value of the record's field of this name."""
    if name != "labels":
        value = _with_flags(value)
    values = _int32(value, allow_bool=name != "labels")
    if values is None or len(values) != len(tokens):
        raise Drop(f"`{name}` that does not match the tokens")
    if name != "labels":
        if not np.isin(values, (0, 1)).all():
            raise Drop(f"`{name}` with numbers other than 0 and 1")
        return values.astype(bool)
    mask = values != IGNORED_LABEL
    # transformers shifts labels in the model: in a record each is the token at its own place.
    if (values[mask] != tokens[mask]).any():
        raise Drop(SHIFTED_LABELS)
    return mask


def _check_other_masks(fields: Mapping[Any, Any], count: int) -> None:
    """Raises Drop if a record without a mask that is read has another field for each token that may
    be one."""
    for name, value in fields.items():
        is_for_tokens = isinstance(value, list | np.ndarray) and len(value) == count
        if is_for_tokens and _MAYBE_MASK.fullmatch(str(name)):
            raise Drop(f"{OTHER_MASK}`{printable(str(name))[:80]}`")


def _without_padding(value: object, count: int) -> slice:
    """Returns which of a record's tokens are not padding, by its attention_mask, if it has one."""
    if not isinstance(value, np.ndarray) and not has_value(value):
        return slice(0, count)
    mask = _int32(_with_flags(value), allow_bool=True)
    if mask is None or len(mask) != count:
        raise Drop("`attention_mask` that does not match the tokens")
    if not np.isin(mask, (0, 1)).all():  # axolotl numbers the documents
        raise Drop(f"{PACKED}`attention_mask`")
    (places,) = mask.nonzero()
    if not len(places):
        raise Drop("`attention_mask` without a token")
    kept = slice(int(places[0]), int(places[-1]) + 1)
    if not mask[kept].all():
        raise Drop("`attention_mask` with a gap between tokens")
    return kept


def _with_flags(values: object) -> object:
    """Returns a list of numbers with integers for 0.0 and 1.0."""
    if isinstance(values, list):
        kinds = {*map(type, values)}
        if float in kinds and kinds <= {float, int, bool}:
            return [int(each) if each == 0 or each == 1 else each for each in values]
    return values


def _read_packing(fields: Mapping[str, Any], kept: slice, total: int) -> set[str]:
    """Returns the fields that say that a record is one document, as read here; raises Drop if they
    say that it is several, which would attend to each other.

    Args:
      fields: of the record.
      kept: the tokens that are not padding.
      total: the number of its tokens with padding.
    """
    values = {name: _int32(fields.get(name)) for name in _PACKING[1:]}
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        several, fits = _documents(name, value, kept, total)
        if not fits:
            raise Drop(f"`{name}` {_MISFITS.get(name, 'that does not match the tokens')}")
        if several:
            raise Drop(f"{PACKED}`{name}`")
    return {*given}


def _documents(
    name: str, value: Int32[np.ndarray, " n"], kept: slice, total: int
) -> tuple[bool, bool]:
    """Returns whether a field of _PACKING says that a record is several documents, and whether it
    is one of these tokens; other arguments as in `_read_packing`."""
    count, own = kept.stop - kept.start, value[kept]
    if name in _POSITIONS:
        several = bool((own[1:] == 0).any())
        return several, several or (len(own) == count and bool((np.diff(own) == 1).all()))
    if name in _LENGTHS:
        return len(value) > 1, value.sum() in (count, total)
    if name in _STARTS:
        return len(value) > 1, value[0] in (0, kept.start)
    if name in _BORDERS:
        return len(value) > 2, value[0] == 0 and value[-1] in (count, total)
    return bool((own[1:] != own[:-1]).any()), len(value) == total


def _parse_array(array: np.memmap) -> Tokens:
    """Returns the tokens of an array that stays on disk, all in the loss."""
    if not _is_int32(array):
        raise Drop(NO_TOKENS)
    digest = hashlib.sha256()
    for start in range(0, len(array), _PART):
        digest.update(array[start : start + _PART].astype(np.int32).tobytes())
    return Tokens(digest.hexdigest()[:16], array, np.broadcast_to(np.True_, len(array)))


def _unread(raw: object, read: set[str], written: Mapping[str, Any]) -> set[str]:
    """Returns a record's unread fields; `id` is read if it is an id.

    Args:
      read: the fields that are read.
      written: how the record writes their names, where it differs.
    """
    if not isinstance(raw, dict):
        return set()
    read = {written.get(name, name) for name in read}
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
    own = own_id(raw) if isinstance(raw, dict) else None
    return own or hashlib.sha256(content).hexdigest()[:16]
