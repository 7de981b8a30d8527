"""What is learned: the loop asks an objective for its loss, its batches and its assets, and knows nothing of text itself."""
from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from data.batch import permute
from data.errors import UserError
from data.loader import Loader
from data.prepare import Prepared, prepare
from data.sources import Source
from data.templates import jinja_template
from data.tokenizer import Tokenizer
from model.attention import Mask
from model.attention.kernels import get_kernel
from model.attention.layout import permutation
from model.attention.schedules import get_schedule
from model.llama import Llama

from .config import load as configuration
from .config.schema import RunConfig
from .mesh import Part, part_here, wanted
from .model_source import chat_templates, choose_model, for_templates
from .run.cluster import first_then_others
from .step import text_batch


class Objective(Protocol):
    """What the training loop needs.

    Attributes:
      model: has `parameters`, `shardings`, `mesh`, `config` and `mask`; fingerprint: changes whenever a batch would.
      origin: changes with the parameters to begin with, where they are read.
      sources: names of the sources that the loss tells apart, none if it is one number.
      has_held_out: whether `held_out` gives any batch.
      part: what of a batch lies on this process's devices, and all that it makes of one.
    """

    model: object
    fingerprint: str
    origin: str
    sources: tuple[str, ...]
    has_held_out: bool
    part: Part

    def loss(self, params, batch): """(mean loss in nats, sum of weights) of a global batch, and with sources their sums."""
    def abstract_batch(self) -> dict: """Shapes and shardings of a batch."""
    def batches(self, step: int) -> Iterator[dict[str, np.ndarray]]: """Its part of batches, on from `step` finished steps."""
    def lengths(self, step: int) -> np.ndarray: """Tokens of each document in the whole batch after `step` finished steps."""
    def record_ids(self, step: int) -> list[str]: """Which records the batch after `step` finished steps is made of."""
    def held_out(self) -> Iterator[dict[str, np.ndarray]]: """Its part of every held-out batch."""
    def read_params(self) -> dict: """The parameters to begin with."""
    def write_assets(self, folder: Path) -> None: """What a checkpoint needs beside arrays."""


def build_llama(config: RunConfig, model_config, mesh: Mesh, storage_axes=("fsdp", "sequence")) -> Llama:
    """The model as a run's attention and memory sections want it computed."""
    attention = config.attention
    schedule = get_schedule(attention.schedule, mesh.shape.get("sequence", 1), attention.layout)
    return Llama(
        model_config, mesh, schedule=schedule,
        kernel=get_kernel(attention.kernel, query_tile=attention.query_tile, key_tile=attention.key_tile),
        dtype=jnp.dtype(config.model.compute_dtype), memory=config.memory, storage_axes=storage_axes,
        sequence_parallel=config.mesh.sequence_parallel,
        mask=Mask(window=attention.window, global_tokens=attention.global_tokens))


def prepare_text(config: RunConfig, tokenizer: Tokenizer, progress: bool = True, key: str | None = None) -> Prepared:
    """The data of a run, tokenized or found so, or with a key opened; progress shows a bar on a terminal."""
    data = config.data
    sources = [Source(s.path, s.format, s.template or data.template, s.weight) for s in data.sources]
    held_out = [Source(data.held_out_path, sources[0].format, sources[0].template)] if data.held_out_path else []
    return prepare(sources, tokenizer, data.context_length, data.prepared, held_out_sources=held_out, clean=data.clean,
                   train_on=data.train_on, held_out_fraction=0.0 if held_out else data.held_out_fraction,
                   progress=progress and sys.stderr.isatty(), key=key)


def source_names(config: RunConfig) -> tuple[str, ...]:
    """What the metrics call each source, by its number, where there are several; the held-out file's comes last.

    A source is called like its file without the ending; where several are called alike, the later ones get a number.
    """
    data, names = config.data, []
    if len(data.sources) < 2:
        return ()
    for path in [source.path for source in data.sources] + ([data.held_out_path] if data.held_out_path else []):
        stem = path.rstrip("/").rsplit("/", 1)[-1].split(".", 1)[0]
        alike = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count(2)))
        names.append(next(name for name in alike if name not in names))
    return tuple(names)


@dataclasses.dataclass
class TextObjective:
    """Next tokens: cross-entropy over the assistant's part of conversations, and over all of a text."""

    config: RunConfig
    mesh: Mesh

    def __post_init__(self):
        data = self.config.data
        source, self.tokenizer = for_templates(choose_model(self.config.model), data)
        # What is learned at this length is not beyond the trained one: an export and evaluation go by that number.
        self.source = dataclasses.replace(source, config=source.config.with_length(data.context_length))
        if self.tokenizer.vocab_size > self.source.config.vocab_size:
            raise UserError(f"model: vocab_size is {self.source.config.vocab_size}, but the tokenizer has ids up to "
                            f"{self.tokenizer.vocab_size - 1}; another tokenizer or a larger vocab_size would work")
        self.model = build_llama(self.config, self.source.config, self.mesh)
        self.sources = source_names(self.config)
        self.loss = functools.partial(self.model.loss, sources=len(self.sources)) if self.sources else self.model.loss
        first = jax.process_index() == 0
        # One process reads and tokenizes the sources for all.
        prepare = functools.partial(prepare_text, self.config, self.tokenizer, self.config.logging.console)
        self.prepared = first_then_others(lambda key: prepare(key=key), lambda prepared: prepared.folder.name)
        if first:
            print(self.prepared.report.summary(), flush=True)
        rows = self.config.train.batch_size
        load = functools.partial(Loader, self.prepared, data.context_length, rows, data.seed,
                                 with_sources=bool(self.sources))
        self.loader = load()
        self.has_held_out = len(self.prepared.held_out) > 0
        self._held_out = load(split="held_out") if self.has_held_out else None
        order = permutation(data.context_length, self.mesh.shape["sequence"], self.config.attention.layout)
        self.fingerprint, self.origin = self.loader.fingerprint, self.source.fingerprint
        self.part = part_here(self.mesh, rows, data.context_length)
        indices, self.order = wanted(self.part, order)
        self.here = {"rows": self.part.rows, "indices": indices}

    def abstract_batch(self):
        return text_batch(self.config.train.batch_size, self.config.data.context_length, self.mesh, bool(self.sources))

    def batches(self, step):
        for batch in self.loader.batches(step, **self.here):
            yield permute(batch, self.order)

    def lengths(self, step):
        return self.loader.lengths(step)

    def record_ids(self, step):
        return self.loader.record_ids(step)

    def held_out(self):
        for batch in self._held_out.epoch_batches(**self.here) if self.has_held_out else ():
            yield permute(batch, self.order)

    def read_params(self):
        return self.source.read(self.model, self.config.model.seed)

    def write_assets(self, folder):
        templates = chat_templates(self.config.data)
        # Trained on texts alone, a model chats as it did before.
        template = jinja_template(templates[0], self.tokenizer) if templates else self.tokenizer.chat_template
        self.source.write_assets(folder, self.tokenizer, template, configuration.dump(self.config))
