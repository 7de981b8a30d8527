"""A checkpoint's other Hugging Face files: tokenizer, configuration, dtypes."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from data.tokenizer import NAMED_TEMPLATES, TEMPLATE_DATE, Tokenizer, template_files
from data.untrusted_files import file_within, read_json, read_text
from model.adapter import Quantization
from model.attention import Mask
from model.config import TransformerConfig
from model.families import FAMILIES, causal_fields
from model.rope_config import RopeConfig
from trainer.config.fields import check_kinds
from trainer.config.yaml_text import MAX_BYTES, parse

from .folder import weight_dtypes
from .hub_models import SMALL_FILES
from .table import DTYPES, EMBEDDING, HEAD

# Files of a Hugging Face model other than weights. The list is fixed, since a training run adds
# files (its configuration) that do not belong in an export.
ASSET_FILES = tuple(
    name
    for name in SMALL_FILES
    if name not in ("adapter_config.json", "trained_config.json", NAMED_TEMPLATES)
)

# Fields of config.json about the source's files that an export lacks or changes.
_OF_ITS_FILES = ("auto_map", "quantization_config", "num_nextn_predict_layers")
_ORIGINAL = "original_max_position_embeddings"
# Fields that a change of the rotary embedding invalidates, in all spellings.
_ROPE = frozenset(
    (
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "rope_local_base_freq",
        _ORIGINAL,
    )
)

SOURCE_DTYPE_FILE = "source_dtype.json"


def copy_assets(folder: str | Path, assets: str | Path) -> None:
    """Copies a Hugging Face folder's files to a checkpoint's `assets`, and records its dtypes."""
    folder, assets = Path(folder), Path(assets)
    copy_files(folder, assets)
    _describe_text_part(assets / "config.json")
    dtypes = weight_dtypes(folder)
    if HEAD in dtypes:  # the only tensor of some tied models, whose exports have the other
        dtypes.setdefault(EMBEDDING, dtypes[HEAD])
    write_source_dtype(assets, dtypes)


def _describe_text_part(path: Path) -> None:
    """Replaces a config.json with that of the text model in it; see `causal_fields`."""
    if not path.is_file():
        return
    fields = _read_json(path)
    if (text := causal_fields(fields)) != fields:
        path.write_text(json.dumps(text, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def asset_files(folder: Path) -> list[str]:
    """Returns the names of a folder's ASSET_FILES and named chat templates.

    Raises:
      UserError: a link leads out of the folder.
    """
    return [name for name in ASSET_FILES if file_within(folder, name)] + template_files(folder)


def copy_files(folder: Path, to: Path) -> None:
    """Copies a folder's `asset_files`, some of them in folders of their own."""
    for name in asset_files(folder):
        if file := file_within(folder, name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, to / name)


