"""Counts the compiler's cycles per tile of the TPU kernels, ours and splash attention's.

    python -m scripts.benchmarks.kernel_cycles            # compiles all and writes the result
    python -m scripts.benchmarks.kernel_cycles --check    # fails if one of ours is slower

The cost model reads planning/costs/kernel_cycles.json, which the first command writes. Needs no
TPU. The compiler schedules a kernel into bundles, each of which takes one cycle if nothing waits,
and prints them (`--xla_jf_dump_llo_text`). There, each kind of score tile is a separate region. Our
kernels have three: an unmasked tile, a part (a quarter) of a masked tile with tokens of one
document, and a part with tokens of several. On the causal diagonal three of four parts are
computed. Splash attention masks all tiles or none; it is compiled without a mask, for the
generations that have goals.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.folders import scratch_folder
from planning.costs.kernel_rates import TABLE
from scripts.benchmarks.commands import in_own_process, write_json
from scripts.benchmarks.results import load, renew, row, same_versions
from trainer.options import command, option

NAME = "kernel_cycles"
TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
GOALS = ("v5p", "v6e")  # generations compared with splash attention
PASSES = ("forward", "backward")
COMPILERS = ("jax", "jaxlib", "libtpu")
TOKENS, TILE, HEADS, KV_HEADS, HEAD_DIM = 4096, 1024, 4, 2, 128
WORSE = 1.03  # a kernel with more bundles than this times the stored ones fails the check
COLUMNS = (
    "generation",
    "pass",
    "kernel",
    "full tile",
    "part, one document",
    "part, several documents",
    "other bundles",
)
PARTS, DIAGONAL_PARTS = 4, 3  # of a masked tile; of these, those on or below the causal diagonal
BUNDLE = re.compile(r"^ *(?:0x([0-9a-f]+)|0) +(?:[A-Z]{2})?:", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Case:
    """What one process compiles: a pass (`direction`) of a kernel, ours or splash."""

    generation: str
    direction: str
    kernel: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel's bundles: all of them, and those of each region that computes a tile, in order."""

    bundles: int
    tiles: list[int]


def read_program(text: str) -> Program:
    """Reads the final bundles of a kernel, as the compiler prints them.

    A tile's region is an innermost region with matrix products. Its inner regions without products,
    which prepare the first such tile, are not counted.
    """
    starts = [*BUNDLE.finditer(text)]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    opened: dict[str, int] = {}
    regions, products = [], []
    for number, (match, end) in enumerate(zip(starts, ends, strict=True)):
        bundle = text[match.start() : end]
        opened.update(dict.fromkeys(re.findall(r"Start region (\d+)", bundle), number))
        regions += [
            (opened[name], number)
            for name in re.findall(r"End region (\d+)", bundle)
            if name in opened
        ]
        products += [number] if "vmatmul" in bundle else []
    working = [
        region for region in regions if any(region[0] <= number <= region[1] for number in products)
    ]
    tiles = [
        region
        for region in working
        if not any(
            other != region and region[0] <= other[0] and other[1] <= region[1] for other in working
        )
    ]
    inside = {
        tile: {
            number
            for first, last in regions
            if tile[0] <= first <= last <= tile[1] and (first, last) != tile
            for number in range(first, last + 1)
        }
        for tile in tiles
    }
    return Program(
        len(starts), [last - first + 1 - len(inside[first, last]) for first, last in sorted(tiles)]
    )


def compile_ours(mesh, direction: str) -> None:
    """Compiles a pass of our kernel in its own arrays, as a ring's round calls it."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from model.attention import AttentionPartial, Mask, Queries, TokenCoords
    from model.attention.blocks import BackwardInputs, StackedKeys
    from model.attention.kernels import get_kernel

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    kernel = get_kernel("tpu", query_tile=TILE, key_tile=TILE)
    options = {"mask": Mask(), "scale": HEAD_DIM**-0.5}
    q, statistics = shape(1, TOKENS, HEADS, HEAD_DIM, dtype=jnp.bfloat16), shape(1, HEADS, TOKENS)
    coords = TokenCoords(*[shape(1, TOKENS, dtype=jnp.int32)] * 2)
    blocks = (
        Queries(q, coords),
        StackedKeys(shape(2, 1, TOKENS, KV_HEADS, HEAD_DIM, dtype=jnp.bfloat16), coords),
    )
    arguments: tuple[Any, ...]
    function: Callable
    if direction == "forward":
        arguments = AttentionPartial(shape(*q.shape), statistics), *blocks
        function = kernel.extend
    else:
        arguments = shape(*q.shape), *blocks, BackwardInputs(q, statistics, statistics)
        function = kernel.gradients
    jax.jit(lambda *arrays: function(*arrays, **options), donate_argnums=0).lower(
        *arguments
    ).compile()


def compile_splash(mesh, direction: str) -> None:
    """Compiles a pass of splash attention in its fastest form: no mask, fused backward."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.sharding import NamedSharding, PartitionSpec

    mask = masks.MultiHeadMask([masks.FullMask((TOKENS, TOKENS))] * HEADS)
    sizes = splash.BlockSizes(
        TILE, TILE, block_q_dkv=TILE, block_kv_dkv=TILE, use_fused_bwd_kernel=True
    )
    kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    arrays = [
        jax.ShapeDtypeStruct(
            (HEADS, TOKENS, HEAD_DIM), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
        )
    ] * 3
    if direction == "forward":
        function = kernel
    else:

        def function(*arrays):
            return jax.vjp(kernel, *arrays)[1](arrays[0])

    jax.jit(function).lower(*arrays).compile()


