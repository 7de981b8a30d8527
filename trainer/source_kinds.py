"""Sources of models: a Hugging Face folder, a checkpoint, or only a shape."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from data.paths import expanded
from data.tokenizer import Tokenizer
from model.attention import Mask
from model.config import TransformerConfig
from model.language_model import LanguageModel
from model.sharding import Parameter

from .checkpoint.manifest import fingerprint, reading
from .checkpoint.readers import restore_model, stored_parameters
from .huggingface.assets import (
    copy_assets,
    trained_date,
    trained_mask,
    trained_template_kwargs,
    write_assets,
    write_source_dtype,
)
from .huggingface.folder import has_any_weights, has_weights, weights_fingerprint
from .huggingface.hub_models import hub_name
from .huggingface.read import check_codes, check_weights, read_hf, stored_hf
from .huggingface.table import hf_layout
from .objective import Params
from .vocabulary import draw_rows


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads the tokenizer at a path; a checkpoint's is the one that was trained with.

    Raises:
      UserError: as `Tokenizer.load`.
    """
    path = expanded(path)
    return Tokenizer.load(path, as_saved=(path / "run.yaml").is_file())


@dataclasses.dataclass(frozen=True)
class ModelSource(abc.ABC):
    """A model that can be loaded onto any mesh.

    Attributes:
      config: the model's sizes, which may exceed those of its files (see `with_vocabulary`).
      tokenizer_path: the argument of `Tokenizer.load`.
    """

    config: TransformerConfig
    tokenizer_path: Path

    @property
    def mask(self) -> Mask:
        """The attention mask with which this project trained the model."""
        return Mask()

    @property
    def is_pretrained(self) -> bool:
        """Whether there are weights to read."""
        return True

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A hash of the initial weights, independent of paths; empty from scratch."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The base's name in an adapter's configuration: its hub name, address or folder."""

    @abc.abstractmethod
    def read(self, model: LanguageModel, seed: int = 0) -> Params:
        """Reads or draws the parameters onto the mesh of `model`, a part per device.

        Args:
          seed: for a model from scratch, new adapters, and vocabulary rows that the files lack (see
            `with_vocabulary`).
        """

    @property
    def lacks_weights(self) -> bool:
        """Whether no weights are here: the folder has none, or they are not downloaded yet."""
        return False

    def check_weights(self, quantize: str) -> None:  # noqa: B027 - checkpoints have checksums
        """Checks the names, shapes and dtypes of the stored weights.

        Args:
          quantize: `adapter.quantize`.

        Raises:
          ValueError: one cannot be read, or cannot be quantized this way.
        """

    @abc.abstractmethod
    def copy_assets(self, assets: Path) -> None:
        """Copies the source's configuration and tokenizer files to the new folder `assets`."""

    def with_vocabulary(self, tokenizer: Tokenizer) -> Self:
        """Returns this model with a vocabulary row for each of the tokenizer's ids."""
        size, pad = self.config.vocab_size, self.config.pad_token_id
        if tokenizer.vocab_size <= size:
            return self
        if pad is not None and pad < 0:  # a row from the end; it stays the same one
            pad += size
        config = dataclasses.replace(self.config, vocab_size=tokenizer.vocab_size, pad_token_id=pad)
        return dataclasses.replace(self, config=config)

    def ending_at(self, ids: Iterable[int]) -> Self:
        """Returns this model with `ids` added to its eos ids."""
        eos = self.config.eos_token_id
        before = eos if isinstance(eos, tuple) else (eos,)
        unique = tuple(dict.fromkeys(id for id in (*before, *ids) if id is not None))
        eos_token_id = unique if len(unique) > 1 else unique[0] if unique else None
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, eos_token_id=eos_token_id)
        )

    def tokenizer(self) -> Tokenizer:
        """Loads the model's tokenizer."""
        return load_tokenizer(self.tokenizer_path)

    def write_assets(
        self, assets: Path, tokenizer: Tokenizer, chat_template: str | None, resolved: str
    ) -> None:
        """Writes the assets of a checkpoint trained from this model: everything an export needs.

        Args:
          assets: the folder to write.
          tokenizer: the run's tokenizer.
          chat_template: the exported Jinja template; None for none.
          resolved: the run's configuration as YAML, a mapping.
        """
        self.copy_assets(assets)
        write_assets(assets, self.config, tokenizer, chat_template, resolved)


@dataclasses.dataclass(frozen=True)
class ScratchSource(ModelSource):
    """A shape without weights; they are drawn."""

    fingerprint = name = ""
    is_pretrained = False

    def read(self, model: LanguageModel, seed: int = 0) -> Params:
        return model.init(seed)

    def copy_assets(self, assets: Path) -> None:
        assets.mkdir(parents=True, exist_ok=True)
        write_source_dtype(assets, "float32")


