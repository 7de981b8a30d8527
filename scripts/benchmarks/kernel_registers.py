"""Reads registers, spills, shared memory and instructions of the Mosaic GPU kernels from what the CUDA compiler makes of them.

    python -m scripts.benchmarks.kernel_registers            # compiles all, and writes docs/results/kernel_registers.json
    python -m scripts.benchmarks.kernel_registers --check    # compiles all, and fails where one is worse than stored

Needs no GPU, but JAX's CUDA plugin and its compiler's wheels. The kernels are compiled for a described H100, with carries, and
with K and V stacked, as in a ring's round. ptxas tells registers and the bytes that it spills to local memory; wgmma and TMA
are counted in the text that it gets. Nothing is timed.
"""
from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
import tempfile
import time
from pathlib import Path

from data.errors import UserError
from scripts.benchmarks.commands import in_own_process, make_parser
from scripts.benchmarks.results import load, measured, row, save, versions
from trainer import entry

NAME = "kernel_registers"
TOPOLOGY = "h100:1"
KERNELS = ("forward", "dq", "dkv")
HEAD_DIMS = (64, 128, 256)
COMPILERS = ("jax", "jaxlib", "jax-cuda13-plugin")
TOKENS, HEADS, KV_HEADS = 4096, 4, 2
CORE_REGISTERS, CORE_SHARED, SYSTEM_SHARED = 65536, 228 * 1024, 1024  # of compute capability 9.0; what the system keeps a block
WORSE = 1.03  # a kernel with more registers or shared memory than this times the stored ones fails the check


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the compiler tells of a kernel.

    Attributes:
      registers: of a thread, when the kernel starts; warpgroups then exchange theirs.
      spilled: bytes that a thread stores in local memory for want of registers.
      serialized: whether ptxas makes products wait for each other.
      shared: bytes of shared memory a block.
      wgmma, tma: instructions for products, and for copies of tiles, in the kernel's text.
      blocks: blocks of the kernel that a core can hold.
    """

    registers: int
    spilled: int
    serialized: bool
    shared: int
    wgmma: int
    tma: int
    blocks: int


def read_figures(ptxas: str, ptx: str, passes: str) -> Figures:
    """Reads the figures of a kernel.

    Args:
      ptxas: the compiler's remarks; ptx: the text it got; passes: the beginning of Mosaic's own text.

    Raises:
      UserError: one of them does not say.
    """
    def number(pattern: str, text: str) -> int:
        match = re.search(pattern, text)
        if match is None:
            raise UserError(f"the compiler's text has no {pattern!r}")
        return int(match[1])

    registers, shared = number(r"Used (\d+) registers", ptxas), number(r"dynamic_shared_memory_size %c(\d+)_i32", passes)
    threads = number(r"\.maxntid (\d+)", ptx) if ".maxntid" in ptx else number(r"\.reqntid (\d+)", ptx)
    blocks = min(CORE_REGISTERS // (registers * threads), CORE_SHARED // (shared + SYSTEM_SHARED))
    return Figures(registers, number(r"(\d+) bytes spill stores", ptxas), "serialized" in ptxas, shared,
                   ptx.count("wgmma.mma_async"), ptx.count("cp.async.bulk.tensor"), blocks)


def compile_kernel(mesh, kernel: str, head_dim: int) -> None:
    """Compiles one of the kernels for the mesh's device."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from model.attention import AttentionPartial, Saved
    from model.attention.kernels import mosaic_backward, mosaic_forward
    from model.attention.kernels.intervals import Intervals

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    q, statistics = shape(1, TOKENS, HEADS, head_dim, dtype=jnp.bfloat16), shape(1, HEADS, TOKENS)
    keys = (shape(2, 1, TOKENS, KV_HEADS, head_dim, dtype=jnp.bfloat16),)
    carry, saved = shape(*q.shape), Saved(q, statistics, statistics)
    seen = Intervals(*[shape(1, TOKENS, dtype=jnp.int32)] * 2)
    options = {"scale": head_dim ** -0.5, "interpret": None}
    function, arguments = {
        "forward": (mosaic_forward.forward, (AttentionPartial(carry, statistics), q, keys, seen)),
        "dq": (mosaic_backward.dq_pass, (carry, q, keys, saved, seen)),
        "dkv": (mosaic_backward.dkv_pass, (q, keys, saved, seen)),
    }[kernel]
    jax.jit(lambda *arrays: function(*arrays, **options)).lower(*arguments).compile()