def compile_case(case: Case, folder: Path) -> dict:
    """Compiles a case in this process and returns its Program, read from dumps in `folder`.

    Raises:
      UserError: the compiler printed no such kernel.
    """
    import jax
    import numpy as np

    from planning.topology import topology_devices

    mesh = jax.sharding.Mesh(
        np.array(topology_devices(TOPOLOGIES[case.generation])[:1]), "sequence"
    )
    if case.kernel == "ours":
        with jax.set_mesh(mesh):  # tells the kernel its device, as the trainer's mesh does
            compile_ours(mesh, case.direction)
    else:
        compile_splash(mesh, case.direction)
    # Splash's backward pass runs its forward first: the requested kernel is the last one.
    texts = [
        path.read_text()
        for path in sorted(folder.glob("*-final_bundles.txt"))
        if "analysis" not in path.name
    ]
    programs = [program for program in map(read_program, texts) if program.tiles]
    if not programs:
        raise UserError(f"{case}: the compiler printed no kernel with matrix products")
    return dataclasses.asdict(programs[-1])


def measure(case: Case) -> Program:
    """Compiles a case in a separate process: a compiler reads its flags when loaded."""
    with scratch_folder() as folder:
        flags = (
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=^final_bundles$"
        )
        return Program(
            **in_own_process(
                NAME,
                "--case",
                json.dumps(dataclasses.asdict(case)),
                str(folder),
                environment={"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu"},
            )
        )


def measure_line(generation: str, direction: str, kernel: str) -> list:
    """Returns the line of a kernel in the table."""
    program = measure(Case(generation, direction, kernel))
    tiles = program.tiles if kernel == "ours" else (*program.tiles, None, None)
    return [generation, direction, kernel, *tiles, program.bundles - sum(program.tiles)]


def summarize(lines: list[list]) -> dict[str, dict[str, str]]:
    """Returns the result's rows: ours against splash attention, masked tiles against full ones."""
    table = {tuple(line[:3]): line[3:] for line in lines}
    rows = {}
    for generation, direction in itertools.product(GOALS, PASSES):
        full, one_document, several, _ = table[generation, direction, "ours"]
        splash = table[generation, direction, "splash"][0]
        share = 1.05 if direction == "backward" else 1.0
        goal = f"at most {share * splash:,.0f}, splash attention's" + (
            " plus 5%" if share > 1 else ""
        )
        name = f"{direction}_{generation}"
        rows[name] = row(
            f"TPU kernel, {direction}, unmasked tile, {generation}",
            f"{full:,} bundles",
            goal,
            full <= share * splash,
        )
        masked = {
            "diagonal": ("on the causal diagonal", DIAGONAL_PARTS * one_document),
            "masked": ("masked in all parts, with several documents", PARTS * several),
        }
        for suffix, (label, bundles) in masked.items():
            rows[f"{name}_{suffix}"] = row(
                f"TPU kernel, {direction}, tile {label}, {generation}",
                f"{bundles:,} bundles",
                f"at most 5% more than unmasked: {1.05 * full:,.0f}",
                bundles <= 1.05 * full,
            )
    return rows


def for_cost_model(lines: list[list]) -> dict:
    """Returns the input of `planning.costs.kernel_rates`: the bundles of our full tiles."""
    bundles: dict[str, dict[str, int]] = {}
    for generation, direction, kernel, full, *_ in lines:
        if kernel == "ours":
            bundles.setdefault(generation, {})[direction] = full
    return {
        "made by": f"python -m scripts.benchmarks.{NAME}",
        "tile": TILE,
        "head_dim": HEAD_DIM,
        "bundles": bundles,
    }


def write() -> int:
    """Compiles all kernels and writes the result and the cost model's table. Returns 0."""
    start, lines = time.perf_counter(), []
    for generation, direction, kernel in itertools.product(TOPOLOGIES, PASSES, ("ours", "splash")):
        if kernel == "ours" or generation in GOALS:
            lines.append(measure_line(generation, direction, kernel))
            print(*lines[-1], flush=True)
    write_json(TABLE, for_cost_model(lines))
    tables = {"bundles": {"columns": list(COLUMNS), "rows": lines}}
    seconds = round(time.perf_counter() - start, 1)
    renew(NAME, summarize(lines), tables=tables, seconds=seconds)
    return 0


def check() -> int:
    """Compares our kernels with the stored ones; returns 1 if one has become slower, else 0.

    Compares nothing if the compilers' versions differ, since those may cause the differences.
    """
    result = load(NAME)
    if not same_versions(result, COMPILERS):
        return 0
    stored = {
        tuple(line[:2]): line[3:] for line in result.tables["bundles"]["rows"] if line[2] == "ours"
    }
    slower = False
    for (generation, direction), before in stored.items():
        after = measure_line(generation, direction, "ours")[3:]
        worse = any(new > WORSE * old for new, old in zip(after, before, strict=True))
        slower |= worse
        print(
            f"{generation} {direction}: bundles {before} -> {after}{': SLOWER' if worse else ''}",
            flush=True,
        )
    return int(slower)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    check: bool = option("compare ours with the stored result, and write nothing")
    case: tuple[str, ...] = option(argparse.SUPPRESS, (), nargs=2, metavar=("CASE", "FOLDER"))


def work(args: Options) -> int:
    """Writes or checks the result; as a child process compiles one case."""
    if args.case:
        case, folder = args.case
        print(json.dumps(compile_case(Case(**json.loads(case)), Path(folder))))
        return 0
    return check() if args.check else write()


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
