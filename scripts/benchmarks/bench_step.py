"""Compares a training step with transformers + torch: speed, memory, share of the matmul rate.

    python -m scripts.benchmarks.bench_step [--lengths 2048 4096] [--steps 3]  # on a CPU
    python -m scripts.benchmarks.bench_step --model llama-3.2-1b --dtype bfloat16 --torch-liger \\
        --lengths 8192 32768 --documents 16                                     # on a GPU
    python -m scripts.benchmarks.bench_step --side ours --model llama-3.1-8b --layers 4 \\
        --dtype bfloat16 --remat save_attention --lengths 32768 1048576   # on a GPU or TPU: MFU

One step (forward, backward, clipping, AdamW) on one row of one document, or of --documents;
SmolLM2-135M in float32 by default. The sides take turns in separate processes, and the fastest step
counts. torch runs as users run it: SDPA, and on a CPU gradient checkpointing from 4096 tokens on,
without which it needs more memory. On a GPU both sides have float32 weights and moments and
products in bfloat16 (--dtype, torch's autocast).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time

import numpy as np

from data.paths import output_files
from scripts.benchmarks.commands import add_output_folder, in_own_process, make_parser, write_json
from scripts.benchmarks.kernel_case import measure_products
from scripts.benchmarks.torch_step import TorchOptions, add_flags, torch_step
from trainer import entry

CHECKPOINT_FROM = 4096  # tokens from which torch recomputes its layers
# What a side's process is given: options with a value, and those without.
OPTIONS = (
    "steps",
    "model",
    "layers",
    "dtype",
    "remat",
    "kernel",
    "chunk",
    "loss_chunk",
    "documents",
    "torch_attention",
    "torch_weights",
)
SWITCHES = ("moments_on_host", "torch_recompute", "torch_liger", "torch_compile")


def matmul_rate(multiply) -> float:
    """Returns the FLOP/s of `multiply()`, a 2048^3 product, in the fastest of ten runs."""
    times = []
    for _ in range(10):
        start = time.perf_counter()
        multiply()
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(times)


def document_lengths(length: int, count: int) -> list[int]:
    """Returns the unequal lengths of `count` documents that fill `length` tokens."""
    if count == 1:
        return [length]
    shares = np.random.default_rng(1).uniform(0.25, 1.75, count)
    ends = np.round(np.cumsum(shares) / shares.sum() * length).astype(int)
    return np.diff([0, *ends]).tolist()


def preset(args):
    """Returns the configuration of the measured model, with --layers layers if that is given."""
    from model.config import TransformerConfig

    config = TransformerConfig.preset(args.model)
    return dataclasses.replace(config, num_hidden_layers=args.layers) if args.layers else config


def make_builder(length: int, args):
    """Returns the StepBuilder of the measured step, on the first device."""
    import jax
    import jax.numpy as jnp

    from model.attention import get_kernel
    from model.language_model import LanguageModel
    from model.memory.options import MemoryConfig
    from trainer.config.schema import MeshConfig
    from trainer.mesh import make_mesh
    from trainer.step import StepBuilder
    from trainer.text import text_batch

    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    chunks = (
        {"feed_forward_chunk": args.chunk, "projection_chunk": args.chunk} if args.chunk else {}
    )
    memory = MemoryConfig(
        args.remat, moments_on_host=args.moments_on_host, loss_chunk=args.loss_chunk, **chunks
    )
    model = LanguageModel(
        preset(args),
        mesh,
        kernel=get_kernel(args.kernel),
        dtype=jnp.dtype(args.dtype),
        memory=memory,
    )
    return StepBuilder(model, model.loss, text_batch(1, length, mesh), memory_config=memory)


def ours(length: int, args) -> dict:
    """Returns our step's seconds, loss, plan and device facts."""
    import jax

    from planning.compiled import memory as planned_memory
    from trainer.devices import peak_flops
    from trainer.reporting.metrics import peak_device_gib

    builder = make_builder(length, args)
    start = time.perf_counter()
    step = builder.lower_train().compile()
    compile_seconds, plan = time.perf_counter() - start, planned_memory(step)
    tokens = np.random.default_rng(0).integers(
        0, builder.model.config.vocab_size, (1, length + 1), np.int32
    )
    index = np.arange(length, dtype=np.int32)[None]
    lengths = document_lengths(length, args.documents)
    positions = np.concatenate([np.arange(document, dtype=np.int32) for document in lengths])[None]
    segments = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[None]
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "index": index,
        "positions": positions,
        "segment_ids": segments,
        "loss_weights": np.ones(index.shape, np.float32),
    }
    batch = {
        name: jax.device_put(x, builder.abstract_batch[name].sharding) for name, x in batch.items()
    }
    params = builder.model.init(0)
    moments = builder.init_optimizer(params)
    seconds = []
    for number in range(args.steps + 1):
        start = time.perf_counter()
        params, moments, metrics = step(params, {}, moments, batch, number)
        loss = float(metrics.loss)
        seconds.append(time.perf_counter() - start)
    device = jax.devices()[0]
    result = {
        "seconds": seconds,
        "loss": loss,
        "device": device.device_kind,
        "peak_flops": peak_flops(device.device_kind),
        "device_gib": peak_device_gib([device]),
        "planned_gib": plan["peak"],
        "planned_host_gib": plan["host"],
        "compile_seconds": compile_seconds,
    }
    del params, moments
    return {**result, "matmul": jax_matmul_rate(args.dtype)}


