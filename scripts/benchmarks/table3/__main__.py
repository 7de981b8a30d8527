"""Finds Ring Attention's Table 3 with the real compilers: the longest context by model and machine.

    python -m scripts.benchmarks.table3                              # compiles what is missing
    python -m scripts.benchmarks.table3 --only llama-7b v5e ring     # cells with these words
    python -m scripts.benchmarks.table3 --show                       # compiles nothing

Every cell is our training step at the longest context that compiled; twice that was tried and does
not fit. The columns are the paper's. `vanilla` keeps all scores (the dense kernel).
`memory-efficient` uses the blockwise kernel and computes everything else at once. `blockwise
feed-forward` computes projections, feed-forward and loss in chunks. These three give each device a
separate row; `ring` splits one row over all devices. Memory is only the `device`'s, or `ours`: also
the host's. On GPUs a third kind, `paper`, is like for like (section 5.1 and appendix A): one row
for all devices, split by tensor parallelism (in the ring's column, by the ring), products in
float32, and only device memory. Cells of machines without an installed compiler stay unchanged
(TPUs: `libtpu`; A100: make install PLATFORM=cuda).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.outputs import output_file
from model.config import TransformerConfig
from planning.plan import DoesNotFit, Job, plan, sizes_text
from planning.topology import topology_devices
from scripts.benchmarks.commands import read_json
from scripts.benchmarks.results import write_whole
from scripts.benchmarks.table3.cells import CELL_FIELDS, FILE, Cell, cells, read_cells, write_cells
from scripts.benchmarks.table3.summary import show
from trainer.flops import flops_per_step
from trainer.options import command, option

LEAST, MOST = 1 << 10, 1 << 30  # contexts
Outcome = dict[str, Any]


def longest(fits: Callable[[int], bool], start: int) -> int:
    """Returns the longest context, `start` times a power of two from LEAST to MOST, that fits.

    Returns 0 if none does. Both the context and its double are tried.
    """
    context = start
    if fits(context):
        while context < MOST and fits(2 * context):
            context *= 2
        return context
    while context > LEAST:
        context //= 2
        if fits(context):
            return context
    return 0


class Compilations:
    """Outcomes by cell, memory options and context, kept in a file so that a search can resume."""

    def __init__(self, path: Path):
        self.path = path
        self.outcomes: dict[str, Outcome] = read_json(path) if path.exists() else {}

    def __call__(self, cell: Cell, context: int, options: dict[str, Any]) -> Outcome:
        """Compiles one context unless its outcome is known."""
        name = f"{cell.name} {' '.join(f'{k}={v}' for k, v in options.items())} {context}"
        if name not in self.outcomes:
            self.outcomes[name] = outcome = compiled(cell.job(context, options))
            result = refusal(cell, outcome) or f"fits with {outcome['peak_gib']:.2f} GiB"
            print(f"{name}: {result} ({outcome['compile_seconds']:.0f} s)", flush=True)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(self.outcomes))
        return self.outcomes[name]


def compiled(job: Job) -> Outcome:
    """Returns the job's plan, or the memory it needs if it does not fit; `fits` says which."""
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


def refusal(cell: Cell, outcome: Outcome) -> str:
    """Returns why a compiled step does not fit on the device or its host; empty if it fits."""
    if not outcome["fits"]:
        return sizes_text(outcome["needs_gib"], outcome["has_gib"])
    if outcome["host_gib"] > cell.host_gib:
        return f"needs {outcome['host_gib']:.2f} GiB of the host's {cell.host_gib}"
    if outcome["peak_gib"] > outcome["device_gib"]:
        return sizes_text(outcome["peak_gib"], outcome["device_gib"])
    return ""


def search(cell: Cell, compilations: Compilations) -> dict[str, Any]:
    """Returns a cell's record: longest context, its plan, and why the double does not fit.

    The search starts at the paper's context. A context fits if it does with any of the cell's
    memory options.
    """
    fitting: dict[int, tuple[dict[str, Any], Outcome]] = {}
    refusals: dict[int, list[str]] = {}

    def fits(context: int) -> bool:
        reasons = refusals[context] = []
        for options in cell.memory_options():
            on_host = cell.on_host_gib(context, options)
            if on_host > cell.host_gib:
                reasons.append(
                    f"not compiled: arrays on the host alone take {on_host:.2f} GiB of its "
                    f"{cell.host_gib}"
                )
                continue
            outcome = compilations(cell, context, options)
            if reason := refusal(cell, outcome):
                reasons.append(f"compiled: {reason}")
            else:
                fitting[context] = options, outcome
                return True
        return False

    context = longest(fits, cell.paper)
    double = 2 * context or LEAST
    content = {
        **dataclasses.asdict(cell),
        "paper": cell.paper,
        "longest": context,
        "next": double if double in refusals else None,
        "next_refused": refusals.get(double, []),
    }
    if not context:
        return content
    options, outcome = fitting[context]
    job = cell.job(context, options)
    tokens = context * job.batch
    return content | {
        "way": options,
        "plan": outcome,
        "flops": flops_per_step(
            TransformerConfig.preset(cell.model), tokens, tokens * (context + 1) / 2
        ),
    }


def work(args: Options) -> None:
    """Fills in the table with the installed compilers, and prints it."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    output_file(args.output, b'"column"')
    output_file(args.compilations, b'"compile_seconds"')
    stored = {
        Cell(*(content[name] for name in CELL_FIELDS)): content
        for content in read_cells(args.output)
    }
    compilations, missing = Compilations(args.compilations), set()
    for cell in () if args.show else cells(args.only):
        if cell in stored and stored[cell]["next"] is not None:
            continue
        try:
            topology_devices(cell.topology)
        except ValueError as error:
            if cell.topology not in missing:
                print(f"skipped: {error}", file=sys.stderr)
            missing.add(cell.topology)
            continue
        try:
            stored[cell] = search(cell, compilations)
        except jax.errors.JaxRuntimeError as error:  # a compiler failure; a flag may help
            reason = str(error).splitlines()[0][:200]
            print(f"{cell.name}: the compiler failed: {reason}", file=sys.stderr)
            continue
        write_cells((stored[known] for known in cells() if known in stored), args.output)
    show(list(stored.values()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    only: tuple[str, ...] = option(
        "only cells whose names have these words: model, topology, column, memory", ()
    )
    show: bool = option("print the table and compile nothing")
    output: Path = option("file of the table, read and then extended", FILE)
    compilations: Path = option(
        "file of all compilations, so that a later start can resume", Path(".cache/table3.json")
    )


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
