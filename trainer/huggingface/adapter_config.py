"""PEFT's `adapter_config.json`: written, and read as far as it describes LoRA or DoRA."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from data.paths import expanded
from data.untrusted_files import file_within, read_json
from model.adapter import (
    ALL_LINEAR,
    ATTENTION,
    PROJECTIONS,
    ROUTER,
    AdapterConfig,
    ends_with,
    last_part,
)
from model.config import TransformerConfig
from model.families import FAMILIES
from model.number_checks import as_float, require_int, require_number

from . import peft_experts
from .hub_models import hub_name
from .peft_modules import FUSED, AdaptedModules, names_in
from .table import hf_layout

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
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
    "exclude_modules",
    "layers_to_transform",
)
# Fields that do not affect what a saved adapter computes: versions, training, initialization, and
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
    "fan_in_fan_out": (False, None, True),  # PEFT takes false for the projections' matrices
    # These initialize A and B differently and keep the base (of mica see `check_trainable`). The
    # others change the base, now and whenever peft loads it.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}
_PLAIN = (
    "; its base's weights were changed when it was begun. peft's save_pretrained with "
    "path_initial_model_for_weight_conversion makes a plain LoRA of it, which is read"
)
_WHOLE = "; peft's merge_and_unload makes a whole model of it"
_WHOLE_UNLESS_TIED = f"{_WHOLE}, unless the base's head is its embedding (tie_word_embeddings)"
_IN_A_WHOLE_MODEL = ("bias", "trainable_token_indices")


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


def _saved_modules(config: TransformerConfig) -> list[str]:
    """`adapter.train` with transformers' names for modules that have another one here, such as a
    router or projections in one tensor."""
    assert config.adapter is not None
    modules = {
        entry.name.rpartition(".")[0]: entry.hf_name.rpartition(".")[0]
        for entry in hf_layout(config, stacked=True)
    }
    names: list[str] = []
    for entry in config.adapter.train:
        found = {ours: theirs for ours, theirs in modules.items() if ends_with(ours, entry)}
        differ = any(
            last_part(ours) != last_part(theirs) or not theirs.endswith(entry)
            for ours, theirs in found.items()
        )
        names += [last_part(theirs) for theirs in found.values()] if differ else [entry]
    return list(dict.fromkeys(names))


def _patterns(adapter: AdapterConfig, modules: Iterable[str]) -> dict[str, dict[str, Any]]:
    """PEFT's fields for modules whose rank, and so alpha, differ from the adapter's."""
    counts = {module: len(FUSED[module]) for module in modules if module in FUSED}
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
        "modules_to_save": _saved_modules(config) or None,
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


def read_config(
    folder: str | Path, model: TransformerConfig | None = None
) -> tuple[AdapterConfig, str]:
    """Returns the adapter in a PEFT folder, and the path or name of its base.

    Args:
      model: the base's configuration, if known: `target_modules` may name projections in one family
        and the tensor that stacks them in another.

    Raises:
      ValueError: not an adapter, or an unsupported kind; one line that names the field.
    """
    path = expanded(folder) / CONFIG
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
    if "lora_parameters" in content:
        raise ValueError(
            f"{path}: lora_parameters: an adapter of mlx-lm, whose format is not read; its "
            "mlx_lm.fuse makes a whole model of it"
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
            targets=_projections(content, model, path.parent),
            train=_trained(content, model, path.parent),
        )
        base = _base(content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error} is missing or of another type; write it again") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return adapter, base


def check_trainable(folder: Path) -> None:
    """Raises ValueError for an adapter of which peft trains only A, since here both A and B would
    be trained."""
    path = folder / CONFIG
    if read_json(path, folder).get("init_lora_weights") == "mica":
        raise ValueError(
            f"{path}: init_lora_weights: found 'mica', whose B peft keeps as it is, so the adapter "
            "can't be continued; a new adapter on what peft's merge_and_unload makes of it would "
            "work"
        )


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
            remedy = _WHOLE if name in _IN_A_WHOLE_MODEL else ""
            raise ValueError(f"{name}: found {value!r:.80}{why}{remedy}")


def _base(content: Mapping[str, Any]) -> str:
    """The base's path or name, with a revision if there is one; "" if the file gives none."""
    base, revision = content.get("base_model_name_or_path") or "", content.get("revision")
    for field, value in (("base_model_name_or_path", base), ("revision", revision)):
        if not isinstance(value, str | None):
            raise ValueError(f"{field}: found {value!r:.80}; needs text or null")
    named = base.count("/") == 1 and "@" not in base and not base.startswith((".", "/", "~"))
    return f"{base}@{revision}" if revision and named else base


def _trained(
    content: Mapping[str, Any], model: TransformerConfig | None, folder: Path
) -> tuple[str, ...]:
    """The modules in `modules_to_save`, by our names; and embedding and head, if the file has them.

    Of a base with resized embeddings peft saves both, and loads them into the base.
    """
    names, is_tied = _saved(content), model is not None and model.tie_word_embeddings
    in_file = [name.split(".")[-2] for name in _tensor_names(folder) if name.endswith(".weight")]
    rows = ("embed_tokens",) if is_tied else ("embed_tokens", "lm_head")
    return tuple(dict.fromkeys((*names, *(name for name in rows if name in in_file))))


