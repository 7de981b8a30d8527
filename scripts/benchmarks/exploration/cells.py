"""The cells of scripts.benchmarks.exploration, chosen before any result was seen.

A cell is a task, a protocol, a method and a training seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from data.trajectories.tasks import TASKS
from scripts.benchmarks.commands import identifier

RECIPE = "configs/trajectories/walker_walk.yaml"  # whose task and options are replaced
EPISODES = 1000  # per domain, before its tasks are trained on
EVALUATION_SEEDS = 20
PLAYED = 32  # consecutive episodes of an evaluation
TRAINING_SEEDS = 3
ATTENDING = 2  # environments whose attention by episode is measured; added after the first cell


@dataclasses.dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
      in_context: episodes per row.
      rows: rows per step.
      start: the training whose final parameters it starts from; None for random parameters.
      devices: number of simulated devices along the sequence axis, with the striped layout.
      options: further fields of the section trajectories.
    """

    in_context: int
    steps: int
    rows: int
    start: str | None = None
    devices: int = 1
    options: tuple[str, ...] = ()


ALONE = "one episode"
METHODS = ("BC-10%", "DT", "AT, N = 4", "AT, N = 16", "AT, N = 32")
BASELINES, SHORTEST, LONGEST = METHODS[:2], METHODS[2], METHODS[-1]
# Decision Transformer continues from ALONE with one episode per context, Agentic Transformers with
# more: with many from the start, they hardly learn (docs/notes/in_context.md).
TRAININGS = {
    "BC-10%": Training(1, 1000, 16, options=("conditioning", "none", "best", "0.1")),
    ALONE: Training(1, 400, 16),
    "DT": Training(1, 600, 16, ALONE),
    "AT, N = 4": Training(4, 400, 4, ALONE),
    "AT, N = 16": Training(16, 150, 1, "AT, N = 4"),
    "AT, N = 32": Training(32, 80, 1, "AT, N = 4", devices=8),
}
PROTOCOLS = {
    "ours": ("see_actions", "false", "components", "8", "loss_on", "last"),
    "the paper's": ("see_actions", "true", "components", "1", "loss_on", "all"),
}
# Returns in the Ring Attention paper's Table 5 with 32 trajectories: the second requested return
# under the paper's protocol.
PAPER_RETURNS = {
    "walker_stand": 95.45,
    "walker_walk": 78.56,
    "walker_run": 105.88,
    "cheetah_run": 178.75,
    "cartpole_swingup": 120.56,
    "jaco_reach_top_left": 87.56,
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training of the table, and its evaluations."""

    task: str
    protocol: str
    method: str
    seed: int

    @property
    def requests(self) -> tuple[str, ...]:
        """The requested returns."""
        both = self.protocol != "ours" and self.method == SHORTEST
        return ("best in the data", "the paper's") if both else ("best in the data",)

    @property
    def name(self) -> str:
        """The run's folder, below the output."""
        return f"{self.task}/{identifier(f'{self.protocol} {self.method}')}_seed_{self.seed}"


def cells(tasks: tuple[str, ...] = tuple(TASKS)) -> Iterator[Cell]:
    """Yields all cells, the most needed first: a seed of each, more seeds, the paper's protocol."""
    for seed in range(TRAINING_SEEDS):
        for method in METHODS:
            if seed == 0 or TRAININGS[method].in_context <= TRAININGS[SHORTEST].in_context:
                yield from (Cell(task, "ours", method, seed) for task in tasks)
    for method in METHODS:
        yield from (Cell(task, "the paper's", method, 0) for task in tasks)
