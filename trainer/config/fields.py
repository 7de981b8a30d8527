"""The names of a configuration's sections and fields, and errors for unknown names."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from data.clean import SETS
from data.errors import UserError
from model.attention.names import Tokens
from trainer.reporting.rows import is_number

from .data import SourceConfig
from .schema import RunConfig
from .stage import StageConfig


def field_names(cls: type) -> list[str]:
    """The field names of a dataclass."""
    return [field.name for field in dataclasses.fields(cls)]


def _sections(cls: type, prefix: str = "") -> dict[str, type]:
    """Dotted name -> dataclass of every section of `cls`, nested ones included."""
    sections: dict[str, type] = {}
    for field in dataclasses.fields(cls):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            sections |= {prefix + field.name: field.type} | _sections(
                field.type, f"{prefix}{field.name}."
            )
    return sections


SECTIONS = _sections(RunConfig)
# Dotted name -> type of every field that is not a section.
FIELDS: dict[str, Any] = {
    name: kind
    for section, cls in {"": RunConfig, **SECTIONS}.items()
    for field, kind in typing.get_type_hints(cls).items()  # resolves annotations that are strings
    if (name := f"{section}.{field}".lstrip(".")) not in SECTIONS
}
# Sections that `auto` may replace.
AUTO = ("mesh", "memory")
# Fields that are lists of sections; the first field of such a section is required.
LISTS = {"data.sources": SourceConfig, "stages": StageConfig}
# Mappings; a flag may set one entry: --model.overrides.hidden_size 64.
# Fields that a run records and nobody sets.
RECORDED = ("config_version", "planned")
MAPPINGS = ("model.overrides", "attention.schedule")
# What other trainers call these fields (Hugging Face's TrainingArguments, torchtune, MaxText,
# Megatron).
_ELSEWHERE = {
    "adapter.alpha": ("lora_alpha",),
    "adapter.dropout": ("lora_dropout",),
    "adapter.rank": ("lora_r", "lora_rank"),
    "adapter.targets": ("lora_target_modules", "target_modules", "lora_target"),
    "adapter.train": ("modules_to_save",),
    "checkpoint.best": ("metric_for_best_model", "load_best_model_at_end"),
    "checkpoint.every": ("save_steps", "checkpoint_period", "save_interval"),
    "checkpoint.keep": ("save_total_limit",),
    "checkpoint.patience": ("early_stopping_patience",),
    "data.context_length": (
        "max_seq_length",
        "max_seq_len",
        "seq_len",
        "seq_length",
        "sequence_length",
        "max_target_length",
        "cutoff_len",
        "model_max_length",
        "block_size",
    ),
    "data.path": ("dataset", "dataset_name", "train_file", "data_path"),
    "data.held_out_fraction": ("val_size", "val_split", "eval_fraction"),
    "data.held_out_path": ("eval_dataset", "eval_file", "validation_file"),
    "data.train_on": (
        "assistant_only_loss",
        "completion_only_loss",
        "mask_prompt",
        "roles_to_train",
        "train_on_inputs",
        "train_on_prompt",
    ),
    "memory.remat": (
        "gradient_checkpointing",
        "remat_policy",
        "activation_checkpointing",
        "recompute_activations",
    ),
    "mesh.sequence": (
        "context_parallel_size",
        "cp",
        "sequence_parallel_size",
        "ring_size",
        "sp_degree",
    ),
    "mesh.tensor": ("tensor_parallel_size", "tp", "tp_size", "tensor_model_parallel_size"),
    "mesh.fsdp": ("fsdp_size", "dp_shard", "zero_stage", "ici_fsdp_parallelism"),
    "model.compute_dtype": ("bf16", "fp16", "dtype", "torch_dtype", "precision", "mixed_precision"),
    "model.path": ("model_name_or_path", "pretrained", "base_model", "checkpoint_dir", "hf_model"),
    "optimizer.beta1": ("adam_beta1",),
    "optimizer.beta2": ("adam_beta2",),
    "optimizer.clip_norm": ("max_grad_norm", "grad_clip", "gradient_clipping", "clip_grad"),
    "optimizer.epsilon": ("adam_epsilon", "adam_eps"),
    "optimizer.final_fraction": ("min_lr", "min_lr_ratio", "min_lr_rate"),
    "optimizer.learning_rate": ("lr", "peak_lr", "max_lr"),
    "optimizer.name": ("optim", "optimizer_type"),
    "optimizer.schedule": ("lr_scheduler_type", "lr_schedule", "scheduler", "lr_decay_style"),
    "optimizer.warmup_fraction": ("warmup_ratio", "lr_warmup_fraction", "warmup_steps_fraction"),
    "optimizer.warmup_steps": ("warmup", "num_warmup_steps", "warmup_iters", "lr_warmup"),
    "run_dir": (
        "output_dir",
        "save_dir",
        "out_dir",
        "base_output_directory",
        "logdir",
        "logging_dir",
    ),
    "train.accumulation": (
        "gradient_accumulation_steps",
        "grad_accum",
        "gradient_accumulation",
        "accumulate_grad_batches",
    ),
    "train.batch_size": (
        "per_device_train_batch_size",
        "micro_batch_size",
        "global_batch_size",
        "bs",
        "batch",
    ),
    "train.evaluate_every": ("eval_steps", "eval_interval", "eval_every"),
    "train.log_every": ("logging_steps", "log_interval", "log_period"),
    "train.epochs": ("num_train_epochs", "num_epochs", "n_epochs", "max_epochs", "epoch"),
    "train.steps": ("max_steps", "num_steps", "iters", "train_iters", "total_steps"),
}
# What other trainers have, and this one has not, or always.
_NO_FIELD = {
    "label_smoothing_factor": "there is no label smoothing for fine-tuning",
    "neftune_noise_alpha": "there is no NEFTune",
    "packing": "rows are always packed with documents",
}
# How our field differs from what another trainer calls so.
_REMARKS = {
    "micro_batch_size": ", rows of a step over all devices and microbatches",
    "min_lr": ", a share of the peak",
    "per_device_train_batch_size": ", rows of a step over all devices and microbatches",
    "train_on_inputs": " everything",
    "train_on_prompt": " everything",
}
# What other trainers call a field -> our name of it.
MEANT = {name: field for field, names in _ELSEWHERE.items() for name in names}


def is_text(kind: Any) -> bool:
    """Whether a field's type is a text, any or one of several, or null for none: a flag's value is
    then what was written, not YAML."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return all(part is type(None) or is_text(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return all(isinstance(name, str) for name in typing.get_args(kind))
    return kind is str


