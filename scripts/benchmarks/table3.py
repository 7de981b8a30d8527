"""Ring Attention's Table 3 by the real compilers: the longest context of each model and machine, column by column.

    python -m scripts.benchmarks.table3                              # compiles what docs/plans/table3.json lacks, prints, draws
    python -m scripts.benchmarks.table3 --only llama-7b v5e ring     # cells whose name has all of these words
    python -m scripts.benchmarks.table3 --show                       # compiles nothing

Every cell is our own training step: the longest context that compiled, and its double, which was tried and does not fit. The
columns are the paper's: `vanilla` keeps all scores (the dense kernel); `memory-efficient` has the blockwise kernel, all else
at once; `blockwise feed-forward` has projections, feed-forward and loss in chunks; these three give each device its own row.
`ring` splits one row over all devices. Memory is the `device`'s alone, or `ours`: with what such hosts have. Machines whose
compiler is not installed here are left as they are (TPUs: `libtpu`; A100: make install PLATFORM=cuda).
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
from model.config import LlamaConfig
from planning.plan import GIB, DoesNotFit, Job, host_parts_gib, parts_gib, plan, sizes_text
from planning.topology import host_gib, memory_gib, topology_devices
from scripts.benchmarks.paper_rows import RING_ATTENTION_COLUMNS as COLUMNS
from scripts.benchmarks.paper_rows import RING_ATTENTION_CONTEXTS as PAPER
from trainer import entry
from trainer.config.schema import MeshConfig
from trainer.flops import flops_per_step

MEMORIES = ("device", "ours")
# Sizes of chunks: position-wise work runs on all of a device's tokens at once.
ALL_AT_ONCE = {"projection_chunk": 0, "feed_forward_chunk": 0, "loss_chunk": 0}
LEAST, MOST = 1 << 10, 1 << 30


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry of the table."""

    topology: str
    model: str
    column: str
    memory: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.topology} {self.column} {self.memory}"

    @property
    def paper(self) -> int:
        """Tokens that the paper has here."""
        return PAPER[self.topology][self.model][COLUMNS.index(self.column)] << 10

    @property
    def devices(self) -> int:
        """All of the topology's; a v3 chip is two."""
        generation, _, shape = self.topology.partition(":")
        return math.prod(map(int, shape.split("x"))) * (2 if generation == "v3" else 1)

    @property
    def host_gib(self) -> float:
        return host_gib(self.topology)

    def ways(self) -> list[dict]:
        """Fields of `Job` that spare memory, of the host in later ones; a context fits where one of them does."""
        config = LlamaConfig.preset(self.model)
        layers = config.num_hidden_layers
        k = min((k for k in range(1, layers + 1) if layers % k == 0), key=lambda k: layers / k + k)
        # Beside scores of length x length the layers' inputs are nothing, so `vanilla` keeps them all.
        device = {"remat": "nothing"} if self.column == "vanilla" else {"remat": "every_k", "every_k": k}
        ways = [device] if self.memory == "device" else [{"remat": "offload"}, {"remat": "offload_every_k", "every_k": k}]
        if self.memory == "ours" and self.devices < 64:  # shared by hundreds, parameters and moments are little
            ways[0]["moments_on_host"] = ways[1]["moments_on_host"] = ways[1]["parameters_on_host"] = True
        heads = {"attention_groups": config.num_key_value_heads} if self.column == "ring" else {}  # one after the other
        return [way | heads for way in ways]

    def on_host_gib(self, context: int, way: dict) -> float:
        """What the host holds for each device, known without compiling."""
        return sum(host_parts_gib(self.job(context, way), LlamaConfig.preset(self.model), self.devices).values())

    def job(self, context: int, way: dict) -> Job:
        """The column's configuration of our step."""
        devices = self.devices
        job = Job(self.model, self.topology, context, mesh=MeshConfig(sequence=devices), **way)
        if self.column == "ring":
            return job
        return dataclasses.replace(job, batch=devices, mesh=MeshConfig(fsdp=devices), schedule="local",
                                   kernel="reference" if self.column == "vanilla" else "auto",
                                   chunks=None if self.column == "blockwise feed-forward" else ALL_AT_ONCE)


