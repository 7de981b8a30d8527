"""Prints where a training step's time goes: by part, next to the least time each part can take.

    python -m scripts.profile_step --model llama-3.2-1b --dtype bfloat16 --length 32768   # on a GPU
    python -m scripts.profile_step --length 2048 --steps 2            # on a CPU: SmolLM2 135M
    python -m scripts.profile_step --trace RUN/profile       # a trace of a run (profile_steps)

Compiles bench_step's step, traces some steps with jax.profiler, reads the trace, and measures this
device's rates of matrix products and memory. A part's floor is the least time it can take: for
products and attention, their FLOPs (including recomputation) over the rate of products; for the
optimizer, the bytes of its state read and written and of the gradient read twice, over the rate of
memory; for other parts, the bytes that their compiled instructions read and write, over the same
rate. Writes OUTPUT/profile.json, the trace, and the compiled text; with --picture also
OUTPUT/profile.png. On a CPU with libtpu installed set JAX_PLATFORMS=cpu.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.outputs import PICTURE, PICTURE_METADATA, output_files, write_text
from data.printable import printable
from scripts.benchmarks.bench_step import (
    StepOptions,
    document_lengths,
    jax_matmul_rate,
    make_batch,
    make_builder,
    preset,
)
from scripts.benchmarks.step_parts import (
    ATTENTION,
    OPTIMIZER,
    PARTS,
    PRODUCTS,
    CompiledParts,
    is_communication,
)
from scripts.benchmarks.step_trace import DeviceTrace, read_trace
from trainer import entry
from trainer.options import AtLeastOne, Tokens, command, option

TRACE, TEXT, RESULT, PICTURE_NAME = "trace", "compiled.txt", "profile.json", "profile.png"
MARK = b'"floor_ms"'
LISTED = 3  # kernels listed per part


def trace_steps(args: Options) -> dict[str, Any]:
    """Traces the step; returns the inputs of the floors: rates, and FLOPs or bytes by part."""
    import jax

    builder = make_builder(args.length, args)
    step = builder.lower_train().compile()
    text = step.as_text() or ""
    (args.output / TEXT).write_text(text, encoding="utf-8")
    batch = make_batch(builder, args.length, args.documents)
    params = builder.model.init(0)
    moments = builder.init_optimizer(params)
    options = jax.profiler.ProfileOptions()
    # Python tracing slows the host, and the device's waiting would count as idle.
    options.python_tracer_level = 0
    for number in range(args.steps + 1):
        if number == 1:  # the first step warms up
            jax.profiler.start_trace(str(args.output / TRACE), profiler_options=options)
        params, moments, metrics = step(params, {}, moments, batch, number)
    float(metrics.loss)
    jax.block_until_ready(params)
    jax.profiler.stop_trace()
    state, weights = (
        sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in ((params, moments), params)
    )
    del params, moments
    # The gradient is read twice: for its norm and for the update.
    work = {**step_flops(args), OPTIMIZER: 2.0 * state + 2.0 * weights}
    return {
        "rates": {"flops": jax_matmul_rate(args.dtype), "bytes": memory_rate()},
        "work": {**CompiledParts(text).bytes_moved(), **work},
    }


def step_flops(args: Options) -> dict[str, float]:
    """Returns the FLOPs of a step's matrix products and of its attention, including the remat
    policy's recomputation; attention's backward pass counts as five products."""
    from planning.costs.step import REMAT
    from trainer.flops import all_layers, head_weights, layer_weights

    config = preset(args.model, args.layers)
    pairs = sum(n * (n + 1) // 2 for n in document_lengths(args.length, args.documents))
    work, forwards = REMAT[args.remat]
    weights = work * all_layers(config, layer_weights) + 3 * head_weights(config)
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return {
        PRODUCTS: 2.0 * args.length * weights,
        ATTENTION: (4 * forwards + 10) * float(width) * pairs,
    }


def memory_rate() -> float:
    """Returns the bytes per second that an addition of large arrays reads and writes."""
    import jax
    import jax.numpy as jnp

    numbers = (1 if jax.default_backend() == "cpu" else 8) << 25
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = add(jnp.zeros(numbers, jnp.float32)).block_until_ready()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        x = add(x)
        x.block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 8.0 * numbers / min(seconds)


def part_rows(
    devices: Mapping[str, DeviceTrace],
    steps: int,
    parts: CompiledParts,
    measured: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Returns a row per part: milliseconds per step (mean over devices), share and floor."""
    share = 1e-6 / steps / len(devices)
    by_part: dict[str, dict[str, float]] = {part: {} for part in PARTS}
    for device in devices.values():
        for kernel, nanoseconds in device.nanoseconds.items():
            kernels = by_part[parts.part(kernel)]
            kernels[kernel] = kernels.get(kernel, 0.0) + nanoseconds * share
    idle = share * sum(device.idle for device in devices.values())
    span = share * sum(device.span for device in devices.values())
    rows: list[dict[str, Any]] = []
    for part, kernels in by_part.items():
        ms, floor = sum(kernels.values()), None
        if measured:
            rate = measured["rates"]["flops" if part in (PRODUCTS, ATTENTION) else "bytes"]
            floor = 1e3 * measured["work"].get(part, 0.0) / rate
        rows.append(
            {
                "part": part,
                "ms": ms,
                "share": ms / span,
                "floor_ms": floor if floor or not ms else None,
                "kernels": sorted(kernels.items(), key=lambda item: -item[1])[:LISTED],
            }
        )
    rows.append({"part": "idle", "ms": idle, "share": idle / span, "floor_ms": 0.0, "kernels": []})
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of the table; the last line has the sums."""
    lines = [f"{'part':20} {'ms':>10} {'share':>7} {'floor ms':>10}  longest kernels"]
    for row in rows:
        names = ", ".join(f"{printable(name)[:40]} {took:.1f}" for name, took in row["kernels"])
        lines.append(_line(row["part"], row["ms"], row["share"], row["floor_ms"], names))
    floors = [row["floor_ms"] for row in rows]
    whole = sum(floors) if None not in floors else None
    lines.append(_line("step", sum(row["ms"] for row in rows), 1.0, whole, ""))
    return lines


def _line(part: str, ms: float, share: float, floor: float | None, rest: str) -> str:
    least = "-" if floor is None else f"{floor:.1f}"
    return f"{part:20} {ms:10.1f} {share:7.1%} {least:>10}  {rest}".rstrip()


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draws each part's time as a bar, and its floor as the filled start of the bar."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    names = [row["part"] for row in rows]
    axes.barh(names, [row["ms"] for row in rows], color="#c9d6e8", label="measured")
    floors = [min(row["floor_ms"] or 0.0, row["ms"]) for row in rows]
    axes.barh(names, floors, color="#2f5d94", label="floor, by the device's rates")
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds per step", title=title)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150, metadata=PICTURE_METADATA)


def work(args: Options) -> None:
    """Runs the command."""
    if args.trace is not None:
        report_trace(args, args.trace)
        return
    output_files(args.output, {RESULT: MARK, PICTURE_NAME: PICTURE})
    measured = trace_steps(args)
    devices = read_trace(args.output / TRACE, is_communication)
    text = (args.output / TEXT).read_text(encoding="utf-8")
    rows = part_rows(devices, args.steps, CompiledParts(text), measured)
    rates = measured["rates"]
    print(
        f"{args.model}, {args.length} tokens, {args.dtype}, {args.remat}: {args.steps} steps; "
        f"products {rates['flops'] / 1e12:.2f} TFLOP/s, memory {rates['bytes'] / 1e9:.1f} GB/s"
    )
    print(*table(rows), sep="\n")
    names = (
        "model",
        "layers",
        "length",
        "documents",
        "dtype",
        "remat",
        "kernel",
        "backward",
        "steps",
    )
    result = {
        "settings": {name: getattr(args, name) for name in names},
        "devices": list(devices),
        "rates": rates,
        "parts": rows,
    }
    write_text(args.output / RESULT, json.dumps(result, indent=2) + "\n")
    if args.picture:
        worst = max(rows, key=lambda row: row["ms"] - (row["floor_ms"] or 0.0))
        title = f"{args.model}, {args.length} tokens: {worst['part']} has the most to gain"
        draw(rows, title, args.output / PICTURE_NAME)


def report_trace(args: Options, trace: Path) -> None:
    """Prints the table of an existing trace, using a compiled text next to it if there is one."""
    if not trace.is_dir():
        raise UserError(f"--trace: found no folder {trace}; pass a run's folder RUN/profile")
    texts = [folder / TEXT for folder in (trace, trace.parent)]
    text = next((path.read_text(encoding="utf-8") for path in texts if path.is_file()), "")
    devices = read_trace(trace, is_communication)
    print(*table(part_rows(devices, args.steps, CompiledParts(text))), sep="\n")
    if not text:
        print(f"no {TEXT} next to the trace: the optimizer's kernels count as elementwise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(StepOptions):
    """The command's options."""

    length: Tokens = option("tokens in the row", 2048)
    steps: AtLeastOne = option(
        "traced steps, after an untraced one; with --trace, the number of steps in the trace", 3
    )
    trace: Path | None = option("read the trace in this folder instead of running a step", None)
    picture: bool = option("also draw the table")
    output: Path = option("folder for results", Path("runs/profile_step"))


main = command(Options, work)


if __name__ == "__main__":
    entry.leave(main())
