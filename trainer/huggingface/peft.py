"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors` in a folder.

If a family's files hold k projections as rows of one tensor, PEFT's adapter of that tensor has one
A. Ours has an A of rank r for each, which becomes an adapter of rank k r: its A stacks ours, and
its B is block-diagonal.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import regex
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from data.folders import building, holds_files
from data.outputs import new_folder
from data.within import file_within, read_json
from model.adapter import ALL_LINEAR, ATTENTION, MAGNITUDE, PROJECTIONS, ROUTER, AdapterConfig
from model.checks import as_float, require_int, require_number
from model.config import TransformerConfig
from model.declarations import LAYERS, declare
from model.families import FAMILIES
from model.language_model import LanguageModel

from . import peft_experts
from .folder import EMBEDDING, HEAD, are_equal, hub_name
from .peft_experts import FactorEntry
from .read import padded_part
from .table import DTYPES, HFEntry, HoldsNaN, check_numbers, hf_layout

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# The fields of an adapter_config.json. These are read:
_READ = (
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "use_dora",
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "base_model_name_or_path",
    "revision",
    "ensure_weight_tying",
)
# Fields that do not affect what a saved adapter computes: versions, training, initialisation, and
# numbers that only matter with another field. The last three are ms-swift's.
_SILENT = (
    "auto_mapping",
    "peft_version",
    "inference_mode",
    "runtime_config",
    "megatron_core",
    "qalora_group_size",
    "layers_pattern",
    "eva_config",
    "lora_dtype",
    "lorap_lr_ratio",
    "lorap_emb_lr",
)
_EMPTY: tuple[Any, ...] = (None, False, [], {}, "")
# Fields that affect it, with their values for plain LoRA. Any other field has to be empty.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "task_type": ("CAUSAL_LM", None),
    # These initialise A and B differently and keep the base. The others change the base, now and
    # whenever peft loads it.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}
_PLAIN = (
    "; its base's weights were changed when it was begun. peft's save_pretrained with "
    "path_initial_model_for_weight_conversion makes a plain LoRA of it, which is read"
)
_MATCH_SECONDS = 1.0  # for an untrusted regular expression; a good one takes microseconds
_MATCHED_LAYERS = 512  # more than any model has; the tensors show which layers have an adapter


# Tensors that hold several projections -> the projections, over all families.
_FUSED = {
    module: names
    for family in FAMILIES.values()
    for module, names in family.fused_projections.items()
}


def adapter_layout(
    config: TransformerConfig, shares_a: bool = False, per_expert: bool = False
) -> list[HFEntry]:
    """Returns every trained parameter of a model with adapters, and its PEFT tensors.

    Args:
      shares_a: whether projections in one tensor share an A, as in PEFT's own adapters of such a
        tensor.
      per_expert: whether each expert has tensors, as with transformers 4.
    """
    assert config.adapter is not None
    entries = [
        dataclasses.replace(entry, hf_name=_PREFIX + entry.hf_name)
        for entry in hf_layout(config)
        if config.adapter.trains(entry.name)
    ]
    declared, rank = declare(config), config.adapter.rank
    fused = {
        name: (module, names)
        for module, names in FAMILIES[config.family].fused_projections.items()
        for name in names
    }
    if config.num_experts:
        entries += peft_experts.entries(config, _PREFIX, shares_a, per_expert)
    for projection in config.adapter.projections:
        if config.num_experts and projection not in ATTENTION:
            continue
        block = f"{'self_attn' if projection in ATTENTION else 'mlp'}."
        inputs, outputs = config.projection_sizes(projection)
        shapes = {"lora_A": (rank, inputs), "lora_B": (outputs, rank), MAGNITUDE: (outputs,)}
        module, names = fused.get(projection, (projection, (projection,)))
        sizes, place = [config.projection_sizes(name)[1] for name in names], names.index(projection)
        of_outputs = {"first_row": sum(sizes[:place]), "file_rows": sum(sizes)}
        of_rank = (
            {"first": 0, "all": rank}
            if shares_a
            else {"first": place * rank, "all": len(names) * rank}
        )
        within = {
            "lora_A": {"first_row": of_rank["first"], "file_rows": of_rank["all"]},
            MAGNITUDE: of_outputs,
            "lora_B": {
                **of_outputs,
                "first_column": of_rank["first"],
                "file_columns": of_rank["all"],
            },
        }
        for part in config.adapter.parts:
            name, end = (
                f"{LAYERS}{block}{projection}.{part}",
                "" if part == MAGNITUDE else ".weight",
            )
            entries.append(
                HFEntry(
                    name,
                    f"{_PREFIX}model.layers.{{i}}.{block}{module}.{part}{end}",
                    declared[name].shape,
                    shapes[part],
                    config.num_hidden_layers,
                    transpose=part != MAGNITUDE,
                    **within[part],
                )
            )
    return entries


