"""Hugging Face model folders: their sizes, opening their safetensors, checking their tensors."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
import re
import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from safetensors import SafetensorError, safe_open

from data.digests import file_digest
from data.untrusted_files import check_within, check_writable, file_within, is_text, read_json
from model.config import TransformerConfig
from model.families import FAMILIES
from model.families.text_part import vision_language_architecture
from model.rope import inverse_frequencies
from model.rope_config import RopeConfig

from .bitsandbytes import decoded_dtype, is_nf4, parts
from .mxfp4 import with_matrices
from .names import misnamed, of_text_model, other_parts
from .table import DTYPES, EMBEDDING, HEAD, HFEntry

# What a module has instead of, or beside, its weight -> the programs that quantize it so.
_QUANTIZED = {
    "qweight": "GPTQ or AWQ",
    "weight_packed": "compressed-tensors",
    "weight_scale_inv": "FP8",
    "weight_scale": "FP8 or compressed-tensors",
    "SCB": "bitsandbytes' int8",
    "biases": "MLX",
    "weight.absmax": "bitsandbytes' 4 bits, not as NF4",
}
# Files of weights that are not read; why not, unless they are pickled.
_PICKLED = ("*.bin", "*.pth", "*.pt")
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")  # of Trainer
_OTHER_WEIGHTS = {
    "model-*.safetensors": "a part of a model, whose index is missing",
    "*.safetensors": "of another layout, as the model's authors write it or of an adapter",
    "*.gguf": "of llama.cpp, which is not read",
    "pytorch_model_fsdp_*": "FSDP's, of which accelerate merge-weights makes model.safetensors",
    "global_step*": "DeepSpeed's, of which zero_to_fp32.py --safe_serialization makes "
    "model.safetensors",
    "tf_model.h5": "of TensorFlow, which is not read",
    "flax_model*.msgpack": "of Flax, which is not read",
}
_VALUE_HEAD = "v_head."  # of TRL's models with a value head, which transformers leaves out too
_COMPARED_NUMBERS = 1 << 22  # for two tensors at a time


def folder_config(folder: str | Path) -> TransformerConfig:
    """Returns the sizes of the model in a Hugging Face folder.

    As in transformers, a head in the files that differs from the embedding is kept even if
    tie_word_embeddings is true; a warning names it. Another says what is left out of a
    vision-language model.

    Raises:
      ValueError: as `TransformerConfig.from_hf` and `open_tensors`; or the folder has an adapter.
    """
    folder = Path(folder)
    _check_no_adapter(folder)
    file_within(folder, "config.json")
    config = TransformerConfig.from_hf(folder)
    for name in ("config.json", "generation_config.json"):  # an export writes them again
        with suppress(ValueError):  # not JSON, and then copied as it is
            if file_within(folder, name):
                check_writable(read_json(folder / name, folder), folder / name)
    if (whole := wrapper(folder)) is not None:
        _warn_of_other_parts(folder, whole, config)
    if not config.tie_word_embeddings or not has_weights(folder):
        return config
    with ExitStack() as stack:
        files = open_tensors(folder, stack)
        if not {HEAD, EMBEDDING} <= files.keys() or are_equal(
            *(files[name].get_slice(name) for name in (HEAD, EMBEDDING))
        ):
            return config
    warnings.warn(
        f"{folder}: tie_word_embeddings is true in config.json, but {HEAD} differs from "
        f"{EMBEDDING}: both are kept, and the model is not tied, as in transformers",
        stacklevel=2,
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def has_weights(folder: Path) -> bool:
    """Whether a folder has all files of a whole model's weights.

    Raises:
      ValueError: an index that cannot be read.
    """
    if (folder / "model.safetensors").is_file():
        return True
    index = folder / "model.safetensors.index.json"
    return index.is_file() and all(path.is_file() for path in read_index(index).values())


def has_any_weights(folder: Path) -> bool:
    """Whether a folder has some weights, even if they cannot be read, such as pickled ones."""
    return bool(_pickled(folder)) or any(any(folder.glob(form)) for form in _OTHER_WEIGHTS)


def _pickled(folder: Path) -> list[Path]:
    """A folder's files of pickled weights."""
    found = sorted(path for form in _PICKLED for path in folder.glob(form))
    return [path for path in found if not path.name.startswith(_NOT_WEIGHTS)]


