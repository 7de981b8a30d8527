"""Reads Hugging Face model folders into sharded arrays, without ever holding the model twice."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import jax
import numpy as np
import yaml
from safetensors import SafetensorError, safe_open

from model.adapter import Quantization
from model.attention import Mask
from model.config import LlamaConfig
from model.families import FAMILIES
from model.padding import fits
from model.quantization import Nf4, dequantize_nf4

from .bitsandbytes import is_nf4, parts, read_nf4

# safetensors' name -> numpy's of the dtypes that are read. Each is exact in float32, so import and export change no bit.
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Files of a Hugging Face folder that belong to the model and are not weights. The list is fixed, since a training run puts
# files of its own beside them (its configuration), which do not belong in an exported model.
ASSET_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)
SOURCE_DTYPE_FILE = "source_dtype.json"


@dataclass(frozen=True)
class HFEntry:
    """One of our parameters, and the Hugging Face tensors that it is made of.

    A tensor becomes ours by a transpose, if `transpose`, and a reshape to `layer_shape`; `to_hf` undoes both.

    Attributes:
      name: of our parameter.
      hf_name: of the tensor, with `{i}` for the layer if our parameter stacks the layers.
      shape: of our parameter, with the leading layer axis if it has one.
      hf_shape: of one tensor, or of the rows of it that are this parameter's.
      layers: the number of layers; None for a parameter without layer axis.
      transpose: the tensor is stored output-first, ours input-first.
      first_row, file_rows: of a tensor that holds several parameters one below the other: the first row of this one, and the
        number of all rows; None for a tensor that holds no other.
    """

    name: str
    hf_name: str
    shape: tuple[int, ...]
    hf_shape: tuple[int, ...]
    layers: int | None
    transpose: bool
    first_row: int = 0
    file_rows: int | None = None

    @property
    def rows(self) -> slice:
        """The rows of the tensor that are this parameter's."""
        return slice(self.first_row, self.first_row + self.hf_shape[0])

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of one tensor, with the rows of other parameters."""
        return (self.file_rows or self.hf_shape[0], *self.hf_shape[1:])

    def hf_names(self) -> list[str]:
        """The names of the Hugging Face tensors, one for each layer if the parameter stacks the layers."""
        return [self.hf_name] if self.layers is None else [self.hf_name.format(i=i) for i in range(self.layers)]

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Our shape without the layer axis."""
        return self.shape if self.layers is None else self.shape[1:]

    def to_hf(self, value: np.ndarray) -> np.ndarray:
        """One layer of our parameter as a Hugging Face tensor, a view where possible."""
        return value.reshape(self.hf_shape[::-1]).T if self.transpose else value.reshape(self.hf_shape)

    def read(self, tensor: Any, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the part `index` of one layer of our parameter; of the file only the rows and columns that hold it.

        Args:
          tensor: a slice of a safetensors file (`get_slice`).
          index: one slice for each axis of `layer_shape`.
        """
        bounds = [axis_slice.indices(size)[:2] for axis_slice, size in zip(index, self.layer_shape, strict=True)]
        stored_shape = self.hf_shape[::-1] if self.transpose else self.hf_shape
        # Each axis of the (transposed) tensor merges consecutive axes of ours: [E, (Hq, D)], [(Hq, D), E], ...
        axis = 0
        file_index: list[slice] = []
        shape: list[int] = []
        finer: list[slice] = []
        for size in stored_shape:
            first = axis
            total = 1
            while total < size or (axis == first and axis < len(bounds)):
                total *= self.layer_shape[axis]
                axis += 1
            # The first of the merged axes is cut in the file, further ones (D within a head) after reading.
            (start, stop), inner_sizes = bounds[first], self.layer_shape[first + 1:axis]
            inner = math.prod(inner_sizes)
            file_index.append(slice(start * inner, stop * inner))
            shape += [stop - start, *inner_sizes]
            finer += [slice(None), *(slice(*bound) for bound in bounds[first + 1:axis])]
        rows, *columns = reversed(file_index) if self.transpose else file_index
        value = tensor[slice(rows.start + self.first_row, rows.stop + self.first_row), *columns]
        return (value.T if self.transpose else value).reshape(shape)[tuple(finer)]


def hf_layout(config: LlamaConfig) -> list[HFEntry]:
    """Every parameter of `config`'s model with its Hugging Face tensors: the one table for reading and writing."""
    e, f, v, n = config.hidden_size, config.intermediate_size, config.vocab_size, config.num_hidden_layers
    # LlamaConfig fills in head counts and sizes that are not given.
    hq, hkv, d = config.num_attention_heads, cast(int, config.num_key_value_heads), cast(int, config.head_dim)
    entries: list[HFEntry] = []

    def add(name: str, shape: tuple[int, ...], hf_shape: tuple[int, ...], *, layer: bool = True) -> None:
        prefix = "layers." if layer else ""
        hf_prefix = "model.layers.{i}." if layer else "" if name == "lm_head.weight" else "model."
        # A matrix that multiplies is input-first here; the embedding is a table of rows for both.
        transpose = len(hf_shape) == 2 and name != "embed_tokens.weight"
        entries.append(HFEntry(prefix + name, hf_prefix + name, (n, *shape) if layer else shape, hf_shape,
                               n if layer else None, transpose))

    add("embed_tokens.weight", (v, e), (v, e), layer=False)
    if config.norms != "after":
        add("input_layernorm.weight", (e,), (e,))
    for letter, heads in (("q", hq), ("k", hkv), ("v", hkv)):
        add(f"self_attn.{letter}_proj.weight", (e, heads, d), (heads * d, e))
        if config.attention_bias:
            add(f"self_attn.{letter}_proj.bias", (heads, d), (heads * d,))
    for letter, heads in (("q", hq), ("k", hkv)):
        if config.qk_norm == "head":
            add(f"self_attn.{letter}_norm.weight", (d,), (d,))
        elif config.qk_norm == "all":
            add(f"self_attn.{letter}_norm.weight", (heads, d), (heads * d,))
    add("self_attn.o_proj.weight", (hq, d, e), (e, hq * d))
    if config.output_bias:
        add("self_attn.o_proj.bias", (e,), (e,))
    add("post_attention_layernorm.weight", (e,), (e,))
    if config.norms == "both":
        add("pre_feedforward_layernorm.weight", (e,), (e,))
    if config.norms != "before":
        add("post_feedforward_layernorm.weight", (e,), (e,))
    for part, size_in, size_out in (("gate", e, f), ("up", e, f), ("down", f, e)):
        add(f"mlp.{part}_proj.weight", (size_in, size_out), (size_out, size_in))
        if config.mlp_bias:
            add(f"mlp.{part}_proj.bias", (size_out,), (size_out,))
    add("norm.weight", (e,), (e,), layer=False)
    if not config.tie_word_embeddings:
        add("lm_head.weight", (e, v), (v, e), layer=False)
    for module, projections in FAMILIES[config.family].fused.items():
        entries = _fused(entries, module, projections)
    return entries


def _fused(entries: list[HFEntry], module: str, projections: tuple[str, ...]) -> list[HFEntry]:
    """The table in which the weights of these projections are rows of one tensor, in the order of the table."""
    names = [f"layers.{projection}.weight" for projection in projections]
    file_rows = sum(entry.hf_shape[0] for entry in entries if entry.name in names)
    fused, first_row = [], 0
    for entry in entries:
        if entry.name in names:
            entry = dataclasses.replace(entry, hf_name=f"model.layers.{{i}}.{module}.weight", first_row=first_row,
                                        file_rows=file_rows)
            first_row = entry.rows.stop
        fused.append(entry)
    return fused


def read_hf(
    folder: str | Path, config: LlamaConfig, shardings: Mapping[str, jax.sharding.Sharding] | jax.sharding.Sharding,
    dtype: Any = np.float32, in_memory: LlamaConfig | None = None,
) -> dict[str, jax.Array]:
    """Reads the weights in `folder` as our flat dictionary, parameter name -> array.

    Each device's part is read by itself from the memory-mapped files, so that at most one part is held beside the arrays.

    Args:
      config: the model's own sizes.
      shardings: by name, of the parameters that are read; or one for all parameters.
      dtype: of the arrays: by name, or one for all.
      in_memory: the sizes of the arrays, if they are padded (see model.padding); the padding is zero.

    Raises:
      ValueError: names the tensor that is missing, unknown, of another shape, or of a dtype other than bfloat16, float16 and
        float32; or the folder has no safetensors.
    """
    with ExitStack() as stack:
        files = _open_tensors(Path(folder), stack)
        layout = hf_layout(config)
        _check_tensors(Path(folder), files, layout, config)
        params: dict[str, jax.Array] = {}
        for entry, padded in zip(layout, hf_layout(in_memory or config), strict=True):
            if isinstance(shardings, Mapping) and entry.name not in shardings:
                continue
            if is_nf4(files, entry.hf_names()[0]):
                raise ValueError(f"{folder}: tensor {entry.hf_names()[0]} is stored in NF4, which is read beside adapters with "
                                 "adapter.quantize nf4; use the unquantised model otherwise")
            sharding = shardings[entry.name] if isinstance(shardings, Mapping) else shardings
            dtype_of_entry = np.dtype(dtype[entry.name] if isinstance(dtype, Mapping) else dtype)
            read = functools.partial(padded_part, files, entry, padded.shape, dtype_of_entry)
            params[entry.name] = jax.make_array_from_callback(padded.shape, sharding, read)
            # Transfers may lag behind; waiting keeps one array's parts on the host, not those of all.
            params[entry.name].block_until_ready()
        return params


class StoredParameter:
    """A parameter in the files of a Hugging Face folder, of which a layer is read when it is sliced."""

    def __init__(self, files: Mapping[str, Any], entry: HFEntry) -> None:
        self.files, self.entry, self.shape = files, entry, entry.shape

    def __getitem__(self, layer: int) -> np.ndarray:
        return self._read(self.entry.hf_names()[layer])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        names = self.entry.hf_names()
        whole = self._read(names[0]) if self.entry.layers is None else np.stack([self._read(name) for name in names])
        return whole if dtype is None else whole.astype(dtype)

    def _read(self, name: str) -> np.ndarray:
        return self.entry.read(self.files[name].get_slice(name), tuple(map(slice, self.entry.layer_shape)))


class StoredCodes(StoredParameter):
    """A parameter that the files hold as codes of NF4."""

    def quantized(self, layer: int) -> Nf4:
        """Returns a layer's codes and scales as they are stored."""
        return read_nf4(self.files, self.entry.hf_names()[layer], self.entry.hf_shape)

    def _read(self, name: str) -> np.ndarray:
        return self.entry.read(dequantize_nf4(read_nf4(self.files, name, self.entry.hf_shape)),
                               tuple(map(slice, self.entry.layer_shape)))


def stored_hf(folder: str | Path, config: LlamaConfig, stack: ExitStack) -> dict[str, StoredParameter]:
    """Returns the parameters in `folder` without reading them; the files are closed with `stack`. Errors as in `read_hf`."""
    files, layout = _open_tensors(Path(folder), stack), hf_layout(config)
    _check_tensors(Path(folder), files, layout, config)
    return {entry.name: (StoredCodes if is_nf4(files, entry.hf_names()[0]) else StoredParameter)(files, entry)
            for entry in layout}


def padded_part(
    files: Mapping[str, Any], entry: HFEntry, shape: tuple[int, ...], dtype: Any, index: tuple[slice, ...]
) -> np.ndarray:
    """Reads the part `index` of a parameter that is padded to `shape` with zeros."""
    if shape == entry.shape:
        return _read_part(files, entry, index, dtype)
    bounds = [axis_slice.indices(size)[:2] for axis_slice, size in zip(index, shape, strict=True)]
    stored = [(start, min(stop, size)) for (start, stop), size in zip(bounds, entry.shape, strict=True)]
    part = np.zeros([stop - start for start, stop in bounds], dtype)
    if all(start < stop for start, stop in stored):
        unpadded = tuple(slice(stop - start) for start, stop in stored)
        part[unpadded] = _read_part(files, entry, tuple(slice(*bound) for bound in stored), dtype)
    return part


def _read_part(files: Mapping[str, Any], entry: HFEntry, index: tuple[slice, ...], dtype: Any) -> np.ndarray:
    """Reads the part `index` of a parameter as `dtype`, layer by layer if it stacks the layers."""
    if entry.layers is None:
        return np.ascontiguousarray(entry.read(files[entry.hf_name].get_slice(entry.hf_name), index).astype(dtype))
    names = entry.hf_names()[index[0]]
    parts = (entry.read(files[name].get_slice(name), index[1:]) for name in names)
    shape = tuple(len(range(*axis_slice.indices(size))) for axis_slice, size in zip(index, entry.shape, strict=True))
    result = np.empty(shape, dtype)
    for layer, part in enumerate(parts):
        result[layer] = part  # casts; in numpy, which keeps denormal numbers, where an XLA cast may flush them
    return result


def tensor_dtypes(folder: str | Path) -> dict[str, str]:
    """Tensor name -> dtype of a Hugging Face folder; errors as in `read_hf`."""
    with ExitStack() as stack:
        files = _open_tensors(Path(folder), stack)
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


def _open_tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
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


def _check_tensors(folder: Path, files: Mapping[str, Any], layout: list[HFEntry], config: LlamaConfig) -> None:
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


def copy_assets(folder: str | Path, assets: str | Path) -> None:
    """Copies the files that a checkpoint keeps of a Hugging Face folder to `assets`, and records its dtypes there."""
    folder, assets = Path(folder), Path(assets)
    assets.mkdir(parents=True, exist_ok=True)
    for name in ASSET_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, assets / name)
    dtypes = {name: dtype for name, dtype in tensor_dtypes(folder).items() if dtype in DTYPES.values()}  # not those of codes
    write_source_dtype(assets, dtypes)


