"""Compiles the Agentic Transformer of 350M parameters for absent TPUs: with which attention 32 and 128 trajectories fit.

    python -m scripts.benchmarks.trajectory_memory                  # compiles what is missing
    python -m scripts.benchmarks.trajectory_memory --compiles 1     # stops after one compilation
    python -m scripts.benchmarks.trajectory_memory --only v4 ring   # rows whose name has all of these words

Every row is the training step of configs/trajectories/walker_walk_350m_512k.yaml, one context in a batch. `vanilla` keeps all
scores, `memory-efficient` has the blockwise kernel and computes all else at once, `blockwise` computes projections and
feed-forward in chunks too; these three run on one device. `ring` splits the context over several. The columns are those of
Ring Attention's Table 5, which names neither the machine nor what is kept for the backward pass. Here the layers' inputs are
kept, and where that is too much, every third one; `ring` keeps what the recipe says.

Each compilation is recorded in --output before the next one begins. Writes docs/results/trajectory_memory.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planning.machines import memory_gib
from planning.plan import Job, changed
from planning.search import best_every_k
from scripts.benchmarks.commands import add_output_folder, make_parser, read_json, write_json
from scripts.benchmarks.measurements import MODEL, PLANNING
from scripts.benchmarks.results import ROOT, fingerprint, measured, row, save, versions
from scripts.benchmarks.table3 import compiled
from scripts.benchmarks.table3_cells import ALL_AT_ONCE
from trainer import entry
from trainer.config.load import load
from trainer.config.schema import MeshConfig, RunConfig
from trainer.trajectories import trajectory_model

RECIPE = "configs/trajectories/walker_walk_350m_512k.yaml"
TOKENS = 4000  # of a trajectory: 1,000 decisions of four
# Device -> the topologies with 1, 8, 32 and 64 of it.
MACHINES = {
    "v4": ("v4:1x1x1", "v4:2x2x2", "v4:2x4x4", "v4:4x4x4"),
    "v5e": ("v5e:1x1", "v5e:2x4", "v5e:4x8", "v5e:8x8"),
}
# Not the recipe, in whose comments the result is quoted.
DEPENDS_ON = (
    MODEL,
    PLANNING,
    "trainer/step.py",
    "trainer/trajectories.py",
    "scripts/benchmarks/trajectory_memory.py",
)
FACTS = [
    "Table 5 of the paper says oom for memory-efficient attention with 32 trajectories (128,000 tokens) and for the blockwise "
    "transformer with 128 (512,000 tokens), and names no machine.",
    "Its own Table 3 contradicts that on 8 A100: there a model of 3B parameters, nine times larger, has 256,000 tokens with "
    "memory-efficient attention and 512,000 with the blockwise transformer.",
    "On TPU v4 Table 3 has 64,000 and 256,000 tokens at 3B, which leaves an oom at 350M possible.",
    "What fits depends on what is kept for the backward pass, which the paper does not say.",
]


@functools.cache
def recipe() -> RunConfig:
    """Returns the recipe of 350M parameters."""
    return load(["--config", str(ROOT / RECIPE)])


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: a kind of attention on a machine.

    Attributes:
      attention: vanilla, memory-efficient, blockwise or ring.
      devices: how many; trajectories: in the context.
      paper: what the paper's Table 5 says of this column, "" if it lacks the column.
    """

    machine: str
    attention: str
    devices: int
    trajectories: int
    paper: str

    @property
    def name(self) -> str:
        return f"{self.machine}_{self.attention.replace('-', '_')}_{self.trajectories}_on_{self.devices}"

    @property
    def topology(self) -> str:
        return MACHINES[self.machine][(1, 8, 32, 64).index(self.devices)]

    def memory_options(self, layers: int) -> list[dict[str, Any]]:
        """Returns the memory options to try, in their order."""
        if self.attention == "ring":
            return [{}]
        chunks = {} if self.attention == "blockwise" else ALL_AT_ONCE
        # Beside scores of length x length the layers' inputs are nothing.
        spare = (
            []
            if self.attention == "vanilla"
            else [{"remat": "every_k", "every_k": best_every_k(layers), **chunks}]
        )
        return [{"remat": "nothing", **chunks}, *spare]

    def job(self, options: dict[str, Any]) -> Job:
        """Returns the recipe's training step on this machine."""
        run = recipe()
        attention = (
            {}
            if self.attention == "ring"
            else {
                "schedule": "local",
                "kernel": "reference" if self.attention == "vanilla" else "auto",
            }
        )
        run = changed(
            run,
            data={"context_length": self.trajectories * TOKENS},
            memory=options,
            attention=attention,
            trajectories={"in_context": self.trajectories},
            mesh=MeshConfig(sequence=self.devices),
        )
        return Job(run, trajectory_model(run), self.topology, self.name)