def _modules(config: TransformerConfig) -> list[str]:
    """The modules with the adapter in a model's files, in layer order."""
    assert config.adapter is not None
    fused = {
        name: module
        for module, names in FAMILIES[config.family].fused_projections.items()
        for name in names
    }
    named = [
        name for name in config.adapter.projections if name in ATTENTION or not config.num_experts
    ]
    return list(dict.fromkeys(fused.get(name, name) for name in named))


def _patterns(adapter: AdapterConfig, modules: Iterable[str]) -> dict[str, dict[str, Any]]:
    """PEFT's fields for modules whose rank, and so alpha, differ from the adapter's."""
    counts = {module: len(_FUSED[module]) for module in modules if module in _FUSED}
    return {
        "rank_pattern": {module: count * adapter.rank for module, count in counts.items()},
        "alpha_pattern": {
            module: adapter.alpha * (math.sqrt(count) if adapter.use_rslora else count)
            for module, count in counts.items()
        },
    }


def write_config(config: TransformerConfig, base: str | None, folder: Path) -> None:
    """Writes adapter_config.json, which names `base`.

    Args:
      config: of the model with its adapters.
    """
    adapter, modules = config.adapter, _modules(config)
    assert adapter is not None
    parameters = peft_experts.target_parameters(config) if config.num_experts else []
    adapted = [*modules, *(name.rpartition(".")[2] for name in parameters)]
    name, _, revision = (base or "").partition("@") if base and hub_name(base) else (base, "", "")
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout_rate,
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
        "target_modules": modules,
        **_patterns(adapter, adapted),
        "modules_to_save": list(adapter.train) or None,
        "bias": "none",
    }
    if revision:
        content["revision"] = revision
    if parameters:
        content["target_parameters"] = parameters
    # Otherwise peft leaves the base's head.
    if config.tie_word_embeddings and adapter.trains("embed_tokens.weight"):
        content["ensure_weight_tying"] = True
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_adapter(
    params: Mapping[str, Any],
    config: TransformerConfig,
    base: str | None,
    out: str | Path,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Writes an adapter as a folder that peft loads; `out` appears complete or not at all.

    Args:
      params: the trained parameters by name: arrays, or arrays on disk that are read when sliced.
      config: of the model with its adapters.
      base: the path or name of its base model; None names none.
      finish: called with the folder before it becomes `out`, to add files.

    Raises:
      UserError: `out` is not empty, or cannot be written.
    """
    out = new_folder(out)
    assert config.adapter is not None
    tensors: dict[str, np.ndarray] = {}
    for entry in adapter_layout(config):
        value = np.asarray(params[entry.name])[tuple(map(slice, entry.shape))]
        for i, name in enumerate(entry.hf_names()):
            tensor = tensors.setdefault(name, np.zeros(entry.file_shape, value.dtype))
            layer = value if entry.layers is None else value[i]
            check_numbers(name, layer)
            entry.put(tensor, layer)
    head, embedding = (f"{_PREFIX}{name}" for name in (HEAD, EMBEDDING))
    if config.tie_word_embeddings and embedding in tensors:
        tensors[head] = tensors[embedding].copy()  # peft saves and loads tied modules twice
    with building(out, holds_files) as scratch:
        write_config(config, base, scratch)
        save_file(tensors, scratch / WEIGHTS, metadata={"format": "pt"})
        if finish:
            finish(scratch)


def read_config(folder: str | Path) -> tuple[AdapterConfig, str]:
    """Returns the adapter in a PEFT folder, and the path or name of its base.

    Raises:
      ValueError: not an adapter, or an unsupported kind; one line that names the field.
    """
    path = Path(folder).expanduser() / CONFIG
    try:
        content = read_json(path, path.parent)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder}: no {CONFIG} here; a folder that peft wrote has one") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); write it again") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: found {type(content).__name__}, needs a JSON object; write it again"
        )
    if content.get("peft_type") != "LORA":
        raise ValueError(
            f"{path}: peft_type: found {content.get('peft_type')!r}; only 'LORA' is read"
        )
    try:
        _check_fields(content)
        require_int("r", content["r"], at_least=1)
        require_number("lora_alpha", content["lora_alpha"], above=0)
        adapter = AdapterConfig(
            rank=content["r"],
            alpha=content["lora_alpha"],
            use_rslora=_switch(content, "use_rslora"),
            use_dora=_switch(content, "use_dora"),
            dropout=_dropout(content),
            targets=_projections(content),
            # peft prefixes a tied module with the model's name.
            train=tuple(
                dict.fromkeys(
                    name.removeprefix("model.") for name in _names(content, "modules_to_save")
                )
            ),
        )
        _check_patterns(content, adapter)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error} is missing or of another type; write it again") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return adapter, _base(content)


def _dropout(content: Mapping[str, Any]) -> float:
    """Returns the dropout probability, 0 if missing or null; `AdapterConfig` checks its range."""
    return as_float(
        "lora_dropout",
        0.0 if content.get("lora_dropout") is None else content["lora_dropout"],
        or_equal=True,
    )


def _switch(content: Mapping[str, Any], field: str) -> bool:
    """Returns a boolean field, false if missing or null."""
    if content.get(field) not in (True, False, None):
        raise ValueError(f"{field}: found {content[field]!r:.80}; needs true or false")
    return bool(content.get(field))


def _check_patterns(content: Mapping[str, Any], adapter: AdapterConfig) -> None:
    """Raises ValueError for per-module ranks or alphas other than those of `write_config`."""
    own = _patterns(adapter, _FUSED)
    for field, expected in own.items():
        for pattern, value in (content.get(field) or {}).items():
            module = pattern.removeprefix(".*\\.")  # as PEFT names experts' tensors
            if value != expected.get(module):
                wanted = f"; {expected[module]} would be" if module in expected else ""
                raise ValueError(
                    f"{field}: found {value!r} for {module}, which is not read{wanted}"
                )


def _names(content: Mapping[str, Any], field: str) -> list[str]:
    """Returns a field that names modules: a list, one name, or null."""
    value = content.get(field) or []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{field}: found {value!r:.80}; needs names of modules")
    return names


def _check_fields(content: Mapping[str, Any]) -> None:
    """Raises ValueError for the first field that makes the adapter, or may, other than LoRA."""
    for name, value in content.items():
        if name in _READ or name in _SILENT:
            continue
        neutral = _NEUTRAL.get(name, _EMPTY)
        # In JSON 1 is not true.
        if not any(
            value == good and isinstance(value, bool) == isinstance(good, bool) for good in neutral
        ):
            why = _PLAIN if name == "init_lora_weights" else f"; only {neutral[0]!r} is read"
            raise ValueError(f"{name}: found {value!r:.80}{why}")


def _base(content: Mapping[str, Any]) -> str:
    """The base's path or name, with a revision if there is one; "" if the file gives none."""
    base, revision = content.get("base_model_name_or_path") or "", content.get("revision")
    for field, value in (("base_model_name_or_path", base), ("revision", revision)):
        if not isinstance(value, str | None):
            raise ValueError(f"{field}: found {value!r:.80}; needs text or null")
    named = base.count("/") == 1 and "@" not in base and not base.startswith((".", "/", "~"))
    return f"{base}@{revision}" if revision and named else base


def _projections(content: Mapping[str, Any]) -> tuple[str, ...]:
    """The projections in `target_modules`, in layer order.

    peft writes them as a set, sometimes each layer's separately; the tensors show whether every
    layer has them. A text that is not a name is a regular expression for full names.
    """
    targets, found = _names(content, "target_modules"), content.get("target_modules")
    parameters = peft_experts.projections_of(_names(content, "target_parameters"))
    if targets == [ALL_LINEAR]:
        return (ALL_LINEAR,)
    if isinstance(found, str) and found not in (*PROJECTIONS, *_FUSED):
        modules = _matched(found)
        others = sorted(modules - {*PROJECTIONS, *_FUSED})
        if others or not modules:
            raise ValueError(
                f"target_modules: found {found!r:.80}, which matches "
                f"{', '.join(others) or 'no projection'}; adapters of {', '.join(PROJECTIONS)} are "
                "read"
            )
    else:
        ends = {target.rpartition(".")[2] for target in targets}
        modules = {peft_experts.MODULES.get(end, end) for end in ends}
    names = {name for module in modules for name in _FUSED.get(module, (module,))} | {*parameters}
    known = (*PROJECTIONS, ROUTER)
    return (*(name for name in known if name in names), *sorted(names - set(known)))


def _matched(pattern: str) -> set[str]:
    """The last parts of the module names that a regular expression matches, as in peft."""
    ends = {
        name: "self_attn"
        if name in ATTENTION or set(_FUSED.get(name, ())) & set(ATTENTION)
        else "mlp"
        for name in (*PROJECTIONS, *_FUSED)
    }
    matched, deadline = set(), time.monotonic() + _MATCH_SECONDS
    try:
        compiled = regex.compile(pattern)
        for name in (*ends, "lm_head", "embed_tokens"):
            places = (
                [f"model.layers.{i}.{ends[name]}.{name}" for i in range(_MATCHED_LAYERS)]
                if name in ends
                else ["lm_head" if name == "lm_head" else "model.embed_tokens"]
            )
            if any(
                compiled.fullmatch(place, timeout=max(1e-3, deadline - time.monotonic()))
                for place in places
            ):
                matched.add(name)
    except (regex.error, TimeoutError, RecursionError, OverflowError) as error:
        problem = (
            "takes too long to match"
            if isinstance(error, TimeoutError)
            else f"is not a regular expression ({error})"
        )
        raise ValueError(
            f"target_modules: found {pattern!r:.80}, which {problem}; a list of modules would work"
        ) from None
    # Models have the fused tensors or the projections, with different names.
    return matched if not matched & set(PROJECTIONS) else matched - set(_FUSED)


def check_tied(folder: Path, adapter: AdapterConfig) -> None:
    """Checks an adapter of a base with a tied head.

    Raises:
      ValueError: the adapter unties them: peft then trains and loads one, and leaves the other as
        in the base.
    """
    path = folder / CONFIG
    ensured = read_json(path, folder).get("ensure_weight_tying") is True
    for name in ("lm_head", "embed_tokens"):
        if adapter.trains(f"{name}.weight") and (name == "lm_head" or not ensured):
            raise ValueError(
                f"{path}: modules_to_save: found {name!r}, and the base's head is its embedding "
                "(tie_word_embeddings): such an adapter unties them, which is not read; "
                "embed_tokens with ensure_weight_tying true trains both as one"
            )


def read_adapter(folder: str | Path, model: LanguageModel) -> dict[str, jax.Array]:
    """Reads an adapter's float32 parameters onto the mesh of `model`, each device its part.

    Raises:
      ValueError: names the tensor that is missing, unknown, or of another shape, due to another
        base or rank.
    """
    path = Path(folder).expanduser() / WEIGHTS
    file_within(path.parent, WEIGHTS)
    try:
        with safe_open(path, framework="np") as file:
            files = dict.fromkeys(file.keys(), file)
            form = {
                "shares_a": _shares_a(files, model.config),
                "per_expert": peft_experts.is_per_expert(files),
            }
            layout, padded = (
                adapter_layout(config, **form) for config in (model.config, model.in_memory)
            )
            _check_tensors(path, files, layout, model.config.tie_word_embeddings)
            params: dict[str, jax.Array] = {}
            for entry, in_memory in zip(layout, padded, strict=True):
                read = functools.partial(padded_part, files, entry, in_memory.shape, np.float32)
                params[entry.name] = jax.make_array_from_callback(
                    in_memory.shape, model.shardings[entry.name], read
                )
                params[entry.name].block_until_ready()
            return params
    except HoldsNaN as error:
        raise ValueError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; peft writes it next to {CONFIG}") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: not a complete safetensors file ({error}); write it again"
        ) from None