def write_source_dtype(assets: str | Path, dtypes: Mapping[str, str] | str) -> None:
    """Records in `assets` the dtype that an export is written in: one for all, or by Hugging Face tensor name."""
    if isinstance(dtypes, str):
        dtypes = {"": dtypes}
    common = collections.Counter(dtypes.values()).most_common(1)[0][0]
    content = {"dtype": common, "tensors": {name: d for name, d in sorted(dtypes.items()) if d != common}}
    (Path(assets) / SOURCE_DTYPE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def trained_mask(assets: str | Path) -> Mask:
    """The attention mask that the model of a checkpoint's `assets` was trained with, by its run.yaml; full without one."""
    recipe = Path(assets) / "run.yaml"
    written = yaml.safe_load(recipe.read_text(encoding="utf-8")) if recipe.is_file() else {}
    attention = written.get("attention", {})
    return Mask(window=attention.get("window"), global_tokens=attention.get("global_tokens", 0))


def trained_quantization(assets: str | Path) -> Quantization:
    """How the base was quantized that the adapters of a checkpoint's `assets` were trained beside, by its run.yaml."""
    recipe = Path(assets) / "run.yaml"
    written = yaml.safe_load(recipe.read_text(encoding="utf-8")) if recipe.is_file() else {}
    return written.get("adapter", {}).get("quantize", "none")


def source_dtype(assets: str | Path) -> tuple[str, dict[str, str]]:
    """The dtype that an export from `assets` is written in, and tensor name -> dtype of the exceptions.

    Without a record it is the dtype in config.json, or else bfloat16.
    """
    assets = Path(assets)
    if (assets / SOURCE_DTYPE_FILE).is_file():
        content = json.loads((assets / SOURCE_DTYPE_FILE).read_text(encoding="utf-8"))
        dtype, tensors = content["dtype"], content["tensors"]
    else:
        config = json.loads((assets / "config.json").read_text(encoding="utf-8"))
        dtype, tensors = config.get("dtype") or config.get("torch_dtype") or "bfloat16", {}
    for name in (dtype, *tensors.values()):
        if name not in DTYPES.values():
            raise ValueError(f"source dtype: found {name!r}; supported are {', '.join(DTYPES.values())}")
    return dtype, tensors


def check_params(shapes: Mapping[str, tuple[int, ...]], config: LlamaConfig) -> None:
    """Raises ValueError, naming the parameter, unless `shapes` (by name) are those of `config`'s model, padded or not."""
    layout = {entry.name: entry.shape for entry in hf_layout(config)}
    for name, shape in layout.items():
        if name not in shapes:
            raise ValueError(f"parameter {name} is missing; the config makes it {list(shape)}")
        if not fits(name, tuple(shapes[name]), shape, shape):
            raise ValueError(f"parameter {name} has shape {list(shapes[name])}; the config makes it {list(shape)}")
    for name in shapes:
        if name not in layout:
            raise ValueError(f"parameter {name} does not belong to the model that the config describes")


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
