"""Finding a model: its folder, or its place in the Hugging Face cache, where it is downloaded."""

from __future__ import annotations

import fnmatch
import os
import re
from pathlib import Path

from data import hub
from data.errors import UserError
from data.paths import expanded
from data.tokenizer import NAMED_TEMPLATES, PROCESSORS_TEMPLATE

from .folder import has_weights

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
_WHOLE_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_WEIGHTS = (*_WHOLE_WEIGHTS, "adapter_model.safetensors")


def hub_name(path: str) -> str | None:
    """The hub name org/name[@revision] of a path or cache folder; None for other paths."""
    if cached := re.search(r"models--([^/]+)/snapshots/", f"{path}/"):
        return cached[1].replace("--", "/", 1)
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(@.+)?", path)
    return path if is_name and not Path(path).exists() else None


def resolve_model_path(path: str | Path, weights: bool = True) -> Path:
    """A model's folder: `path`, or that of org/name[@revision] in the Hugging Face cache.

    Missing files are downloaded unless HF_HUB_OFFLINE is set; a complete cached model is used
    without asking the hub. Pickled weights are never downloaded.

    Args:
      weights: whether to download weights; the other files are small.

    Raises:
      ValueError, UserError: no such model.
    """
    folder = expanded(path)
    if folder.is_dir():
        return folder
    name, revision = _named_on_hub(path, folder)
    files = (*SMALL_FILES, *(_WEIGHTS if weights else ()))
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = hub.cached_model(name, revision or None, files)
        removed = _removed_files(cached, files)
        if removed and hub.is_offline():
            raise UserError(
                f"{path}: {removed[0]} is no longer in the local Hugging Face cache, and downloads "
                "are forbidden (HF_HUB_OFFLINE or --no-download); the same command with downloads "
                "gets it again"
            )
        if not removed and (hub.is_offline() or is_whole(cached, weights)):
            return cached
    except HFValidationError:
        raise ValueError(
            f"{path}: neither a folder nor a hub name (org/name or org/name@revision)"
        ) from None
    except (LocalEntryNotFoundError, OSError):
        if hub.is_offline():
            raise _not_cached(path, folder, name, revision) from None
    try:
        return hub.download_model(name, revision or None, files, ".safetensors" if weights else "")
    except UserError as error:
        if not _may_be_mistyped(folder, revision):
            raise
        raise UserError(
            f"{path}: no such run or model folder in {folder.parent}; as a hub model: "
            + str(error).removeprefix(f"{name}: ")
        ) from None


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
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    return ValueError(
        f"{path}: neither a folder nor in the local Hugging Face cache, and downloads are "
        f"forbidden (HF_HUB_OFFLINE or --no-download); download it: {command}"
    )


def _may_be_mistyped(folder: Path, revision: str) -> bool:
    """Whether the path may be a mistyped folder: its parent exists, though that may only be named
    like an owner on the hub."""
    return not revision and folder.parent.is_dir()


def hub_has_weights(path: str) -> bool | None:
    """Whether the hub lists the weights of a whole model under org/name[@revision]; None if it
    cannot be asked."""
    if hub.is_offline():
        return None
    from huggingface_hub import HfApi, constants

    name, _, revision = path.partition("@")
    try:
        listed = HfApi(endpoint=constants.ENDPOINT).list_repo_files(name, revision=revision or None)
    except Exception:  # many kinds; a model in the cache must open without a network
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