def described(
    config: TransformerConfig, source: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Returns a trained model's config.json, and the fields of its source that are left out.

    Fields that only other programs read are kept, as are those that training has not changed, with
    their spelling. Fields that would be wrong are left out: those of a changed RoPE, numbers of
    weights, and code that is not exported.

    Args:
      config: the trained model.
      source: the config.json of the model from which it was trained.
    """
    fields = config.to_hf()
    only_there = [name for name in source if name not in fields]
    try:
        before = _read(source).to_hf()
    except ValueError:  # of another model
        return fields, only_there
    changed = {name for name in fields if name not in before or fields[name] != before[name]}
    if changed.intersection(_ROPE) or _has_old_rule(source, config):
        changed |= _ROPE
    # Another length may change a factor that the source's RoPE leaves to be computed from it.
    for differing in (changed, changed | _ROPE):
        result, left_out = _merged(fields, source, differing)
        if _describes(result, config):
            return result, left_out
    # A field contradicts what training changed: drop the source's fields.
    return fields, only_there


def _has_old_rule(source: Mapping[str, Any], config: TransformerConfig) -> bool:
    """Whether a config.json has an older name of the RoPE rule, which some programs do not read."""
    ropes = [source.get(name) for name in ("rope_scaling", "rope_parameters")]
    rules = [rope.get("rope_type", rope.get("type")) for rope in ropes if isinstance(rope, dict)]
    return any(rule not in (None, config.rope.rule) for rule in rules)


def _merged(
    fields: dict[str, Any], source: Mapping[str, Any], changed: set[str]
) -> tuple[dict[str, Any], list[str]]:
    """Returns a trained model's fields with those of its source that still hold, and the names of
    the others.

    Args:
      changed: the names of fields that training has changed.
    """
    left_out = [
        name
        for name, value in source.items()
        if (name in _OF_ITS_FILES and value not in (None, fields.get(name)))
        or (name in changed and name not in fields)
    ]
    kept = {
        name: value
        for name, value in source.items()
        if name not in left_out
        and name not in changed
        # With YaRN transformers fails on a null for a number, as in Mixtral's head_dim.
        and (value is not None or fields.get(name) is None)
    }
    result = {**fields, **kept}
    for rope in ("rope_scaling", "rope_parameters"):
        if changed.intersection(_ROPE):
            unknown = _unknown_numbers(source.get(rope)).keys() - (result[rope] or {}).keys()
            left_out += sorted(f"{rope}.{name}" for name in unknown)
        elif isinstance(result.get(rope), dict) and not any(
            isinstance(value, dict) for value in result[rope].values()
        ):
            # Programs read one of the two spellings, so a field in one is written in both.
            other = source.get("rope_parameters" if rope == "rope_scaling" else "rope_scaling")
            result[rope] = {**_unknown_numbers(other), **result[rope]}
    return result, left_out


def _read(fields: Mapping[str, Any]) -> TransformerConfig:
    """Reads a config.json without its warnings, which opening the model has given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig.from_hf_dict(dict(fields))


def _describes(fields: dict[str, Any], config: TransformerConfig) -> bool:
    """Whether these fields of a config.json describe the model."""
    try:
        model = _read(fields)
    except ValueError:
        return False
    return dataclasses.replace(model, adapter=config.adapter) == config


def _unknown_numbers(rope: Any) -> dict[str, Any]:
    """The fields of a RoPE in config.json that `RopeConfig` lacks."""
    known = {field.name for field in dataclasses.fields(RopeConfig)} | {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
    }
    fields = rope if isinstance(rope, dict) else {}
    return {
        name: value
        for name, value in fields.items()
        if name not in known and not isinstance(value, dict)
    }


def write_config(config: TransformerConfig, assets: str | Path) -> None:
    """Writes a trained model's config.json over its source's in `assets`.

    Warnings name the fields left out, and what its form cannot say; see `described` and
    `Family.published`.
    """
    path = Path(assets) / "config.json"
    source = _read_json(path) if path.is_file() else {}
    content, left_out = described(config, source) if source else (config.to_hf(), [])
    content = FAMILIES[config.family].published(content)
    original = config.rope.original_max_position_embeddings
    if config.rope.rule == "llama3" and original != 8192:  # llama.cpp's, unless it is said here
        content[_ORIGINAL] = original
        left_out = [name for name in left_out if name != _ORIGINAL]
    if left_out:
        warnings.warn(
            f"{path.name} of the source: left out, since they no longer hold: "
            f"{', '.join(left_out)}",
            stacklevel=2,
        )
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_assets(
    assets: Path,
    config: TransformerConfig,
    tokenizer: Tokenizer,
    chat_template: str | None,
    resolved: str,
) -> None:
    """Writes a trained model's configuration, tokenizer and recipe over its source's files.

    `assets` has copies of those; see `ModelSource.write_assets`.
    """
    write_config(config, assets)
    generation = assets / "generation_config.json"
    eos = config.to_hf()["eos_token_id"]
    if generation.exists() and _ids(_read_json(generation).get("eos_token_id")) != _ids(eos):
        _set_fields(generation, eos_token_id=eos)
    tokenizer.save(assets, chat_template)
    settings = assets / "tokenizer_config.json"
    length = config.max_position_embeddings
    # Tokenizers cut texts at this length, or warn.
    shortest = _read_json(settings).get("model_max_length") if settings.exists() else None
    if isinstance(shortest, int | float) and shortest < length:
        _set_fields(settings, model_max_length=length)
    (assets / "run.yaml").write_text(resolved, encoding="utf-8")


def _ids(value: Any) -> set[Any]:
    """The ids in a field that holds one, several, or null."""
    return set(value if isinstance(value, list | tuple) else () if value is None else (value,))


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, path.parent)