def jax_matmul_rate(dtype: str) -> float:
    """Returns the FLOP/s of matrix products, on a CPU as `matmul_rate` has it."""
    import jax
    import jax.numpy as jnp

    # A single small product would measure the host's launch time.
    if jax.default_backend() != "cpu":
        return measure_products(dtype)["matmul_flops"]
    a, multiply = jnp.ones((2048, 2048), dtype), jax.jit(jnp.matmul)
    return matmul_rate(lambda: multiply(a, a).block_until_ready())


def theirs(length: int, args) -> dict:
    """Returns the seconds, loss and device facts of a transformers step under torch."""
    import torch

    options = TorchOptions.of(args)
    on_cpu = not torch.cuda.is_available()
    if on_cpu and length >= CHECKPOINT_FROM:
        options = dataclasses.replace(options, recompute=True)
    result = torch_step(preset(args), document_lengths(length, args.documents), args.steps, options)
    a = torch.ones(2048, 2048)
    return result | ({"matmul": matmul_rate(lambda: a @ a)} if on_cpu else {})


def measure(side: str, length: int, args) -> dict:
    """Runs one side in a separate process, for its peak memory."""
    options = [
        word
        for name in OPTIONS
        for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))
    ]
    switches = [f"--{name.replace('_', '-')}" for name in SWITCHES if getattr(args, name)]
    return in_own_process(
        "bench_step", "--one", side, "--lengths", str(length), *options, *switches
    )


