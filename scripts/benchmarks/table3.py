"""Finds the entries of Ring Attention's Table 3 with the real compilers: the longest context of each model and machine.

    python -m scripts.benchmarks.table3                              # compiles what docs/plans/table3.json lacks, prints, draws
    python -m scripts.benchmarks.table3 --only llama-7b v5e ring     # cells whose name has all of these words
    python -m scripts.benchmarks.table3 --show                       # compiles nothing

Every cell is our own training step: the longest context that compiled, and its double, which was tried and does not fit. The
columns are the paper's. `vanilla` keeps all scores (the dense kernel). `memory-efficient` has the blockwise kernel, and
computes all else at once. `blockwise feed-forward` computes projections, feed-forward and loss in chunks. These three give each
device a row of its own; `ring` splits one row over all devices. Memory is the `device`'s alone, or `ours`: with the host's.
On GPUs a third, `paper`, is like for like (section 5.1 and appendix A): one row for all devices, split by tensor parallelism
(by the ring in its own column), products in float32, and the device's memory alone.
Cells of machines whose compiler is not installed stay as they are (TPUs: `libtpu`; A100: make install PLATFORM=cuda).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

from data.paths import output_file
from model.config import TransformerConfig
from planning.compiled import GIB
from planning.machines import memory_gib
from planning.parts import parts_gib
from planning.plan import DoesNotFit, Job, plan, sizes_text
from planning.topology import topology_devices
from scripts.benchmarks.commands import make_parser, read_json, tokens_text
from scripts.benchmarks.table3_cells import (
    FILE,
    LIKE_FOR_LIKE,
    MEMORIES,
    Cell,
    cells,
    read_cells,
    write_cells,
)
from scripts.benchmarks.table3_picture import draw, show
from trainer import entry
from trainer.flops import flops_per_step

LEAST, MOST = 1 << 10, 1 << 30  # contexts
CELL_FIELDS = tuple(field.name for field in dataclasses.fields(Cell))


def longest(
    share: Callable[[int], float],
    start: int,
    fixed: float = 0.0,
    power: int = 1,
    enough: Callable[[], bool] = lambda: False,
) -> tuple[int, int | None]:
    """Returns the longest power-of-two multiple of `start` that fits, and its double; both were tried.

    Memory is guessed to be `fixed` plus a part that grows with the `power` of the context. The guess only chooses the next
    context to try.

    Args:
      share: context -> needed memory as a share of what there is; above 1 it does not fit.
      enough: ends the search early.

    Returns:
      (longest, next); longest is below LEAST where nothing fits, next None where even MOST does.
    """
    fits, fails, context = LEAST // 2, None, start
    while fits < MOST and (fails is None or fails > 2 * fits) and not enough():
        needed = share(context)
        if needed > 1:
            fails = context
        else:
            fits = context
        doublings = (
            math.floor(math.log2((1 - fixed) / max(needed - fixed, 1e-3)) / power)
            if fixed < 1
            else -1
        )
        context = max(int(context * 2.0**doublings), 2 * fits)
        context = min(context, fails // 2 if fails else MOST)
    return fits, fails


class Table:
    """The stored cells, and the compilations of cells that are not known yet.

    Compilations are kept in a file of their own, which is not part of the repository: for each column, model, machine and
    choice of memory options, context -> outcome. With it an interrupted search goes on.
    """

    def __init__(self, path: Path, compilations: Path):
        self.path, self.compilations, self.compiles = path, compilations, 0
        self.stored = {
            Cell(*(content[name] for name in CELL_FIELDS)): content for content in read_cells(path)
        }
        self.tries = read_json(compilations) if compilations.exists() else {}

    def save(self) -> None:
        """Writes every outcome, and the cells that they fill."""
        write_cells((content for cell in cells() if (content := self.content(cell))), self.path)
        self.compilations.parent.mkdir(parents=True, exist_ok=True)
        partial = self.compilations.with_suffix(".part")
        partial.write_text(
            json.dumps({name: tried for name, tried in self.tries.items() if tried}),
            encoding="utf-8",
        )
        partial.replace(self.compilations)

    def is_known(self, cell: Cell) -> bool:
        """Whether a cell's longest context is stored, and that its double does not fit."""
        return cell in self.stored and self.stored[cell]["next"] is not None

    def content(self, cell: Cell) -> dict | None:
        """Returns what is stored of a cell, or else what its compilations so far say; None without any."""
        return (
            self.stored[cell] if self.is_known(cell) else self.filled(cell) or self.stored.get(cell)
        )

    def of(self, cell: Cell, options: dict) -> dict[str, dict]:
        """Returns the outcomes of one cell with one choice of memory options, by context."""
        name = f"{cell.model} {cell.topology} {cell.column} {' '.join(f'{k}={v}' for k, v in options.items())}"
        if cell.memory == LIKE_FOR_LIKE:  # of another split and dtype
            name = f"{name} {LIKE_FOR_LIKE}"
        return self.tries.setdefault(name, {})

    def attempt(self, cell: Cell, context: int, options: dict) -> dict:
        """Compiles one context unless its outcome is known; a context longer than one that was refused is refused as well."""
        outcomes = self.of(cell, options)
        refused = [
            tried
            for length, tried in outcomes.items()
            if int(length) < context and not tried["fits"]
        ]
        if str(context) not in outcomes and refused:
            return refused[-1]
        if str(context) not in outcomes:
            outcomes[str(context)] = compiled(cell.job(context, options))
            self.compiles += 1
            self.save()
        return outcomes[str(context)]

    def share(self, cell: Cell, context: int) -> float:
        """Returns the share of memory needed by the first choice of memory options that fits; if none fits, the least share."""
        shares = []
        for options in cell.memory_options():
            on_host = cell.on_host_gib(context, options)
            if on_host > cell.host_gib:
                shares.append(on_host / cell.host_gib)
                continue
            tried = self.attempt(cell, context, options)
            shares.append(_share(cell, tried))
            outcome = (
                f"fits with {tried['peak_gib']:.2f} GiB"
                if shares[-1] <= 1
                else _refusal(cell, tried)
            )
            details = f"{options['remat']}, {tried['compile_seconds']:.0f} s"
            print(f"{cell.name}: {tokens_text(context)} {outcome} ({details})", flush=True)
            if shares[-1] <= 1:
                break
        return min(shares)

    def filled(self, cell: Cell) -> dict | None:
        """Returns the cell's longest context so far with its plan, and why its double does not fit; None without outcomes.

        `next` is the double, or None where it has not been tried with every choice of memory options.
        """
        known = [
            (options, {int(context): tried for context, tried in self.of(cell, options).items()})
            for options in cell.memory_options()
        ]
        fitting = {
            context: (options, tried)
            for options, outcomes in reversed(known)
            for context, tried in outcomes.items()
            if _share(cell, tried) <= 1
        }
        most = max(fitting, default=LEAST // 2)
        refusals = [self._refused(cell, 2 * most, options, outcomes) for options, outcomes in known]
        content = {
            **dataclasses.asdict(cell),
            "paper": cell.paper,
            "longest": most if fitting else 0,
            "next": None if None in refusals else 2 * most,
            "next_refused": [reason for reason in refusals if reason],
        }
        if not fitting:
            return content if content["next"] else None
        options, tried = fitting[most]
        job = cell.job(most, options)
        tokens = most * job.batch
        flops = flops_per_step(
            TransformerConfig.preset(cell.model), tokens, tokens * (most + 1) / 2
        )
        return content | {
            "way": options,
            "plan": tried,
            "flops": flops,
            "estimated_step_hours": _hours(cell, job, tried),
        }

    @staticmethod
    def _refused(cell: Cell, context: int, options: dict, outcomes: dict[int, dict]) -> str | None:
        """Returns why a context does not fit with these memory options; None while that is not known."""
        on_host = cell.on_host_gib(context, options)
        if on_host > cell.host_gib:
            return f"not compiled: arrays on the host alone take {on_host:.2f} GiB of its {cell.host_gib}"
        refused = [
            tried
            for length, tried in sorted(outcomes.items())
            if length <= context and _share(cell, tried) > 1
        ]
        return f"compiled: {_refusal(cell, refused[-1])}" if refused else None


def compiled(job: Job) -> dict:
    """Returns the job's plan, or what it needs where it does not fit; `fits` says which."""
    start = time.perf_counter()
    try:
        outcome = {"fits": True, **plan(job)}
    except DoesNotFit as error:
        outcome = {"fits": False, "needs_gib": error.needs_gib, "has_gib": error.has_gib}
    outcome["compile_seconds"] = time.perf_counter() - start
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in outcome.items()
    }


