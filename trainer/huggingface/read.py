"""Hugging Face model folders: what is in them, and how they are read into sharded arrays without holding the model twice."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from safetensors import SafetensorError, safe_open

from model.attention import Mask
from model.config import LlamaConfig
from model.padding import fits

# safetensors' names of the types we read. Each is exact in float32, so import followed by export changes no bit.
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Files of a Hugging Face folder that belong to the model and are not weights. A fixed list: a training run puts files
# of its own beside them (run configuration), which do not belong into an exported model.
ASSET_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)
SOURCE_DTYPE_FILE = "source_dtype.json"


@dataclass(frozen=True)
class HFEntry:
    """How one of our parameters is spelt by Hugging Face.

    `shape` is ours, with the leading layer axis where `layers` is not None; `hf_shape` is one Hugging Face tensor's.
    One tensor becomes ours by: transpose if `transpose`, then reshape to the shape without the layer axis. Both are
    undone in the opposite order.
    """

    name: str
    hf_name: str
    shape: tuple[int, ...]
    hf_shape: tuple[int, ...]
    layers: int | None
    transpose: bool

    def hf_names(self) -> list[str]:
        """The Hugging Face tensors, by layer if stacked, else the one."""
        return [self.hf_name] if self.layers is None else [self.hf_name.format(i=i) for i in range(self.layers)]

    @property
    def one_shape(self) -> tuple[int, ...]:
        """Our shape without the layer axis."""
        return self.shape if self.layers is None else self.shape[1:]

    def to_hf(self, value: np.ndarray) -> np.ndarray:
        """Ours, one layer -> one Hugging Face tensor (a view where possible)."""
        return value.reshape(self.hf_shape[::-1]).T if self.transpose else value.reshape(self.hf_shape)

    def read(self, tensor: Any, index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` of ours, one layer, from a safetensors slice; reads only the rows and columns it needs."""
        ranges = [s.indices(n)[:2] for s, n in zip(index, self.one_shape, strict=True)]
        # Our axes merge, in order, into those of the (transposed) Hugging Face tensor: [E, (Hq, D)], [(Hq, D), E], ...
        merged = self.hf_shape[::-1] if self.transpose else self.hf_shape
        rest, wanted, shape, finer = list(zip(ranges, self.one_shape, strict=True)), [], [], []
        for size in merged:
            group, total = [], 1
            while total < size or (not group and rest):
                group.append(rest.pop(0))
                total *= group[-1][1]
            # The first axis of a group is cut in the file, further ones (head_dim inside a head) after reading.
            (start, stop), inner = group[0][0], math.prod(n for _, n in group[1:])
            wanted.append(slice(start * inner, stop * inner))
            shape += [stop - start, *(n for _, n in group[1:])]
            finer += [slice(None), *(slice(*r) for r, _ in group[1:])]
        value = tensor[tuple(reversed(wanted))].T if self.transpose else tensor[tuple(wanted)]
        return value.reshape(shape)[tuple(finer)]


def hf_layout(config: LlamaConfig) -> list[HFEntry]:
    """Every parameter of `config`'s model with its Hugging Face tensors: the one table for reading and writing."""
    e, f, v, n = config.hidden_size, config.intermediate_size, config.vocab_size, config.num_hidden_layers
    hq, hkv, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    entries = []

    def add(name: str, shape: tuple[int, ...], hf_shape: tuple[int, ...], *, layer: bool = True) -> None:
        prefix = "layers." if layer else ""
        hf_prefix = "model.layers.{i}." if layer else "" if name == "lm_head.weight" else "model."
        # A matrix that multiplies is input-first here; the embedding is a table of rows for both.
        transpose = len(hf_shape) == 2 and name != "embed_tokens.weight"
        entries.append(HFEntry(prefix + name, hf_prefix + name, (n, *shape) if layer else shape, hf_shape,
                               n if layer else None, transpose))

    add("embed_tokens.weight", (v, e), (v, e), layer=False)
    add("input_layernorm.weight", (e,), (e,))
    for letter, heads in (("q", hq), ("k", hkv), ("v", hkv)):
        add(f"self_attn.{letter}_proj.weight", (e, heads, d), (heads * d, e))
        if config.attention_bias:
            add(f"self_attn.{letter}_proj.bias", (heads, d), (heads * d,))
    add("self_attn.o_proj.weight", (hq, d, e), (e, hq * d))
    if config.attention_bias:
        add("self_attn.o_proj.bias", (e,), (e,))
    add("post_attention_layernorm.weight", (e,), (e,))
    for part, size_in, size_out in (("gate", e, f), ("up", e, f), ("down", f, e)):
        add(f"mlp.{part}_proj.weight", (size_in, size_out), (size_out, size_in))
        if config.mlp_bias:
            add(f"mlp.{part}_proj.bias", (size_out,), (size_out,))
    add("norm.weight", (e,), (e,), layer=False)
    if not config.tie_word_embeddings:
        add("lm_head.weight", (e, v), (v, e), layer=False)
    return entries