def wrapper(folder: Path) -> str | None:
    """Returns the architecture of a vision-language model whose text part is read, or None."""
    with suppress(ValueError):  # `TransformerConfig.from_hf` reports it
        if file := file_within(folder, "config.json"):
            content = read_json(file, folder)
            return vision_language_architecture(content) if isinstance(content, dict) else None
    return None


def _check_no_adapter(folder: Path) -> None:
    """Raises ValueError for an adapter, alone or beside a whole model, where transformers reads
    it."""
    file = file_within(folder, "adapter_config.json")
    if file is None:
        return
    if not (folder / "config.json").exists():
        raise ValueError(
            f"{folder}: an adapter ({file.name}), and a whole model is needed; --adapter.path "
            "continues it, and peft's merge_and_unload makes a whole model of it"
        )
    base = None
    with suppress(ValueError, AttributeError):
        base = read_json(file, folder).get("base_model_name_or_path")
    raise ValueError(
        f"{folder}: config.json describes a whole model, and {file.name} an adapter of "
        f"{base!r:.200}, with which transformers reads that base instead of the weights here; the "
        f"folder without {file.name} (the whole model) or without config.json (the adapter) would "
        "work"
    )


def _warn_of_other_parts(folder: Path, whole: str, config: TransformerConfig) -> None:
    """Warns that only the text part of a vision-language model is read, and what is left out."""
    found = ""
    if has_weights(folder):
        with ExitStack() as stack:
            stored = _open_all(folder, stack)
            slices = [stored[name].get_slice(name) for name in other_parts(stored)]
            size = sum(math.prod(part.get_shape()) * _bytes(part.get_dtype()) for part in slices)
            found = f" ({len(slices)} tensors, {size / 1e9:,.2f} GB)"
    text = FAMILIES[config.family].architecture
    warnings.warn(
        f"{folder}: of {whole} only the text part is read, as {text}; vision tower and projector"
        f"{found} are left out, and so not in checkpoints and exports",
        stacklevel=3,
    )


def _bytes(dtype: str) -> float:
    """The bytes of a number of a safetensors dtype, such as BF16 or F8_E4M3."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 1  # BOOL


def are_equal(first: Any, second: Any) -> bool:
    """Whether two safetensors slices (`get_slice`) are equal; reads up to the first difference."""
    shape = first.get_shape()
    if shape != second.get_shape():
        return False
    rows = max(1, _COMPARED_NUMBERS // max(1, math.prod(shape[1:])))
    ranges = [slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]
    parts = ((first[part], second[part]) for part in ranges)
    return all(
        np.array_equal(one.astype(np.float32), other.astype(np.float32)) for one, other in parts
    )


def _compare_frequencies(
    folder: Path, files: Mapping[str, Any], name: str, config: TransformerConfig
) -> None:
    """Warns if RoPE frequencies in the files differ from config.json's, which are used."""
    stored = files[name].get_tensor(name).astype(np.float32)
    # Old exports have the unscaled table.
    tables = [
        inverse_frequencies(rope, config.rotary_dim)
        for rope in (config.rope, RopeConfig(theta=config.rope.theta))
    ]
    # The tolerance is two bfloat16 units, since such a table was rounded with the model; 6e-8 is
    # float16's smallest step.
    if not any(
        stored.shape == table.shape and np.allclose(stored, table, 2**-7, 6e-8) for table in tables
    ):
        warnings.warn(
            f"{folder}: tensor {name} holds frequencies that differ from config.json's rope_theta "
            "and rope_scaling; config.json's are used, as in transformers",
            stacklevel=2,
        )


