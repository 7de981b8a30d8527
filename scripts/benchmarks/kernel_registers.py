"""Reads the GPU kernels' registers, spills, shared memory and instructions from the CUDA compiler.

    python -m scripts.benchmarks.kernel_registers            # writes the result
    python -m scripts.benchmarks.kernel_registers --check    # fails if one is worse
    python -m scripts.benchmarks.kernel_registers --backend mosaic   # prints these

Needs no GPU, only JAX's CUDA plugin and its compiler's wheels. The kernels are compiled for
described GPUs: Mosaic's with carries and stacked K and V, as in a ring round, Triton's as called by
a model. ptxas reports registers and bytes spilled to local memory; products and copies are counted
in its input. Nothing is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from data.errors import UserError
from data.folders import scratch_folder
from data.outputs import new_folder
from scripts.benchmarks.commands import in_own_process
from scripts.benchmarks.results import load, renew, row, same_versions
from trainer.options import command, option

NAME = "kernel_registers"
PTXAS_PACKAGE = "nvidia-cuda-nvcc"
# Mosaic's kernels need Hopper's matrix units.
COMPILED = (("mosaic", "h100"), ("triton", "h100"), ("triton", "b200"))
PRODUCTS = {"h100": "wgmma", "b200": "tcgen05"}
COPIES = {"mosaic": "TMA", "triton": "cp.async"}
KERNELS = ("forward", "dq", "dkv")
HEAD_DIMS = (64, 128, 256)
COMPILERS = ("jax", "jaxlib", "jax-cuda13-plugin", PTXAS_PACKAGE)
TOKENS, HEADS, KV_HEADS = 4096, 4, 2
# Of a core, compute capability 9.0 and 10.0; the system keeps SYSTEM_SHARED bytes per block.
CORE_REGISTERS, CORE_SHARED, SYSTEM_SHARED = 65536, 228 * 1024, 1024
WORSE = 1.03  # more registers or shared memory than this multiple of the stored ones fail the check


@dataclasses.dataclass(frozen=True)
class Case:
    """A Pallas kernel to compile, on the backend mosaic or triton, for a `chip`."""

    backend: str
    chip: str
    kernel: str
    head_dim: int


CASES = [
    Case(*compiled, kernel, head_dim)
    for compiled, kernel, head_dim in itertools.product(COMPILED, KERNELS, HEAD_DIMS)
]
# One kernel in place of dq and dkv, for `attention.backward: any_order`.
CASES += [Case("mosaic", "h100", "backward", head_dim) for head_dim in (64, 128)]
# The forward kernel where there is one round: without a carry, and with results in 16 bits.
CASES += [Case("mosaic", "h100", "rounded_forward", head_dim) for head_dim in HEAD_DIMS]
MAY_SPILL = ("dkv", "backward")


@dataclasses.dataclass(frozen=True)
class Figures:
    """The compiler's figures of a kernel.

    Attributes:
      registers: per thread at the kernel's start; Mosaic's warpgroups then exchange theirs.
      spilled: bytes per thread spilled to local memory.
      serialized: whether ptxas serializes the matrix products.
      shared: bytes of shared memory per block.
      products, copies: numbers of instructions in the kernel's text: tile products on matrix units
        (wgmma, tcgen05), and asynchronous tile copies (TMA's, or cp.async).
      blocks: blocks of the kernel per core.
    """

    registers: int
    spilled: int
    serialized: bool
    shared: int
    products: int
    copies: int
    blocks: int


def read_figures(ptxas: str, ptx: str, launch: str) -> Figures:
    """Reads the figures of a kernel.

    Args:
      ptxas: the compiler's remarks; ptx: its input; launch: the kernel's launch as written by
        Mosaic or XLA.

    Raises:
      UserError: one of them lacks a figure.
    """

    def number(pattern: str, text: str) -> int:
        match = re.search(pattern, text)
        if match is None:
            raise UserError(f"the compiler's text has no {pattern!r}")
        return int(match[1])

    registers = number(r"Used (\d+) registers", ptxas)
    shared = number(r"(?:dynamic_shared_memory_size %c|shared_memory: )(\d+)", launch)
    threads = (
        number(r"\.maxntid (\d+)", ptx) if ".maxntid" in ptx else number(r"\.reqntid (\d+)", ptx)
    )
    blocks = min(CORE_REGISTERS // (registers * threads), CORE_SHARED // (shared + SYSTEM_SHARED))
    return Figures(
        registers,
        number(r"(\d+) bytes spill stores", ptxas),
        "serialized" in ptxas,
        shared,
        len(re.findall(r"wgmma\.mma_async|tcgen05\.mma", ptx)),
        len(re.findall(r"cp\.async\.(?:bulk\.tensor|c[ag]\.)", ptx)),
        blocks,
    )


def compile_mosaic(mesh, case: Case) -> None:
    """Compiles one of Mosaic's kernels for the mesh's device."""
    import jax
    import jax.numpy as jnp

    from model.attention import AttentionPartial
    from model.attention.blocks import BackwardInputs
    from model.attention.kernels import mosaic_backward, mosaic_forward, mosaic_one_pass
    from model.attention.kernels.intervals import Intervals

    q = _shape(mesh, 1, TOKENS, HEADS, case.head_dim, dtype=jnp.bfloat16)
    statistics = _shape(mesh, 1, HEADS, TOKENS)
    keys = (_shape(mesh, 2, 1, TOKENS, KV_HEADS, case.head_dim, dtype=jnp.bfloat16),)
    carry, saved = _shape(mesh, *q.shape), BackwardInputs(q, statistics, statistics)
    seen = Intervals(*[_shape(mesh, 1, TOKENS, dtype=jnp.int32)] * 2)
    options = {"scale": case.head_dim**-0.5, "interpret": None}
    forward, partial = mosaic_forward.forward, AttentionPartial(carry, statistics)
    kernels: dict[str, tuple[Callable, tuple]] = {
        "forward": (functools.partial(forward, rounded=False), (partial, q, keys, seen)),
        "rounded_forward": (functools.partial(forward, None, rounded=True), (q, keys, seen)),
        "dq": (mosaic_backward.dq_pass, (carry, q, keys, saved, seen)),
        "dkv": (mosaic_backward.dkv_pass, (q, keys, saved, seen)),
        "backward": (mosaic_one_pass.gradients, (carry, q, keys, saved, seen)),
    }
    function, arguments = kernels[case.kernel]
    jax.jit(lambda *arrays: function(*arrays, **options)).lower(*arguments).compile()


def compile_triton(mesh, case: Case) -> None:
    """Compiles a Triton kernel for the mesh's device, with only one pass's outputs."""
    import jax
    import jax.numpy as jnp

    from model.attention import Keys, Mask, Queries, TokenCoords, get_kernel
    from model.attention.blocks import BackwardInputs

    kernel, options = get_kernel("gpu"), {"mask": Mask(), "scale": case.head_dim**-0.5}
    q = _shape(mesh, 1, TOKENS, HEADS, case.head_dim, dtype=jnp.bfloat16)
    statistics = _shape(mesh, 1, HEADS, TOKENS)
    k = _shape(mesh, 1, TOKENS, KV_HEADS, case.head_dim, dtype=jnp.bfloat16)
    coords = TokenCoords(*[_shape(mesh, 1, TOKENS, dtype=jnp.int32)] * 2)
    blocks = Queries(q, coords), Keys(k, k, coords)
    if case.kernel == "forward":
        jax.jit(lambda *blocks: kernel.rounded_forward(*blocks, **options)).lower(*blocks).compile()
        return
    part = slice(0, 1) if case.kernel == "dq" else slice(1, 3)
    saved = BackwardInputs(q, statistics, statistics)
    jax.jit(lambda *blocks: kernel.backward(*blocks, **options)[part]).lower(
        *blocks, saved
    ).compile()


def _shape(mesh, *dims: int, dtype="float32"):
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def read_mosaic(folder: Path) -> Figures:
    """Reads the figures of the kernel in Mosaic's dump.

    Raises:
      UserError: Mosaic wrote no such dump.
    """
    texts = [
        next(folder.glob(f"*{suffix}"), None) for suffix in (".ptxas", ".ptx", ".mlir-passes.log")
    ]
    ptxas, ptx, passes = texts
    if ptxas is None or ptx is None or passes is None:
        raise UserError("Mosaic wrote no text of the kernel")
    with passes.open(encoding="utf-8") as text:  # 100 MB, with the launch at the beginning
        launch = next((line for line in text if "dynamic_shared_memory_size %c" in line), "")
    return read_figures(ptxas.read_text(), ptx.read_text(), launch)


def read_triton(folder: Path, kernel: str) -> Figures:
    """Reads a kernel's figures from XLA's dump; reruns ptxas, since XLA does not dump its remarks.

    Raises:
      UserError: it wrote no such kernel, or ptxas refuses it.
    """
    name = f"attention_{kernel}"
    path = next(
        (path for path in folder.glob("*.ptx") if f".entry {name}(" in path.read_text()), None
    )
    launches = "".join(path.read_text() for path in folder.glob("*.thunk_sequence.txt"))
    launch = next((line for line in launches.splitlines() if f" {name} " in line), "")
    if path is None:
        raise UserError(
            f"XLA wrote no text of the kernel {name}; JAX 0.10's does, 0.11's and 0.12's do not"
        )
    ptx = path.read_text()
    architecture = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    ptxas = next(
        file.locate()
        for file in importlib.metadata.files(PTXAS_PACKAGE) or ()
        if file.name == "ptxas"
    )
    command = [
        ptxas,
        "-v",
        f"-arch={architecture[1] if architecture else ''}",
        path,
        "-o",
        folder / "kernel.cubin",
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"ptxas refuses {name}: {done.stderr.strip().splitlines()[-1]}")
    return read_figures(done.stderr, ptx, launch)


def compile_all(folder: Path, backend: str | None) -> list[list]:
    """Compiles kernels in this process, with dumps into `folder`, and returns their Figures."""
    import jax
    import numpy as np

    from planning.topology import topology_devices

    figures, xla = [], folder / "xla"
    for case in cases(backend):
        mesh = jax.sharding.Mesh(np.array(topology_devices(f"{case.chip}:1")), "sequence")
        with jax.set_mesh(mesh):  # tells the kernel its device, as the trainer's mesh does
            (compile_mosaic if case.backend == "mosaic" else compile_triton)(mesh, case)
        read = read_mosaic(folder) if case.backend == "mosaic" else read_triton(xla, case.kernel)
        figures.append([*dataclasses.astuple(read)])
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return figures


def cases(backend: str | None) -> list[Case]:
    """Returns the cases of a backend, or all of them."""
    return [case for case in CASES if backend in (None, case.backend)]


def measure(backend: str | None = None) -> dict[Case, Figures]:
    """Compiles kernels in a new process, with the compilers' dumps enabled."""
    with scratch_folder() as folder:
        dumps = {
            "MOSAIC_GPU_DUMP_TO": str(folder),
            "MOSAIC_GPU_DUMP_PTX": "1",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "XLA_FLAGS": f"--xla_dump_to={folder}/xla --xla_dump_hlo_as_text=false",
            "JAX_PLATFORMS": "cpu",
        }
        chosen = ("--backend", backend) if backend else ()
        compiled = in_own_process(NAME, "--into", str(folder), *chosen, environment=dumps)
    return {case: Figures(*values) for case, values in zip(cases(backend), compiled, strict=True)}


def summarize(figures: dict[Case, Figures]) -> dict[str, dict[str, str]]:
    """Returns the result's rows: each kernel's spills, and whether it uses the matrix units."""
    rows = {}
    for case, figure in figures.items():
        product, copy = PRODUCTS[case.chip], COPIES[case.backend]
        may_spill = case.kernel in MAY_SPILL
        needed = [
            product,
            *(["TMA"] if case.backend == "mosaic" else []),
            *([] if may_spill else ["no spill"]),
        ]
        held = bool(
            figure.products
            and figure.copies
            and not figure.serialized
            and (may_spill or not figure.spilled)
        )
        text = (
            f"{figure.spilled} bytes spilled, {figure.products} "
            f"{product}{' (serialized)' if figure.serialized else ''}, "
            f"{figure.copies} {copy}; {figure.shared / 1024:.0f} KiB shared, "
            f"{figure.blocks} per core"
        )
        rows["_".join(map(str, dataclasses.astuple(case)))] = row(
            f"{case.backend.capitalize()} kernel {case.kernel} on {case.chip.upper()}, head size "
            f"{case.head_dim}",
            text,
            ", ".join(needed),
            held,
        )
    return rows


def write() -> int:
    """Compiles all kernels and writes the result. Returns 0."""
    start, figures = time.perf_counter(), measure()
    columns = [field.name for kind in (Case, Figures) for field in dataclasses.fields(kind)]
    lines = [
        [*dataclasses.astuple(case), *dataclasses.astuple(figure)]
        for case, figure in figures.items()
    ]
    for line in lines:
        print(*line)
    tables = {"figures": {"columns": columns, "rows": lines}}
    seconds = round(time.perf_counter() - start, 1)
    renew(NAME, summarize(figures), tables=tables, seconds=seconds)
    return 0


def worse(before: Figures, after: Figures) -> bool:
    """Whether a kernel got worse in registers, shared memory, spills or serialized products."""
    more = any(
        new > WORSE * old
        for new, old in (
            (after.registers, before.registers),
            (after.shared, before.shared),
            (after.spilled, before.spilled),
        )
    )
    lost = any(
        old and not new
        for new, old in ((after.products, before.products), (after.copies, before.copies))
    )
    return more or lost or after.blocks < before.blocks or after.serialized > before.serialized


def check() -> int:
    """Compares our kernels with the stored ones; returns 1 if one has become worse, else 0.

    Compares nothing if the compilers' versions differ, since those may cause the differences.
    """
    result = load(NAME)
    if not same_versions(result, COMPILERS):
        return 0
    figures, failed = measure(), False
    width = len(dataclasses.fields(Case))
    for line in result.tables["figures"]["rows"]:
        before, after = Figures(*line[width:]), figures[Case(*line[:width])]
        is_worse = worse(before, after)
        failed |= is_worse
        print(
            f"{' '.join(map(str, line[:width]))}: {before} -> "
            f"{after}{': WORSE' if is_worse else ''}",
            flush=True,
        )
    return int(failed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    check: bool = option("compare with the stored result, and write nothing")
    backend: str | None = option(
        "compile and print only these kernels, and write nothing", None, choices=COPIES
    )
    into: Path | None = option(argparse.SUPPRESS, None, metavar="FOLDER")


def work(args: Options) -> int:
    """Writes or checks the result; as a child process compiles kernels."""
    if args.into:
        new_folder(args.into)  # emptied after each kernel
        print(json.dumps(compile_all(args.into, args.backend)))
    elif args.backend:
        print(*measure(args.backend).items(), sep="\n")
    else:
        return check() if args.check else write()
    return 0


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
