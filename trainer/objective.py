"""The contract between the training loop and what is learned: `Objective`, and the `TrainableModel` that it trains."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from model.attention import Mask
from model.config import TransformerConfig
from model.experts import RouterTotals
from model.loss import LossSums
from model.sharding import OnHost, Parameter

Params = dict[str, jax.Array]
"""Parameters by name: float32 where they are trained; frozen ones in the compute dtype, or as codes."""
LossParams = dict[str, jax.Array | OnHost]
"""Parameters by name as the loss takes them: those in the host's memory may come with a placeholder for their gradient."""
HostBatch = Mapping[str, np.ndarray]
"""The part of a batch that one process reads, by array name."""
DeviceBatch = dict[str, jax.Array]
"""A global batch, by array name, sharded over the mesh."""
AbstractBatch = Mapping[str, jax.ShapeDtypeStruct]
"""Shapes, dtypes and shardings of a global batch, by array name."""
BY_SOURCE = "loss_by_source/"
"""Begins the name of a metric that is one source's loss; the source's name follows."""
AUXILIARY = "auxiliary_loss/"
"""Begins the name of a metric that is a loss of the layers', such as a router's; its name follows."""


class TrainableModel(Protocol):
    """What the loop, the step and the metrics read of a model."""

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Shape and logical axes of every parameter, as held in memory. Those named `layers.*` are stacked layers."""

    @property
    def own_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter without the padding that `parameters` has in memory."""

    @property
    def specs(self) -> Mapping[str, PartitionSpec]:
        """How each parameter is split over the mesh."""

    @property
    def shardings(self) -> Mapping[str, NamedSharding]:
        """`specs` on `mesh`."""

    @property
    def mesh(self) -> Mesh:
        """The devices, with the axes data, fsdp, expert, tensor and sequence."""

    @property
    def config(self) -> TransformerConfig:
        """The transformer's shape, from which a step's FLOPs are counted."""

    @property
    def mask(self) -> Mask:
        """Which keys a query sees, from which attention's FLOPs are counted."""

    def router_totals(self, params: LossParams, batch: DeviceBatch) -> RouterTotals:
        """Returns what the routers' losses of a batch are made with; see `Transformer`."""


class Objective(abc.ABC):
    """What is learned: a model, a loss and the batches it is computed on. The loop knows nothing else about them.

    A batch is any set of named arrays, each with its own shape, dtype and sharding. The first dimension of every array counts
    the batch's rows; gradient accumulation splits the batch along it.

    Attributes:
      model: the model, whose parameters are trained.
      loss_name: what metrics call the loss, with its unit, such as loss_nats_per_target.
      weight_name: what metrics call the sum of the weights that the loss is divided by, such as target_tokens.
      sources: names of the data sources whose losses are also reported one by one; () if the loss does not tell them apart.
      has_held_out: whether `held_out` yields any batch.
      tokens_per_batch: tokens of a global batch, padding included.
      rows_per_epoch: rows of the first epoch; None where every row is drawn anew.
      fingerprint: a text that changes whenever any batch would.
      origin: a text that changes whenever the initial parameters would, where these are read from files; "" where they are
        drawn.
    """

    model: TrainableModel
    loss_name: str
    weight_name: str
    sources: tuple[str, ...]
    has_held_out: bool
    tokens_per_batch: int
    rows_per_epoch: int | None = None
    fingerprint: str
    origin: str

    @abc.abstractmethod
    def loss(self, params: LossParams, batch: DeviceBatch) -> LossSums:
        """Computes the loss of a global batch, whose `trained` is differentiated with respect to `params`.

        Returns:
          The sums of weighted losses and of weights over the batch, those of each of `sources`, auxiliary
          losses, and whatever else metrics report, by its name there. The step adds up the sums of all
          parts of a batch and divides once.
        """

    def totals(self, params: LossParams, batch: DeviceBatch) -> dict[str, Any]:
        """Returns what the loss of a part of a batch needs to know of the whole one, as sums over the tokens of `batch`.

        The step adds them up over the parts and puts them into each part under the same names. {} where a batch's loss is
        no more than the sum of its parts'.
        """
        return {}

    @abc.abstractmethod
    def abstract_batch(self) -> AbstractBatch:
        """Returns shapes, dtypes and shardings of a global batch; the step is compiled for them."""

    @abc.abstractmethod
    def batches(self, step: int) -> Iterator[HostBatch]:
        """Yields this process's part of each batch, without end, from the one that step `step` (from 0) trains on."""

    @abc.abstractmethod
    def held_out(self) -> Iterator[HostBatch]:
        """Yields this process's part of every held-out batch, the same each time."""

    @abc.abstractmethod
    def to_device(self, batch: HostBatch) -> DeviceBatch:
        """Returns the global arrays of a batch from the parts that the processes read."""

    @abc.abstractmethod
    def record_ids(self, step: int) -> list[str]:
        """Returns the ids of the records in the whole batch of step `step` (from 0), for messages about it."""

    @abc.abstractmethod
    def lengths(self, step: int) -> Int[np.ndarray, " documents"]:
        """Returns the tokens of each document in the whole batch of step `step` (from 0), from which FLOPs are counted."""

    @abc.abstractmethod
    def read_params(self) -> Params:
        """Returns the initial parameters, sharded as the model's `shardings` say."""

    @abc.abstractmethod
    def write_assets(self, folder: Path) -> None:
        """Writes the files that a checkpoint holds beside its arrays, such as config.json and the tokenizer."""
