"""Tokenizers without a tokenizer.json: transformers converts them, so that ids are its own."""

import functools
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.added_tokens import (
    CONFIG,
    LISTED,
    OLDER_CONFIG,
    OLDER_IDS,
    AddedToken,
    is_tag,
    parse_object,
    tokens_with_ids,
    tokens_without_ids,
)
from data.errors import UserError, first_line
from data.folders import named_errors, scratch_folder
from data.untrusted_files import file_within

BPE_FILES = ("vocab.json", "merges.txt")
# Files that say how to convert; the first two name the tokenizer's class.
DESCRIBES = (CONFIG, "config.json", OLDER_CONFIG, OLDER_IDS)
# Names of special tokens that a sentencepiece model has.
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
# The class that reads all of a tokenizer.json, by the name that transformers 4 knows too.
READS_ALL = "PreTrainedTokenizerFast"
_OF_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")  # a token in base 64, and its rank
WOULD_WORK = (
    "a folder with tokenizer.json, tokenizer.model, or vocab.json and merges.txt, or a "
    "sentencepiece .model file, would work"
)


def from_bpe_files(folder: Path) -> dict[str, bytes]:
    """Returns the tokenizer.json that transformers makes of a folder's vocab.json and merges.txt.

    Raises:
      UserError: the files cannot be read.
    """
    files = read_files(folder, (*BPE_FILES, *DESCRIBES))
    # The first model with these two files was GPT-2.
    try:
        _, library = converted(files, "GPT2Tokenizer")
    except UserError as error:
        raise _unreadable(f"{folder}: {' and '.join(BPE_FILES)}", error) from None
    return {"tokenizer.json": library.to_str().encode()}


def from_sentencepiece(path: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Returns the tokenizer.json that transformers makes of a tokenizer.model, and the
    tokenizer_config.json that belongs to it.

    The files beside the model, such as tokenizer_config.json with `legacy` and `add_bos_token`, say
    how transformers encodes; without any, it follows the model, as the library sentencepiece does.

    Args:
      path: the tokenizer's folder, or its only file.
      files: its files by name.

    Raises:
      UserError: the files cannot be read, or transformers gives tokens other ids than they do.
    """
    given = {name: files[name] for name in ("tokenizer.model", *DESCRIBES) if name in files}
    given |= read_files(path, ("config.json",)) if path.is_dir() else {}
    return _of_sentencepiece(path, tuple(given.items()))


@functools.lru_cache(4)  # a vocabulary of 32,000 takes seconds
def _of_sentencepiece(path: Path, described: tuple[tuple[str, bytes], ...]) -> dict[str, bytes]:
    """See `from_sentencepiece`; `described` are the files that matter."""
    files = dict(described)
    try:
        added = tokens_with_ids(files)
        tokens_without_ids(files)
        config = parse_object(files, CONFIG)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    config = {name: value for name, value in config.items() if value != ""}
    if CONFIG in files:  # a chat template, which may be wrong, says nothing about ids
        without = {name: value for name, value in config.items() if name != "chat_template"}
        files[CONFIG] = json.dumps(without).encode()
    pieces = _pieces(path, files["tokenizer.model"])
    try:
        theirs, library = converted(files, READS_ALL)
    except UserError as error:
        raise _unreadable(f"{path}:", error) from None
    for token_id, token in added.items():
        if token.content and library.token_to_id(token.content) != token_id:
            raise UserError(
                f"{path}: the added token {token.content!r} has id {token_id}, in transformers "
                f"{library.token_to_id(token.content)}; ids after those of tokenizer.model, "
                "without a gap, or a tokenizer.json, would work"
            )
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    library.add_tokens([tag for tag in _tags(pieces) if tag.content not in known])
    return {
        "tokenizer.json": library.to_str().encode(),
        CONFIG: (json.dumps(_described(config, theirs, library), indent=2) + "\n").encode(),
    }


def _described(config: dict[str, Any], theirs: Any, library: Any) -> dict[str, Any]:
    """Returns a tokenizer_config.json with what transformers found elsewhere: added tokens, names
    of special ones, its class, and that it adds no BOS, which versions before 5 would."""
    names = {name: getattr(theirs, name) for name in _NAMES}
    found = {name: str(text) for name, text in names.items() if text is not None}
    flags = asdict(AddedToken("")).keys()
    listed = {
        str(token_id): {flag: getattr(token, flag) for flag in flags}
        for token_id, token in library.get_added_tokens_decoder().items()
    }
    kind = type(theirs).__name__
    # With add_prefix_space, classes of version 4 convert tokenizer.model again, to other ids.
    if kind == "TokenizersBackend" or config.get("add_prefix_space") is not None:
        kind = READS_ALL
    return {"add_bos_token": False, **config, **found, "tokenizer_class": kind, LISTED: listed}


def _pieces(path: Path, model: bytes) -> Any:
    """Returns the tokens of a sentencepiece model; UserError if the file is not one."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    try:
        proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
        sentencepiece.SentencePieceProcessor(model_proto=model)
        return proto.pieces
    except Exception as error:  # the libraries raise RuntimeError and DecodeError
        if _OF_TIKTOKEN.match(model):
            raise UserError(
                f"{path}: tokenizer.model is a file of tiktoken; the tokenizer.json that "
                "transformers makes of it, as in the model's folder on the hub, would work"
            ) from None
        raise _unreadable(f"{path}:", error) from None


def _tags(pieces: Any) -> list[Any]:
    """Returns the tokens that a model's author defined, such as <|im_end|>, as the library's added
    tokens. In transformers, text may become some of them unless they are added."""
    from tokenizers import AddedToken as LibraryToken

    texts = [piece.piece for piece in pieces if piece.type == type(piece).USER_DEFINED]
    return [LibraryToken(text, normalized=False) for text in texts if is_tag(text)]


def read_files(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """Returns those files that a folder has, by name; UserError if a link leads out of it."""
    return {name: file.read_bytes() for name in names if (file := file_within(folder, name))}


def converted(files: dict[str, bytes], undescribed: str) -> tuple[Any, Any]:
    """Returns transformers' tokenizer of files, and the library's in it; UserError with its reason
    if it cannot read them.

    Args:
      undescribed: the tokenizer's class, if no file names it.
    """
    import transformers

    described = any(name in files for name in DESCRIBES[:2])
    kind = transformers.AutoTokenizer if described else getattr(transformers, undescribed)
    with scratch_folder() as scratch, named_errors(scratch):
        # Only copies of these files are given to transformers, which would otherwise follow links
        # out of the folder and offer to run its code.
        for name, content in files.items():
            (scratch / name).write_bytes(content)
        try:
            theirs = kind.from_pretrained(
                str(scratch), local_files_only=True, trust_remote_code=False
            )
            return theirs, theirs.backend_tokenizer
        except Exception as error:  # transformers and tokenizers raise any kind of error
            reason = first_line(error).replace(f"{scratch}/", "").replace(str(scratch), "it")
            if "trust_remote_code" in str(error):
                reason = f"auto_map in {CONFIG} names code of the folder, which is never run"
            raise UserError(reason) from None


def _unreadable(what: str, error: Exception) -> UserError:
    return UserError(f"{what} cannot be read as a tokenizer ({first_line(error)}); {WOULD_WORK}")
