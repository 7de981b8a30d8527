"""Compares a training step with transformers + torch: speed, memory, share of the matmul rate.

    python -m scripts.benchmarks.bench_step [--lengths 2048 4096] [--steps 3]  # on a CPU
    python -m scripts.benchmarks.bench_step --model llama-3.2-1b --dtype bfloat16 --torch-liger \\
        --lengths 8192 32768 --documents 16                                     # on a GPU
    python -m scripts.benchmarks.bench_step --side ours --model llama-3.1-8b --layers 4 \\
        --dtype bfloat16 --remat save_attention --lengths 32768 1048576   # on a GPU or TPU: MFU

One step (forward, backward, clipping, AdamW) on one row with one document, or with --documents;
SmolLM2-135M in float32 by default. The sides alternate in separate processes, and the fastest step
counts. torch runs as users run it: with SDPA, and on a CPU with gradient checkpointing from 4096
tokens on, without which it needs more memory. On a GPU both sides have float32 weights and moments
and products in bfloat16 (--dtype, torch's autocast).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from data.outputs import output_files
from model.attention.choice import BACKWARDS
from scripts.benchmarks.bench_kernels.case import best_of, measure_products
from scripts.benchmarks.commands import in_own_process, write_json
from scripts.benchmarks.torch_step import TorchOptions, torch_step
from trainer.options import AtLeastOne, Tokens, TokensOr0, command, option

CHECKPOINT_FROM = 4096  # tokens from which on torch recomputes its layers


def matmul_rate(multiply) -> float:
    """Returns the FLOP/s of `multiply()`, a 2048^3 product, in the fastest of ten runs."""
    seconds, _ = best_of(multiply, 10)
    return 2 * 2048**3 / seconds


def document_lengths(length: int, count: int) -> list[int]:
    """Returns the unequal lengths of `count` documents that fill `length` tokens."""
    if count == 1:
        return [length]
    shares = np.random.default_rng(1).uniform(0.25, 1.75, count)
    ends = np.round(np.cumsum(shares) / shares.sum() * length).astype(int)
    return np.diff([0, *ends]).tolist()


def preset(name: str, layers: int):
    """Returns the configuration of a preset, with `layers` layers if that is not 0."""
    from model.config import TransformerConfig

    config = TransformerConfig.preset(name)
    return dataclasses.replace(config, num_hidden_layers=layers) if layers else config


def make_builder(length: int, args: StepOptions):
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
    chunks: dict[str, Any] = (
        {"feed_forward_chunk": args.chunk, "projection_chunk": args.chunk} if args.chunk else {}
    )
    memory = MemoryConfig(
        args.remat, moments_on_host=args.moments_on_host, loss_chunk=args.loss_chunk, **chunks
    )
    model = LanguageModel(
        preset(args.model, args.layers),
        mesh,
        kernel=get_kernel(args.kernel, backward=args.backward),
        dtype=jnp.dtype(args.dtype),
        memory=memory,
    )
    return StepBuilder(model, model.loss, text_batch(1, length, mesh), memory_config=memory)


def random_row(vocabulary: int, length: int) -> np.ndarray:
    """Returns a row's random tokens and one more, the last target, int32 [1, length + 1]."""
    return np.random.default_rng(0).integers(0, vocabulary, (1, length + 1), np.int32)


def make_batch(builder, length: int, documents: int) -> dict[str, Any]:
    """Returns a row of random tokens in `documents` documents, with the step's sharding."""
    import jax

    tokens = random_row(builder.model.config.vocab_size, length)
    index = np.arange(length, dtype=np.int32)[None]
    lengths = document_lengths(length, documents)
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
    return {
        name: jax.device_put(x, builder.abstract_batch[name].sharding) for name, x in batch.items()
    }


def ours(length: int, args: Options) -> dict:
    """Returns our step's seconds, loss, plan and device facts."""
    from planning.compiled import memory as planned_memory

    builder = make_builder(length, args)
    start = time.perf_counter()
    step = builder.lower_train().compile()
    compile_seconds, plan = time.perf_counter() - start, planned_memory(step)
    batch = make_batch(builder, length, args.documents)
    params = builder.model.init(0)
    moments = builder.init_optimizer(params)
    seconds = []
    for number in range(args.steps + 1):
        start = time.perf_counter()
        params, moments, metrics = step(params, {}, moments, batch, number)
        loss = float(metrics.loss)
        seconds.append(time.perf_counter() - start)
    result = {
        "seconds": seconds,
        "loss": loss,
        **device_facts(),
        "planned_gib": plan["peak"],
        "planned_host_gib": plan["host"],
        "compile_seconds": compile_seconds,
    }
    del params, moments
    return {**result, "matmul": jax_matmul_rate(args.dtype)}


