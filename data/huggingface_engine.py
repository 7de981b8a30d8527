"""The engine for tokenizer.json: Hugging Face's library tokenizers."""

import json
import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from data.added_tokens import (
    CONFIG,
    LISTED,
    AddedToken,
    is_tag,
    lacking,
    parse_object,
    tokens_with_ids,
    tokens_without_ids,
)
from data.errors import UserError, first_line
from data.spans import ControlToken, Spans, check_no_forbidden

# Unicode noncharacters, which occur in no real text: data.tokenizer replaces them in its input.
# Before a text that continues a conversation, GUARD keeps the library from treating it as a
# beginning.
GUARD = "\ufdd0\ufdd1\ufdd0"
# Characters that a tokenizer may make of one; published ones make a few.
MOST_GROWTH = 1_000


class Offsets(Sequence[tuple[int, int]]):
    """The positions of the tokens of a library's encoding, from token `first` on, less `shift`.

    An element is (start, end) in characters. Each is computed when it is read, because a search
    reads a few, and a list of all makes a tuple for every token of every text.
    """

    def __init__(self, encoding: Any, first: int, shift: int):
        self._encoding, self._first, self._shift = encoding, first, shift

    def __len__(self) -> int:
        return len(self._encoding) - self._first

    def __getitem__(self, token: Any) -> Any:
        if not 0 <= token < len(self):
            raise IndexError(token)
        start, end = self._encoding.token_to_chars(self._first + token)
        return start - self._shift, end - self._shift

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for start, end in self._encoding.offsets[self._first :]:
            yield start - self._shift, end - self._shift


