"""Adapters, and models with an adapter."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from pathlib import Path

from data.tokenizer import Tokenizer
from data.untrusted_files import file_within, read_json
from model.adapter import AdapterConfig
from model.attention import Mask
from model.config import TransformerConfig
from model.language_model import LanguageModel

from .checkpoint.manifest import fingerprint
from .checkpoint.readers import read_data, restore_model
from .huggingface import adapter_config, peft
from .huggingface.assets import trained_mask
from .huggingface.hub_models import TOKENIZERS
from .objective import Params
from .source_kinds import ModelSource, StoredSource

# Fields of the base that a run may change, besides the vocabulary.
_TRAINED = ("rope", "local_rope", "max_position_embeddings", "eos_token_id")


@dataclasses.dataclass(frozen=True)
class AdaptedSource(ModelSource):
    """A whole model with an adapter.

    Attributes:
      base: the model without the adapter.
      adapter: its adapter.
    """

    base: StoredSource
    adapter: AdapterSource

    @property
    def mask(self) -> Mask:
        mask = self.adapter.mask
        return self.base.mask if mask is None else mask

    @property
    def fingerprint(self) -> str:
        return f"{self.base.fingerprint}+{self.adapter.fingerprint}"

    @property
    def name(self) -> str:
        return self.base.name

    def read(self, model: LanguageModel, seed: int = 0) -> Params:
        return {**self.base.read_base(model, seed), **self.adapter.read(model)}

    def tokenizer(self) -> Tokenizer:
        return dataclasses.replace(self.base, tokenizer_path=self.tokenizer_path).tokenizer()

    @property
    def lacks_weights(self) -> bool:
        return self.base.lacks_weights

    def check_weights(self, quantize: str) -> None:
        self.base.check_weights(quantize)
        self.adapter.check_weights(self.config)

    def copy_assets(self, assets: Path) -> None:
        self.base.copy_assets(assets)


@dataclasses.dataclass(frozen=True)
class AdapterSource(abc.ABC):
    """An adapter that can be read onto any mesh.

    Attributes:
      config: its rank, targets and scale.
      folder: of its files.
    """

    config: AdapterConfig
    folder: Path

    @property
    def mask(self) -> Mask | None:
        """The attention mask that this project trained it with; None if that is unknown."""
        return None

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A hash of its contents."""

    @abc.abstractmethod
    def read(self, model: LanguageModel) -> Params:
        """Reads the trained parameters in float32 onto the mesh, a part per device."""

    def check_weights(self, model: TransformerConfig) -> None:  # noqa: B027 - as ModelSource's
        """Checks the names, shapes and dtypes of the tensors of this model's adapter.

        Raises:
          ValueError: one cannot be read.
        """

    @abc.abstractmethod
    def adapt(self, base: StoredSource, path: str) -> AdaptedSource:
        """Returns the base with this adapter.

        Args:
          path: the adapter's name in messages.

        Raises:
          ValueError: it belongs to another base.
        """


class PeftAdapter(AdapterSource):
    """An adapter in PEFT's format; if exported here, its folder also has TRAINED_CONFIG."""

    @property
    def _is_exported(self) -> bool:
        return file_within(self.folder, peft.TRAINED_CONFIG) is not None

    @property
    def mask(self) -> Mask | None:
        return peft.exported_mask(self.folder) if self._is_exported else None

    @property
    def fingerprint(self) -> str:
        # Includes its configuration: a different lora_alpha makes a different model of the same
        # weights.
        names = [adapter_config.CONFIG, peft.WEIGHTS]
        if self._is_exported:
            names.append(peft.TRAINED_CONFIG)
        content = b"\0".join((self.folder / name).read_bytes() for name in names)
        return hashlib.sha256(content).hexdigest()[:32]

    def read(self, model: LanguageModel) -> Params:
        return peft.read_adapter(self.folder, model)

    def check_weights(self, model: TransformerConfig) -> None:
        with peft.opened_adapter(self.folder, model.with_adapter(self.config)):
            pass

    def adapt(self, base: StoredSource, path: str) -> AdaptedSource:
        if base.config.tie_word_embeddings:
            adapter_config.check_tied(self.folder, self.config)
        config = peft.open_config(self.folder, base.config)
        # Other programs' folders often hold a tokenizer too, but without a template, or with tokens
        # that have no row.
        has_tokenizer = any(file_within(self.folder, name) for name in TOKENIZERS)
        return AdaptedSource(
            self._trained_on(base.config),
            self.folder if has_tokenizer and self._is_exported else base.tokenizer_path,
            base,
            dataclasses.replace(self, config=config),
        )

    def _trained_on(self, base: TransformerConfig) -> TransformerConfig:
        """Returns the base's configuration with the changes of the run that was exported here.

        Raises:
          ValueError: it was another base, or the run's new vocabulary rows were not trained.
        """
        path = self.folder / peft.TRAINED_CONFIG
        if not self._is_exported:
            return base
        try:
            trained = TransformerConfig.from_hf_dict(read_json(path, self.folder))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}; export the adapter again") from None
        for name in ("family", "num_hidden_layers", "hidden_size"):
            if getattr(trained, name) != getattr(base, name):
                raise ValueError(
                    f"{path}: {name}: found {getattr(trained, name)!r}, the base has "
                    f"{getattr(base, name)!r}; give the model it was trained on"
                )
        changed = {name: getattr(trained, name) for name in _TRAINED}
        size = max(trained.vocab_size, base.vocab_size)
        if size > base.vocab_size and not self.config.trains("embed_tokens.weight"):
            raise ValueError(
                f"{path}: vocab_size: found {size}, and the base has {base.vocab_size} rows; the "
                "others are in no file, since the run did not train embed_tokens"
            )
        return dataclasses.replace(base, vocab_size=size, **changed)


class CheckpointAdapter(AdapterSource):
    """A checkpoint of adapters, with the vocabulary it was trained with."""

    @property
    def mask(self) -> Mask:
        return trained_mask(self.folder / "assets")

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.folder)

    def read(self, model: LanguageModel) -> Params:
        trained = {
            name: parameter.shape
            for name, parameter in model.parameters.items()
            if not parameter.frozen
        }
        shardings = {name: model.shardings[name] for name in trained}
        return restore_model(self.folder, shardings, dtype="float32", shapes=trained)

    def adapt(self, base: StoredSource, path: str) -> AdaptedSource:
        trained_on = (read_data(self.folder) or {}).get("model", "").partition("+")[0]
        if trained_on not in ("", base.fingerprint):
            raise ValueError(
                f"{path}: an adapter of another base (fingerprint {trained_on}; {base.folder} has "
                f"{base.fingerprint}); give the model it was trained on"
            )
        # Includes the trained length, and tokens that the run added.
        assets = self.folder / "assets"
        return AdaptedSource(TransformerConfig.from_hf(assets), assets, base, self)
