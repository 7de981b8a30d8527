"""The training step beside transformers + torch on this CPU: tokens a second, memory, share of the matrix-product rate.

    python -m scripts.bench_step [--lengths 2048 4096] [--steps 3] [--output DIR]

One SmolLM2-135M step (forward, backward, AdamW) in float32 on one row of one document. Each side runs in a process of its
own, one after the other in turns, and the fastest step counts. torch runs as a user would: SDPA, and from 4096 tokens on
gradient checkpointing, without which it needs more memory.
"""
from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from trainer import entry

MODEL = "smollm2-135m"
CHECKPOINT_FROM = 4096  # tokens from which torch recomputes its layers


def matmul_rate(multiply) -> float:
    """FLOP/s of `multiply()`, a 2048 x 2048 x 2048 product, the best of ten."""
    times = []
    for _ in range(10):
        start = time.perf_counter()
        multiply()
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(times)


def step_flops(config, length: int) -> float:
    """FLOPs of a step that runs nothing twice: 6 a weight of a matrix product, 12 a visible pair, head and channel."""
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    layer = hidden * (2 * heads + 2 * config.num_key_value_heads * config.head_dim + 3 * config.intermediate_size)
    weights = config.num_hidden_layers * layer + config.vocab_size * hidden
    return 6 * weights * length + 12 * config.num_hidden_layers * heads * length * (length + 1) / 2


def ours(length: int, steps: int, remat: str) -> dict:
    """Seconds of each step of the compiled step that `train.py` runs."""
    import jax
    import jax.numpy as jnp

    from model.config import LlamaConfig
    from model.llama import Llama
    from trainer.config import MeshConfig, OptimizerConfig
    from trainer.mesh import make_mesh
    from trainer.step import StepBuilder, text_batch

    mesh = make_mesh(MeshConfig())
    model = Llama(LlamaConfig.preset(MODEL), mesh, dtype=jnp.float32, remat=remat)
    builder = StepBuilder(model, model.loss, tuple(model.parameters), text_batch(1, length, mesh), OptimizerConfig(), 100)
    step = builder.lower_train().compile()
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, length + 1), np.int32)
    place = np.arange(length, dtype=np.int32)[None]
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "index": place, "positions": place,
             "segment_ids": np.ones_like(place), "loss_weights": np.ones(place.shape, np.float32)}
    batch = {name: jax.device_put(x, builder.abstract_batch[name].sharding) for name, x in batch.items()}
    params = model.init(0)
    moments = builder.init_optimizer(params)
    seconds = []
    for number in range(steps + 1):
        start = time.perf_counter()
        params, moments, metrics = step(params, {}, moments, batch, number)
        loss = float(metrics["loss_nats_per_target"])
        seconds.append(time.perf_counter() - start)
    a = jnp.ones((2048, 2048))
    multiply = jax.jit(jnp.matmul)
    return {"seconds": seconds, "loss": loss, "matmul": matmul_rate(lambda: multiply(a, a).block_until_ready())}


def theirs(length: int, steps: int) -> dict:
    """Seconds of each step of transformers' model under torch."""
    import torch
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    from model.config import LlamaConfig

    model = LlamaForCausalLM(TheirConfig(**LlamaConfig.preset(MODEL).to_hf(), attn_implementation="sdpa")).train()
    if length >= CHECKPOINT_FROM:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, model.config.vocab_size, (1, length)))
    seconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    a = torch.ones(2048, 2048)
    return {"seconds": seconds, "loss": float(loss), "matmul": matmul_rate(lambda: a @ a)}


def measure(side: str, length: int, steps: int, remat: str) -> dict:
    """One side in a process of its own, so that its peak memory is its own."""
    command = [sys.executable, "-m", "scripts.bench_step", "--side", side, "--lengths", str(length), "--steps", str(steps),
               "--remat", remat]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(length: int, args) -> list[dict]:
    """Two turns of each side; the fastest step of either."""
    from model.config import LlamaConfig

    flops = step_flops(LlamaConfig.preset(MODEL), length)
    turns = [(side, measure(side, length, args.steps, args.remat)) for side in ("theirs", "ours") * args.turns]
    matmul = max(result["matmul"] for _, result in turns)
    rows = []
    for side in ("theirs", "ours"):
        mine = [result for name, result in turns if name == side]
        seconds = min(min(result["seconds"][1:]) for result in mine)
        rows.append({
            "side": side, "length": length, "tokens_per_second": length / seconds, "step_seconds": seconds,
            "peak_gib": max(result["peak_gib"] for result in mine), "matmul_gflops": max(r["matmul"] for r in mine) / 1e9,
            "share_of_matmul": flops / seconds / matmul})
    return rows


def main(argv=None) -> int:
    """Prints the table; writes OUTPUT/step.json."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_step", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], help="tokens in the row (default 2048 4096)")
    parser.add_argument("--steps", type=int, default=3, help="steps timed in a turn, after one that is not (default 3)")
    parser.add_argument("--turns", type=int, default=2, help="processes of each side, in turns (default 2)")
    parser.add_argument("--remat", default="everything", help="our policy (default everything: nothing is run again)")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder for results (default runs/bench)")
    parser.add_argument("--side", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.side:
        result = ours(args.lengths[0], args.steps, args.remat) if args.side == "ours" else theirs(args.lengths[0], args.steps)
        result["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps(result))
        return 0
    return entry.run(lambda: report(args))


def report(args) -> None:
    """Measures, prints and writes."""
    rows = [row for length in args.lengths for row in compare(length, args)]
    print(f"{'side':8} {'tokens':>7} {'tokens/s':>9} {'s/step':>8} {'peak GiB':>9} {'matmul GFLOP/s':>15} {'share':>7}")
    for row in rows:
        print(f"{row['side']:8} {row['length']:7} {row['tokens_per_second']:9.1f} {row['step_seconds']:8.2f} "
              f"{row['peak_gib']:9.2f} {row['matmul_gflops']:15.1f} {row['share_of_matmul']:7.1%}")
    for theirs_row, ours_row in zip(rows[::2], rows[1::2], strict=True):
        print(f"{ours_row['length']} tokens: {ours_row['tokens_per_second'] / theirs_row['tokens_per_second']:.2f}x torch")
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "step.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
