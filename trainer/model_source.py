"""Opens a model by path, hub name or recipe, with an adapter if there is one."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.conversation import TEMPLATE_FILES
from data.errors import UserError
from data.sources import TURN_FORMATS
from data.templates import end_ids, missing_controls
from data.templates.template_file import read_template
from data.tokenizer import Tokenizer
from data.untrusted_files import file_within, read_json
from model.config import POSITIONS, TransformerConfig
from model.number_checks import MOST, is_int

from .adapted_source import AdaptedSource, AdapterSource, CheckpointAdapter, PeftAdapter
from .checkpoint.commit import MANIFEST
from .checkpoint.fetch import MODEL, SMALL, copied, local_copy
from .checkpoint.readers import assets_dir, best_or_itself
from .config.data import DataConfig
from .config.schema import ModelConfig
from .huggingface import adapter_config
from .huggingface.assets import trained_quantization
from .huggingface.folder import folder_config
from .huggingface.hub_models import (
    hub_has_weights,
    hub_name,
    resolve_model_path,
    resolve_tokenizer_path,
)
from .source_kinds import (
    CheckpointSource,
    HuggingFaceSource,
    ModelSource,
    ScratchSource,
    StoredSource,
    load_tokenizer,
)


def open_model(path: str, weights: bool = True) -> StoredSource | AdaptedSource:
    """Opens the model at `path`.

    A path may be a Hugging Face folder, org/name@revision, a checkpoint, a run with checkpoints, or
    an adapter, which names its base.

    Args:
      weights: whether they will be read; otherwise a model on the hub or in a bucket is downloaded
        without them.

    Raises:
      ValueError: no such model, or an unsupported architecture; the message says what would work.
    """
    local, address = copied(path, MODEL if weights else SMALL)
    folder = best_or_itself(local)
    if _is_adapter(folder):
        return open_adapter(path)
    if folder.is_dir() and not (folder / "config.json").exists():
        assets = assets_dir(folder)
        if (assets / adapter_config.CONFIG).is_file():
            return open_adapter(path)
        config = TransformerConfig.from_hf(assets)
        # Verified by the search for a run's newest undamaged checkpoint.
        verified = not (folder / MANIFEST).exists()
        source: StoredSource = CheckpointSource(
            config, assets, assets.parent, config, address, verified
        )
    else:
        is_local = folder.is_dir()
        folder = resolve_model_path(path, weights)
        if _is_adapter(folder) and (weights or is_local or not _has_more_on_hub(folder, path)):
            return open_adapter(str(folder))  # on the hub
        config = folder_config(folder)
        source = HuggingFaceSource(config, folder, folder, config, "" if is_local else path)
    return source.ending_at(_generation_ends(source.tokenizer_path))


def _is_adapter(folder: Path) -> bool:
    """Whether a folder has a PEFT adapter and no whole model; some have a config.json too."""
    if not (folder / adapter_config.CONFIG).is_file():
        return False
    return not ((folder / "config.json").exists() and any(folder.glob("model*.safetensors*")))


def _has_more_on_hub(folder: Path, name: str) -> bool:
    """Whether an adapter that was downloaded without weights is beside a whole model on the hub."""
    return (folder / "config.json").exists() and bool(hub_has_weights(name))


def adapter_source(path: str) -> tuple[AdapterSource, str]:
    """Returns the adapter at `path`, and the path or name of its base.

    A checkpoint's adapter has its base quantized as in training; PEFT's format does not say.

    Args:
      path: a PEFT folder, org/name@revision on the hub, a checkpoint with adapters, or a run with
        such checkpoints.

    Raises:
      ValueError: no such adapter, or an unsupported kind.
    """
    folder = best_or_itself(local_copy(path))
    if not folder.is_dir() and hub_name(path):
        folder = resolve_model_path(path)
    is_checkpoint = folder.is_dir() and not (folder / adapter_config.CONFIG).is_file()
    if is_checkpoint:
        assets = folder if (folder / "config.json").exists() else assets_dir(folder)
        if not (assets / adapter_config.CONFIG).is_file():
            raise ValueError(f"{path}: a whole model, but an adapter is needed")
        folder = assets.parent
    config, base = adapter_config.read_config(assets if is_checkpoint else folder)
    if not is_checkpoint:
        return PeftAdapter(config, folder), base
    config = dataclasses.replace(config, quantize=trained_quantization(assets))
    return CheckpointAdapter(config, folder), base


def open_adapter(path: str, base: str | None = None) -> AdaptedSource:
    """Returns the adapter at `path` with the base it names, or the model at `base`.

    Raises:
      ValueError: as `adapter_source`, `open_model` and `with_adapter`.
    """
    adapter, named = adapter_source(path)
    if not (base or named):
        raise ValueError(
            f"{path}: {adapter_config.CONFIG} names no base_model_name_or_path; give the base in "
            "addition to --adapter"
        )
    try:
        source = open_model(base or named)
    except ValueError as error:
        if base:
            raise
        raise ValueError(
            f"{path}: the base that it names cannot be opened: {error}; if it is elsewhere, give "
            "it in addition to --adapter, or to scripts.export_hf as --base"
        ) from None
    return _adapted(source, adapter, path)


def with_adapter(source: ModelSource, path: str) -> AdaptedSource:
    """Returns this model with the adapter at `path`.

    Raises:
      ValueError: as `adapter_source`; or the model is not a base, or not the adapter's.
    """
    adapter, _ = adapter_source(path)
    return _adapted(source, adapter, path)


def _adapted(source: ModelSource, adapter: AdapterSource, path: str) -> AdaptedSource:
    """Returns a model with an adapter, which `path` names in messages; errors as in
    `with_adapter`."""
    if isinstance(source, AdaptedSource):
        raise ValueError(
            f"{path}: an adapter needs a whole model as its base, found the adapter "
            f"{source.adapter.folder}"
        )
    if not isinstance(source, StoredSource):
        raise ValueError(
            f"{path}: an adapter needs a pretrained base, found a model from scratch; give "
            "--model.path"
        )
    return adapter.adapt(source, path)


def generation_settings(folder: Path) -> dict[str, Any]:
    """Returns a folder's generation_config.json; empty if there is none."""
    path = folder / "generation_config.json"
    try:
        return dict(read_json(path, folder).items()) if file_within(folder, path.name) else {}
    except (ValueError, AttributeError):
        raise ValueError(f"{path}: not a JSON object; download it again") from None


