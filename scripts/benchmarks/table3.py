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
from model.config import LlamaConfig
from planning.compiled import GIB
from planning.machines import host_gib, memory_gib
from planning.parts import host_parts_gib, parts_gib
from planning.plan import DoesNotFit, Job, plan, sizes_text
from planning.search import best_every_k
from planning.topology import topology_devices
from scripts.benchmarks.commands import make_parser, read_json, tokens_text
from scripts.benchmarks.paper_rows import RING_ATTENTION_COLUMNS as COLUMNS
from scripts.benchmarks.paper_rows import RING_ATTENTION_CONTEXTS as PAPER
from trainer import entry
from trainer.config.schema import MeshConfig
from trainer.flops import flops_per_step

MEMORIES = ("device", "ours")
LIKE_FOR_LIKE = "paper"
# Chunk sizes with which position-wise work runs on all of a device's tokens at once.
ALL_AT_ONCE = {"projection_chunk": 0, "feed_forward_chunk": 0, "loss_chunk": 0}
LEAST, MOST = 1 << 10, 1 << 30
# Memory -> its mark, colour and name in the picture.
MARKS = {"device": ("|", "#4477aa", "ours, device memory only"), "ours": ("D", "#ee6677", "ours, with host memory")}


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
        """The paper's entry, in tokens."""
        return PAPER[self.topology][self.model][COLUMNS.index(self.column)] << 10

    @property
    def devices(self) -> int:
        """The number of the topology's devices; a v3 chip has two."""
        generation, _, shape = self.topology.partition(":")
        return math.prod(map(int, shape.split("x"))) * (2 if generation == "v3" else 1)

    @property
    def host_gib(self) -> float:
        return host_gib(self.topology)

    def ways(self) -> list[dict]:
        """Memory options, those that spare the host's memory last; a context fits where it fits with one of them."""
        if self.memory == LIKE_FOR_LIKE:  # "full gradient checkpointing"
            return [{"remat": "nothing"}]
        config = LlamaConfig.preset(self.model)
        k = best_every_k(config.num_hidden_layers)
        # Beside scores of length x length the layers' inputs are nothing, so `vanilla` keeps them all.
        device = {"remat": "nothing"} if self.column == "vanilla" else {"remat": "every_k", "every_k": k}
        ways = [device] if self.memory == "device" else [{"remat": "offload"}, {"remat": "offload_every_k", "every_k": k}]
        if self.memory == "ours" and self.devices < 64:  # shared by hundreds, parameters and moments are little
            ways[0]["moments_on_host"] = ways[1]["moments_on_host"] = ways[1]["parameters_on_host"] = True
        heads = {"attention_groups": config.num_key_value_heads} if self.column == "ring" else {}  # one after the other
        return [way | heads for way in ways]

    def on_host_gib(self, context: int, way: dict) -> float:
        """What the host holds for each device, known without compiling."""
        job = self.job(context, way)
        return sum(host_parts_gib(job.run, job.model).values())

    def job(self, context: int, way: dict) -> Job:
        """The column's configuration of our step."""
        if self.memory == LIKE_FOR_LIKE:
            # The authors' code splits activations between layers over its tensor axis, as sequence parallelism does.
            mesh = MeshConfig(tensor=self.devices, sequence_parallel=True)
            return self._job(context, way, mesh, rows=1).changed(model={"compute_dtype": "float32"})
        return self._job(context, way, MeshConfig(fsdp=self.devices), rows=self.devices)

    def _job(self, context: int, way: dict, mesh: MeshConfig, rows: int) -> Job:
        """The column's configuration of our step; other columns than the ring have this mesh and so many rows."""
        if self.column == "ring":
            return Job.of(self.model, self.topology, context, mesh=MeshConfig(sequence=self.devices), memory=way)
        chunks = {} if self.column == "blockwise feed-forward" else ALL_AT_ONCE
        kernel = "reference" if self.column == "vanilla" else "auto"
        return Job.of(self.model, self.topology, context, batch=rows, mesh=mesh, memory=way | chunks,
                      attention={"schedule": "local", "kernel": kernel})


def cells(words=()) -> list[Cell]:
    """Returns the cells whose names contain all of these words, in the order of their measurement: rings with host memory
    first."""
    ordered = [Cell(topology, model, column, memory) for column in reversed(COLUMNS) for memory in reversed(MEMORIES)
               for topology, models in PAPER.items() for model in models]
    ordered += [Cell(topology, model, column, LIKE_FOR_LIKE) for column in COLUMNS
                for topology, models in PAPER.items() if is_gpu(topology) for model in models]
    return [cell for cell in ordered if all(word in cell.name for word in words)]