def _hours(cell: Cell, job: Job, tried: dict) -> float:
    """Returns the cost model's hours of a step: between those with all transfers beside compute and those with none, by the
    share of the largest transfer that the compiled step hides."""
    hiding, waiting = (
        job.estimate(causal=cell.column != "vanilla", overlap=overlap).seconds
        for overlap in (True, False)
    )
    largest = max(
        tried.get("communication", {}).values(),
        key=lambda kind: kind["received_gib"],
        default={"hidden": 0.0},
    )
    return (waiting - largest["hidden"] * (waiting - hiding)) / 3600


def _share(cell: Cell, tried: dict) -> float:
    """Returns an outcome's needed memory as a share of what there is, of the device or the host, whichever is larger."""
    if not tried["fits"]:
        return tried["needs_gib"] / tried["has_gib"]
    return max(tried["peak_gib"] / tried["device_gib"], tried["host_gib"] / cell.host_gib)


def _refusal(cell: Cell, tried: dict) -> str:
    """Returns why an outcome does not fit, as text."""
    if tried["fits"]:
        return f"needs {tried['host_gib']:.2f} GiB of the host's {cell.host_gib}"
    return sizes_text(tried["needs_gib"], tried["has_gib"])


def first_guess(cell: Cell) -> int:
    """Returns the context to try first: the longest that fits by a rough count of temporaries.

    Temporaries count as many arrays of [tokens, hidden size] in bfloat16 as compilations were seen to have (for `vanilla` three
    float32 arrays of scores as well), and gradients as much as parameters.
    """
    config, capacity = TransformerConfig.preset(cell.model), memory_gib(cell.topology)
    widening = config.intermediate_size / config.hidden_size
    arrays = {"ring": 6, "blockwise feed-forward": 18}.get(cell.column, 18 + 8 * widening)

    def fits(context, options):
        job = cell.job(context, options)
        parts = parts_gib(job.run, config)
        tokens = job.context * job.batch / cell.devices
        scores = 12 * config.num_attention_heads * tokens**2 if cell.column == "vanilla" else 0
        needs = (
            sum(parts.values())
            + parts["parameters"]
            + (scores + arrays * 2 * tokens * config.hidden_size) / GIB
        )
        return needs <= capacity and cell.on_host_gib(context, options) <= cell.host_gib

    context = MOST
    while context > LEAST and not any(fits(context, options) for options in cell.memory_options()):
        context //= 2
    return context


