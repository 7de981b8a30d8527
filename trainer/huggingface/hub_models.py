"""Finding a model: its folder, or its place in the Hugging Face cache, where it is downloaded."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import warnings
from pathlib import Path

from data import hub
from data.errors import UserError
from data.paths import expanded
from data.tokenizer import NAMED_TEMPLATES, PROCESSORS_TEMPLATE

from .folder import has_weights, read_index

# A hub model's files to download; a pattern stands for several.
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    *TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    PROCESSORS_TEMPLATE,
    NAMED_TEMPLATES,
    "adapter_config.json",
    "trained_config.json",
)
_FILES = (".model", ".json")  # endings of a tokenizer in one file
_INDEX = "model.safetensors.index.json"
_WHOLE_WEIGHTS = ("model.safetensors", "model-*.safetensors", _INDEX)
_WEIGHTS = (*_WHOLE_WEIGHTS, "adapter_model.safetensors")
# Most models have them: the names of BOS and EOS or a chat template, and further ends of answers.
_USUAL = ("tokenizer_config.json", "generation_config.json")


def hub_name(path: str) -> str | None:
    """The hub name org/name[@revision] of a path or cache folder; None for other paths."""
    if cached := re.search(r"models--([^/]+)/snapshots/", f"{path}/"):
        return cached[1].replace("--", "/", 1)
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(@.+)?", path)
    return path if is_name and not Path(path).exists() else None


def resolve_model_path(path: str | Path, weights: bool = True) -> Path:
    """A model's folder: `path`, or that of org/name[@revision] in the Hugging Face cache.

    Missing files are downloaded unless HF_HUB_OFFLINE is set. A complete cached model is used
    without asking the hub if the hub's list of its files is there too; else the hub is asked once,
    for seconds. Pickled weights are never downloaded.

    Args:
      weights: whether to download weights; the other files are small.

    Raises:
      ValueError, UserError: no such model.
    """
    folder = expanded(path)
    if folder.is_dir():
        return folder
    name, revision = _named_on_hub(path, folder)
    cached = _in_cache(path, folder, weights)
    if cached and hub.list_in_cache(name, "model", cached) is not None:
        return cached
    if cached and hub.list_on_hub(name, "model", cached.name) is None:
        return _perhaps_partial(cached, name, revision)
    try:  # a newer commit than the cached one may be another model
        return _download(name, cached.name if cached else revision or None, weights)
    except UserError as error:
        if cached:
            return _perhaps_partial(cached, name, revision)
        if not _may_be_mistyped(folder, revision):
            raise
        raise UserError(
            f"{path}: no such run or model folder in {folder.parent}; as a hub model: "
            + str(error).removeprefix(f"{name}: ")
        ) from None


def resolve_tokenizer_path(path: str) -> Path:
    """A tokenizer's folder or file: `path`, or the folder of org/name[@revision] in the cache, as
    `resolve_model_path`."""
    is_on_hub = hub_name(path) and not expanded(path).exists() and not path.endswith(_FILES)
    return resolve_model_path(path, weights=False) if is_on_hub else Path(path)


def _in_cache(path: str | Path, folder: Path, weights: bool) -> Path | None:
    """A model's folder in the cache, if all files that are read are there, as far as this folder
    shows; None if they must be downloaded. Raises like `resolve_model_path`."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    name, revision = _named_on_hub(path, folder)
    files = _wanted(weights)
    try:
        cached = hub.cached_model(name, revision or None, files)
        removed = _removed_files(cached, files)
    except HFValidationError:
        raise ValueError(
            f"{path}: neither a folder nor a hub name (org/name or org/name@revision)"
        ) from None
    except (LocalEntryNotFoundError, OSError):
        if hub.is_offline():
            raise _not_cached(path, folder, name, revision) from None
        return None
    if removed and hub.is_offline():
        raise UserError(
            f"{path}: {removed[0]} is no longer in the local Hugging Face cache, and downloads "
            "are forbidden (HF_HUB_OFFLINE or --no-download); the same command with downloads "
            "gets it again"
        )
    # With the hub's list, its small files are known to be there, such as a tokenizer's alone.
    is_listed = not weights and hub.list_in_cache(name, "model", cached) is not None
    is_usable = hub.is_offline() or is_listed or is_whole(cached, weights)
    return cached if is_usable and not removed else None