def is_gpu(topology: str) -> bool:
    """Returns whether a topology is one of GPUs, which the paper's experiments used in float32."""
    return not topology.startswith("v")


def longest(share: Callable[[int], float], start: int, fixed: float = 0.0, power: int = 1,
            enough: Callable[[], bool] = lambda: False) -> tuple[int, int | None]:
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
        doublings = math.floor(math.log2((1 - fixed) / max(needed - fixed, 1e-3)) / power) if fixed < 1 else -1
        context = max(int(context * 2.0**doublings), 2 * fits)
        context = min(context, fails // 2 if fails else MOST)
    return fits, fails


class Table:
    """The file of compilations so far: for each column, model, machine and choice of memory options, context -> outcome."""

    def __init__(self, path: Path):
        self.path, self.compiles = path, 0
        self.tries = read_json(path)["tries"] if path.exists() else {}

    def save(self) -> None:
        """Writes every outcome, and the cells that they fill."""
        filled = [content for cell in cells() if (content := self.filled(cell))]
        text = json.dumps({"cells": filled, "tries": {way: tried for way, tried in self.tries.items() if tried}}, indent=1)
        partial = self.path.with_suffix(".part")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(self.path)

    def of(self, cell: Cell, way: dict) -> dict[str, dict]:
        """Returns the outcomes of one cell with one choice of memory options, by context."""
        name = f"{cell.model} {cell.topology} {cell.column} {' '.join(f'{k}={v}' for k, v in way.items())}"
        if cell.memory == LIKE_FOR_LIKE:  # of another split and dtype
            name = f"{name} {LIKE_FOR_LIKE}"
        return self.tries.setdefault(name, {})

    def attempt(self, cell: Cell, context: int, way: dict) -> dict:
        """Compiles one context unless its outcome is known; a context longer than one that was refused is refused as well."""
        outcomes = self.of(cell, way)
        refused = [tried for length, tried in outcomes.items() if int(length) < context and not tried["fits"]]
        if str(context) not in outcomes and refused:
            return refused[-1]
        if str(context) not in outcomes:
            outcomes[str(context)] = compiled(cell.job(context, way))
            self.compiles += 1
            self.save()
        return outcomes[str(context)]

    def share(self, cell: Cell, context: int) -> float:
        """Returns the share of memory needed by the first choice of memory options that fits; if none fits, the least share."""
        shares = []
        for way in cell.ways():
            on_host = cell.on_host_gib(context, way)
            if on_host > cell.host_gib:
                shares.append(on_host / cell.host_gib)
                continue
            tried = self.attempt(cell, context, way)
            shares.append(_share(cell, tried))
            outcome = f"fits with {tried['peak_gib']:.2f} GiB" if shares[-1] <= 1 else _refusal(cell, tried)
            details = f"{way['remat']}, {tried['compile_seconds']:.0f} s"
            print(f"{cell.name}: {tokens_text(context)} {outcome} ({details})", flush=True)
            if shares[-1] <= 1:
                break
        return min(shares)

    def filled(self, cell: Cell) -> dict | None:
        """Returns the cell's longest context so far with its plan, and why its double does not fit; None without outcomes.

        `next` is the double, or None where it has not been tried with every choice of memory options.
        """
        known = [(way, {int(context): tried for context, tried in self.of(cell, way).items()}) for way in cell.ways()]
        fitting = {context: (way, tried) for way, outcomes in reversed(known) for context, tried in outcomes.items()
                   if _share(cell, tried) <= 1}
        most = max(fitting, default=LEAST // 2)
        refusals = [self._refused(cell, 2 * most, way, outcomes) for way, outcomes in known]
        content = {**dataclasses.asdict(cell), "paper": cell.paper, "longest": most if fitting else 0,
                   "next": None if None in refusals else 2 * most, "next_refused": [reason for reason in refusals if reason]}
        if not fitting:
            return content if content["next"] else None
        way, tried = fitting[most]
        job = cell.job(most, way)
        tokens = most * job.batch
        flops = flops_per_step(LlamaConfig.preset(cell.model), tokens, tokens * (most + 1) / 2)
        return content | {"way": way, "plan": tried, "flops": flops, "estimated_step_hours": _hours(cell, job, tried)}

    @staticmethod
    def _refused(cell: Cell, context: int, way: dict, outcomes: dict[int, dict]) -> str | None:
        """Returns why a context does not fit with these memory options; None while that is not known."""
        on_host = cell.on_host_gib(context, way)
        if on_host > cell.host_gib:
            return f"not compiled: arrays on the host alone take {on_host:.2f} GiB of its {cell.host_gib}"
        refused = [tried for length, tried in sorted(outcomes.items()) if length <= context and _share(cell, tried) > 1]
        return f"compiled: {_refusal(cell, refused[-1])}" if refused else None


def compiled(job: Job) -> dict:
    """Returns the job's plan, or what it needs where it does not fit; `fits` says which."""
    start = time.perf_counter()
    try:
        outcome = {"fits": True, **plan(job)}
    except DoesNotFit as error:
        outcome = {"fits": False, "needs_gib": error.needs_gib, "has_gib": error.has_gib}
    outcome["compile_seconds"] = time.perf_counter() - start
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in outcome.items()}


def _hours(cell: Cell, job: Job, tried: dict) -> float:
    """Returns the cost model's hours of a step: between those with all transfers beside compute and those with none, by the
    share of the largest transfer that the compiled step hides."""
    hiding, waiting = (job.estimate(causal=cell.column != "vanilla", overlap=overlap).seconds for overlap in (True, False))
    largest = max(tried.get("communication", {}).values(), key=lambda kind: kind["received_gib"], default={"hidden": 0.0})
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
    config, capacity = LlamaConfig.preset(cell.model), memory_gib(cell.topology)
    widening = config.intermediate_size / config.hidden_size
    arrays = {"ring": 6, "blockwise feed-forward": 18}.get(cell.column, 18 + 8 * widening)

    def fits(context, way):
        job = cell.job(context, way)
        parts = parts_gib(job.run, config)
        tokens = job.context * job.batch / cell.devices
        scores = 12 * config.num_attention_heads * tokens**2 if cell.column == "vanilla" else 0
        needs = sum(parts.values()) + parts["parameters"] + (scores + arrays * 2 * tokens * config.hidden_size) / GIB
        return needs <= capacity and cell.on_host_gib(context, way) <= cell.host_gib

    context = MOST
    while context > LEAST and not any(fits(context, way) for way in cell.ways()):
        context //= 2
    return context


def fill(table: Table, cell: Cell, compiles: int | None = None) -> None:
    """Compiles until the cell is known, or at most `compiles` times."""
    job = cell.job(LEAST, cell.ways()[0])
    parts = parts_gib(job.run, job.model)
    fixed = (parts["parameters"] + parts["moments"]) / memory_gib(cell.topology)
    most = math.inf if compiles is None else table.compiles + compiles
    longest(lambda context: table.share(cell, context), first_guess(cell), fixed, 2 if cell.column == "vanilla" else 1,
            lambda: table.compiles >= most)


def show(filled: dict[Cell, dict | None]) -> None:
    """Prints the table of the cells' contents, and that of the like-for-like ones.

    In a cell stand device memory only / ours (the paper's), and + where the double has not been tried yet.
    """
    show_memories(filled, MEMORIES, list(PAPER))
    if gpus := [topology for topology in PAPER if is_gpu(topology)]:
        print("\nLike for like: one row, tensor parallelism, float32, device memory only")
        show_memories(filled, (LIKE_FOR_LIKE,), gpus)


def show_memories(filled: dict[Cell, dict | None], memories: tuple[str, ...], topologies: list[str]) -> None:
    """Prints one table: a cell's contexts with each choice of memory."""
    print(f"| hardware | model | {' | '.join(COLUMNS)} |\n|{'---|' * (2 + len(COLUMNS))}")
    for topology in topologies:
        for model in PAPER[topology]:
            row = []
            for column in COLUMNS:
                contents = [filled[Cell(topology, model, column, memory)] for memory in memories]
                text = " / ".join(f"{tokens_text(content['longest'])}{'' if content['next'] else '+'}" if content else "?"
                                  for content in contents)
                row.append(f"{text} ({tokens_text(Cell(topology, model, column, 'ours').paper)})")
            print(f"| {topology} | {model.removeprefix('llama-')} | {' | '.join(row)} |")


def draw(longest_contexts: dict[Cell, int], path: Path) -> None:
    """Draws a panel for each column of the table, with a line for each model and machine: the paper's context and ours.

    The panels are as wide as their contexts' range, so that a doubling is as long in each.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    ranges = {}
    for column in COLUMNS:
        contexts = [Cell(*row, column, "ours").paper for row in _rows()]
        contexts += [context for cell, context in longest_contexts.items() if cell.column == column]
        ranges[column] = (math.log2(min(contexts)) - 0.7, math.log2(max(contexts)) + 0.7)
    # A machine's models stand together, under its name.
    heights, names = {}, {}
    for topology, models in PAPER.items():
        names[len(heights) + len(names)] = topology
        heights |= {(topology, model): len(heights) + len(names) + index for index, model in enumerate(models)}
    figure = Figure(figsize=(12, 1.6 + 0.25 * (len(heights) + len(names))), facecolor="white", layout="constrained")
    panels = figure.subplots(1, len(COLUMNS), sharey=True, width_ratios=[high - low for low, high in ranges.values()])
    for axes, column in zip(panels, COLUMNS, strict=True):
        for row, height in heights.items():
            paper = Cell(*row, column, "ours").paper
            ours = {memory: longest_contexts[cell] for memory in MEMORIES
                    if (cell := Cell(*row, column, memory)) in longest_contexts}
            ends = (min(paper, *ours.values()), max(paper, *ours.values())) if ours else (paper, paper)
            axes.plot([math.log2(context) for context in ends], [height] * 2, color="#cccccc", zorder=1)
            axes.plot(math.log2(paper), height, "o", markersize=9, color="#222222", fillstyle="none")
            for memory, context in ours.items():
                mark, colour, _ = MARKS[memory]
                size, edge = (12, 2) if mark == "|" else (5, 1)
                axes.plot(math.log2(context), height, mark, color=colour, markersize=size, markeredgewidth=edge)
        axes.set(xlim=ranges[column], title=column)
        powers = range(math.ceil(ranges[column][0]), math.floor(ranges[column][1]) + 1)
        ticks = [power for power in powers if power % 2 == 0]
        axes.set_xticks(ticks, [tokens_text(1 << power) for power in ticks])
        axes.grid(axis="x", linewidth=0.3)
        for spine in ("top", "right", "left"):
            axes.spines[spine].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks([*heights.values(), *names],
                         [f"{model.removeprefix('llama-').upper()} " for _, model in heights]
                         + [machine_text(topology) for topology in names.values()])
    for label in panels[0].get_yticklabels()[len(heights):]:
        label.set_fontweight("bold")
    panels[0].invert_yaxis()
    figure.suptitle("Ring Attention's Table 3: the longest row in tokens, and what the compilers accept of our step")
    marks = [Line2D([], [], marker="o", linestyle="", markersize=9, color="#222222", fillstyle="none", label="the paper")]
    marks += [Line2D([], [], marker=mark, linestyle="", color=colour, markeredgewidth=2, label=label)
              for mark, colour, label in MARKS.values()]
    figure.legend(handles=marks, frameon=False, ncols=3, loc="outside lower center")
    figure.savefig(path, dpi=100)


def _rows() -> list[tuple[str, str]]:
    """Returns the topology and the model of each row of the paper's table."""
    return [(topology, model) for topology, models in PAPER.items() for model in models]


def machine_text(topology: str) -> str:
    """Returns a topology as the machine is called: `a100:4x8` as 32 A100, `v4:8x8x4` as 256 v4."""
    kind, shape = topology.split(":")
    return f"{math.prod(map(int, shape.split('x')))} {kind.upper() if kind[0] not in 'v' else kind}"


def work(args: argparse.Namespace) -> None:
    """Fills the table as far as the installed compilers can, from the outcomes in its file; prints and draws it."""
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
        except jax.errors.JaxRuntimeError as error:  # the compiler's own fault; one of its flags may help
            print(f"{cell.name}: the compiler failed: {str(error).splitlines()[0][:200]}", file=sys.stderr)
    if not args.show:
        table.save()
    filled = {cell: table.filled(cell) for cell in cells()}
    show(filled)
    draw({cell: content["longest"] for cell, content in filled.items() if content and content["longest"]}, picture)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser("table3", __doc__)
    parser.add_argument("--only", nargs="+", default=[], help="words that a cell's name has: model, topology, column, memory")
    parser.add_argument("--show", action="store_true", help="compile nothing")
    parser.add_argument("--compiles", type=int, help="at most so many for a cell; a later start goes on")
    parser.add_argument("--output", type=Path, default=Path("docs/plans/table3.json"), help="the table, read first and then "
                        "written again (default docs/plans/table3.json, the repository's own)")
    parser.add_argument("--picture", type=Path, help="where to draw (default: beside the table)")
    args = parser.parse_args(argv)
    return entry.run(lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
