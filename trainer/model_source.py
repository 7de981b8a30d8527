"""The origin of a model: a Hugging Face folder (or hub name), a checkpoint, a run's newest checkpoint, or a shape alone."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from data.errors import UserError
from data.templates import end_ids, missing_controls
from data.tokenizer import Tokenizer
from data.within import file_within
from model.adapter import AdapterConfig
from model.attention import Mask
from model.checks import is_int
from model.config import POSITIONS, TransformerConfig
from model.language_model import LanguageModel
from model.padding import vocabulary_axes
from model.sharding import Parameter

from .checkpoint.manifest import MANIFEST, fingerprint
from .checkpoint.store import (
    assets_dir,
    best_or_itself,
    read_data,
    restore_model,
    stored_parameters,
)
from .config.schema import DataConfig, ModelConfig
from .huggingface import peft
from .huggingface.assets import (
    copy_assets,
    trained_date,
    trained_mask,
    trained_quantization,
    write_config,
    write_source_dtype,
)
from .huggingface.folder import folder_config, hub_name, resolve_model_path, weights_fingerprint
from .huggingface.read import read_hf, stored_hf
from .huggingface.table import hf_layout


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model that can be read onto any mesh.

    Attributes:
      config: the model's sizes.
      kind: 'huggingface', 'checkpoint' or 'scratch'.
      folder: the folder of its files; None from scratch.
      tokenizer_path: the argument of `Tokenizer.load`.
      mask: the attention mask that it was trained with by this project.
      verified: all of the checkpoint has been compared with its manifest.
      adapter: the adapter that stands beside this model, if one is read.
      stored_config: the sizes of the weights in the files, without what a run adds; None from scratch.
    """

    config: TransformerConfig
    kind: Literal["huggingface", "checkpoint", "scratch"]
    folder: Path | None
    tokenizer_path: Path
    mask: Mask = Mask()
    verified: bool = False
    adapter: AdapterSource | None = None
    stored_config: TransformerConfig | None = None

    def read(self, model: LanguageModel, seed: int = 0) -> dict[str, jax.Array]:
        """Reads the parameters onto the mesh of `model`, each device its own part; from scratch, draws them.

        Args:
          seed: of the parameters of a model from scratch, of new adapters, and of the vocabulary rows that the files do not
            have (see `with_vocabulary`).
        """
        if self.folder is None:
            return model.init(seed)
        base = self._read_base(model, seed)
        if self.adapter is not None:
            return {**base, **self.adapter.read(model)}
        params = {**base, **model.init_adapters(seed)}
        return {**params, **model.init_magnitudes(params)}

    def _read_base(self, model: LanguageModel, seed: int) -> dict[str, jax.Array]:
        assert self.folder is not None
        base = {
            entry.name: model.parameters[entry.name]
            for entry in hf_layout(model.config)
            if entry.name in model.parameters
        }
        shardings = {name: model.shardings[name] for name in base}
        dtypes = {name: parameter.dtype for name, parameter in base.items()}
        stored = self.stored_config
        assert stored is not None
        if self.kind == "huggingface":
            params = read_hf(self.folder, stored, shardings, dtypes, model.in_memory)
        else:
            shapes = {name: parameter.shape for name, parameter in base.items()}
            params = (
                {}
                if model.quantized_names
                else restore_model(
                    self.folder, shardings, dtype=dtypes, shapes=shapes, verified=self.verified
                )
            )
        if model.quantized_names:
            with contextlib.ExitStack() as stack:
                tensors = self.stored(stack)
                if self.kind != "huggingface":
                    params = _read_some(tensors, base, shardings)
                params |= model.quantized(tensors)
        grown = stored.vocab_size < model.config.vocab_size
        return _draw_rows(params, model, stored.vocab_size, seed) if grown else params

    @property
    def fingerprint(self) -> str:
        """A hash of the initial weights, wherever their files are; empty from scratch."""
        return self.base_fingerprint + (f"+{self.adapter.fingerprint}" if self.adapter else "")

    @property
    def base_fingerprint(self) -> str:
        """A hash of the weights beside which the adapter stands, if there is one."""
        if self.folder is None:
            return ""
        return (
            weights_fingerprint(self.folder)
            if self.kind == "huggingface"
            else fingerprint(self.folder)
        )

    @property
    def name(self) -> str:
        """What an adapter's configuration calls its base: the name on the hub, or the folder."""
        if self.folder is None:
            return ""
        folder = str(self.folder.absolute())
        return hub_name(folder) or folder

    def stored(self, stack: contextlib.ExitStack) -> Mapping[str, Any]:
        """Returns the base's parameters on disk, of which a layer is read when it is sliced; files are closed with `stack`."""
        assert self.folder is not None
        if self.kind == "huggingface":
            assert self.stored_config is not None
            return stored_hf(self.folder, self.stored_config, stack)
        return stored_parameters(self.folder, verified=self.verified)

    def with_vocabulary(self, tokenizer: Tokenizer) -> ModelSource:
        """This model with at least one row of vocabulary for each of the tokenizer's ids."""
        size = max(self.config.vocab_size, tokenizer.vocab_size)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, vocab_size=size))

    def ending_at(self, ids: Iterable[int]) -> ModelSource:
        """This model with `ids` added to its eos ids, which end an answer."""
        eos = (
            self.config.eos_token_id
            if isinstance(self.config.eos_token_id, tuple)
            else (self.config.eos_token_id,)
        )
        unique = tuple(dict.fromkeys(id for id in (*eos, *ids) if id is not None))
        eos_token_id = unique if len(unique) > 1 else unique[0] if unique else None
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, eos_token_id=eos_token_id)
        )

    def tokenizer(self) -> Tokenizer:
        """Loads the model's tokenizer."""
        tokenizer = Tokenizer.load(self.tokenizer_path)
        if self.kind != "checkpoint":
            return tokenizer
        assert self.folder is not None
        return tokenizer.with_template_date(trained_date(self.folder / "assets"))

    def write_assets(
        self, assets: Path, tokenizer: Tokenizer, chat_template: str | None, resolved: str
    ) -> None:
        """Writes the assets of a checkpoint that is trained from this model, so that an export needs no other files.

        Args:
          assets: the folder to write.
          tokenizer: the tokenizer that the run uses.
          chat_template: the jinja template that is exported, None for none.
          resolved: the run's configuration as YAML, a mapping.
        """
        if self.folder is None:
            assets.mkdir(parents=True, exist_ok=True)
            write_source_dtype(assets, "float32")
        elif self.kind == "huggingface":
            copy_assets(self.folder, assets)
        else:
            shutil.copytree(self.folder / "assets", assets)  # verified when the model was opened
        write_config(self.config, assets)
        generation = assets / "generation_config.json"
        if generation.exists() and set(_ids(_read_json(generation).get("eos_token_id"))) != set(
            _ids(self.config.eos_token_id)
        ):
            _set_fields(generation, eos_token_id=self.config.to_hf()["eos_token_id"])
        tokenizer.save(assets, chat_template)
        settings = assets / "tokenizer_config.json"
        length = self.config.max_position_embeddings
        # Tokenizers cut texts at this length, or warn.
        shortest = _read_json(settings).get("model_max_length") if settings.exists() else None
        if isinstance(shortest, int | float) and shortest < length:
            _set_fields(settings, model_max_length=length)
        (assets / "run.yaml").write_text(resolved, encoding="utf-8")