def device_facts() -> dict:
    """Returns the first device's name, its peak FLOP/s and this process's peak memory on it."""
    import jax

    from trainer.devices import peak_flops
    from trainer.reporting.meter import peak_device_gib

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "peak_flops": peak_flops(device.device_kind),
        "device_gib": peak_device_gib([device]),
        "versions": {"jax": jax.__version__},
    }


def jax_matmul_rate(dtype: str) -> float:
    """Returns the FLOP/s of matrix products, on a CPU by `matmul_rate`."""
    import jax
    import jax.numpy as jnp

    # A single small product would measure the host's launch time.
    if jax.default_backend() != "cpu":
        return measure_products(dtype)["matmul_flops"]
    a, multiply = jnp.ones((2048, 2048), dtype), jax.jit(jnp.matmul)
    return matmul_rate(lambda: multiply(a, a).block_until_ready())


def torch_options(args: Options) -> TorchOptions:
    """Returns the options of torch's step."""
    names = [field.name for field in dataclasses.fields(TorchOptions)]
    return TorchOptions(**{name: getattr(args, f"torch_{name}") for name in names})


def theirs(length: int, args: Options) -> dict:
    """Returns the seconds, loss and device facts of a transformers step under torch."""
    import torch

    options = torch_options(args)
    on_cpu = not torch.cuda.is_available()
    if on_cpu and length >= CHECKPOINT_FROM:
        options = dataclasses.replace(options, recompute=True)
    result = torch_step(
        preset(args.model, args.layers),
        document_lengths(length, args.documents),
        args.steps,
        options,
    )
    a = torch.ones(2048, 2048)
    return result | ({"matmul": matmul_rate(lambda: a @ a)} if on_cpu else {})


def measure(side: str, length: int, args: Options) -> dict:
    """Runs one side in a separate process, to measure its peak memory."""
    flags = []
    for name, value in dataclasses.asdict(args).items():
        if name not in ("lengths", "side", "turns", "one", "output") and value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return in_own_process("bench_step", "--one", side, "--lengths", str(length), *flags)


def compare(length: int, args: Options) -> list[dict]:
    """Returns a row per side: its fastest step and its largest peak memory."""
    from trainer.flops import flops_per_step

    pairs = sum(tokens * (tokens + 1) // 2 for tokens in document_lengths(length, args.documents))
    flops = flops_per_step(preset(args.model, args.layers), length, pairs)
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


def _settings(side: str, args: Options) -> dict:
    """Returns a side's settings for its row."""
    if side == "ours":
        return {"layers": args.layers, "remat": args.remat, "kernel": args.kernel}
    return {"layers": args.layers, **dataclasses.asdict(torch_options(args))}


def report(args: Options) -> None:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of our step, read by `make_builder`, and a row's number of documents."""

    model: str = option("a preset", "smollm2-135m")
    layers: int = option("number of layers; 0 for all", 0)
    dtype: str = option("our compute precision", "float32", choices=("float32", "bfloat16"))
    remat: str = option("our remat policy", "everything")
    kernel: str = option("our attention kernel", "auto")
    backward: str = option(
        "whether attention's backward pass is repeatable", "repeatable", choices=BACKWARDS
    )
    chunk: TokensOr0 = option("tokens per chunk of our projections (default: the trainer's)", 0)
    loss_chunk: TokensOr0 = option("tokens per chunk of the loss", 1024)
    moments_on_host: bool = option("keep AdamW's moments on the host")
    documents: AtLeastOne = option("documents in the row", 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(StepOptions):
    """The command's options."""

    lengths: tuple[Tokens, ...] = option("tokens in the row", (2048, 4096))
    steps: int = option("timed steps per turn, after an untimed one; 0 times the first step", 3)
    turns: int = option("processes per side, alternating", 2)
    side: tuple[str, ...] = option(
        "whose step to measure", ("theirs", "ours"), choices=("theirs", "ours")
    )
    torch_attention: str = option("torch's attention: sdpa, flex_attention", "sdpa")
    torch_recompute: bool = option("torch recomputes layers (gradient checkpointing)")
    torch_liger: bool = option("torch uses Liger's kernels (pip install liger-kernel)")
    torch_compile: bool = option("torch's model is compiled with torch.compile")
    torch_weights: str = option(
        "dtype of torch's weights and moments; products on a GPU are always bfloat16",
        "float32",
        choices=("float32", "bfloat16"),
    )
    output: Path = option("folder for results", Path("runs/bench"))
    one: str | None = option(argparse.SUPPRESS, None, choices=("ours", "theirs"))


def work(args: Options) -> None:
    """Measures one side in this process, or compares both."""
    if not args.one:
        return report(args)
    result = (ours if args.one == "ours" else theirs)(args.lengths[0], args)
    result["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps(result))


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