def read_hf(
    folder: str | Path, config: LlamaConfig, shardings: Mapping[str, jax.sharding.Sharding] | jax.sharding.Sharding,
    dtype: Any = np.float32, in_memory: LlamaConfig | None = None,
) -> dict[str, jax.Array]:
    """The weights in `folder` as our flat dictionary, of `dtype`, placed by `shardings` (by name, or one for all).

    `in_memory`: the sizes that the arrays get (see model.padding); what the files do not have is zero.
    Each device's part is read by itself from the memory-mapped files, so that the peak is the arrays and one part.
    Raises ValueError naming the tensor for one that is missing, misshapen, of a type other than bfloat16, float16 and
    float32, or unknown; and for folders without safetensors.
    """
    with ExitStack() as stack:
        files = _open_tensors(Path(folder), stack)
        layout = hf_layout(config)
        _check_tensors(Path(folder), files, layout, config)
        params = {}
        for entry, padded in zip(layout, hf_layout(in_memory or config), strict=True):
            sharding = shardings[entry.name] if isinstance(shardings, Mapping) else shardings
            shape = padded.shape
            params[entry.name] = jax.make_array_from_callback(
                shape, sharding, lambda index, entry=entry, shape=shape: _padded_part(files, entry, shape, index, dtype)
            )
            # Transfers may lag behind; waiting keeps one array's parts on the host, not all of them.
            params[entry.name].block_until_ready()
        return params


def _padded_part(
    files: Mapping[str, Any], entry: HFEntry, shape: tuple[int, ...], index: tuple[slice, ...], dtype: Any
) -> np.ndarray:
    """The part `index` of a parameter that is of `shape` in memory: zeros beyond its own."""
    if shape == entry.shape:
        return _read_part(files, entry, index, dtype)
    wanted = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    inside = [(start, min(stop, n)) for (start, stop), n in zip(wanted, entry.shape, strict=True)]
    part = np.zeros([stop - start for start, stop in wanted], dtype)
    if all(start < stop for start, stop in inside):
        own = tuple(slice(stop - start) for start, stop in inside)
        part[own] = _read_part(files, entry, tuple(slice(*ends) for ends in inside), dtype)
    return part


def _read_part(files: Mapping[str, Any], entry: HFEntry, index: tuple[slice, ...], dtype: Any) -> np.ndarray:
    """The part `index` of our (stacked) parameter as `dtype`."""
    if entry.layers is None:
        return np.ascontiguousarray(entry.read(files[entry.hf_name].get_slice(entry.hf_name), index).astype(dtype))
    names = entry.hf_names()[index[0]]
    parts = (entry.read(files[name].get_slice(name), index[1:]) for name in names)
    shape = tuple(len(range(*s.indices(n))) for s, n in zip(index, entry.shape, strict=True))
    result = np.empty(shape, dtype)
    for place, part in enumerate(parts):
        result[place] = part  # casts; in numpy, which keeps denormal numbers, where an XLA cast may flush them
    return result


def tensor_dtypes(folder: str | Path) -> dict[str, str]:
    """The dtype of each tensor in a Hugging Face folder, by name; errors as read_hf's."""
    with ExitStack() as stack:
        files = _open_tensors(Path(folder), stack)
        return {name: DTYPES.get(file.get_slice(name).get_dtype(), file.get_slice(name).get_dtype())
                for name, file in files.items()}


