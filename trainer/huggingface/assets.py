"""What a checkpoint keeps of a Hugging Face folder beside its weights: tokenizer, configuration, dtypes."""
from __future__ import annotations

import collections
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from model.adapter import Quantization
from model.attention import Mask

from .folder import tensor_dtypes
from .table import DTYPES

# Files of a Hugging Face folder that belong to the model and are not weights. The list is fixed, since a training run puts
# files of its own beside them (its configuration), which do not belong in an exported model.
ASSET_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)

SOURCE_DTYPE_FILE = "source_dtype.json"


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


def trained_mask(assets: str | Path) -> Mask:
    """The attention mask that the model of a checkpoint's `assets` was trained with, by its run.yaml; full without one."""
    attention = _recipe(assets).get("attention", {})
    return Mask(window=attention.get("window"), global_tokens=attention.get("global_tokens", 0))


def trained_quantization(assets: str | Path) -> Quantization:
    """How the base was quantized that the adapters of a checkpoint's `assets` were trained beside, by its run.yaml."""
    return _recipe(assets).get("adapter", {}).get("quantize", "none")


def _recipe(assets: str | Path) -> dict[str, Any]:
    """Returns the run's configuration that lies in `assets`; empty where none does."""
    recipe = Path(assets) / "run.yaml"
    return (yaml.safe_load(recipe.read_text(encoding="utf-8")) if recipe.is_file() else None) or {}
