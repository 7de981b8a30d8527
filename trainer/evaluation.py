"""Measurements during training: the `Evaluation` protocol, and the held-out loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np

from model.loss import LossSums

from .objective import AUXILIARY, BY_SOURCE, Objective, Params
from .overlap import one_behind
from .run.preemption import end_if_noticed
from .step import StepBuilder


class Evaluation(Protocol):
    """A measurement before the first step, every `every` steps, and after the last step.

    Attributes:
      name: of the file RUN/NAME.jsonl, with a line per measurement, and of the TensorBoard section.
      every: number of steps between measurements; 0 measures only before the first and after the
        last step.
    """

    name: str
    every: int

    def prepare(self, objective: Objective, builder: StepBuilder) -> None:
        """Compiles for `run`, counted as compile time; called by all processes before the first
        step."""

    def run(self, params: Params, step: int) -> Mapping[str, float | str]:
        """Measures the parameters after `step` finished steps; called by all processes.

        Returns:
          Metrics by name, and answers by prompt; {}, which writes no line, if there is nothing to
          measure.

        Raises:
          Interrupted: by `trainer.run.preemption.end_if_noticed`, which a long measurement calls
            between its parts.
        """


class HeldOutLoss:
    """The mean loss over all held-out targets (not over batches), and that of each source."""

    name = "held_out"

    def __init__(self, every: int = 0) -> None:
        self.every = every

    def prepare(self, objective: Objective, builder: StepBuilder) -> None:
        """Compiles the evaluation step if there are held-out data."""
        self._objective = objective
        self._sums = builder.lower_evaluate().compile() if objective.has_held_out else None

    def run(self, params: Params, step: int) -> dict[str, float]:
        """Returns the loss, the sum of its weights, and the losses of sources with weight."""
        if self._sums is None:
            return {}
        batches = (self._objective.to_device(batch) for batch in self._objective.held_out())
        computed = (self._sums(params, batch) for batch in batches)
        batch_sums = []
        for result in one_behind(computed):
            batch_sums.append(jax.tree.map(lambda x: np.asarray(x, np.float64), result))
            end_if_noticed()
        sums: LossSums = jax.tree.map(lambda *parts: sum(parts), *batch_sums)
        if not sums.weight:
            return {}
        totals, weights = sums.by_source
        return {
            f"held_out_{self._objective.loss_name}": float(sums.total / sums.weight),
            f"held_out_{self._objective.weight_name}": float(sums.weight),
            **{
                f"held_out_{BY_SOURCE}{name}": float(totals[i] / weights[i])
                for i, name in enumerate(self._objective.sources)
                if weights[i]
            },
            **{
                f"held_out_{AUXILIARY}{name}": float(loss / sums.weight)
                for name, loss in sums.auxiliary.items()
            },
            **{
                f"held_out_{name}": float(value / sums.weight)
                for name, value in sums.measures.items()
                if not np.isnan(value)
            },
        }


def held_out_names(objective: Objective, sums: LossSums) -> list[str]:
    """Returns the names of HeldOutLoss's metrics; none without held-out data.

    Args:
      sums: of a batch's loss, or their shapes.
    """
    if not objective.has_held_out:
        return []
    names = [
        objective.loss_name,
        objective.weight_name,
        *(BY_SOURCE + name for name in objective.sources),
        *(AUXILIARY + name for name in sums.auxiliary),
        *sums.measures,
    ]
    return [f"held_out_{name}" for name in names]
