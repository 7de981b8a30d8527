"""The objective of language models: next-token cross-entropy over packed documents."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from data.batch import Batch, dtypes, permute
from data.cards import is_pattern
from data.encode import EncodingRules
from data.engine import PROCESSES, Engine
from data.errors import UserError
from data.loader import Loader
from data.paths import expanded
from data.prepare import prepare
from data.prepared import Prepared
from data.sources import Source, Sources
from data.synthetic import source as synthetic
from data.templates import jinja_template
from data.tokenizer import Tokenizer
from model.attention.layout import permutation
from model.config import TransformerConfig
from model.language_model import LanguageModel
from model.loss import LossSums

from .adapted_source import AdaptedSource
from .build import build_language_model, shares_prompts
from .config import load as configuration
from .config.checks import check_profile
from .config.data import DataConfig, SourceConfig
from .config.schema import RunConfig
from .huggingface import adapter_config
from .mesh import LocalPart, batch_sharding, is_abstract, local_order, local_part, place_batch
from .model_source import chat_templates, choose_model, for_templates
from .objective import DeviceBatch, HostBatch, Loss, LossParams, Objective, Params, Totals
from .run.cluster import first_then_others, require_same
from .run.directory import RunDirectory
from .source_kinds import ModelSource
from .text_checks import (
    check_new_rows,
    check_same,
    check_vocabulary,
    data_warnings,
    longest_document,
)


def text_batch(
    rows: int, length: int, mesh: Mesh, with_sources: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and shardings of `data.batch.Batch`'s arrays, each [rows, length].

    Args:
      with_sources: whether the batch also holds each token's source, `source_ids`.
    """
    sharding = batch_sharding(mesh)
    return {
        name: jax.ShapeDtypeStruct((rows, length), dtype, sharding=sharding)
        for name, dtype in dtypes(with_sources).items()
    }


def prepare_text(
    config: RunConfig,
    model: TransformerConfig,
    tokenizer: Tokenizer,
    progress: bool = True,
    key: str | None = None,
    engine: Engine = PROCESSES,
) -> Prepared:
    """Returns the run's tokenized data, from `data.prepared` if they exist there.

    Args:
      model: the model's shape; its windows decide whether preference pairs share prompts.
      progress: whether to show a progress bar on a terminal.
      key: opens this data set instead, without reading the sources.
      engine: what prepares the data.
    """
    data = config.data
    rules = EncodingRules(
        data.context_length,
        clean=data.clean,
        train_on=data.train_on,
        cut_prompts=config.preference.long_pairs == "cut_prompt",
        unpaired=config.preference.labelled,
        share_prompts=shares_prompts(config, model),
    )
    return prepare(
        _sources_of(data, tokenizer, generate=key is None),
        tokenizer,
        rules,
        data.prepared,
        progress=progress and sys.stderr.isatty(),
        key=key,
        engine=engine,
        cache_gib=data.cache_gib,
    )


def _sources_of(data: DataConfig, tokenizer: Tokenizer, generate: bool) -> Sources:
    """Returns what `data.prepare` reads.

    Args:
      generate: whether to write the records of synthetic sources, and read those.
    """

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    def path_of(source: SourceConfig) -> str:
        if not (generate and source.path.startswith(synthetic.PREFIX)):
            return source.path
        return str(synthetic.write(source.path, data.context_length, count, tokenizer.fingerprint))

    sources = tuple(
        Source(
            path=path_of(source),
            format=source.format,
            template=data.template_of(source),
            weight=source.weight,
            fields=source.fields,
            add_bos=source.add_bos,
            control_tokens=source.control_tokens,
        )
        for source in data.sources
    )
    if not data.held_out_path:
        return Sources(sources, (), data.held_out_fraction)
    return Sources(
        sources, (dataclasses.replace(sources[0], path=data.held_out_path, weight=1.0),), 0.0
    )


def source_names(config: RunConfig) -> tuple[str, ...]:
    """Returns the sources' names in metrics, in order of their numbers.

    () for a single source, with or without a held-out file. A source's name is its file's without
    the suffix and the characters of a pattern, or its task if generated; duplicates get a number:
    x, x_2. The held-out file comes last.
    """
    data = config.data
    if len(data.sources) < 2:
        return ()
    names: list[str] = []
    for path in [source.path for source in data.sources] + (
        [data.held_out_path] if data.held_out_path else []
    ):
        is_synthetic = path.startswith(synthetic.PREFIX)
        stem = (
            synthetic.Spec.parse(path).task
            if is_synthetic
            else path.rstrip("/").rsplit("/", 1)[-1].split(".", 1)[0]
        )
        if is_pattern(stem):
            stem = re.sub(r"[*?\[\]]", "", stem).strip("-_") or "files"
        candidates = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count(2)))
        names.append(next(name for name in candidates if name not in names))
    return tuple(names)