def cases(words: Sequence[str] = ()) -> list[Case]:
    """Returns the rows whose names have all of these words."""
    rows = [
        Case(machine, *rest)
        for machine in MACHINES
        for rest in (
            ("vanilla", 1, 32, ""),
            ("memory-efficient", 1, 32, "oom"),
            ("blockwise", 1, 32, "trained"),
            ("blockwise", 1, 128, "oom"),
            *(("ring", devices, 128, "trained") for devices in (8, 32, 64)),
        )
    ]
    return [case for case in rows if all(word in case.name for word in words)]


class Compilations:
    """What was compiled so far: row -> remat -> outcome, in a file that is dropped when code or versions have changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inputs = {**{pattern: fingerprint(pattern) for pattern in DEPENDS_ON}, **versions()}
        recorded = read_json(path) if path.exists() else {}
        self.outcomes: dict[str, dict[str, dict]] = (
            recorded["outcomes"] if recorded.get("inputs") == self.inputs else {}
        )

    def missing(self, case: Case) -> tuple[Job, str] | None:
        """Returns the next step to compile for a row, with the name of its remat policy; None where the row is known."""
        layers = case.job({}).model.num_hidden_layers
        for options in case.memory_options(layers):
            job = case.job(options)
            outcome = self.outcomes.get(case.name, {}).get(job.policy)
            if outcome is None:
                return job, job.policy
            if outcome["fits"]:
                return None
        return None

    def compile(self, case: Case, job: Job, policy: str) -> None:
        """Compiles a step, prints and records the outcome."""
        outcome = compiled(job)
        self.outcomes.setdefault(case.name, {})[policy] = outcome
        partial = self.path.with_suffix(".part")
        write_json(partial, {"inputs": self.inputs, "outcomes": self.outcomes})
        partial.replace(self.path)
        print(
            f"{case.name}: {text(case, policy, outcome)} ({outcome['compile_seconds']:.0f} s)",
            flush=True,
        )


def needed_gib(outcome: dict) -> float:
    """Returns the memory that a step needs on each device, by the compiler."""
    return outcome["peak_gib"] if outcome["fits"] else outcome["needs_gib"]


def text(case: Case, policy: str, outcome: dict) -> str:
    """Returns an outcome in words."""
    sizes = f"{needed_gib(outcome):,.2f} of {memory_gib(case.topology)} GiB, {policy}"
    return f"{'fits' if outcome['fits'] else 'too large'}: {sizes}"


def figures(case: Case, outcome: dict) -> list[str]:
    """Returns whether an outcome fits, and what it needs, what there is and the temporaries of it, in GiB."""
    temporaries = f"{outcome['temporaries_gib']:.2f}" if outcome["fits"] else ""
    return [
        "yes" if outcome["fits"] else "no",
        f"{needed_gib(outcome):.2f}",
        f"{memory_gib(case.topology)}",
        temporaries,
    ]


def save_result(compilations: Compilations) -> None:
    """Writes the result of the rows that are known."""
    rows, lines = {}, []
    for case in cases():
        outcomes = compilations.outcomes.get(case.name, {})
        if not outcomes or compilations.missing(case):
            continue
        policy, outcome = list(outcomes.items())[-1]
        outcome_text = text(case, policy, outcome) + (
            f"; paper: {case.paper}" if case.paper == "oom" else ""
        )
        goal = "fits: the paper trained it" if case.paper == "trained" else ""
        device = f"{case.devices} x {case.machine}" if case.devices > 1 else f"one {case.machine}"
        rows[case.name] = row(
            f"{case.attention}, {case.trajectories} trajectories, {device}",
            outcome_text,
            goal,
            outcome["fits"] if goal else None,
        )
        lines += [
            [
                case.attention,
                case.trajectories,
                device,
                case.paper or "no such column",
                remat,
                *figures(case, tried),
            ]
            for remat, tried in outcomes.items()
        ]
    columns = [
        "attention",
        "trajectories",
        "devices",
        "Ring Attention, Table 5",
        "remat",
        "fits",
        "needs GiB",
        "has GiB",
        "of it temporaries",
    ]
    save(
        "trajectory_memory",
        measured(
            "Agentic Transformer of 350M parameters: memory of a training step on TPUs, by the compiler",
            rows,
            "python -m scripts.benchmarks.trajectory_memory",
            DEPENDS_ON,
            note="docs/notes/trajectories.md",
            tables={"compilations": {"columns": columns, "rows": lines}},
            facts=FACTS,
        ),
    )


def work(args: argparse.Namespace) -> None:
    """Compiles what is missing, and writes the result after each row."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    args.output.mkdir(parents=True, exist_ok=True)
    compilations, count = Compilations(args.output / "compilations.json"), 0
    for case in cases(args.only):
        while step := compilations.missing(case):
            if args.compiles is not None and count >= args.compiles:
                return
            compilations.compile(case, *step)
            count += 1
            save_result(compilations)
    print(json.dumps({"rows": len(compilations.outcomes), "compiled": count}))


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser("trajectory_memory", __doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="WORD",
        help="rows whose name has all of these words",
    )
    parser.add_argument(
        "--compiles", type=entry.at_least_one, help="stop after as many compilations"
    )
    add_output_folder(parser, "runs/bench/trajectory_memory")
    args = parser.parse_args(argv)
    return entry.run(lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
