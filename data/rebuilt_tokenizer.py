"""Tokenizers that transformers builds otherwise than their tokenizer.json describes."""

import contextlib
import functools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.added_tokens import CONFIG, NAMES, parse_object
from data.converted_tokenizer import DESCRIBES, READS_ALL, converted, read_files
from data.errors import UserError

# Models for which transformers builds its own class even if the files name READS_ALL.
OWN_CLASS = ("qwen2",)
_READERS = (READS_ALL, "TokenizersBackend")


def rebuilt(path: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Returns the tokenizer.json that transformers encodes with and the tokenizer_config.json that
    belongs to it, or nothing if the folder's own tokenizer.json gives the same ids.

    In transformers 5 some classes, such as LlamaTokenizer, take no more than vocabulary, merges and
    post-processor from a tokenizer.json. In transformers 4 they took all of it, so a warning says
    what differs.

    Args:
      path: the tokenizer's folder, or its only file.
      files: its files by name.
    """
    names = ("tokenizer.json", "tokenizer.model", *DESCRIBES)
    given = {name: files[name] for name in names if name in files}
    given |= read_files(path, ("config.json",)) if path.is_dir() else {}
    config = parse_object(given, CONFIG)
    if config.get("tokenizer_class") in (None, *_READERS) and not _has_own_class(given, config):
        return {}
    if "chat_template" in config:  # it may be wrong, and says nothing about ids
        without = {name: value for name, value in config.items() if name != "chat_template"}
        given[CONFIG] = json.dumps(without).encode()
    found = _rebuilt(path, tuple(given.items()))
    if found is None:
        return {}
    model, named = found
    config = {**named, **config, "tokenizer_class": READS_ALL}
    described = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return {"tokenizer.json": model, CONFIG: described.encode()}


def _has_own_class(files: dict[str, bytes], config: dict[str, Any]) -> bool:
    """Returns whether config.json may decide on the tokenizer's class."""
    try:
        model_type = parse_object(files, "config.json").get("model_type")
    except UserError:
        return False  # the model is refused
    return model_type in OWN_CLASS or (
        model_type is not None and config.get("tokenizer_class") is None
    )


@functools.lru_cache(4)  # a vocabulary of 128,000 takes seconds
def _rebuilt(
    path: Path, described: tuple[tuple[str, bytes], ...]
) -> tuple[bytes, dict[str, str]] | None:
    """Returns the tokenizer.json and special tokens by name; `described` are the files that matter.

    None if the ids are the same.
    """
    from tokenizers import Tokenizer as Library

    files = dict(described)
    try:
        with _silent_transformers():
            theirs, library = converted(files, READS_ALL)
    except UserError as error:
        warnings.warn(
            f"{path}: transformers cannot read this tokenizer ({error}); its tokenizer.json is "
            "read as it stands",
            stacklevel=2,
        )
        return None
    own = Library.from_str(files["tokenizer.json"].decode())
    spec, built = json.loads(own.to_str()), json.loads(library.to_str())
    parts = ["normalizer"] * (spec["normalizer"] != built["normalizer"])
    steps, theirs_steps = (_without_offsets(one["pre_tokenizer"]) for one in (spec, built))
    parts += ["pre_tokenizer"] * (steps != theirs_steps)
    parts += ["model"] * (_options(spec["model"]) != _options(built["model"]))
    parts += ["post_processor"] * (own.encode("").ids != library.encode("").ids)
    if not parts:
        return None
    can_read_all = not _has_own_class(files, {"tokenizer_class": READS_ALL})
    _warn(path, type(theirs).__name__, parts, can_read_all)
    # The file's added tokens are kept: transformers' class ignores those that CONFIG does not list.
    spec |= {part: built[part] for part in ("decoder", "post_processor", *parts)}
    named = {name: str(token) for name in NAMES if (token := getattr(theirs, name, None))}
    return json.dumps(spec, ensure_ascii=False).encode(), named


def _without_offsets(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns a pre_tokenizer without `trim_offsets`, which changes no id: Qwen publishes another
    than transformers builds."""
    if step is None:
        return None
    kept = {name: value for name, value in step.items() if name != "trim_offsets"}
    if step["type"] == "Sequence":
        kept["pretokenizers"] = [_without_offsets(each) for each in step["pretokenizers"]]
    return kept


def _options(model: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a model on which ids depend, without those that are off."""
    options = {name: value for name, value in model.items() if value not in (None, False, "")}
    if model.get("byte_fallback") and all(f"<0x{n:02X}>" in model["vocab"] for n in range(256)):
        return {name: options[name] for name in options.keys() - {"unk_token", "fuse_unk"}}
    return options


def _warn(path: Path, kind: str, parts: list[str], can_read_all: bool) -> None:
    import transformers

    as_it_stands = (
        f'; so do version 5 and training with "tokenizer_class": "{READS_ALL}" in {CONFIG}'
    )
    warnings.warn(
        f"{path}: {kind} of transformers {transformers.__version__} builds its own "
        f"{' and '.join(parts)} instead of those in tokenizer.json, which gives some texts other "
        "ids; these are used here and in exports. Version 4, with which older models were "
        "trained, reads most files as they stand"
        f"{as_it_stands if can_read_all else ''}",
        stacklevel=2,
    )


@contextlib.contextmanager
def _silent_transformers() -> Iterator[None]:
    """Without transformers' messages, which would name temporary files."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