class TextObjective(Objective):
    """Next-token prediction: of the assistant's turns, and of every token of other texts.

    Attributes:
      config: the run's configuration.
      source: of the model and the tokenizer.
      prepared: the tokenized data.
      loader: the batches of the training split.
      warnings: lines for the user about the data, before training; see `data_warnings`.
    """

    model: LanguageModel
    loss_name = "loss_nats_per_target"
    weight_name = "target_tokens"

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        """Opens the model and prepares the data (in process 0, for all).

        Args:
          mesh: `abstract_mesh` in a dry run, which reads no weights and does its own printing.

        Raises:
          UserError, ValueError: the model, tokenizer or data cannot be used; the message says what
            would work.
        """
        self.config, self.mesh = config, mesh
        self._open_model()
        self.sources = source_names(config)
        self._open_data()

    def _open_model(self) -> None:
        data = self.config.data
        weights = not is_abstract(self.mesh)
        chosen = choose_model(self.config.model, self.config.adapter.path, weights)
        source, self.tokenizer = for_templates(chosen, data)
        if isinstance(source, AdaptedSource):
            check_vocabulary(source, chosen.config.vocab_size)
            check_same(self.config.adapter, source)
            # In preference tuning no adapter drops anything unless asked to, as in TRL.
            if self.config.adapter.dropout is None and self.config.preference.loss is None:
                adapter = dataclasses.replace(
                    self.config.adapter, dropout=source.adapter.config.dropout
                )
                self.config = dataclasses.replace(self.config, adapter=adapter)
        check_new_rows(self.config.adapter, source.config, chosen.config.vocab_size)
        self.source = source
        if self.tokenizer.vocab_size > self.source.config.vocab_size:
            more = (
                "data.add_control_tokens true, which adds rows,"
                if self.config.model.path
                else f"model.overrides.vocab_size {self.tokenizer.vocab_size}"
            )
            last = self.tokenizer.vocab_size - 1
            raise UserError(
                f"model.tokenizer: has ids up to {last} "
                f"({self.tokenizer.decode([last], skip_special=False)!r}), but the model has "
                f"{self.source.config.vocab_size} rows of vocabulary; another tokenizer or "
                f"{more} would work"
            )
        self.model = build_language_model(
            self.config, self.source.config.with_length(data.context_length), self.mesh
        )
        self._check_weights(source, self.config.adapter.quantize)

    def _check_weights(self, source: ModelSource, quantize: str) -> None:
        """Checks a model's stored weights, if they are here; otherwise reading them raises, and a
        dry run says so."""
        if not source.lacks_weights:
            source.check_weights(quantize)

    @property
    def pretrained(self) -> dict[str, ModelSource]:
        """The models whose weights are read, by the paths given for them."""
        return {self.config.model.path: self.source} if self.config.model.path else {}

    @classmethod
    def abstract_model_and_batch(
        cls, config: RunConfig, shape: TransformerConfig, mesh: Mesh
    ) -> tuple[LanguageModel, dict[str, jax.ShapeDtypeStruct]]:
        """See `Objective`."""
        batch = text_batch(config.train.batch_size, config.data.context_length, mesh)
        return build_language_model(config, shape, mesh), batch

    @classmethod
    def loss_and_totals(cls, config: RunConfig, model: LanguageModel) -> tuple[Loss, Totals | None]:
        """See `Objective`."""
        return model.loss, None

    @functools.cached_property
    def origin(self) -> str:
        """See `Objective`."""
        return self.source.fingerprint

    @property
    def inputs(self) -> dict[str, Any]:
        """See `Objective`."""
        fields = self.source.config.with_length(self.config.data.context_length).to_hf()
        # For models from scratch earlier versions set it, without an effect; their runs resume.
        if not self.source.is_pretrained and fields["pad_token_id"] is None:
            del fields["pad_token_id"]
        return {"config.json": fields}

    def _open_data(self) -> None:
        data, rows = self.config.data, self.config.train.batch_size
        template = hashlib.sha256((self.tokenizer.chat_template or "").encode()).hexdigest()
        require_same({"the chat template's sha256": template})
        prepare = functools.partial(
            prepare_text,
            self.config,
            self.source.config,
            self.tokenizer,
            self.config.logging.console,
        )
        self.prepared = first_then_others(
            lambda key: prepare(key=key), lambda prepared: prepared.folder.name
        )
        prints = not is_abstract(self.mesh) and jax.process_index() == 0
        if prints and not RunDirectory(self.config.folder).config.exists():
            print(self.prepared.report.summary(), flush=True)
        self.loader = self._load("train")
        self.tokens_per_batch, self.rows_per_epoch = rows * data.context_length, len(self.loader)
        self.config = dataclasses.replace(
            self.config, train=self.config.train.for_epochs(self.rows_per_epoch)
        )
        if self.config.train.epochs is not None:
            check_profile(self.config)
            self.loader.end = self.rows_taken(self.config.train.steps)
        self.warnings = self._data_warnings()
        for warning in self.warnings if prints else ():
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        # Exports state the longest document as the model's length: longer rows hold several
        # documents.
        longest = longest_document(self.prepared)
        self.source = dataclasses.replace(
            self.source, config=self.source.config.with_length(longest)
        )
        self.fingerprint = self.loader.fingerprint
        self._held_out_loader = self._load("held_out") if len(self.prepared.held_out) else None
        self.has_held_out = self._held_out_loader is not None

    def _data_warnings(self) -> list[str]:
        return data_warnings(self.source, self.config, self.prepared, self.loader)

    @functools.cached_property
    def part(self) -> LocalPart:
        """The part of each batch that this process makes."""
        rows, length = self.config.train.batch_size, self.config.data.context_length
        return local_part(self.mesh, rows, length)

    @functools.cached_property
    def order(self) -> Int[np.ndarray, " T"]:
        """The permutation from this process's reading order to the mesh's layout."""
        return local_order(self.part, self._layout)[1]

    @functools.cached_property
    def _read_part(self) -> dict[str, Any]:
        """The rows of a batch, and the indices in a row, that this process reads; ascending."""
        indices, _ = local_order(self.part, self._layout)
        return {"rows": self.part.rows.tolist(), "indices": indices}

    @property
    def _layout(self) -> Int[np.ndarray, " L"]:
        """The permutation of a row's tokens into the mesh's layout."""
        length, shards = self.config.data.context_length, self.mesh.shape["sequence"]
        return permutation(length, shards, self.config.attention.layout)

    def _load(self, split: str) -> Loader:
        """Returns the loader of one split of the prepared data."""
        data = self.config.data
        return Loader(
            self.prepared,
            data.context_length,
            self.config.train.batch_size,
            data.seed,
            split=split,
            with_sources=bool(self.sources),
        )

    def loss(self, params: LossParams, batch: DeviceBatch) -> LossSums:
        """Returns the sums of cross-entropy (nats) and of weights; see `LanguageModel.loss`."""
        return self.model.loss(params, batch, sources=len(self.sources))

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """See `text_batch`."""
        return text_batch(
            self.config.train.batch_size,
            self.config.data.context_length,
            self.mesh,
            bool(self.sources),
        )

    def batches(self, step: int) -> Iterator[HostBatch]:
        """Yields the loader's batches from `step` on, in the mesh's layout."""
        yield from map(self._permuted, self.loader.batches(step, **self._read_part))

    def held_out(self) -> Iterator[HostBatch]:
        """Yields the held-out batches, if any, in the mesh's layout."""
        if self._held_out_loader is not None:
            yield from map(self._permuted, self._held_out_loader.epoch_batches(**self._read_part))

    def _permuted(self, batch: Batch) -> HostBatch:
        return cast(HostBatch, permute(batch, self.order))

    def to_device(self, batch: HostBatch) -> DeviceBatch:
        """Returns the global arrays [rows, length] from `batch`, this process's part."""
        return place_batch(dict(batch), self.mesh, self.part)

    def record_ids(self, step: int) -> list[str]:
        """See `Loader.record_ids`."""
        return self.loader.record_ids(step)

    def lengths(self, step: int) -> Int[np.ndarray, " documents"]:
        """See `Loader.lengths`."""
        return self.loader.lengths(step)

    def read_params(self) -> Params:
        """Reads the pretrained parameters, or draws those of a model from scratch."""
        return self.source.read(self.model, self.config.model.seed)

    def write_assets(self, folder: Path) -> None:
        """Writes config.json, the tokenizer with its chat template, and the configuration."""
        templates = chat_templates(self.config.data)
        # A model trained only on texts keeps its chat template.
        template = (
            jinja_template(templates[0], self.tokenizer)
            if templates
            else self.tokenizer.chat_template
        )
        resolved = configuration.dump(_with_absolute_model(self.config))
        self.source.write_assets(folder, self.tokenizer, template, resolved)
        if self.config.adapter.rank:
            adapted = self.source.config.with_adapter(self.config.adapter)
            adapter_config.write_config(adapted, self.source.name, folder)


def _with_absolute_model(config: RunConfig) -> RunConfig:
    """Returns a recipe whose model is not a relative folder, since `models/mine` would elsewhere
    look like a hub name."""
    path = config.model.path
    if not path or not expanded(path).is_dir():
        return config
    absolute = str(expanded(path).absolute())
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=absolute))
