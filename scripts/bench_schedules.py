"""Compares the schedules: what each device receives, by the compiled text.

    python -m scripts.bench_schedules bytes [--ranks 4 16 64 256] [--output FILE.json]
"""
from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys

# Pods with twice the ranks: another mesh axis beside the sequence, as in training. (Of a reduce-scatter over all chips of a
# pod the TPU's compiler may make an all-reduce.)
PODS = {4: "v4:2x2x2", 8: "v4:2x2x4", 16: "v4:4x4x2", 64: "v4:4x4x8", 256: "v4:8x8x8"}
# Name in the table: schedule, layout. The layout matters to `balanced` alone.
CASES = {
    "ring": ("ring", "striped"),
    "all_gather": ("all_gather", "striped"),
    "balanced": ("balanced", "contiguous"),
    "balanced split": ({"name": "balanced", "split": True}, "contiguous"),
    "balanced, striped": ("balanced", "striped"),
    "ulysses": ("ulysses", "striped"),
    "usp 4": ({"name": "ulysses", "degree": 4}, "striped"),
    "attention2d": ("attention2d", "striped"),
    "attention2d square": ({"name": "attention2d", "columns": "square"}, "striped"),
}


def case(name: str, size: int):
    """(schedule, layout) of a case, for so many ranks."""
    from model.attention import get_schedule

    options, layout = CASES[name]
    if isinstance(options, dict) and options.get("columns") == "square":
        options = options | {"columns": math.isqrt(size)}
    return get_schedule(options, size, layout), layout


def compile_pass(schedule, layout, size, devices, block, backward: bool, tile: int = 128) -> str:
    """The compiled text of one pass of a schedule alone, over lines of `size` of the `devices`, each with one Block."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from model.attention import Mask, TokenCoords, get_kernel, get_schedule
    from model.attention.schedules import Ranks

    rows = len(devices) // size
    mesh = Mesh(np.array(devices).reshape(rows, size), ("fsdp", "sequence"))
    chosen, kernel = get_schedule(schedule, size, layout), get_kernel("xla", query_tile=tile, key_tile=tile)
    options = {"ranks": Ranks("sequence", size), "mask": Mask(), "scale": block.head_dim ** -0.5}
    tokens, statistics = PartitionSpec("fsdp", "sequence"), PartitionSpec("fsdp", None, "sequence")

    def forward(q, k, v, index, segment_ids):
        coords = TokenCoords(index, segment_ids)
        return tuple(chosen.forward(kernel, q, k, v, coords, coords, **options))

    def gradients(q, k, v, index, segment_ids, dout, lse, delta):
        coords = TokenCoords(index, segment_ids)
        return chosen.backward(kernel, q, k, v, dout, lse, delta, coords, coords, **options)

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    batch, length, dtype = rows * block.batch, size * block.tokens, {2: jnp.bfloat16, 4: jnp.float32}[block.itemsize]
    q = array((batch, length, block.query_heads, block.head_dim), dtype, tokens)
    k = array((batch, length, block.kv_heads, block.head_dim), dtype, tokens)
    coords = array((batch, length), jnp.int32, tokens)
    lse = array((batch, block.query_heads, length), jnp.float32, statistics)
    arrays = (q, k, k, coords, coords, *((q, lse, lse) if backward else ()))
    run = jax.shard_map(gradients if backward else forward, mesh=mesh, in_specs=tuple(x.sharding.spec for x in arrays),
                        out_specs=(tokens,) * 3 if backward else (tokens, statistics), check_vma=False)
    return jax.jit(run).lower(*arrays).compile().as_text()


def count_bytes(name: str, size: int, block) -> dict:
    """What the compiled text says that devices receive in each pass, beside the plan: bytes, hops, kinds of collectives."""
    from model.attention.schedules import plan
    from trainer.compiled.transfers import received, transfers

    from .plan import topology_devices

    schedule, layout = case(name, size)
    planned = schedule.plan(size, block)
    devices = sorted(topology_devices(PODS[size]), key=lambda device: device.id)
    row = {"schedule": name, "layout": layout, "ranks": size}
    for which, rounds in zip(("forward", "backward"), planned, strict=True):
        found = transfers(compile_pass(schedule, layout, size, devices, block, which == "backward"), len(devices))
        got, expected = received(found)[:size], plan.received(rounds, size)
        row[which] = {
            "max_bytes": float(got.max()), "mean_bytes": float(got.mean()),
            "planned_max_bytes": float(expected.max()), "planned_mean_bytes": float(expected.mean()),
            "kinds": sorted({one.kind for one in found}), "planned_kinds": sorted(plan.kinds(rounds)),
            "permutes": sum(one.times for one in found if one.kind == "collective-permute"),
        }
    return row


def main(argv=None) -> int:
    """Prints a table, and with --output writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_schedules", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    bytes_ = commands.add_parser("bytes", help="bytes received per device and layer, from compiled texts for TPU pods")
    bytes_.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64, 256], choices=PODS)
    bytes_.add_argument("--schedules", nargs="+", default=list(CASES), choices=CASES)
    bytes_.add_argument("--output", help="also write this JSON file")
    args = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rows = bytes_table(args.schedules, args.ranks)
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)
    return 0


def bytes_table(names, ranks) -> list[dict]:
    """Bytes of each schedule for each number of ranks, printed as they are found."""
    from model.attention.schedules.plan import Block

    block = Block(batch=1, tokens=1024, query_heads=32, kv_heads=8, head_dim=128)
    print(f"{block}\nbytes received per device and layer, in units of the device's own q ({block.queries:,} bytes)")
    print(f"{'':19} {'':4}  {'forward':^32}  {'backward':^32}\n{'schedule':19} {'P':>4}"
          + f"  {'max':>8} {'mean':>8} {'plan max':>8} {'off':>5}" * 2)
    rows = []
    for size, name in itertools.product(ranks, names):
        row = count_bytes(name, size, block)
        rows.append(row)
        print(f"{name:19} {size:4}  " + "  ".join(_columns(row[which], block.queries) for which in ("forward", "backward")),
              flush=True)
    return rows


def _columns(one: dict, unit: int) -> str:
    shown = " ".join(f"{one[key] / unit:8.3f}" for key in ("max_bytes", "mean_bytes", "planned_max_bytes"))
    off = max(abs(one[f"{kind}_bytes"] / one[f"planned_{kind}_bytes"] - 1) for kind in ("max", "mean"))
    return f"{shown} {off:5.1%}"


if __name__ == "__main__":
    sys.exit(main())