def _set_fields(path: Path, **fields: object) -> None:
    """Sets fields of a JSON file and leaves its others as they are."""
    content = {**_read_json(path), **fields}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_source_dtype(assets: str | Path, dtypes: Mapping[str, str] | str) -> None:
    """Records an export's dtype in `assets`: one for all, or by Hugging Face tensor name."""
    if isinstance(dtypes, str):
        dtypes = {"": dtypes}
    common = collections.Counter(dtypes.values()).most_common(1)[0][0]
    content = {
        "dtype": common,
        "tensors": {name: d for name, d in sorted(dtypes.items()) if d != common},
    }
    (Path(assets) / SOURCE_DTYPE_FILE).write_text(
        json.dumps(content, indent=2) + "\n", encoding="utf-8"
    )


def source_dtype(assets: str | Path) -> tuple[str, dict[str, str]]:
    """The dtype of an export from `assets`, and tensor name -> dtype of the exceptions.

    Without a record it is config.json's dtype, or bfloat16.
    """
    assets = Path(assets)
    if (assets / SOURCE_DTYPE_FILE).is_file():
        content = _read_json(assets / SOURCE_DTYPE_FILE)
        dtype, tensors = content["dtype"], content["tensors"]
        if _counts_scales(assets, dtype, tensors):
            (dtype,) = set(tensors.values())
            tensors = {}
    else:
        config = _read_json(assets / "config.json")
        dtype, tensors = config.get("dtype") or config.get("torch_dtype") or "bfloat16", {}
    for name in (dtype, *tensors.values()):
        if name not in DTYPES.values():
            raise ValueError(
                f"source dtype: found {name!r}; supported are {', '.join(DTYPES.values())}"
            )
    return dtype, tensors


def _counts_scales(assets: Path, dtype: str, tensors: Mapping[str, str]) -> bool:
    """Whether a record's float32 is that of the scales of NF4 codes, which earlier versions counted
    as weights: all weights beside the codes have config.json's dtype."""
    if dtype != "float32" or trained_quantization(assets) != "nf4":
        return False
    config = _read_json(assets / "config.json")
    return set(tensors.values()) == {config.get("dtype") or config.get("torch_dtype")}


def trained_mask(assets: str | Path) -> Mask:
    """The attention mask of a checkpoint's training, from its run.yaml; full without one."""
    return mask_of(_recipe(assets).get("attention", {}))


def mask_of(attention: Mapping[str, Any]) -> Mask:
    """The attention mask of a recipe's section `attention`."""
    return Mask(window=attention.get("window"), global_tokens=attention.get("global_tokens") or 0)


def trained_quantization(assets: str | Path) -> Quantization:
    """Returns `adapter.quantize` of the run that saved a checkpoint: "none", "nf4", ...

    Args:
      assets: the checkpoint's folder `assets`, whose run.yaml says so.
    """
    return _recipe(assets).get("adapter", {}).get("quantize", "none")


def trained_date(assets: str | Path) -> datetime:
    """The date that chat templates wrote in a checkpoint's training, from its run.yaml."""
    text = _recipe(assets).get("data", {}).get("template_date")
    return datetime.fromisoformat(text) if text else TEMPLATE_DATE


def trained_template_kwargs(assets: str | Path) -> dict[str, Any]:
    """The chat template variables in a checkpoint's training, from its `assets`."""
    return _recipe(assets).get("data", {}).get("chat_template_kwargs") or {}


def _recipe(assets: str | Path) -> dict[str, Any]:
    """Returns the run's configuration in `assets`; empty if there is none."""
    return read_recipe(Path(assets) / "run.yaml", Path(assets))


def read_recipe(path: Path, folder: Path) -> dict[str, Any]:
    """Returns the run's configuration from a file in a folder; empty if there is none.

    Raises:
      UserError: a section is not a mapping, or a value has the wrong kind.
    """
    recipe = parse(read_text(path, folder, MAX_BYTES), str(path)) if os.path.lexists(path) else None
    if not isinstance(recipe, dict):
        return {}
    check_kinds(recipe, str(path))
    return recipe