def weight_dtypes(folder: str | Path) -> dict[str, str]:
    """Tensor name -> dtype of a Hugging Face folder's weights; errors as in `read_hf`.

    That of a matrix in NF4 is the one it had before; its scales, and tensors of other dtypes than
    DTYPES, are left out.
    """
    with ExitStack() as stack:
        files = open_tensors(Path(folder), stack)
        coded = {name: decoded_dtype(files, name) for name in files if is_nf4(files, name)}
        scales = {part for name in coded for part in parts(name)}
        plain = {
            name: DTYPES.get(file.get_slice(name).get_dtype())
            for name, file in files.items()
            if name not in coded and name not in scales
        }
    return coded | {name: dtype for name, dtype in plain.items() if dtype is not None}


def weights_fingerprint(folder: str | Path) -> str:
    """A hash of a Hugging Face folder's weights, independent of its path; see `file_digest`."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")):
        check_within(folder, path)
        digest.update(f"{path.name}\0{file_digest(path)}\0".encode())
    for name, file in sorted(_chosen_by_index(Path(folder)).items()):
        digest.update(f"{name}\0{file}\0".encode())
    return digest.hexdigest()[:32]


def _chosen_by_index(folder: Path) -> dict[str, str]:
    """Tensor name -> the file that an index names, for tensors that are in several files."""
    index_file = folder / "model.safetensors.index.json"
    if file_within(folder, "model.safetensors") or not file_within(folder, index_file.name):
        return {}
    indexed, holders = read_index(index_file), collections.Counter[str]()
    for path in set(indexed.values()):
        with suppress(SafetensorError, OSError), safe_open(path, framework="np") as opened:
            holders.update(opened.keys())  # `open_tensors` reports what is wrong with the others
    return {name: path.name for name, path in indexed.items() if holders[name] > 1}


def open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> opened safetensors file; closing `stack` closes the files.

    If several files hold a tensor, the index chooses. MXFP4 codes are read as matrices. Names are
    those of a text model with its head, and other parts are left out; see `of_text_model`.
    """
    stored, is_wrapped = _open_all(folder, stack), wrapper(folder) is not None
    try:
        return with_matrices(of_text_model(stored, is_wrapped))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _open_all(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> opened safetensors file, as in the files; see `open_tensors`."""
    index_file = folder / "model.safetensors.index.json"
    indexed: dict[str, Path] = {}
    if single := file_within(folder, "model.safetensors"):
        paths = [single]
    elif file_within(folder, index_file.name):
        indexed = read_index(index_file)
        paths = sorted(set(indexed.values()))
    else:
        _raise_no_weights(folder)
    tensors: dict[str, Any] = {}
    holders: dict[str, Path] = {}
    for path in paths:
        file_within(folder, path.name)
        try:
            opened = stack.enter_context(safe_open(path, framework="np"))
        except FileNotFoundError:
            raise ValueError(
                f"{path}: missing, but {index_file.name} names it; download it again"
            ) from None
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path}: not a complete safetensors file ({error}); download it again"
            ) from None
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            if indexed.get(name, path) != path:
                continue
            if name in tensors:
                raise ValueError(
                    f"{folder}: tensor {name} is in {holders[name].name} and {path.name}, and "
                    f"{index_file.name} does not say which; download the folder again"
                )
            tensors[name], holders[name] = opened, path
    for name, path in indexed.items():
        if name not in tensors:
            raise ValueError(
                f"{index_file}: tensor {name} is not in {path.name}, the file it names; "
                "download the folder again"
            )
    return tensors


def read_index(index_file: Path) -> dict[str, Path]:
    """Tensor name -> file, from an index; ValueError for a file outside its folder."""
    folder = index_file.parent
    try:
        weight_map = read_json(index_file, folder)["weight_map"]
        indexed = {name: folder / file for name, file in weight_map.items()}
        if unwritable := [file for file in weight_map.values() if not is_text(file)]:
            raise ValueError(f"a file's name is {unwritable[0]!a}")
        if not indexed:
            raise ValueError("it names no tensors")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index_file}: not a safetensors index ({error!r}); download it again"
        ) from None
    outside = sorted(path for path in indexed.values() if path.parent != folder)
    if outside:
        raise ValueError(f"{index_file}: names {outside[0]}, which is not in its folder")
    return indexed


def _raise_no_weights(folder: Path) -> NoReturn:
    """Raises the ValueError for a folder without safetensors; says what it has instead."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if pickled := _pickled(folder):
        raise ValueError(
            f"{folder}: only pickled weights here ({pickled[0].name}); they can run code when "
            "loaded and are refused; convert them to safetensors "
            "(https://huggingface.co/docs/safetensors/convert-weights)"
        )
    raise ValueError(
        f"{folder}: no weights here{_other_weights(folder)}; needs model.safetensors, or "
        "model.safetensors.index.json and the files it names"
    )


def _other_weights(folder: Path) -> str:
    """What a folder without readable weights has instead, for a message; "" if nothing."""
    for pattern, kind in _OTHER_WEIGHTS.items():
        if found := sorted(folder.glob(pattern)):
            return f": {found[0].name} is {kind}"
    return ""


def check_tensors(
    folder: Path, files: Mapping[str, Any], layout: list[HFEntry], config: TransformerConfig
) -> None:
    """Raises ValueError for the first tensor that is missing, unknown, or unreadable."""
    expected = set()
    for entry in layout:
        for name, shape in entry.file_tensors().items():
            expected.add(name)
            if name in files and is_nf4(files, name):
                expected.update(parts(name))
            elif fault := _fault(name, shape, files):
                raise ValueError(f"{folder}: tensor {name} {fault}{_there_instead(name, files)}")
    unread = FAMILIES[config.family].left_out
    left_out = {name for name in {*files} - expected if unread and re.fullmatch(unread, name)}
    if left_out:
        warnings.warn(
            f"{folder}: left out {len(left_out)} tensors such as {min(left_out)}: as transformers, "
            "this reads the model without the layers that predict tokens after the next one",
            stacklevel=2,
        )
    values = sorted(name for name in files if name.startswith(_VALUE_HEAD))
    if values:
        warnings.warn(
            f"{folder}: left out {', '.join(values)}: the model is read without its value head",
            stacklevel=2,
        )
    for name in sorted({*files} - expected - {*values} - left_out):
        if name == HEAD and config.tie_word_embeddings:
            continue  # an equal copy: compared by `folder_config`
        if name.endswith("rotary_emb.inv_freq"):  # old exports store the table of frequencies
            _compare_frequencies(folder, files, name, config)
            continue
        if 0 in files[name].get_slice(name).get_shape():  # such as an expert of width 0
            continue
        raise ValueError(
            f"{folder}: tensor {name} does not belong to the model that config.json describes"
        )


def _fault(name: str, shape: tuple[int, ...], files: Mapping[str, Any]) -> str | None:
    """What is wrong with a tensor that should be in the files and readable; None if nothing is."""
    if name not in files:
        return f"is missing; expected shape {list(shape)}"
    tensor = files[name].get_slice(name)
    if tuple(tensor.get_shape()) != shape:
        return f"has shape {list(tensor.get_shape())}; config.json makes it {list(shape)}"
    if tensor.get_dtype() not in DTYPES:
        return f"is {tensor.get_dtype()}; supported are {', '.join(DTYPES)}"
    return None


def _there_instead(name: str, files: Collection[str]) -> str:
    """What a file has instead of a missing or wrong tensor, for a message; "" if nothing alike."""
    module = name.removesuffix("weight")
    for part, kind in _QUANTIZED.items():
        if module + part in files:
            return (
                f"; {module}{part} is there, as in {kind}, which is not read; the unquantized "
                "model, which adapter.quantize quantizes on reading, would work"
            )
    if name in files:
        return ""
    if experts := next((other for other in files if ".switch_mlp." in other), None):
        return (
            f"; {experts} is there, as mlx-lm stores experts, which is not read; the model that it "
            "was converted from would work"
        )
    if (other := misnamed(name, files)) is None:
        return ""
    return (
        f"; {other} is there, a name that torch.compile, FSDP or another wrapper made: "
        "save_pretrained of the model inside would write a readable one"
    )