def compare(length: int, args) -> list[dict]:
    """Returns a row for each side: its fastest step and its largest peak memory."""
    from trainer.flops import flops_per_step

    pairs = sum(tokens * (tokens + 1) // 2 for tokens in document_lengths(length, args.documents))
    flops = flops_per_step(preset(args), length, pairs)
    turns = [(side, measure(side, length, args)) for side in args.side * args.turns]
    matmul = max(result.get("matmul", 0.0) for _, result in turns)
    rows = []
    for side in args.side:
        results = [result for name, result in turns if name == side]
        # The first step is a warm-up, unless it is the only one.
        seconds = min(min(result["seconds"][1:] or result["seconds"]) for result in results)
        peak = results[0].get("peak_flops")
        rows.append(
            {
                "side": side,
                "length": length,
                "tokens_per_second": length / seconds,
                "step_seconds": seconds,
                "peak_gib": max(result["peak_gib"] for result in results),
                "device_gib": results[0].get("device_gib"),
                "matmul_gflops": max(result.get("matmul", 0.0) for result in results) / 1e9,
                "share_of_matmul": flops / seconds / matmul if matmul else None,
                "mfu": flops / seconds / peak if peak else None,
                "device": results[0].get("device", "cpu"),
                "loss": results[0]["loss"],
                "model": args.model,
                "documents": args.documents,
                **_settings(side, args),
                **{
                    name: results[0].get(name)
                    for name in ("planned_gib", "planned_host_gib", "compile_seconds", "versions")
                },
            }
        )
    return rows


def _settings(side: str, args) -> dict:
    """Returns a side's settings for its row."""
    if side == "ours":
        return {"layers": args.layers, "remat": args.remat, "kernel": args.kernel}
    return {"layers": args.layers, **dataclasses.asdict(TorchOptions.of(args))}


def report(args) -> None:
    """Measures, prints the table, and writes OUTPUT/step.json."""
    output_files(args.output, {"step.json": b'"matmul_gflops"'})
    rows = [row for length in args.lengths for row in compare(length, args)]
    print(
        f"{'side':8} {'tokens':>7} {'tokens/s':>9} {'s/step':>8} {'peak GiB':>9} {'planned':>8} "
        f"{'matmul GFLOP/s':>15} {'share':>7} {'MFU':>6}"
    )
    for row in rows:
        peak = row["device_gib"] or row["peak_gib"]
        planned = f"{row['planned_gib']:.2f}" if row["device_gib"] and row["planned_gib"] else "-"
        print(
            f"{row['side']:8} {row['length']:7} {row['tokens_per_second']:9.1f} "
            f"{row['step_seconds']:8.2f} {peak:9.2f} {planned:>8} {row['matmul_gflops']:15.1f} "
            f"{_percent(row['share_of_matmul']):>7} {_percent(row['mfu']):>6}"
        )
    speeds = {(row["side"], row["length"]): row["tokens_per_second"] for row in rows}
    for length in args.lengths:
        if {("ours", length), ("theirs", length)} <= speeds.keys():
            print(
                f"{length} tokens: {speeds['ours', length] / speeds['theirs', length]:.3f}x torch"
            )
    write_json(args.output / "step.json", rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = make_parser("bench_step", __doc__)
    parser.add_argument(
        "--lengths",
        type=entry.tokens,
        nargs="+",
        default=[2048, 4096],
        help="tokens in the row (default 2048 4096)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        help="timed steps per turn, after an untimed one; 0 times that one (default 3)",
    )
    parser.add_argument(
        "--turns", type=int, default=2, help="processes of each side, in turns (default 2)"
    )
    parser.add_argument(
        "--side",
        nargs="+",
        choices=["theirs", "ours"],
        default=["theirs", "ours"],
        help="default both",
    )
    parser.add_argument("--model", default="smollm2-135m", help="a preset (default smollm2-135m)")
    parser.add_argument(
        "--layers", type=int, default=0, help="number of layers; 0 for all (default)"
    )
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="our compute precision"
    )
    parser.add_argument("--remat", default="everything", help="our policy (default everything)")
    parser.add_argument("--kernel", default="auto", help="our attention kernel (default auto)")
    parser.add_argument(
        "--chunk",
        type=entry.tokens_or_0,
        default=0,
        help="our tokens of a chunk of projections (default: the trainer's)",
    )
    parser.add_argument(
        "--loss-chunk",
        "--loss_chunk",
        type=entry.tokens_or_0,
        default=1024,
        help="of the loss (default 1024)",
    )
    parser.add_argument(
        "--moments-on-host",
        "--moments_on_host",
        action="store_true",
        help="keep AdamW's moments on the host",
    )
    parser.add_argument(
        "--documents", type=entry.at_least_one, default=1, help="documents in the row (default 1)"
    )
    add_flags(parser)
    add_output_folder(parser, "runs/bench")
    parser.add_argument("--one", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        result = (ours if args.one == "ours" else theirs)(args.lengths[0], args)
        result["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps(result))
        return 0
    return entry.run(lambda: report(args))


if __name__ == "__main__":
    sys.exit(main())
