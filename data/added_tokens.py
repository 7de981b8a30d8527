"""The added tokens that a tokenizer's other files name, as transformers reads them."""

import json
import string
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from data.errors import UserError
from data.untrusted_files import is_text

CONFIG, OLDER_CONFIG, OLDER_IDS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# The special tokens that every tokenizer may have, in the order in which transformers adds them.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTED, EXTRA, OLDER_EXTRA = (
    "added_tokens_decoder",
    "extra_special_tokens",
    "additional_special_tokens",
)


@dataclass(frozen=True)
class AddedToken:
    """A token outside the learned vocabulary; the fields are those of the library tokenizers."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True

    def options(self) -> dict[str, Any]:
        """Returns the arguments of tokenizers' own class."""
        return asdict(self)


def is_tag(text: str) -> bool:
    """Whether an added token looks like a control token, such as <think>, not like white space, a
    word or a full stop."""
    return bool({*text} & {*string.punctuation}) and any(map(str.isalnum, text))


def parse_object(files: dict[str, bytes], name: str) -> dict[str, Any]:
    """Returns the JSON object of a file, empty if it is missing; UserError names the file."""
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{name} is not a JSON object, but {type(content).__name__}")
    return content


def tokens_with_ids(files: dict[str, bytes]) -> dict[int, AddedToken]:
    """Returns the tokens that are given with an id, by that id.

    transformers has kept them in tokenizer_config.json since 2023, before in added_tokens.json; it
    reads the older file only if the newer one has none.
    """
    config = parse_object(files, CONFIG)
    if LISTED not in config:
        return tokens_of_older_file(files)
    listed = config[LISTED] or {}
    if not isinstance(listed, dict):
        raise UserError(
            f"{_field_of(LISTED, CONFIG)} is of type {type(listed).__name__}; an object would work"
        )
    return {
        _id(number, f"an id of {_field_of(LISTED, CONFIG)}"): _token(
            value, f"token {number} of {_field_of(LISTED, CONFIG)}", special=False
        )
        for number, value in listed.items()
    }


def tokens_of_older_file(files: dict[str, bytes]) -> dict[int, AddedToken]:
    """Returns the tokens in added_tokens.json by id."""
    settings, places = _settings(files)
    named = _named({name: settings.get(name) for name in NAMES}, places)
    special = {token.content for token in (*named, *_extra(EXTRA, settings, places))}
    return {
        _id(number, f"its id of {text!r} in {OLDER_IDS}"): _token(
            text, f"a token of its {OLDER_IDS}", text in special
        )
        for text, number in parse_object(files, OLDER_IDS).items()
    }


def tokens_without_ids(files: dict[str, bytes]) -> list[AddedToken]:
    """Returns the special tokens that are named without an id, in the order in which transformers
    adds those that the vocabulary lacks."""
    settings, places = _settings(files)
    is_older = EXTRA not in settings or isinstance(settings[EXTRA], dict)
    extra = _extra(OLDER_EXTRA if is_older else EXTRA, settings, places)
    return [*_named(settings, places), *extra]


def _field_of(name: str, file: str) -> str:
    """Returns how messages name a field."""
    return f"its {name} in {file}"


def _settings(files: dict[str, bytes]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the settings of both configurations, merged as by transformers 5, and where each
    is."""
    config = parse_object(files, CONFIG)
    places = {name: _field_of(name, CONFIG) for name in config}
    if not config.get(EXTRA) and OLDER_EXTRA in config:
        config[EXTRA], places[EXTRA] = config.pop(OLDER_EXTRA), places[OLDER_EXTRA]
    if LISTED in config:
        return config, places
    older = parse_object(files, OLDER_CONFIG)
    older_places = {name: _field_of(name, OLDER_CONFIG) for name in older}
    newer_extra, older_extra = config.get(EXTRA), older.get(EXTRA)
    if isinstance(newer_extra, list) and isinstance(older_extra, list):
        older[EXTRA] = [*newer_extra, *older_extra]
    elif isinstance(newer_extra, dict) and isinstance(older_extra, dict):
        older[EXTRA] = {**newer_extra, **older_extra}
    if older.get(EXTRA) is not older_extra:
        older_places[EXTRA] = f"{places[EXTRA]} or {older_places[EXTRA]}"
    return {**config, **older}, {**places, **older_places}


def _named(settings: dict[str, Any], places: dict[str, str]) -> list[AddedToken]:
    """Returns the tokens of settings such as pad_token, image_token, and named extra ones."""
    extra = settings.get(EXTRA)
    named_extra = extra if isinstance(extra, dict) else {}
    named = {
        **{name: settings.get(name) for name in NAMES},
        **{
            name: value
            for name, value in settings.items()
            if name.endswith("_token") and name not in NAMES and isinstance(value, str)
        },
        **named_extra,
    }
    where = {**places, **{name: f"{name} of {places[EXTRA]}" for name in named_extra}}
    tokens = [_token(value, where[name]) for name, value in named.items() if value is not None]
    return [replace(token, special=True) for token in tokens]


def _extra(name: str, settings: dict[str, Any], places: dict[str, str]) -> list[AddedToken]:
    """Returns the tokens of a list in the settings; those of an object have names, see `_named`."""
    tokens = settings.get(name)
    if isinstance(tokens, dict):
        return []
    if tokens is not None and not isinstance(tokens, list):
        raise UserError(
            f"{places[name]} is {tokens!r}; a list of tokens, or an object of names and tokens, "
            "would work"
        )
    return [_token(value, f"a token of {places[name]}") for value in tokens or ()]


def _token(value: Any, where: str, special: bool = True) -> AddedToken:
    """Returns a token given as a text or as its properties.

    Args:
      where: the token's name for messages.
      special: whether it is special if its properties do not say so.
    """
    given = value if isinstance(value, dict) else {"content": value}
    if not is_text(given.get("content")):
        raise UserError(
            f"{where} is {given.get('content')!r}, which is no text; the text of a token would work"
        )
    special = given.get("special", special)
    token = AddedToken(given["content"], special=special, normalized=not special)
    flags = {name: given[name] for name in asdict(token).keys() - {"content"} if name in given}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise UserError(f"{where} has {name} {flag!r}; true or false would work")
    return replace(token, **flags)


def _id(number: Any, where: str) -> int:
    try:
        return int(number)
    except (TypeError, ValueError):
        raise UserError(f"{where} is {number!r}; a whole number would work") from None


def lacking(known: Iterable[str], tokens: Iterable[AddedToken]) -> list[AddedToken]:
    """Returns the tokens whose texts are not known, each once, without empty ones."""
    seen = {*known, ""}
    result = []
    for token in tokens:
        if token.content not in seen:
            seen.add(token.content)
            result.append(token)
    return result