def _generation_ends(folder: Path) -> list[int]:
    """The eos ids in generation_config.json, often the only source of a chat's end of turn."""
    path = folder / "generation_config.json"
    ends = generation_settings(folder).get("eos_token_id")
    ids = [id for id in (ends if isinstance(ends, list) else [ends]) if is_int(id) and id >= 0]
    if beyond := [id for id in ids if id > MOST]:
        raise ValueError(f"{path}: eos_token_id: {beyond[0]} is not a token id; download it again")
    return ids


@contextlib.contextmanager
def named(field: str) -> Iterator[None]:
    """Adds a field's name to errors about its value."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def choose_model(
    config: ModelConfig,
    adapter_path: str | None = None,
    weights: bool = True,
    field: str = "model.path",
) -> ModelSource:
    """Opens the model of a recipe's section `model`, with the adapter at `adapter_path`, if any.

    `overrides` and `tokenizer` also replace those of the adapter's checkpoint. `weights` as for
    `open_model`; `field` names the path in a message.

    Raises:
      UserError, ValueError: an impossible shape; or as `load_tokenizer` and `with_adapter`.
    """
    if config.path:
        source = open_model(config.path, weights)
        if isinstance(source, AdaptedSource):
            continued = "--adapter.path continues it, and " * (field == "model.path")
            raise UserError(
                f"{field}: {config.path} is an adapter; {continued}python -m scripts.export_hf "
                "--merge of its run, or peft's merge_and_unload, makes a whole model of it"
            )
        source = with_adapter(source, adapter_path) if adapter_path else source
        if config.tokenizer:
            tokenizer_path = resolve_tokenizer_path(config.tokenizer)
            source = dataclasses.replace(source, tokenizer_path=tokenizer_path)
        return dataclasses.replace(source, config=source.config.with_positions(**config.overrides))
    scratch = _scratch_source(config)
    return with_adapter(scratch, adapter_path) if adapter_path else scratch  # refused as a base


def _scratch_source(config: ModelConfig) -> ScratchSource:
    """Returns the model from scratch in a recipe's section `model`, which `trainer.config.checks`
    has found to have a shape and a tokenizer; errors as in `choose_model`."""
    assert config.tokenizer
    path = resolve_tokenizer_path(config.tokenizer)
    tokenizer = load_tokenizer(path)
    ends = (tokenizer.bos_id, tokenizer.eos_id)
    shape = scratch_config(
        config,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        # The embedding of a padding token is not trained, which that of a text's token must be.
        pad_token_id=None if tokenizer.pad_id in ends else tokenizer.pad_id,
    )
    return ScratchSource(shape, path)


def scratch_config(config: ModelConfig, **defaults: Any) -> TransformerConfig:
    """Returns the shape of a model from scratch in a recipe's section `model`.

    Args:
      defaults: fields of TransformerConfig that `overrides` may replace.

    Raises:
      UserError, ValueError: an unknown field of TransformerConfig, or an impossible shape.
    """
    names = {field.name for field in dataclasses.fields(TransformerConfig)} - {
        "rope",
        "local_rope",
        "adapter",
    } | set(POSITIONS)
    unknown = sorted(set(config.overrides) - names)
    if unknown:
        raise UserError(
            f"model.overrides: unknown field {unknown[0]!r}; valid: {', '.join(sorted(names))}"
        )
    changes = {**defaults, **config.overrides}
    positions = {name: changes.pop(name) for name in POSITIONS if name in changes}
    return TransformerConfig.preset(config.preset or "llama-7b", **changes).with_positions(
        **positions
    )


def for_templates(source: ModelSource, data: DataConfig) -> tuple[ModelSource, Tokenizer]:
    """Prepares the model and its tokenizer for the data's chat templates.

    A file as `data.template` replaces the tokenizer's own template.
    With `data.add_control_tokens`, the tokenizer gets every control token that the templates need
    and it lacks, and the model's vocabulary a row for each. The end-of-turn token of the exported
    template (the first conversations') joins the model's eos ids; base models lack it.
    """
    tokenizer, templates = source.tokenizer(), chat_templates(data)
    if data.template.endswith(TEMPLATE_FILES):
        tokenizer = tokenizer.with_chat_template(read_template(data.template))
    if data.add_control_tokens:
        tokenizer = tokenizer.with_controls(
            dict.fromkeys(
                token for name in templates for token in missing_controls(name, tokenizer)
            )
        )
        source = source.with_vocabulary(tokenizer)
    source = source.ending_at(end_ids(templates[0], tokenizer) if templates else ())
    tokenizer = tokenizer.with_template_date(datetime.datetime.fromisoformat(data.template_date))
    tokenizer = tokenizer.with_template_kwargs(data.chat_template_kwargs)
    return source, tokenizer.with_text_tokens(data.text_tokens)


def chat_templates(data: DataConfig) -> list[str]:
    """The templates of conversation sources, in order."""
    return [data.template_of(source) for source in data.sources if source.format in TURN_FORMATS]