def weights_fingerprint(folder: str | Path) -> str:
    """Changes with the weights in a Hugging Face folder, not with where it lies.

    Of each file the size and 64 blocks of 4 KiB spread over it: the whole of a large model would take minutes to read.
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
    """Tensor name -> opened safetensors file to read it from: of several the one that the index names."""
    index_file, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        paths, named = [single], {}
    elif index_file.is_file():
        try:
            weight_map = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
            named = {name: folder / file for name, file in weight_map.items()}
            paths = sorted(set(named.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index_file}: not a safetensors index ({error!r}); download it again") from None
        outside = [path for path in paths if path.parent != folder]
        if outside:
            raise ValueError(f"{index_file}: names {outside[0]}, which is not in its folder")
    else:
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder")
        pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pth"), *folder.glob("*.pt")])
        if pickled:
            raise ValueError(
                f"{folder}: only pickled weights here ({pickled[0].name}); they can run code when loaded and are "
                "refused; convert them to safetensors (https://huggingface.co/docs/safetensors/convert-weights)"
            )
        raise ValueError(f"{folder}: no weights here; needs model.safetensors or model.safetensors.index.json")
    tensors, holders = {}, {}
    for path in paths:
        try:
            opened = stack.enter_context(safe_open(path, framework="np"))
        except FileNotFoundError:
            raise ValueError(f"{path}: missing, but {index_file.name} names it; download it again") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error}); download it again") from None
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            if named.get(name, path) != path:
                continue
            if name in tensors:
                raise ValueError(f"{folder}: tensor {name} is in {holders[name].name} and {path.name}, and {index_file.name} "
                                 "does not say in which; download the folder again")
            tensors[name], holders[name] = opened, path
    for name, path in named.items():
        if name not in tensors:
            raise ValueError(f"{index_file}: tensor {name} is not in {path.name}, the file that it names; download the folder "
                             "again")
    return tensors


def _check_tensors(folder: Path, files: Mapping[str, Any], layout: list[HFEntry], config: LlamaConfig) -> None:
    known = set()
    for entry in layout:
        for name in entry.hf_names():
            known.add(name)
            if name not in files:
                raise ValueError(f"{folder}: tensor {name} is missing; expected shape {list(entry.hf_shape)}")
            found = files[name].get_slice(name)
            if tuple(found.get_shape()) != entry.hf_shape:
                raise ValueError(f"{folder}: tensor {name} has shape {list(found.get_shape())}; "
                                 f"config.json makes it {list(entry.hf_shape)}")
            if found.get_dtype() not in DTYPES:
                raise ValueError(f"{folder}: tensor {name} is {found.get_dtype()}; supported are {', '.join(DTYPES)}")
    for name in sorted(set(files) - known):
        # Old exports store the table of frequencies; tied models may store the head a second time.
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        raise ValueError(f"{folder}: tensor {name} does not belong to the model that config.json describes")


def copy_assets(folder: str | Path, assets: str | Path) -> None:
    """Fills `assets` with what a checkpoint keeps of a Hugging Face folder: config, tokenizer, template, dtypes."""
    folder, assets = Path(folder), Path(assets)
    assets.mkdir(parents=True, exist_ok=True)
    for name in ASSET_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, assets / name)
    dtypes = tensor_dtypes(folder)
    write_source_dtype(assets, dtypes)


def write_source_dtype(assets: str | Path, dtypes: Mapping[str, str] | str) -> None:
    """Records in `assets` the dtype an export is written in: one for all, or by Hugging Face tensor name."""
    if isinstance(dtypes, str):
        dtypes = {"": dtypes}
    counts: dict[str, int] = {}
    for dtype in dtypes.values():
        counts[dtype] = counts.get(dtype, 0) + 1
    common = max(counts, key=counts.get)
    content = {"dtype": common, "tensors": {name: d for name, d in sorted(dtypes.items()) if d != common}}
    (Path(assets) / SOURCE_DTYPE_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def trained_mask(assets: str | Path) -> Mask:
    """What attention sees in the model of a checkpoint's `assets`: what the recipe said that trained it, if one did."""
    recipe = Path(assets) / "run.yaml"
    written = yaml.safe_load(recipe.read_text(encoding="utf-8")) if recipe.is_file() else {}
    attention = written.get("attention", {})
    return Mask(window=attention.get("window"), global_tokens=attention.get("global_tokens", 0))


def source_dtype(assets: str | Path) -> tuple[str, dict[str, str]]:
    """(dtype, exceptions by tensor name) that an export from `assets` is written in; bfloat16 where nothing says."""
    assets = Path(assets)
    if (assets / SOURCE_DTYPE_FILE).is_file():
        content = json.loads((assets / SOURCE_DTYPE_FILE).read_text(encoding="utf-8"))
        dtype, tensors = content["dtype"], content["tensors"]
    else:
        config = json.loads((assets / "config.json").read_text(encoding="utf-8"))
        dtype, tensors = config.get("dtype") or config.get("torch_dtype") or "bfloat16", {}
    for found in (dtype, *tensors.values()):
        if found not in DTYPES.values():
            raise ValueError(f"source dtype: found {found!r}; supported are {', '.join(DTYPES.values())}")
    return dtype, tensors


def check_params(shapes: Mapping[str, tuple[int, ...]], config: LlamaConfig) -> None:
    """Raises ValueError, naming the parameter, unless `shapes` are those of `config`'s model, padded or not."""
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
    """The folder of a model: a folder as it is, `org/name` or `org/name@revision` from the local Hugging Face cache.

    Nothing is downloaded: a run must not depend on what a hub answers. Raises ValueError naming the download command.
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
