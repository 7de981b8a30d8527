"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors` in a folder."""
from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from data.folders import building, holds_files
from data.paths import new_folder
from model.adapter import ATTENTION, MAGNITUDE, PROJECTIONS, AdapterConfig
from model.checks import as_float, require_int, require_number
from model.config import LlamaConfig
from model.llama import Llama
from model.modules import LAYERS, declare

from .read import padded_part
from .table import DTYPES, HFEntry, hf_layout

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Fields of an adapter_config.json under which an adapter computes something else, with the values that are neutral.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None), "fan_in_fan_out": (False, None), "rank_pattern": ({}, None), "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []), "layer_replication": (None, []), "lora_bias": (False, None),
    "trainable_token_indices": (None, [], {}), "target_parameters": (None, []), "exclude_modules": (None, []),
}


def adapter_layout(config: LlamaConfig) -> list[HFEntry]:
    """Returns every trained parameter of a model with adapters, and the tensors of PEFT that it is made of."""
    assert config.adapter is not None
    entries = [dataclasses.replace(entry, hf_name=_PREFIX + entry.hf_name)
               for entry in hf_layout(config) if config.adapter.trains(entry.name)]
    declared = declare(config)
    for projection in config.adapter.projections:
        prefix = f"{'self_attn' if projection in ATTENTION else 'mlp'}.{projection}."
        inputs, outputs = config.projection_sizes(projection)
        shapes = {"lora_A": (config.adapter.rank, inputs), "lora_B": (outputs, config.adapter.rank), MAGNITUDE: (outputs,)}
        for part in config.adapter.parts:
            name, end = LAYERS + prefix + part, "" if part == MAGNITUDE else ".weight"
            entries.append(HFEntry(name, f"{_PREFIX}model.layers.{{i}}.{prefix}{part}{end}", declared[name].shape, shapes[part],
                                   config.num_hidden_layers, transpose=part != MAGNITUDE))
    return entries


def write_config(adapter: AdapterConfig, base: str, folder: Path) -> None:
    """Writes adapter_config.json, which names `base` as the model that the adapter belongs to."""
    content = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
               "r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": adapter.dropout_rate,
               "use_rslora": adapter.use_rslora, "use_dora": adapter.use_dora,
               "target_modules": list(adapter.projections), "modules_to_save": list(adapter.train) or None, "bias": "none"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_adapter(params: Mapping[str, Any], config: LlamaConfig, base: str, out: str | Path,
                  finish: Callable[[Path], None] | None = None) -> None:
    """Writes an adapter as a folder that peft loads; `out` appears whole or not at all.

    Args:
      params: the trained parameters by name: arrays, or arrays on disk that are read when sliced.
      config: of the model with its adapters.
      base: the path or the name of the model that it belongs to.
      finish: called with the folder before it becomes `out`, to add files.

    Raises:
      UserError: `out` is not empty, or cannot be written.
    """
    out = new_folder(out)
    assert config.adapter is not None
    tensors = {}
    for entry in adapter_layout(config):
        value = np.asarray(params[entry.name])[tuple(map(slice, entry.shape))]
        for i, name in enumerate(entry.hf_names()):
            tensors[name] = np.ascontiguousarray(entry.to_hf(value if entry.layers is None else value[i]))
    with building(out, holds_files) as scratch:
        write_config(config.adapter, base, scratch)
        save_file(tensors, scratch / WEIGHTS, metadata={"format": "pt"})
        if finish:
            finish(scratch)