def _read_some(
    stored: Mapping[str, Any], parameters: Mapping[str, Parameter], shardings: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Reads some parameters out of a checkpoint, each whole on the host, cut or padded with zeros to its shape in memory."""

    def read(name: str, parameter: Parameter) -> jax.Array:
        part = np.asarray(stored[name])[tuple(map(slice, parameter.shape))]
        part = np.pad(
            part,
            [
                (0, after - before)
                for after, before in zip(parameter.shape, part.shape, strict=True)
            ],
        )
        return jax.make_array_from_callback(
            parameter.shape, shardings[name], lambda index: part[index].astype(parameter.dtype)
        )

    return {name: read(name, parameter) for name, parameter in parameters.items()}


def _ids(value: Any) -> list[Any]:
    """The ids of a field that holds one, several, or null for none."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _set_fields(path: Path, **fields: object) -> None:
    """Sets fields of a JSON file and leaves its others as they are."""
    content = {**_read_json(path), **fields}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _draw_rows(
    params: dict[str, jax.Array], model: LanguageModel, stored_rows: int, seed: int
) -> dict[str, jax.Array]:
    """The parameters with all rows of the vocabulary after `stored_rows` drawn anew.

    A new row is the mean of the stored ones plus the noise of an initialisation; one of noise alone would be far from every
    embedding that the other layers were trained on.
    """
    config = model.config

    def draw(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        drawn = {}
        for name, axis in vocabulary_axes().items():
            if name not in params:
                continue
            old = jax.lax.slice_in_dim(params[name], 0, stored_rows, axis=axis)
            shape = (config.vocab_size - stored_rows, config.hidden_size)
            noise = config.initializer_range * jax.random.normal(
                jax.random.fold_in(jax.random.key(seed), axis), shape
            )
            noise = jax.numpy.pad(noise, ((0, 0), (0, old.shape[1 - axis] - config.hidden_size)))
            rows = old.mean(axis, keepdims=True) + (noise.T if axis else noise)
            rows = rows.astype(params[name].dtype)
            drawn[name] = jax.lax.dynamic_update_slice_in_dim(params[name], rows, stored_rows, axis)
        return drawn

    shared = {name: params[name] for name in vocabulary_axes() if name in params}
    shardings = {name: model.shardings[name] for name in shared}
    return {**params, **jax.jit(draw, out_shardings=shardings, donate_argnums=0)(shared)}


def open_model(path: str, weights: bool = True) -> ModelSource:
    """The model at `path`: a Hugging Face folder, org/name@revision, a checkpoint, a run with checkpoints, or an adapter, which
    names its base.

    Args:
      weights: whether they will be read: a model that is named by its name on the hub is downloaded without them otherwise.

    Raises:
      ValueError: there is none, or one of another architecture; one line that says what would work.
    """
    folder = best_or_itself(Path(path).expanduser())
    if (folder / peft.CONFIG).is_file() and not (folder / "config.json").exists():
        return open_adapter(path)
    if folder.is_dir() and not (folder / "config.json").exists():
        assets = assets_dir(folder)
        if (assets / peft.CONFIG).is_file():
            return open_adapter(path)
        config = TransformerConfig.from_hf(assets)
        source = ModelSource(
            config,
            "checkpoint",
            assets.parent,
            assets,
            trained_mask(assets),
            stored_config=config,
            verified=not (folder / MANIFEST).exists(),
        )  # the search for a run's newest good one verifies it
    else:
        folder = resolve_model_path(path, weights)
        if (folder / peft.CONFIG).is_file() and not (folder / "config.json").exists():  # of the hub
            return open_adapter(str(folder))
        config = folder_config(folder)
        source = ModelSource(config, "huggingface", folder, folder, stored_config=config)
    return source.ending_at(_generation_ends(source.tokenizer_path))


@dataclasses.dataclass(frozen=True)
class AdapterSource:
    """An adapter that can be read onto any mesh.

    Attributes:
      config: its rank, targets and scale.
      folder: a folder of PEFT's, or a checkpoint.
      is_checkpoint: which of the two.
    """

    config: AdapterConfig
    folder: Path
    is_checkpoint: bool

    def read(self, model: LanguageModel) -> dict[str, jax.Array]:
        """Reads the trained parameters in float32 onto the mesh of `model`, each device its own part."""
        if not self.is_checkpoint:
            return peft.read_adapter(self.folder, model)
        trained = {
            name: parameter.shape
            for name, parameter in model.parameters.items()
            if not parameter.frozen
        }
        return restore_model(
            self.folder,
            {name: model.shardings[name] for name in trained},
            dtype="float32",
            shapes=trained,
        )

    @property
    def fingerprint(self) -> str:
        """A hash of its contents."""
        if self.is_checkpoint:
            return fingerprint(self.folder)
        # With its configuration: another lora_alpha makes another model of the same weights.
        content = b"\0".join(
            (self.folder / name).read_bytes() for name in (peft.CONFIG, peft.WEIGHTS)
        )
        return hashlib.sha256(content).hexdigest()[:32]


def adapter_source(path: str) -> tuple[AdapterSource, str]:
    """Returns the adapter at `path`, and the path or name of its base. A checkpoint's stands beside weights that are quantized
    as in training; PEFT's format does not tell.

    Args:
      path: a folder of PEFT's, org/name@revision on the hub, a checkpoint with adapters, or a run with such checkpoints.

    Raises:
      ValueError: there is none, or one of a kind that is not supported.
    """
    folder = best_or_itself(Path(path).expanduser())
    if not folder.is_dir() and hub_name(path):
        folder = resolve_model_path(path)
    is_checkpoint = folder.is_dir() and not (folder / peft.CONFIG).is_file()
    if is_checkpoint:
        assets = assets_dir(folder)
        if not (assets / peft.CONFIG).is_file():
            raise ValueError(f"{path}: a checkpoint of a whole model, where an adapter is needed")
        folder = assets.parent
    config, base = peft.read_config(assets if is_checkpoint else folder)
    if is_checkpoint:
        config = dataclasses.replace(config, quantize=trained_quantization(assets))
    return AdapterSource(config, folder, is_checkpoint), base


def open_adapter(path: str, base: str | None = None) -> ModelSource:
    """Returns the adapter at `path` with the base that it names, or with the model at `base`.

    Raises:
      ValueError: as `adapter_source`, `open_model` and `with_adapter`.
    """
    _, named = adapter_source(path)
    if not (base or named):
        raise ValueError(
            f"{path}: {peft.CONFIG} names no base_model_name_or_path; give the base beside --adapter"
        )
    return with_adapter(open_model(base or named), path)


def with_adapter(source: ModelSource, path: str) -> ModelSource:
    """Returns this model with the adapter at `path`.

    Raises:
      ValueError: as `adapter_source`; or the adapter's checkpoint was trained on another base.
    """
    adapter, _ = adapter_source(path)
    if source.adapter is not None:
        raise ValueError(
            f"{path}: an adapter needs a whole model as its base, found the adapter {source.adapter.folder}"
        )
    if source.folder is None:
        raise ValueError(
            f"{path}: an adapter needs a pretrained base, found a model from scratch; give --model.path"
        )
    tied = source.config.tie_word_embeddings
    source = dataclasses.replace(source, adapter=adapter)
    if not adapter.is_checkpoint:
        if tied:
            peft.check_tied(adapter.folder, adapter.config)
        return source
    trained_on = (read_data(adapter.folder) or {}).get("model", "").partition("+")[0]
    if trained_on not in ("", source.base_fingerprint):
        raise ValueError(
            f"{path}: an adapter of another base (its fingerprint is {trained_on}, that of {source.folder} "
            f"{source.base_fingerprint}); give the model that it was trained on"
        )
    assets = adapter.folder / "assets"  # with the trained length, and tokens that the run added
    return dataclasses.replace(
        source,
        config=TransformerConfig.from_hf(assets),
        tokenizer_path=assets,
        mask=trained_mask(assets),
    )


def _generation_ends(folder: Path) -> list[int]:
    """The eos ids in generation_config.json: chat models often name their end of a turn only there."""
    path = folder / "generation_config.json"
    try:
        ends = _read_json(path).get("eos_token_id") if file_within(folder, path.name) else None
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{path}: not a JSON object; download it again") from None
    return [id for id in (ends if isinstance(ends, list) else [ends]) if is_int(id) and id >= 0]


def choose_model(
    config: ModelConfig, adapter_path: str | None = None, weights: bool = True
) -> ModelSource:
    """The model that a recipe's section `model` names, with the adapter at `adapter_path` beside it if that is given.

    `overrides` and `tokenizer` hold for the adapter too: they take the place of what its checkpoint was trained with.
    `weights` as of `open_model`.

    Raises:
      UserError, ValueError: neither a path nor a shape, no tokenizer, or a shape that no model has; or see `with_adapter`.
    """
    if config.path:
        source = open_model(config.path, weights)
        if source.adapter is not None:
            raise UserError(
                f"model.path: {config.path} is an adapter; --adapter.path goes on with it, and python -m "
                "scripts.export_hf --merge makes a whole model of it"
            )
        source = with_adapter(source, adapter_path) if adapter_path else source
        return dataclasses.replace(
            source,
            config=source.config.with_positions(**config.overrides),
            tokenizer_path=Path(config.tokenizer or source.tokenizer_path),
        )
    if not config.preset and not config.overrides:
        raise UserError(
            "model: neither model.path (a pretrained model) nor model.preset (a shape) is given; "
            "add --model.path HF_DIR"
        )
    if not config.tokenizer:
        raise UserError(
            "model.tokenizer: a model from scratch needs a tokenizer; give its folder or .model file"
        )
    tokenizer = Tokenizer.load(config.tokenizer)
    shape = scratch_config(
        config,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
    )
    source = ModelSource(shape, "scratch", None, Path(config.tokenizer))
    return (
        with_adapter(source, adapter_path) if adapter_path else source
    )  # refused: it needs a pretrained base


def scratch_config(config: ModelConfig, **defaults: Any) -> TransformerConfig:
    """Returns the shape of a model from scratch that a recipe's section `model` describes.

    Args:
      defaults: fields of TransformerConfig that `overrides` may replace.

    Raises:
      UserError, ValueError: a field that TransformerConfig does not have, or a shape that no model has.
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
    """Returns the model and its tokenizer, made ready for the chat templates of the data.

    With `data.add_control_tokens`, the tokenizer gets every control token that the templates need and it lacks, and the model's
    vocabulary a row for each. The end-of-turn token of the template that is exported, that of the first conversations, is added
    to the model's eos ids; base models lack it.
    """
    tokenizer, templates = source.tokenizer(), chat_templates(data)
    if data.add_control_tokens:
        tokenizer = tokenizer.with_controls(
            dict.fromkeys(
                token for name in templates for token in missing_controls(name, tokenizer)
            )
        )
        source = source.with_vocabulary(tokenizer)
    source = source.ending_at(end_ids(templates[0], tokenizer) if templates else ())
    tokenizer = tokenizer.with_template_date(datetime.datetime.fromisoformat(data.template_date))
    return source, tokenizer.with_text_tokens(data.text_tokens)


def chat_templates(data: DataConfig) -> list[str]:
    """The templates of the sources that hold conversations, in the order of the sources."""
    return [
        source.template or data.template for source in data.sources if source.format == "sharegpt"
    ]
