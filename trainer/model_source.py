"""Where a model comes from: a Hugging Face folder (or hub name), a checkpoint, a run's newest one, or nothing but a shape."""
from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import jax

from data.errors import UserError
from data.templates import end_ids, missing_controls
from data.tokenizer import Tokenizer
from model.attention import Mask
from model.config import POSITIONS, LlamaConfig
from model.padding import vocabulary_axes

from .checkpoint.manifest import MANIFEST, fingerprint
from .checkpoint.store import assets_dir, restore_model
from .config.schema import DataConfig, ModelConfig
from .huggingface.read import (
    copy_assets,
    read_hf,
    resolve_model_path,
    trained_mask,
    weights_fingerprint,
    write_source_dtype,
)


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model to be read onto any mesh.

    Attributes:
      config: what it is.
      kind: 'huggingface', 'checkpoint' or 'scratch'.
      folder: where its files are; None from scratch.
      tokenizer_path: what `Tokenizer.load` takes.
      mask: what its attention saw when it was trained here.
      verified: whether all of the checkpoint has been compared with its manifest.
    """

    config: LlamaConfig
    kind: str
    folder: Path | None
    tokenizer_path: Path
    mask: Mask = Mask()
    verified: bool = False

    def read(self, model, seed: int = 0) -> dict:
        """float32 parameters on the mesh of `model` (a Llama), each device reading its own part; fresh ones from scratch.

        Rows of vocabulary that the files do not have (see `with_vocabulary`) are drawn with `seed`.
        """
        if self.kind == "scratch":
            return model.init(seed)
        if self.kind == "huggingface":
            stored = LlamaConfig.from_hf(self.folder)
            params = read_hf(self.folder, stored, model.shardings, in_memory=model.in_memory)
        else:
            stored = LlamaConfig.from_hf(self.folder / "assets")
            shapes = {name: parameter.shape for name, parameter in model.parameters.items()}
            params = restore_model(self.folder, model.shardings, dtype="float32", shapes=shapes, verified=self.verified)
        grown = stored.vocab_size < model.config.vocab_size
        return _draw_rows(params, model, stored.vocab_size, seed) if grown else params

    @property
    def fingerprint(self) -> str:
        """Changes with the weights to begin with, not with where their files lie; nothing from scratch."""
        if self.kind == "scratch":
            return ""
        return weights_fingerprint(self.folder) if self.kind == "huggingface" else fingerprint(self.folder)

    def with_vocabulary(self, tokenizer: Tokenizer) -> ModelSource:
        """This model with a row of vocabulary for each of the tokenizer's ids."""
        size = max(self.config.vocab_size, tokenizer.vocab_size)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, vocab_size=size))

    def ending_at(self, ids: Iterable[int]) -> ModelSource:
        """This model with `ids` among those that end its answers."""
        eos = self.config.eos_token_id if isinstance(self.config.eos_token_id, tuple) else (self.config.eos_token_id,)
        eos = tuple(dict.fromkeys(id for id in (*eos, *ids) if id is not None))
        eos = eos if len(eos) > 1 else eos[0] if eos else None
        return dataclasses.replace(self, config=dataclasses.replace(self.config, eos_token_id=eos))

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.tokenizer_path)

    def write_assets(self, assets: Path, tokenizer: Tokenizer, chat_template: str | None, resolved: str) -> None:
        """What a checkpoint of a model that began here carries, so that export needs nothing beside it."""
        if self.kind == "huggingface":
            copy_assets(self.folder, assets)
        elif self.kind == "checkpoint":
            shutil.copytree(self.folder / "assets", assets)  # verified when it was opened
        else:
            assets.mkdir(parents=True, exist_ok=True)
            write_source_dtype(assets, "float32")
        (assets / "config.json").write_text(json.dumps(self.config.to_hf(), indent=2) + "\n", encoding="utf-8")
        generation = assets / "generation_config.json"
        if generation.exists():
            _change(generation, eos_token_id=self.config.to_hf()["eos_token_id"])
        tokenizer.save(assets, chat_template)
        settings = assets / "tokenizer_config.json"
        length = self.config.max_position_embeddings
        # Where it says how much a model takes, it cuts (or warns of) what is longer.
        if settings.exists() and (json.loads(settings.read_text(encoding="utf-8")).get("model_max_length") or length) < length:
            _change(settings, model_max_length=length)
        (assets / "run.yaml").write_text(resolved, encoding="utf-8")