def _saved(content: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules in `modules_to_save`, by our names."""
    names: list[str] = []
    for name in names_in(content, "modules_to_save"):
        # peft prefixes a tied module with the model's name; without it, norm would be every norm.
        unprefixed = name.removeprefix("model.")
        *path, last = (unprefixed if unprefixed in ("embed_tokens", "lm_head") else name).split(".")
        path = ["mlp" if part == "block_sparse_moe" else part for part in path]
        last = peft_experts.MODULES.get(last, last)
        names += [".".join((*path, part)) for part in FUSED.get(last, (last,))]
    return tuple(dict.fromkeys(names))


def _projections(
    content: Mapping[str, Any], model: TransformerConfig | None, folder: Path
) -> tuple[str, ...]:
    """The projections in `target_modules`, in layer order.

    peft writes them as a set, sometimes each layer's separately; the tensors show whether every
    layer has them. A text that is not a name is a regular expression for full names.
    """
    targets, found = names_in(content, "target_modules"), content.get("target_modules")
    adapted = AdaptedModules(content)
    parameters = peft_experts.projections_of(names_in(content, "target_parameters"))
    if targets == [ALL_LINEAR] and not content.get("exclude_modules"):
        return (ALL_LINEAR,)
    if adapted.is_pattern:
        family = None if model is None else model.family
        known = {*PROJECTIONS, *FUSED, "lm_head", "embed_tokens"}
        modules = _of_family(adapted.among(known), family)
        others = sorted(modules - {*PROJECTIONS, *FUSED})
        if others or not modules:
            raise ValueError(
                f"target_modules: found {found!r:.80}, which matches "
                f"{', '.join(others) or 'no projection'}; adapters of {', '.join(PROJECTIONS)} are "
                f"read{_WHOLE_UNLESS_TIED if others else ''}"
            )
    else:
        linear = {*PROJECTIONS, *FUSED}
        named = linear if targets == [ALL_LINEAR] else {last_part(name) for name in targets}
        modules = _named_projections(adapted.not_excluded(named), model)
    if model is not None and model.num_experts:
        modules = _with_tensors(modules, folder)
    if targets and not (modules or parameters):
        raise ValueError(
            f"target_modules: found {found!r:.80}, none of which is a projection of the base; "
            f"adapters of {', '.join(PROJECTIONS)} are read"
        )
    names = {name for module in modules for name in FUSED.get(module, (module,))} | {*parameters}
    return tuple(name for name in (*PROJECTIONS, ROUTER) if name in names)


def _named_projections(names: set[str], model: TransformerConfig | None) -> set[str]:
    """Returns those of some modules' last parts of names that are projections, or tensors that
    stack them.

    Like peft, ignores modules that the base lacks; where peft would not, the tensors of their
    adapters are refused.

    Raises:
      ValueError: an embedding or a head.
    """
    if rows := sorted(names & {"lm_head", "embed_tokens"}):
        raise ValueError(
            f"target_modules: found {rows[0]!r}, needs some of {', '.join(PROJECTIONS)}"
            f"{_WHOLE_UNLESS_TIED}"
        )
    if model is None or model.num_experts:
        known = {peft_experts.MODULES.get(name, name) for name in names}
        known &= {*PROJECTIONS, *FUSED, ROUTER}
    else:
        known = names & {*PROJECTIONS, *FUSED}
    return known if model is None else _of_family(known, model.family)


def _with_tensors(modules: set[str], folder: Path) -> set[str]:
    """Returns those modules of a mixture that the adapter's file has tensors for; all if it cannot
    be read.

    A list for dense models often names gate_proj, up_proj and down_proj, which peft ignores where
    transformers 5 holds all experts in one tensor.
    """
    names = _tensor_names(folder)
    return modules - peft_experts.lacking(names) if names else modules


def _tensor_names(folder: Path) -> list[str]:
    """The names in an adapter's file; none if it cannot be read."""
    with contextlib.suppress(SafetensorError, OSError):  # whoever reads the file says what is wrong
        if file := file_within(folder, WEIGHTS):
            with safe_open(file, framework="np") as opened:
                return list(opened.keys())
    return []


def _of_family(modules: set[str], family: str | None) -> set[str]:
    """Returns those modules that a family's models have.

    Models have either the fused tensors or the projections, with different names; if the family is
    not known, the projections are preferred.
    """
    if family is not None:
        fused = FAMILIES[family].fused_projections
        lacking = {name for names in fused.values() for name in names} | (FUSED.keys() - fused)
        return modules - lacking
    return modules - FUSED.keys() if modules & set(PROJECTIONS) else modules


def check_tied(folder: Path, adapter: AdapterConfig) -> None:
    """Checks an adapter of a base with a tied head.

    Raises:
      ValueError: the adapter unties them: peft then trains and loads one, and leaves the other as
        in the base.
    """
    path = folder / CONFIG
    content = read_json(path, folder)
    named = dataclasses.replace(adapter, train=_saved(content))
    ensured = content.get("ensure_weight_tying") is True
    for name in ("lm_head", "embed_tokens"):
        if named.trains(f"{name}.weight") and (name == "lm_head" or not ensured):
            raise ValueError(
                f"{path}: modules_to_save: found {name!r}, and the base's head is its embedding "
                "(tie_word_embeddings): such an adapter unties them, which is not read (to train "
                f"both as one: embed_tokens with ensure_weight_tying true){_WHOLE}"
            )
