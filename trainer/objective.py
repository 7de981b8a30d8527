"""The contract between the training loop and its objective: `Objective`, `TrainableModel`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int

from model.attention import Mask
from model.config import TransformerConfig
from model.experts import RouterTotals
from model.loss import LossSums
from model.sharding import OnHost, Parameter

if TYPE_CHECKING:
    from .config.schema import RunConfig

Params = dict[str, jax.Array]
"""Parameters by name: trained ones in float32; frozen ones in the compute dtype, or as codes."""
LossParams = dict[str, jax.Array | OnHost]
"""Parameters by name for the loss; host parameters may have a placeholder for their gradient."""
HostBatch = Mapping[str, np.ndarray]
"""One process's part of a batch, by array name."""
DeviceBatch = dict[str, jax.Array]
"""A global batch, by array name, sharded over the mesh."""
AbstractBatch = Mapping[str, jax.ShapeDtypeStruct]
"""Shapes, dtypes and shardings of a global batch, by array name."""
Loss = Callable[[LossParams, DeviceBatch], LossSums]
"""See `Objective.loss`."""
Totals = Callable[[LossParams, DeviceBatch], dict[str, Any]]
"""See `Objective.totals`."""
BY_SOURCE = "loss_by_source/"
"""Prefix of metrics with one source's loss; the source's name follows."""
AUXILIARY = "auxiliary_loss/"
"""Prefix of metrics with a loss of the layers, such as a router's; its name follows."""


class TrainableModel(Protocol):
    """What the loop, the step and the metrics need from a model."""

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Shape and logical axes of every parameter in memory; `layers.*` are stacked layers."""

    @property
    def unpadded_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter without the padding of `parameters`."""

    @property
    def shardings(self) -> Mapping[str, NamedSharding]:
        """The sharding of each parameter on `mesh`."""

    @property
    def mesh(self) -> Mesh:
        """The devices, with the axes data, fsdp, expert, tensor and sequence."""

    @property
    def config(self) -> TransformerConfig:
        """The transformer's shape, for a step's FLOPs."""

    @property
    def mask(self) -> Mask:
        """Which keys a query sees, for attention's FLOPs."""

    def router_totals(self, params: LossParams, batch: DeviceBatch) -> RouterTotals:
        """Returns the totals for a batch's router losses; see `Transformer`."""


class Objective(abc.ABC):
    """What is learned: a model, a loss and its batches. The loop knows nothing else about them.

    A batch is any set of named arrays with any shapes, dtypes and shardings. The first dimension of
    every array counts the batch's rows; gradient accumulation splits the batch along it.

    Attributes:
      config: the run's configuration, with steps for its epochs.
      model: the model, whose parameters are trained.
      loss_name: the loss's name in metrics, with its unit, such as loss_nats_per_target.
      weight_name: the name in metrics of the weight sum that divides the loss, such as
        target_tokens.
      sources: names of data sources whose losses are also reported separately; () for none.
      has_held_out: whether `held_out` yields a batch.
      warnings: lines for the user about the data, before training.
      tokens_per_batch: tokens of a global batch, padding included.
      rows_per_epoch: rows of the first epoch; None if every row is drawn anew.
      fingerprint: a text that changes whenever any batch would.
    """

    config: RunConfig
    model: TrainableModel
    loss_name: str
    weight_name: str
    sources: tuple[str, ...]
    has_held_out: bool
    tokens_per_batch: int
    rows_per_epoch: int | None = None
    fingerprint: str
    warnings: list[str]

    @abc.abstractmethod
    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        """Opens the model and the data.

        Args:
          mesh: without devices in a dry run.
        """

    @classmethod
    def abstract_model_and_batch(
        cls, config: RunConfig, shape: TransformerConfig, mesh: Mesh
    ) -> tuple[TrainableModel, AbstractBatch]:
        """Returns the model that a run trains and its batch's shapes, for plans: without a model's
        files and without data.

        Args:
          shape: the transformer's.
        """
        raise NotImplementedError(f"{cls.__name__} cannot be planned")

    @classmethod
    def loss_and_totals(cls, config: RunConfig, model: Any) -> tuple[Loss, Totals | None]:
        """Returns `loss` and `totals` for a model of `abstract_model_and_batch`; None for {}."""
        raise NotImplementedError(f"{cls.__name__} cannot be planned")

    @property
    @abc.abstractmethod
    def origin(self) -> str:
        """A text that changes whenever initial parameters from files would; "" if drawn."""

    @property
    def inputs(self) -> dict[str, Any]:
        """What else in its files affects training, in JSON, by its name in messages."""
        return {}

    @abc.abstractmethod
    def loss(self, params: LossParams, batch: DeviceBatch) -> LossSums:
        """Computes the loss of a global batch, differentiable with respect to `params`.

        Returns:
          The sums of weighted losses and of weights over the batch, those of each of `sources`,
          auxiliary losses, and further metrics by name. The step sums over all parts of a batch and
          divides once.
        """

    def totals(self, params: LossParams, batch: DeviceBatch) -> dict[str, Any]:
        """Returns what a part's loss needs from the whole batch, as sums over the tokens of
        `batch`.

        The step sums them over the parts and adds them to each part under the same names. {} if a
        batch's loss is the sum of its parts'.
        """
        return {}

    @abc.abstractmethod
    def abstract_batch(self) -> AbstractBatch:
        """Returns shapes, dtypes and shardings of a global batch; the step is compiled for them."""

    @abc.abstractmethod
    def batches(self, step: int) -> Iterator[HostBatch]:
        """Yields this process's part of each batch, endlessly, from step `step` (from 0) on."""

    @abc.abstractmethod
    def held_out(self) -> Iterator[HostBatch]:
        """Yields this process's part of every held-out batch; always the same batches."""

    @abc.abstractmethod
    def to_device(self, batch: HostBatch) -> DeviceBatch:
        """Returns the global arrays of a batch from the processes' parts."""

    @abc.abstractmethod
    def record_ids(self, step: int) -> list[str]:
        """Returns the ids of all records in the batch of step `step` (from 0), for messages."""

    @abc.abstractmethod
    def lengths(self, step: int) -> Int[np.ndarray, " documents"]:
        """Returns the tokens of each document in the batch of step `step` (from 0), for FLOPs."""

    def rows_taken(self, steps: int) -> int:
        """Returns the rows in the first `steps` batches, without empty ones at the run's end."""
        return self.config.train.rows_taken(steps, self.rows_per_epoch)

    def shared_lengths(self, step: int) -> Int[np.ndarray, " documents"] | int:
        """Returns how many tokens of earlier documents each document of `lengths` also sees."""
        return 0

    @abc.abstractmethod
    def read_params(self) -> Params:
        """Returns the initial parameters in the model's `shardings`."""

    @abc.abstractmethod
    def write_assets(self, folder: Path) -> None:
        """Writes a checkpoint's other files, such as config.json and the tokenizer."""