def suggestion(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """Returns ' (did you mean PREFIX NAME?)' for another trainer's name or a misspelt one."""
    plain = name.replace("-", "_").rsplit(".", 1)[-1].lower()
    if plain in _NO_FIELD:
        return f" ({_NO_FIELD[plain]})"
    if meant := MEANT.get(plain):
        remark = _REMARKS.get(plain, "")
        return f" (did you mean {'--' if prefix == '--' else ''}{meant}{remark}?)"
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f" (did you mean {prefix}{matches[0]}?)" if matches else ""


def check_names(recipe: Mapping[str, Any], source: str) -> None:
    """Refuses unknown sections and fields of a recipe.

    Args:
      source: the recipe's path, for messages.

    Raises:
      UserError: names the field and the nearest valid one, or what should be a mapping.
    """
    check_keys(recipe, RunConfig, "", source)
    for section, cls in SECTIONS.items():
        value: Any = recipe
        for part in section.split("."):
            value = value.get(part, {}) if isinstance(value, Mapping) else {}
        check_keys(value, cls, f"{section}.", source)
    data = recipe.get("data", {})
    if data.get("path") and data.get("sources"):
        raise UserError(f"{source}: both data.path and data.sources are given; keep one")
    check_list("data.sources", data.get("sources") or [], source)
    check_list("stages", recipe.get("stages") or [], source)


def clean_set(name: str, field: str) -> dict[str, Any]:
    """Returns the fields for `data.clean: NAME`, a named set of cleaning rules.

    Args:
      field: the source of the name, for messages.

    Raises:
      UserError: no set has this name.
    """
    if name not in SETS:
        raise UserError(
            f"{field}: found {name!r}; {', '.join(SETS)}, or fields of the section, would work"
        )
    return dict(SETS[name])


def check_list(field: str, entries: Any, source: str) -> None:
    """Requires a field of LISTS to be a list of mappings with known fields and the first one.

    Args:
      source: the recipe or flag that gave the value, for messages.
    """
    cls = LISTS[field]
    names = field_names(cls)
    if not isinstance(entries, list | tuple):
        raise UserError(
            f"{source}: {field} expects a list of {{{', '.join(names)}}}, found {entries!r:.200}"
        )
    for index, entry in enumerate(entries):
        check_keys(entry, cls, f"{field}[{index}].", source)
        if names[0] not in entry:
            raise UserError(
                f"{source}: {field}[{index}].{names[0]}: missing; it has {', '.join(names)}"
            )


def check_mapping(section: Any, cls: type, prefix: str, source: str) -> None:
    """Requires a section to be a mapping; arguments as in `check_keys`."""
    if not isinstance(section, Mapping):
        raise UserError(
            f"{source}: {prefix[:-1] or 'a recipe'} expects the fields "
            f"{', '.join(field_names(cls))}, found {section!r:.200}"
        )


def check_keys(section: Any, cls: type, prefix: str, source: str) -> None:
    """Requires a mapping with the fields of `cls`; `prefix` begins the names in messages."""
    check_mapping(section, cls, prefix, source)
    valid = field_names(cls)
    for key in section:
        if key not in valid:
            hint = suggestion(str(key), valid, prefix)
            raise UserError(
                f"{source}: unknown field {prefix}{key}{hint}; valid: {', '.join(valid)}"
            )


def check_kinds(recipe: Mapping[str, Any], source: str) -> None:
    """Refuses a stored recipe with sections that are not mappings, or values of the wrong kind.

    For code that reads single fields of a recipe from any version, or from somebody else; fields
    unknown to this version may have any value.

    Args:
      source: the recipe's path, for messages.

    Raises:
      UserError: names the field.
    """
    _check_kinds(recipe, RunConfig, "", source)


def _check_kinds(section: Any, cls: type, prefix: str, source: str) -> None:
    check_mapping(section, cls, prefix, source)
    for field, kind in typing.get_type_hints(cls).items():
        name, value = f"{prefix}{field}", section.get(field)
        if value is None or (isinstance(value, str) and name in (*AUTO, "data.clean")):
            continue
        if name in SECTIONS:
            _check_kinds(value, SECTIONS[name], f"{name}.", source)
        elif name in LISTS:
            if not isinstance(value, list):
                raise UserError(f"{source}: {name} expects a list, found {value!r}")
            for index, entry in enumerate(value):
                _check_kinds(entry, LISTS[name], f"{name}[{index}].", source)
        elif needed := _not_a(value, kind):
            raise UserError(f"{source}: {name}: found {value!r}; {needed} is needed")


def _not_a(value: Any, kind: Any) -> str | None:
    """Returns what a value must be if it is not the text, number or boolean its type says; None if
    it is, or for other types."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = set(typing.get_args(kind) if is_union else [kind]) - {type(None)}
    if kinds == {str}:
        return None if isinstance(value, str) else "a text"
    if kinds == {bool}:
        return None if isinstance(value, bool) else "true or false"
    if kinds <= {int, float, Tokens}:
        return None if is_number(value) else "a number"
    return None