def _change(path: Path, **fields: object) -> None:
    """These fields in a JSON file, all others as they are."""
    content = {**json.loads(path.read_text(encoding="utf-8")), **fields}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _draw_rows(params: dict, model, had: int, seed: int) -> dict:
    """New rows of the vocabulary, from `had` on: the mean of the old ones, and noise as at the beginning of training.

    The mean, since a row of noise alone would be far from all that the other layers know.
    """
    config = model.config

    def draw(params):
        drawn = {}
        for name, axis in vocabulary_axes().items():
            if name not in params:
                continue
            old = jax.lax.slice_in_dim(params[name], 0, had, axis=axis)
            shape = (config.vocab_size - had, config.hidden_size)
            noise = config.initializer_range * jax.random.normal(jax.random.fold_in(jax.random.key(seed), axis), shape)
            noise = jax.numpy.pad(noise, ((0, 0), (0, old.shape[1 - axis] - config.hidden_size)))
            rows = old.mean(axis, keepdims=True) + (noise.T if axis else noise)
            drawn[name] = jax.lax.dynamic_update_slice_in_dim(params[name], rows, had, axis)
        return drawn

    shared = {name: params[name] for name in vocabulary_axes() if name in params}
    shardings = {name: model.shardings[name] for name in shared}
    return {**params, **jax.jit(draw, out_shardings=shardings, donate_argnums=0)(shared)}


def open_model(path: str) -> ModelSource:
    """The model at a Hugging Face folder, org/name@revision, or at what `find_checkpoint` takes.

    Raises:
      ValueError: there is none, or none that this project computes; one line that says what would work.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and not (folder / "config.json").exists():
        assets = assets_dir(folder)
        source = ModelSource(LlamaConfig.from_hf(assets), "checkpoint", assets.parent, assets, trained_mask(assets),
                             verified=not (folder / MANIFEST).exists())  # the newest of a run is chosen by comparing
    else:
        folder = resolve_model_path(path)
        source = ModelSource(LlamaConfig.from_hf(folder), "huggingface", folder, folder)
    return source.ending_at(_generation_ends(source.tokenizer_path))


def _generation_ends(folder: Path) -> list[int]:
    """What ends an answer by generation_config.json: chat models often name the end of a turn there alone."""
    path = folder / "generation_config.json"
    try:
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    except (ValueError, AttributeError):
        raise ValueError(f"{path}: not a JSON object; download it again") from None
    return [id for id in (ends if isinstance(ends, list) else [ends]) if isinstance(id, int)]


def choose_model(config: ModelConfig) -> ModelSource:
    """What a recipe's `model` section asks for.

    Raises:
      UserError, ValueError: neither a path nor a shape, no tokenizer, or a shape that is none.
    """
    if config.path:
        source = open_model(config.path)
        return dataclasses.replace(source, config=source.config.with_positions(**config.overrides),
                                   tokenizer_path=Path(config.tokenizer or source.tokenizer_path))
    if not config.preset and not config.overrides:
        raise UserError("model: neither model.path (a pretrained model) nor model.preset (a shape) is given; "
                        "add --model.path HF_DIR")
    if not config.tokenizer:
        raise UserError("model.tokenizer: a model from scratch needs a tokenizer; give its folder or .model file")
    tokenizer = Tokenizer.load(config.tokenizer)
    names = {field.name for field in dataclasses.fields(LlamaConfig)} - {"rope"} | set(POSITIONS)
    unknown = sorted(set(config.overrides) - names)
    if unknown:
        raise UserError(f"model.overrides: unknown field {unknown[0]!r}; valid: {', '.join(sorted(names))}")
    changes = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id,
               **config.overrides}
    positions = {name: changes.pop(name) for name in POSITIONS if name in changes}
    shape = LlamaConfig.preset(config.preset or "llama-7b", **changes).with_positions(**positions)
    return ModelSource(shape, "scratch", None, Path(config.tokenizer))


def for_templates(source: ModelSource, data: DataConfig) -> tuple[ModelSource, Tokenizer]:
    """The model and its tokenizer, with `data.add_control_tokens` with every control token that the templates need.

    The model stops at the token that ends an answer in the template it is exported with, that of the first conversations: a
    model that was none for chats knows only the end of a text.
    """
    tokenizer, templates = source.tokenizer(), chat_templates(data)
    if data.add_control_tokens:
        tokenizer = tokenizer.with_controls(dict.fromkeys(
            token for name in templates for token in missing_controls(name, tokenizer)))
        source = source.with_vocabulary(tokenizer)
    source = source.ending_at(end_ids(templates[0], tokenizer) if templates else ())
    return source, tokenizer.with_text_tokens(data.text_tokens)


def chat_templates(data: DataConfig) -> list[str]:
    """The templates of the sources that are conversations, in their order."""
    return [source.template or data.template for source in data.sources if source.format == "sharegpt"]