def read_config(folder: str | Path) -> tuple[AdapterConfig, str]:
    """Returns the adapter that a folder of PEFT's holds, and the path or name of its base.

    Raises:
      ValueError: it is none, or of a kind that is not computed here; one line that names the field.
    """
    path = Path(folder).expanduser() / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder}: no {CONFIG} here; a folder that peft has written has one") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); write it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: found {type(content).__name__}, needs a JSON object; write it again")
    if content.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type: found {content.get('peft_type')!r}; only 'LORA' is read")
    for name, neutral in _NEUTRAL.items():
        if content.get(name) not in neutral:
            raise ValueError(f"{path}: {name}: found {content[name]!r}; only {neutral[0]!r} is read")
    try:
        require_int("r", content["r"], at_least=1)
        require_number("lora_alpha", content["lora_alpha"], above=0)
        adapter = AdapterConfig(
            rank=content["r"], alpha=content["lora_alpha"], use_rslora=_switch(content, "use_rslora"),
            use_dora=_switch(content, "use_dora"), dropout=_dropout(content),
            targets=_projections(_names(content, "target_modules")), train=tuple(_names(content, "modules_to_save")))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error} is missing or of another type; write it again") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return adapter, content.get("base_model_name_or_path") or ""


def _dropout(content: Mapping[str, Any]) -> float:
    """Returns the probability of dropout, and 0 where it is missing or null. That it is less than 1 `AdapterConfig` checks."""
    return as_float("lora_dropout", 0.0 if content.get("lora_dropout") is None else content["lora_dropout"], or_equal=True)


def _switch(content: Mapping[str, Any], field: str) -> bool:
    """Returns a field that is true or false, and false where it is missing or null."""
    if content.get(field) not in (True, False, None):
        raise ValueError(f"{field}: found {content[field]!r:.80}; needs true or false")
    return bool(content.get(field))


def _names(content: Mapping[str, Any], field: str) -> list[str]:
    """Returns a field that names modules: a list, one name, or null for none."""
    value = content.get(field) or []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{field}: found {value!r:.80}; needs names of modules")
    return names


def _projections(targets: list[str]) -> tuple[str, ...]:
    """The projections that are meant, in the order of a layer. peft writes them as a set, and sometimes each layer's by itself;
    whether every layer has them shows in the tensors."""
    names = {target.rpartition(".")[2] for target in targets}
    return (*(name for name in PROJECTIONS if name in names), *sorted(names - set(PROJECTIONS)))


def read_adapter(folder: str | Path, model: Llama) -> dict[str, jax.Array]:
    """Reads an adapter's parameters in float32 onto the mesh of `model`, each device its own part.

    Raises:
      ValueError: names the tensor that is missing, unknown, or of another shape than the model's, as of another base or rank.
    """
    path = Path(folder).expanduser() / WEIGHTS
    layout, padded = adapter_layout(model.config), adapter_layout(model.in_memory)
    try:
        with safe_open(path, framework="np") as file:
            files = dict.fromkeys(file.keys(), file)
            _check_tensors(path, files, layout)
            params: dict[str, jax.Array] = {}
            for entry, in_memory in zip(layout, padded, strict=True):
                read = functools.partial(padded_part, files, entry, in_memory.shape, np.float32)
                params[entry.name] = jax.make_array_from_callback(in_memory.shape, model.shardings[entry.name], read)
                params[entry.name].block_until_ready()
            return params
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; peft writes it beside {CONFIG}") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); write it again") from None


def _check_tensors(path: Path, files: Mapping[str, Any], layout: list[HFEntry]) -> None:
    expected = {name: entry for entry in layout for name in entry.hf_names()}
    for name, entry in expected.items():
        if name not in files:
            raise ValueError(f"{path}: tensor {name} is missing; the base or the adapter is another one")
        tensor = files[name].get_slice(name)
        shape = tuple(tensor.get_shape())
        if shape != entry.hf_shape:
            raise ValueError(f"{path}: tensor {name} has shape {list(shape)}, and needs {list(entry.hf_shape)}: the adapter "
                             "belongs to another base, or has another rank")
        if tensor.get_dtype() not in DTYPES:
            raise ValueError(f"{path}: tensor {name} is {tensor.get_dtype()}; supported are {', '.join(DTYPES)}")
    unknown = sorted(set(files) - set(expected))
    if unknown:
        raise ValueError(f"{path}: tensor {unknown[0]} belongs to no projection of the base")
