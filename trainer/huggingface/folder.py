"""Hugging Face model folders: where one lies, its safetensors files, and whether they hold the model that it describes."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError, safe_open

from model.config import LlamaConfig

from .bitsandbytes import is_nf4, parts
from .table import DTYPES, HFEntry


def resolve_model_path(path: str | Path) -> Path:
    """The folder of a model: `path` itself, or that of `org/name` or `org/name@revision` in the local Hugging Face cache.

    Nothing is downloaded, because a run must not depend on the hub.

    Raises:
      ValueError: there is no such folder; names the command that downloads it.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    name, _, revision = str(path).partition("@")
    if folder.is_absolute() or str(path).startswith(("./", "../", "~")) or name.count("/") != 1 or name.endswith("/"):
        raise ValueError(f"{path}: no such folder (a model of the hub is named org/name or org/name@revision)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except HFValidationError:
        raise ValueError(f"{path}: neither a folder nor a hub name (org/name or org/name@revision)") from None
    except (LocalEntryNotFoundError, OSError):
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        raise ValueError(
            f"{path}: neither a folder nor in the local Hugging Face cache; download it: {command}") from None


def tensor_dtypes(folder: str | Path) -> dict[str, str]:
    """Tensor name -> dtype of a Hugging Face folder; errors as in `read_hf`."""
    with ExitStack() as stack:
        files = open_tensors(Path(folder), stack)
        return {name: DTYPES.get(file.get_slice(name).get_dtype(), file.get_slice(name).get_dtype())
                for name, file in files.items()}


def weights_fingerprint(folder: str | Path) -> str:
    """A hash of the weights in a Hugging Face folder, wherever that is.

    It covers the size of each file and 64 blocks of 4 KiB spread over it: all of a large model would take minutes to read.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for block in range(64):
                file.seek(block * size // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()[:32]


def open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> opened safetensors file that holds it. The files are closed with `stack`.

    If several files hold a tensor, it is read from the one that the index names.
    """
    index_file, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    indexed: dict[str, Path] = {}
    if single.is_file():
        paths = [single]
    elif index_file.is_file():
        indexed = _read_index(index_file)
        paths = sorted(set(indexed.values()))
    else:
        _raise_no_weights(folder)
    tensors: dict[str, Any] = {}
    holders: dict[str, Path] = {}
    for path in paths:
        try:
            opened = stack.enter_context(safe_open(path, framework="np"))
        except FileNotFoundError:
            raise ValueError(f"{path}: missing, but {index_file.name} names it; download it again") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error}); download it again") from None
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            if indexed.get(name, path) != path:
                continue
            if name in tensors:
                raise ValueError(f"{folder}: tensor {name} is in {holders[name].name} and {path.name}, and {index_file.name} "
                                 "does not say in which; download the folder again")
            tensors[name], holders[name] = opened, path
    for name, path in indexed.items():
        if name not in tensors:
            raise ValueError(f"{index_file}: tensor {name} is not in {path.name}, the file that it names; download the folder "
                             "again")
    return tensors


def _read_index(index_file: Path) -> dict[str, Path]:
    """Tensor name -> file, as the index of a model in several files names them; ValueError for a file outside its folder."""
    folder = index_file.parent
    try:
        weight_map = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
        indexed = {name: folder / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index_file}: not a safetensors index ({error!r}); download it again") from None
    outside = sorted(path for path in indexed.values() if path.parent != folder)
    if outside:
        raise ValueError(f"{index_file}: names {outside[0]}, which is not in its folder")
    return indexed


def _raise_no_weights(folder: Path) -> NoReturn:
    """Raises the ValueError for a folder without safetensors, which says what the folder has instead."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pth"), *folder.glob("*.pt")])
    if pickled:
        raise ValueError(
            f"{folder}: only pickled weights here ({pickled[0].name}); they can run code when loaded and are "
            "refused; convert them to safetensors (https://huggingface.co/docs/safetensors/convert-weights)"
        )
    raise ValueError(f"{folder}: no weights here; needs model.safetensors or model.safetensors.index.json")


def check_tensors(folder: Path, files: Mapping[str, Any], layout: list[HFEntry], config: LlamaConfig) -> None:
    """Raises ValueError for the first tensor that is missing, unknown, or of another shape or dtype than can be read."""
    expected = set()
    for entry in layout:
        for name in entry.hf_names():
            expected.add(name)
            if name not in files:
                raise ValueError(f"{folder}: tensor {name} is missing; expected shape {list(entry.file_shape)}")
            if is_nf4(files, name):
                expected.update(parts(name))
                continue
            tensor = files[name].get_slice(name)
            if tuple(tensor.get_shape()) != entry.file_shape:
                raise ValueError(f"{folder}: tensor {name} has shape {list(tensor.get_shape())}; "
                                 f"config.json makes it {list(entry.file_shape)}")
            if tensor.get_dtype() not in DTYPES:
                raise ValueError(f"{folder}: tensor {name} is {tensor.get_dtype()}; supported are {', '.join(DTYPES)}")
    for name in sorted(set(files) - expected):
        # Old exports store the table of frequencies; tied models may store the head a second time.
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        raise ValueError(f"{folder}: tensor {name} does not belong to the model that config.json describes")