def _shares_a(files: Mapping[str, Any], config: TransformerConfig) -> bool:
    """Whether the A of several projections has the rows of a single one."""
    layouts = (adapter_layout(config, shares_a=shares_a) for shares_a in (False, True))
    shapes = {
        apart.hf_names()[0]: shared.file_shape
        for apart, shared in zip(*layouts, strict=True)
        if apart.name.endswith("lora_A") and apart.file_shape != shared.file_shape
    }
    return any(
        name in files and tuple(files[name].get_slice(name).get_shape()) == shape
        for name, shape in shapes.items()
    )


def _check_tensors(path: Path, files: Mapping[str, Any], layout: list[HFEntry], tied: bool) -> None:
    expected = [(name, entry) for entry in layout for name in entry.file_tensors()]
    for name, entry in expected:
        if name not in files:
            raise ValueError(
                f"{path}: tensor {name} is missing; the base and the adapter do not match"
            )
        tensor = files[name].get_slice(name)
        shape = tuple(tensor.get_shape())
        if shape != entry.file_shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {list(shape)}, and needs "
                f"{list(entry.file_shape)}: the adapter belongs to another base, or has another "
                "rank"
            )
        if tensor.get_dtype() not in DTYPES:
            raise ValueError(
                f"{path}: tensor {name} is {tensor.get_dtype()}; supported are {', '.join(DTYPES)}"
            )
        _check_diagonal(path, name, tensor, entry)
    names = {name for name, _ in expected}
    head, embedding = (f"{_PREFIX}{name}" for name in (HEAD, EMBEDDING))
    # peft saves tied modules twice.
    if tied and embedding in names and head in files:
        if not are_equal(*(files[name].get_slice(name) for name in (head, embedding))):
            raise ValueError(
                f"{path}: tensor {head} differs from {embedding}, and the base's head is its "
                "embedding; such an adapter unties them, which is not read"
            )
        names.add(head)
    unknown = sorted(set(files) - names)
    if unknown:
        raise ValueError(f"{path}: tensor {unknown[0]} belongs to no projection of the base")


def _check_diagonal(path: Path, name: str, tensor: Any, entry: HFEntry) -> None:
    """Raises ValueError unless a parameter's rows are zero outside of its columns."""
    if isinstance(entry, FactorEntry):
        others = entry.others(tensor[:])
    elif entry.file_shape[1:] == entry.hf_shape[1:]:
        return
    else:
        columns = np.arange(entry.columns[0].start, entry.columns[0].stop)
        others = np.delete(tensor[entry.rows, :], columns, 1)
    if np.any(others):
        raise ValueError(
            f"{path}: tensor {name} has numbers outside its diagonal blocks, as after training "
            "with peft; adapters of fused projections are read as PEFT creates them, with one A, "
            "or as exported here"
        )
