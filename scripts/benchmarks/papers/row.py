"""One number of a paper and the cost model's prediction."""

from __future__ import annotations

import dataclasses

from model.attention import get_schedule
from model.attention.schedules.plan import Block, received
from planning.costs.step import ONE_BACKWARD_KERNEL, TrainingStep


@dataclasses.dataclass(frozen=True)
class PaperStep(TrainingStep):
    """A step of a paper's system.

    Attributes:
      partial: bytes per element of a partial result in transfers.
    """

    partial: int = 4

    @property
    def tile_backward_products(self) -> int:
        """As in FlashAttention-2, which the papers' systems run: one backward kernel."""
        return ONE_BACKWARD_KERNEL

    @property
    def block(self) -> Block:
        """TrainingStep's block, with the system's bytes per partial result."""
        return dataclasses.replace(super().block, partial=self.partial)


@dataclasses.dataclass(frozen=True)
class Row:
    """One number of a paper and the cost model's prediction.

    Attributes:
      source: the paper.
      table: its table, figure or section.
      label: what the number is.
      paper: the paper's number; None if it is not available.
      predicted: the model's number.
      digits, goal, between: what counts as reproduced: equal when rounded to `digits` decimals; a
        relative error of at most `goal`; within the paper's range. A row with none of them claims
        nothing.
      note: the likely reason for a miss.
      afterwards: constants of the prediction that were set after the paper's number had been seen.
    """

    source: str
    table: str
    label: str
    paper: float | None
    predicted: float
    digits: int | None = None
    goal: float | None = None
    between: tuple[float, float] | None = None
    note: str = ""
    afterwards: str = ""

    @property
    def error(self) -> float | None:
        """The relative error of the prediction; None if the paper's number is not available."""
        return float(self.predicted / self.paper - 1) if self.paper else None

    @property
    def reproduced(self) -> bool | None:
        """Whether the prediction meets the row's claim; None without a claim."""
        if self.between:
            return bool(self.between[0] <= self.predicted <= self.between[1])
        if self.digits is not None:
            return round(float(self.predicted), self.digits) == self.paper
        return (
            None if self.goal is None or self.error is None else bool(abs(self.error) <= self.goal)
        )


def bytes_received(schedule, layout: str, ranks: int, block: Block) -> list[float]:
    """Returns the bytes that a rank receives on average, forward and backward."""
    return [
        received(passes, ranks).mean()
        for passes in get_schedule(schedule, ranks, layout).plan(ranks, block)
    ]