@dataclasses.dataclass(frozen=True)
class StoredSource(ModelSource):
    """A whole model in a folder.

    Attributes:
      folder: the folder of its files.
      stored_config: the sizes of the weights in the files.
      address: where the folder was copied from: org/name[@revision] on the hub, or a checkpoint in
        a bucket; "" for a local one.
    """

    folder: Path
    stored_config: TransformerConfig
    address: str = ""

    @property
    def name(self) -> str:
        folder = str(self.folder.absolute())
        return self.address or hub_name(folder) or folder

    @abc.abstractmethod
    def stored(self, stack: contextlib.ExitStack) -> Mapping[str, Any]:
        """Returns the parameters on disk; slicing reads a layer, and `stack` closes the files."""

    @abc.abstractmethod
    def _read_stored(self, model: LanguageModel, base: Mapping[str, Parameter]) -> Params:
        """Reads the stored parameters `base` onto the mesh."""

    def read(self, model: LanguageModel, seed: int = 0) -> Params:
        params = {**self.read_base(model, seed), **model.init_adapters(seed)}
        return {**params, **model.init_magnitudes(params)}

    def read_base(self, model: LanguageModel, seed: int) -> Params:
        """Reads all parameters except adapters'; `seed` as in `read`."""
        base = {
            entry.name: model.parameters[entry.name]
            for entry in hf_layout(model.config)
            if entry.name in model.parameters
        }
        params = self._read_stored(model, base)
        rows = self.stored_config.vocab_size
        return draw_rows(params, model, rows, seed) if rows < model.config.vocab_size else params


@dataclasses.dataclass(frozen=True)
class HuggingFaceSource(StoredSource):
    """A folder in Hugging Face's format."""

    @property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.folder)

    def stored(self, stack: contextlib.ExitStack) -> Mapping[str, Any]:
        return stored_hf(self.folder, self.stored_config, stack)

    @property
    def lacks_weights(self) -> bool:
        if hub_name(str(self.folder)):
            return not has_weights(self.folder)
        return not has_any_weights(self.folder)

    def check_weights(self, quantize: str) -> None:
        check_weights(self.folder, self.stored_config)
        check_codes(self.folder, self.stored_config, quantize)

    def _read_stored(self, model: LanguageModel, base: Mapping[str, Parameter]) -> Params:
        if model.config.adapter is not None:
            check_codes(self.folder, self.stored_config, model.config.adapter.quantize)
        shardings = {name: model.shardings[name] for name in base}
        dtypes = {name: parameter.dtype for name, parameter in base.items()}
        params = read_hf(self.folder, self.stored_config, shardings, dtypes, model.in_memory)
        if model.quantized_names:
            with contextlib.ExitStack() as stack:
                params |= model.quantized(self.stored(stack))
        return params

    def copy_assets(self, assets: Path) -> None:
        copy_assets(self.folder, assets)


@dataclasses.dataclass(frozen=True)
class CheckpointSource(StoredSource):
    """A checkpoint of a whole model.

    Attributes:
      verified: whether all of it has been compared with its manifest.
    """

    verified: bool = False

    @property
    def mask(self) -> Mask:
        return trained_mask(self.folder / "assets")

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.folder)

    def tokenizer(self) -> Tokenizer:
        assets = self.folder / "assets"
        tokenizer = super().tokenizer().with_template_date(trained_date(assets))
        return tokenizer.with_template_kwargs(trained_template_kwargs(assets))

    def stored(self, stack: contextlib.ExitStack) -> Mapping[str, Any]:
        stack.enter_context(reading(self.folder))
        return stored_parameters(self.folder, verified=self.verified)

    def _read_stored(self, model: LanguageModel, base: Mapping[str, Parameter]) -> Params:
        shardings = {name: model.shardings[name] for name in base}
        if model.quantized_names:
            with contextlib.ExitStack() as stack:
                tensors = self.stored(stack)
                return _read_some(tensors, base, shardings) | model.quantized(tensors)
        return restore_model(
            self.folder,
            shardings,
            dtype={name: parameter.dtype for name, parameter in base.items()},
            shapes={name: parameter.shape for name, parameter in base.items()},
            verified=self.verified,
        )

    def copy_assets(self, assets: Path) -> None:
        shutil.copytree(self.folder / "assets", assets)  # verified when the model was opened


def _read_some(
    stored: Mapping[str, Any], parameters: Mapping[str, Parameter], shardings: Mapping[str, Any]
) -> Params:
    """Reads a checkpoint's parameters via the host, cut or zero-padded to their shapes."""

    def read(name: str, parameter: Parameter) -> jax.Array:
        part = np.asarray(stored[name])[tuple(map(slice, parameter.shape))]
        missing = np.subtract(parameter.shape, part.shape)
        part = np.pad(part, [(0, count) for count in missing])
        return jax.make_array_from_callback(
            parameter.shape, shardings[name], lambda index: part[index].astype(parameter.dtype)
        )

    return {name: read(name, parameter) for name, parameter in parameters.items()}