def fill(table: Table, cell: Cell, compiles: int | None = None) -> None:
    """Compiles until the cell is known, or at most `compiles` times."""
    if table.is_known(cell):
        return
    job = cell.job(LEAST, cell.memory_options()[0])
    parts = parts_gib(job.run, job.model)
    fixed = (parts["parameters"] + parts["moments"]) / memory_gib(cell.topology)
    most = math.inf if compiles is None else table.compiles + compiles
    longest(
        lambda context: table.share(cell, context),
        first_guess(cell),
        fixed,
        2 if cell.column == "vanilla" else 1,
        lambda: table.compiles >= most,
    )


def work(args: argparse.Namespace) -> None:
    """Fills the table as far as the installed compilers can, from the outcomes in its file; prints and draws it."""
    import jax

    picture = output_file(args.picture or args.output.with_suffix(".png"))
    output_file(args.output)
    jax.config.update("jax_platforms", "cpu")
    table = Table(args.output, args.compilations)
    missing = set()
    for cell in () if args.show else cells(args.only):
        try:
            topology_devices(cell.topology)
        except ValueError as error:
            if cell.topology not in missing:
                print(f"left out: {error}", file=sys.stderr)
            missing.add(cell.topology)
            continue
        try:
            fill(table, cell, args.compiles)
        except (
            jax.errors.JaxRuntimeError
        ) as error:  # the compiler's own fault; one of its flags may help
            print(
                f"{cell.name}: the compiler failed: {str(error).splitlines()[0][:200]}",
                file=sys.stderr,
            )
    if not args.show:
        table.save()
    filled = {cell: table.content(cell) for cell in cells()}
    show(filled)
    draw(
        {
            cell: content["longest"]
            for cell, content in filled.items()
            if content and content["longest"] and cell.memory in MEMORIES
        },
        picture,
    )


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser("table3", __doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="words that a cell's name has: model, topology, column, memory",
    )
    parser.add_argument("--show", action="store_true", help="compile nothing")
    parser.add_argument(
        "--compiles", type=int, help="at most so many for a cell; a later start goes on"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=FILE,
        help="the table, read first and then written again "
        "(default docs/plans/table3.json, the repository's own)",
    )
    parser.add_argument(
        "--compilations",
        type=Path,
        default=Path(".cache/table3.json"),
        help="every compilation of cells that "
        "the table lacks, so that a later start goes on (default .cache/table3.json)",
    )
    parser.add_argument("--picture", type=Path, help="where to draw (default: beside the table)")
    args = parser.parse_args(argv)
    return entry.run(lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