class HuggingFace:
    """The tokenizers library with a tokenizer.json."""

    controls: dict[str, ControlToken]
    """The control tokens by their text."""
    vocab_size: int
    """1 + the highest id."""
    named_beside: dict[str, tuple]
    """Tokens by their text that the model file lacks and the files beside it name without an id, or
    with other properties: what encoding depends on, their id first."""

    def __init__(self, files: dict[str, bytes]):
        """Makes an engine from the contents of a tokenizer's files, by name."""
        from tokenizers import Tokenizer as Library

        self._spec = json.loads(files["tokenizer.json"])
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if _growth(self._spec.get(part)) > MOST_GROWTH:
                raise UserError(
                    f"the {part} of its tokenizer.json turns one character into more than "
                    f"{MOST_GROWTH:,}; a published tokenizer would work"
                )
        self._full = Library.from_str(
            json.dumps({**self._spec, "truncation": None, "padding": None})
        )
        self._add_tokens_beside(files)
        special = {token.content for token in tokens_with_ids(files).values() if token.special}
        self.controls = {
            token["content"]: ControlToken(
                token["content"],
                token["id"],
                (bool(token.get("lstrip")), bool(token.get("rstrip"))),
                bool(token.get("special")) or token["content"] in special,
            )
            for token in self._spec.get("added_tokens", [])
            if not _is_text(token)
        }
        self.vocab_size = max(self._full.get_vocab(with_added_tokens=True).values()) + 1

    def _add_tokens_beside(self, files: dict[str, bytes]) -> None:
        """Adds the tokens that only other files name, as transformers 5 does: an id that is taken
        or leaves a gap is ignored, and the next free one is given."""
        from tokenizers import AddedToken as LibraryToken

        self.named_beside = {}
        tokens = _tokens_to_add(self._spec.get("added_tokens", []), files)
        if not tokens:
            return
        before = self._full.get_vocab(with_added_tokens=True)
        self._full.add_tokens([LibraryToken(**token.options()) for token in tokens])
        self._spec["added_tokens"] = [
            {"id": token_id, **{name: getattr(token, name) for name in tokens[0].options()}}
            for token_id, token in sorted(self._full.get_added_tokens_decoder().items())
        ]
        texts = {token.content for token in tokens}
        self.named_beside = {
            token["content"]: (token["id"], token["content"] not in before, *_properties(token))
            for token in self._spec["added_tokens"]
            if token["content"] in texts
        }

    @property
    def punctuation(self) -> list[str]:
        """Added tokens of punctuation alone, such as Yi's full stop; earlier versions took them for
        control tokens."""
        return [
            token["content"]
            for token in self._spec.get("added_tokens", [])
            if _is_text(token) and {*token["content"]} & {*string.punctuation}
        ]

    @property
    def added_tokens(self) -> dict[str, dict[str, Any]]:
        """The added tokens as in tokenizer_config.json: their properties by id."""
        return {
            str(token["id"]): {name: value for name, value in token.items() if name != "id"}
            for token in self._spec.get("added_tokens", [])
        }

    def token_to_id(self, text: str) -> int | None:
        """Returns the id of the token with exactly this text, or None."""
        return self._full.token_to_id(text)

    def with_control_tokens(self, tokens: list[str]) -> dict[str, bytes]:
        """Returns the model file, by name, with control tokens appended to the vocabulary."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Library

        library = Library.from_str(json.dumps(self._spec))
        library.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in tokens]
        )
        return {"tokenizer.json": library.to_str(pretty=True).encode()}

    def forbid(self, control_ids: set[int]) -> None:
        """Prepares `encode`, which never returns one of these ids."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Library

        spec = json.loads(json.dumps(self._spec))
        spec.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        _hide_control_tokens(spec["model"], control_ids)
        self._encoder = Library.from_str(json.dumps(spec))
        # The encoder has fewer added tokens than the tokenizer, so the library gives them other
        # ids.
        self._original_ids: dict[int, int] = {}  # of those whose id differs
        for token in self._spec.get("added_tokens", []):
            if token["id"] not in control_ids:
                options = {
                    name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized")
                }
                self._encoder.add_tokens([AddedToken(token["content"], **options)])
                encoder_id = self._encoder.token_to_id(token["content"])
                if encoder_id is not None and encoder_id != token["id"]:
                    self._original_ids[encoder_id] = token["id"]
        self._encoder.add_special_tokens([AddedToken(GUARD, normalized=False)])
        # <unk> is the only control token that text may become: for characters the vocabulary lacks,
        # never by typing it.
        unknown = spec["model"].get("unk_id", spec["model"].get("unk_token"))
        unknown_id = self._encoder.token_to_id(unknown) if isinstance(unknown, str) else unknown
        self._forbidden = control_ids - {unknown_id}

    def encode(self, text: str, beginning: bool) -> Spans:
        """Returns the tokens of `text`; `beginning` says whether it begins a document."""
        if beginning:
            encoding = _encoded(self._encoder, text, add_special_tokens=False)
            ids, offsets = encoding.ids, Offsets(encoding, 0, 0)
        else:
            encoding = _encoded(self._encoder, GUARD + text, add_special_tokens=False)
            ids, offsets = encoding.ids[1:], Offsets(encoding, 1, len(GUARD))
        if self._original_ids:
            ids = [self._original_ids.get(token, token) for token in ids]
        check_no_forbidden(ids, self._forbidden)
        return Spans(ids, offsets)

    def begins_with(self, bos_id: int) -> bool:
        """Returns whether transformers' tokenizer of these files begins a text with this BOS."""
        # `add_bos_token` is not read beside a tokenizer.json, though transformers writes it.
        return _encoded(self._full, "a").ids[:1] == [bos_id]

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, of special tokens too."""
        return self._full.decode(ids, skip_special_tokens=False)


def _tokens_to_add(present: list[dict], files: dict[str, bytes]) -> list[AddedToken]:
    """Returns the tokens named beside a tokenizer.json that it lacks or has with other properties,
    in the order in which transformers adds them.

    Args:
      present: the added tokens of the tokenizer.json.
    """
    with_ids = tokens_with_ids(files)
    if LISTED not in parse_object(files, CONFIG):
        for token in present:  # transformers prefers them to those of added_tokens.json
            with_ids.pop(token["id"], None)
    named = tokens_without_ids(files)
    special = {token.content for token in named}
    listed = [
        replace(token, special=token.special or token.content in special)
        for _, token in sorted(with_ids.items())
        if token.content
    ]
    properties = {token["content"]: _properties(token) for token in present}
    return [
        token for token in listed if _properties(token.options()) != properties.get(token.content)
    ] + lacking([*properties, *(token.content for token in listed)], named)


def _properties(token: dict) -> tuple:
    """Returns the properties of an added token that encoding depends on."""
    flags = ("lstrip", "rstrip", *(("single_word", "normalized") if _is_text(token) else ()))
    return _is_text(token), *(bool(token.get(name)) for name in flags)


def _growth(part: Any) -> float:
    """Returns a bound on the characters that part of a tokenizer.json makes of each one."""
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") == "Replace":
        # A regular expression may match nothing, between any two characters.
        matched = len(part["pattern"].get("String", ""))
        content = len(part["content"])
        return max(1.0, content / matched) if matched else 1.0 + content
    if part.get("type") == "Prepend":
        return 1.0 + len(part["prepend"])
    steps = [step for value in part.values() if isinstance(value, list) for step in value]
    return math.prod(map(_growth, steps))


def _encoded(library: Any, text: str, **options: Any) -> Any:
    """Returns the library's encoding of a text.

    Raises:
      UserError: the tokenizer cannot encode it.
    """
    try:
        return library.encode(text, **options)
    except BaseException as error:
        # Panics of the library's Rust code are not Exceptions, and have no name to import.
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"the tokenizer cannot encode a text of {len(text):,} characters "
            f"({first_line(error)}); another tokenizer would work"
        ) from None


def _is_text(token: dict) -> bool:
    """Returns whether an added token of a tokenizer.json is text, such as white space or a letter.

    Every other added token is a control token, which typing must not produce.
    """
    return not token.get("special") and not is_tag(token["content"])


def _hide_control_tokens(model: dict, control_ids: set[int]) -> None:
    """Renames control tokens in the vocabulary; unigram and word models would match their text."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        hidden = {
            text: token_id for text, token_id in vocabulary.items() if token_id in control_ids
        }
        for text, token_id in hidden.items():
            del vocabulary[text]
            vocabulary[_hidden_name(token_id)] = token_id
            if model.get("unk_token") == text:
                model["unk_token"] = _hidden_name(token_id)
        if "merges" in model:
            pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
            model["merges"] = [
                list(pair) for pair in pairs if not ({*pair, "".join(pair)} & hidden.keys())
            ]
    elif isinstance(vocabulary, list):
        # A unigram model: [[piece, score], ...], in the order of the ids.
        for token_id in control_ids:
            if token_id < len(vocabulary):
                vocabulary[token_id] = [_hidden_name(token_id), vocabulary[token_id][1]]


def _hidden_name(token_id: int) -> str:
    return f"\ufdd1{token_id}\ufdd1"