def _wanted(weights: bool) -> tuple[str, ...]:
    """Patterns of a hub model's files to download."""
    return (*SMALL_FILES, *(_WEIGHTS if weights else ()))


def _download(name: str, revision: str | None, weights: bool) -> Path:
    """Downloads the missing files of a model, also weights under names that only its index has."""
    files, needed = _wanted(weights), (".safetensors", _INDEX) if weights else ()
    folder = hub.download_model(name, revision, files, needed)
    index = folder / _INDEX
    if not weights or has_weights(folder) or not index.is_file():
        return folder
    named = {glob.escape(path.name) for path in read_index(index).values()}
    return hub.download_model(name, revision, (*files, *sorted(named)), (".safetensors",))


def _perhaps_partial(cached: Path, name: str, revision: str) -> Path:
    """Returns a model's folder in the cache, which another program filled, with a warning if it
    lacks files that most models have, unless that program noted that this one does not."""
    from huggingface_hub import try_to_load_from_cache

    missing = [
        file for file in _USUAL if try_to_load_from_cache(name, file, revision=cached.name) is None
    ]
    if missing and not (cached / "adapter_config.json").is_file():
        warnings.warn(
            f"{name}: {' and '.join(missing)}: not in the local Hugging Face cache; if the hub has "
            f"them, {_command(name, revision)} gets them",
            stacklevel=3,
        )
    return cached


def _command(name: str, revision: str) -> str:
    """The hub's command that downloads a model."""
    return f"hf download {name}" + (f" --revision {revision}" if revision else "")


def _named_on_hub(path: str | Path, folder: Path) -> tuple[str, str]:
    """The name on the hub and the revision ("" for the newest) of a path that is no folder.

    Raises:
      ValueError: it is a file, or not in the form of a hub name.
    """
    if folder.is_file():
        found = " of llama.cpp's format, which is not read," * (folder.suffix == ".gguf")
        raise ValueError(
            f"{path}: a file,{found} and a model needs a folder, with config.json and safetensors"
        )
    name, _, revision = str(path).partition("@")
    is_local = folder.is_absolute() or str(path).startswith(("./", "../", "~"))
    if is_local or name.count("/") != 1 or name.endswith("/"):
        raise ValueError(
            f"{path}: no such folder (a hub model is named org/name or org/name@revision)"
        )
    return name, revision


def _removed_files(cached: Path, files: tuple[str, ...]) -> list[str]:
    """The files of a cached model whose links lead nowhere, since their blobs were removed."""
    return [
        name
        for name in sorted(os.listdir(cached))
        if any(fnmatch.fnmatch(name, form) for form in files) and not (cached / name).exists()
    ]


def _not_cached(path: str | Path, folder: Path, name: str, revision: str) -> UserError | ValueError:
    """The error for a model that is neither a folder nor cached, while downloads are forbidden."""
    if _may_be_mistyped(folder, revision):
        return UserError(
            f"{path}: no such run or model folder in {folder.parent}, nor a model in the local "
            "Hugging Face cache, and downloads are forbidden (HF_HUB_OFFLINE or --no-download)"
        )
    return ValueError(
        f"{path}: neither a folder nor in the local Hugging Face cache, and downloads are "
        f"forbidden (HF_HUB_OFFLINE or --no-download); download it: {_command(name, revision)}"
    )


def _may_be_mistyped(folder: Path, revision: str) -> bool:
    """Whether the path may be a mistyped folder: its parent exists, though that may only be named
    like an owner on the hub."""
    return not revision and folder.parent.is_dir()


def hub_has_weights(path: str) -> bool | None:
    """Whether the hub lists the weights of a whole model under org/name[@revision]; None if it
    cannot be asked."""
    name, _, revision = path.partition("@")
    listed = hub.list_on_hub(name, "model", revision or None)
    if listed is None:
        return None
    return any(fnmatch.fnmatch(file, form) for file in listed for form in _WHOLE_WEIGHTS)


def is_whole(folder: Path, weights: bool = True) -> bool:
    """Whether a folder in the cache has all files that are read."""
    if (folder / "adapter_config.json").is_file():
        return not weights or (folder / "adapter_model.safetensors").is_file()
    if not (folder / "config.json").is_file() or not any(
        (folder / name).is_file() for name in TOKENIZERS
    ):
        return False
    return not weights or has_weights(folder)