def compile_all(folder: Path) -> dict[str, list]:
    """Compiles all kernels in this process, whose compiler writes into the folder, and returns their Figures by name."""
    import jax
    import numpy as np

    from planning.topology import topology_devices

    mesh = jax.sharding.Mesh(np.array(topology_devices(TOPOLOGY)), "sequence")
    figures = {}
    for kernel, head_dim in itertools.product(KERNELS, HEAD_DIMS):
        compile_kernel(mesh, kernel, head_dim)
        ptxas, ptx, passes = (next(folder.glob(f"*{suffix}"), None) for suffix in (".ptxas", ".ptx", ".mlir-passes.log"))
        if ptxas is None or ptx is None or passes is None:
            raise UserError(f"{kernel}: the compiler wrote no text of the kernel for heads of {head_dim}")
        with passes.open(encoding="utf-8") as text:  # 100 MB, of which the beginning has the launch
            launch = next((line for line in text if "dynamic_shared_memory_size %c" in line), "")
        figures[f"{kernel} {head_dim}"] = list(dataclasses.astuple(read_figures(ptxas.read_text(), ptx.read_text(), launch)))
        for path in (ptxas, ptx, passes):
            path.unlink()
    return figures


def measure() -> dict[str, Figures]:
    """Compiles all kernels in a process of its own, whose compiler is told by its environment to write what it makes."""
    with tempfile.TemporaryDirectory() as folder:
        dumps = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
        compiled = in_own_process(NAME, "--into", folder, environment={**dumps, "JAX_PLATFORMS": "cpu"})
    return {name: Figures(*values) for name, values in compiled.items()}


def summarize(figures: dict[str, Figures]) -> dict[str, dict[str, str]]:
    """Returns the rows of the result: of each kernel its spills, and that its products and copies are wgmma's and TMA's."""
    rows = {}
    for name, figure in figures.items():
        kernel, head_dim = name.split()
        goal = "wgmma, TMA" + ("" if kernel == "dkv" else ", no spill")
        held = figure.wgmma > 0 and figure.tma > 0 and not figure.serialized and (kernel == "dkv" or not figure.spilled)
        said = (f"{figure.spilled} bytes spilled, {figure.wgmma} wgmma{' (serialized)' if figure.serialized else ''}, "
                f"{figure.tma} TMA; {figure.shared / 1024:.0f} KiB a block, {figure.blocks} a core")
        rows[f"{kernel}_{head_dim}"] = row(f"{kernel}, heads of {head_dim}", said, goal, held)
    return rows


def write() -> None:
    """Compiles all kernels and writes the result."""
    start, figures = time.perf_counter(), measure()
    columns = ["kernel", "head size", *(field.name for field in dataclasses.fields(Figures))]
    lines = [[kernel, int(head_dim), *dataclasses.astuple(figures[f"{kernel} {head_dim}"])]
             for kernel, head_dim in map(str.split, figures)]
    for line in lines:
        print(*line)
    save(NAME, measured(
        "The Mosaic kernels for an H100 by the CUDA compiler: bfloat16, with carries", summarize(figures),
        f"python -m scripts.benchmarks.{NAME}",
        ("model/attention/kernels/mosaic_*.py", "model/attention/kernels/intervals.py", f"scripts/benchmarks/{NAME}.py"),
        tables={"figures": {"columns": columns, "rows": lines}}, seconds=round(time.perf_counter() - start, 1),
        note="docs/notes/kernels.md"))


def worse(before: Figures, after: Figures) -> bool:
    """Whether a kernel has become worse: more registers or shared memory, more spills, or products that wait."""
    more = any(new > WORSE * old for new, old in ((after.registers, before.registers), (after.shared, before.shared),
                                                  (after.spilled, before.spilled)))
    fewer = after.blocks < before.blocks or not (after.wgmma and after.tma)
    return more or fewer or after.serialized > before.serialized


def check() -> int:
    """Compiles our kernels and prints them beside the stored ones; returns 1 where one has become worse, else 0.

    Compilers of other versions than the stored result's are not compared: what differs then may be theirs.
    """
    result, installed = load(NAME), versions()
    for package in COMPILERS:
        if installed.get(package) != result.versions.get(package):
            print(f"{package} {installed.get(package)}: not compared; the stored figures are of {result.versions.get(package)}")
            return 0
    stored = {f"{line[0]} {line[1]}": Figures(*line[2:]) for line in result.tables["figures"]["rows"]}
    figures, failed = measure(), False
    for name, before in stored.items():
        is_worse = worse(before, figures[name])
        failed |= is_worse
        print(f"{name}: {before} -> {figures[name]}{': WORSE' if is_worse else ''}", flush=True)
    return int(failed)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser(NAME, __doc__)
    parser.add_argument("--check", action="store_true", help="compare with the stored result, and write nothing")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.into:
        print(json.dumps(compile_all(args.into)))
        return 0
    return check() if args.check else entry.run(write)


if __name__ == "__main__":
    sys.exit(main())