def cells(only=()) -> list[Cell]:
    """All cells whose names have all of these words; what is asked first comes first: the ring, with host memory."""
    found = [Cell(topology, model, column, memory) for column in reversed(COLUMNS) for memory in reversed(MEMORIES)
             for topology, models in PAPER.items() for model in models]
    return [cell for cell in found if all(word in cell.name for word in only)]


def longest(share: Callable[[int], float], start: int, fixed: float = 0.0, power: int = 1,
            enough: Callable[[], bool] = lambda: False) -> tuple[int, int | None]:
    """The longest power-of-two multiple of `start` that fits, and its double; each was asked about.

    Memory is taken to be `fixed` plus something that grows with the `power` of the context: that guess says what to ask next,
    and never what the answer is.

    Args:
      share: context -> what it needs, as a share of what there is; above 1 it does not fit.
      enough: ends the search before its end.

    Returns:
      (longest, next); longest is below LEAST where nothing fits, next None where even MOST does.
    """
    fits, fails, context = LEAST // 2, None, start
    while fits < MOST and (fails is None or fails > 2 * fits) and not enough():
        found = share(context)
        if found > 1:
            fails = context
        else:
            fits = context
        doublings = math.floor(math.log2((1 - fixed) / max(found - fixed, 1e-3)) / power) if fixed < 1 else -1
        context = max(int(context * 2.0**doublings), 2 * fits)
        context = min(context, fails // 2 if fails else MOST)
    return fits, fails


class Table:
    """The tries made so far, in a file: of each way to do a column, what each context gave."""

    def __init__(self, path: Path):
        self.path, self.compiles = path, 0
        self.tries = json.loads(path.read_text())["tries"] if path.exists() else {}

    def save(self) -> None:
        """Every try, and the cells that they fill."""
        filled = [found for cell in cells() if (found := self.filled(cell))]
        text = json.dumps({"cells": filled, "tries": {way: tried for way, tried in self.tries.items() if tried}}, indent=1)
        part = self.path.with_suffix(".part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(self.path)

    def of(self, cell: Cell, way: dict) -> dict[str, dict]:
        name = f"{cell.model} {cell.topology} {cell.column} {' '.join(f'{k}={v}' for k, v in way.items())}"
        return self.tries.setdefault(name, {})

    def attempt(self, cell: Cell, context: int, way: dict) -> dict:
        """What the compiler says of one context; what was refused is refused at longer ones too."""
        known = self.of(cell, way)
        smaller = [found for at, found in known.items() if int(at) < context and not found["fits"]]
        if str(context) not in known and smaller:
            return smaller[-1]
        if str(context) not in known:
            known[str(context)] = compiled(cell.job(context, way))
            self.compiles += 1
            self.save()
        return known[str(context)]

    def share(self, cell: Cell, context: int) -> float:
        """Of the memory there is, what the first way needs that fits; where none does, the least that one needs."""
        found = []
        for way in cell.ways():
            on_host = cell.on_host_gib(context, way)
            if on_host > cell.host_gib:
                found.append(on_host / cell.host_gib)
                continue
            tried = self.attempt(cell, context, way)
            found.append(_share(cell, tried))
            said = f"fits with {tried['peak_gib']:.2f} GiB" if found[-1] <= 1 else _refusal(cell, tried)
            print(f"{cell.name}: {_tokens(context)} {said} ({way['remat']}, {tried['compile_seconds']:.0f} s)", flush=True)
            if found[-1] <= 1:
                break
        return min(found)

    def filled(self, cell: Cell) -> dict | None:
        """The longest so far with its plan, and why the next does not fit; `next` is None while that is not known. None while
        nothing is known."""
        known = [(way, {int(context): found for context, found in self.of(cell, way).items()}) for way in cell.ways()]
        good = {context: (way, found) for way, tried in reversed(known) for context, found in tried.items()
                if _share(cell, found) <= 1}
        most = max(good, default=LEAST // 2)
        refused = []
        for way, tried in known:
            on_host = cell.on_host_gib(2 * most, way)
            if on_host > cell.host_gib:
                refused.append(f"needs {on_host:.2f} GiB of the host's {cell.host_gib}")
                continue
            bad = [found for context, found in sorted(tried.items()) if context <= 2 * most and _share(cell, found) > 1]
            refused.append(_refusal(cell, bad[-1]) if bad else None)
        told = {**dataclasses.asdict(cell), "paper": cell.paper, "longest": most if good else 0,
                "next": None if None in refused else 2 * most, "next_refused": [one for one in refused if one]}
        if not good:
            return told if told["next"] else None
        way, found = good[most]
        job = cell.job(most, way)
        estimate, tokens = job.estimate(causal=cell.column != "vanilla"), most * job.batch
        flops = flops_per_step(LlamaConfig.preset(cell.model), tokens, tokens * (most + 1) / 2)
        return told | {"way": way, "plan": found, "flops": flops, "estimated_step_hours": estimate.seconds / 3600,
                       "estimated_mfu": estimate.mfu}


def compiled(job: Job) -> dict:
    """A plan, or what is needed where it does not fit; `fits` says which."""
    start = time.perf_counter()
    try:
        found = {"fits": True, **plan(job)}
    except DoesNotFit as error:
        found = {"fits": False, "needs_gib": error.needs_gib, "has_gib": error.has_gib}
    found["compile_seconds"] = time.perf_counter() - start
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in found.items()}


def _share(cell: Cell, tried: dict) -> float:
    if not tried["fits"]:
        return tried["needs_gib"] / tried["has_gib"]
    return max(tried["peak_gib"] / tried["device_gib"], tried["host_gib"] / cell.host_gib)


def _refusal(cell: Cell, tried: dict) -> str:
    if tried["fits"]:
        return f"needs {tried['host_gib']:.2f} GiB of the host's {cell.host_gib}"
    return sizes_text(tried["needs_gib"], tried["has_gib"])


def first_guess(cell: Cell) -> int:
    """Where to begin: the longest context that fits if the temporaries are so many arrays of [tokens, hidden size] in bfloat16
    as compiles were seen to have (for `vanilla` and three float32 arrays of scores), the gradients as large as parameters."""
    config, has = LlamaConfig.preset(cell.model), memory_gib(cell.topology)
    wide = config.intermediate_size / config.hidden_size
    arrays = {"ring": 6, "blockwise feed-forward": 18}.get(cell.column, 18 + 8 * wide)

    def fits(context, way):
        job = cell.job(context, way)
        parts = parts_gib(job, config, cell.devices)
        tokens = job.context * job.batch / cell.devices
        scores = 12 * config.num_attention_heads * tokens**2 if cell.column == "vanilla" else 0
        needs = sum(parts.values()) + parts["parameters"] + (scores + arrays * 2 * tokens * config.hidden_size) / GIB
        return needs <= has and cell.on_host_gib(context, way) <= cell.host_gib

    context = MOST
    while context > LEAST and not any(fits(context, way) for way in cell.ways()):
        context //= 2
    return context


def fill(table: Table, cell: Cell, compiles: int | None = None) -> None:
    """Compiles until the cell is known, or so many times."""
    parts = parts_gib(cell.job(LEAST, cell.ways()[0]), LlamaConfig.preset(cell.model), cell.devices)
    fixed = (parts["parameters"] + parts["moments"]) / memory_gib(cell.topology)
    most = math.inf if compiles is None else table.compiles + compiles
    longest(lambda context: table.share(cell, context), first_guess(cell), fixed, 2 if cell.column == "vanilla" else 1,
            lambda: table.compiles >= most)


def _tokens(count: int) -> str:
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K" if count else "none"


def show(table: Table) -> None:
    """The table: in each cell device memory only / ours, and the paper's in brackets; + where the next was not tried yet."""
    print(f"| hardware | model | {' | '.join(COLUMNS)} |\n|{'---|' * (2 + len(COLUMNS))}")
    for topology, models in PAPER.items():
        for model in models:
            row = []
            for column in COLUMNS:
                found = [table.filled(Cell(topology, model, column, memory)) for memory in MEMORIES]
                said = " / ".join(f"{_tokens(one['longest'])}{'' if one['next'] else '+'}" if one else "?" for one in found)
                row.append(f"{said} ({_tokens(Cell(topology, model, column, 'ours').paper)})")
            print(f"| {topology} | {model.removeprefix('llama-')} | {' | '.join(row)} |")


def draw(table: Table, path: Path) -> None:
    """Each row's four contexts, ours beside the paper's."""
    from matplotlib.figure import Figure

    rows = [(topology, model) for topology, models in PAPER.items() for model in models]
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    axes = figure.subplots()
    for column, colour in zip(COLUMNS, ("#999999", "#4477aa", "#228833", "#ee6677"), strict=True):
        axes.plot([], [], "s", color=colour, label=column)
        for place, (topology, model) in enumerate(rows):
            axes.plot(place - 0.25, Cell(topology, model, column, "ours").paper, "o", color=colour, fillstyle="none")
            for memory, shift, mark in (("device", 0.0, "v"), ("ours", 0.25, "*")):
                found = table.filled(Cell(topology, model, column, memory))
                if found and found["longest"]:
                    axes.plot(place + shift, found["longest"], mark, color=colour, markersize=9 if mark == "*" else 6)
    for mark, label in (("o", "the paper"), ("v", "device memory only"), ("*", "with host memory")):
        axes.plot([], [], mark, color="black", fillstyle="none" if mark == "o" else "full", label=label)
    axes.set_yscale("log", base=2)
    ticks = [1 << power for power in range(10, 29, 2)]
    axes.set_yticks(ticks, [_tokens(tick) for tick in ticks])
    axes.set_xticks(range(len(rows)), [f"{model.removeprefix('llama-')}\n{topology}" for topology, model in rows], fontsize=8,
                    rotation=90)
    axes.set(ylabel="tokens in a row", title="The longest context that the compilers accept, and Ring Attention's Table 3")
    axes.grid(axis="y", linewidth=0.3)
    axes.legend(frameon=False, fontsize=8, ncols=7, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    figure.savefig(path, dpi=120)


def main(argv=None) -> int:
    """Fills the table as far as the compilers here can, prints and draws it."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.table3", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--only", nargs="+", default=[], help="words that a cell's name has: model, topology, column, memory")
    parser.add_argument("--show", action="store_true", help="compile nothing")
    parser.add_argument("--compiles", type=int, help="at most so many for a cell; a later start goes on")
    parser.add_argument("--output", type=Path, default=Path("docs/plans/table3.json"), help="the table, read first and then "
                        "written again (default docs/plans/table3.json, the repository's own)")
    parser.add_argument("--picture", type=Path, help="where to draw (default: beside the table)")
    args = parser.parse_args(argv)
    return entry.run(lambda: work(args))


def work(args) -> None:
    """Goes on from the tries in the table's file."""
    import jax

    picture = output_file(args.picture or args.output.with_suffix(".png"))
    output_file(args.output)
    jax.config.update("jax_platforms", "cpu")
    table = Table(args.output)
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
        except jax.errors.JaxRuntimeError as error:  # the compiler's own fault; a flag of it may help
            print(f"{cell.name}: the compiler failed: {str(error).splitlines()[0][:200]}", file=sys.stderr)
    if not args.show:
        table.save()
    show(table)
    draw(table, picture)


if __name__ == "__main__":
    sys.exit(main())
