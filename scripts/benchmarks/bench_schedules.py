"""Compares the schedules: bytes received by compiled texts, balance by counts and in seconds, transfers that are hidden.

    python -m scripts.benchmarks.bench_schedules bytes [--ranks 4 16 64 256] [--output FILE.json]
    python -m scripts.benchmarks.bench_schedules balance [--ranks 2 3 4 8] [--output FILE.json]
    python -m scripts.benchmarks.bench_schedules overlap [--schedules ring ...] [--topology v5e:2x4] [--output FILE.json]
    python -m scripts.benchmarks.bench_schedules time [--lengths 2048 ... 32768] [--tiles 16] [--output FILE.json]
        [--picture FILE.png]
    python -m scripts.benchmarks.bench_schedules distflashattn [--ranks 4 16]
"""
from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data.paths import output_file
from model.attention import Mask, TokenCoords, get_kernel, get_schedule
from model.attention.schedules import Ranks, plan
from model.config import LlamaConfig
from planning.compiled.overlap import crossings
from planning.compiled.transfers import received, transfers
from planning.plan import compile_step
from planning.topology import topology_devices
from trainer import entry
from trainer.config.schema import MeshConfig
from trainer.xla_flags import FLAGS

from . import balance_time
from .balance import measure

# Pods with twice the ranks: another mesh axis beside the sequence, as in training. (Of a reduce-scatter over all chips of a
# pod the TPU's compiler may make an all-reduce.)
PODS = {4: "v4:2x2x2", 8: "v4:2x2x4", 16: "v4:4x4x2", 64: "v4:4x4x8", 256: "v4:8x8x8"}
# Name in the table: schedule, layout, and a window, if there is one, in blocks. The layout matters to windows and `balanced`.
CASES = {
    "ring": ("ring", "striped"),
    "ring bidirectional": ({"name": "ring", "bidirectional": True}, "striped"),
    "ring window": ("ring", "contiguous", 2),
    "all_gather": ("all_gather", "striped"),
    "balanced": ("balanced", "contiguous"),
    "balanced split": ({"name": "balanced", "split": True}, "contiguous"),
    "balanced striped": ("balanced", "striped"),
    "balanced window": ("balanced", "contiguous", 1),
    "ulysses": ("ulysses", "striped"),
    "usp 4": ({"name": "ulysses", "degree": 4}, "striped"),
    "attention2d": ("attention2d", "striped"),
    "attention2d square": ({"name": "attention2d", "columns": "square"}, "striped"),
    "attention2d overlap": ({"name": "attention2d", "columns": "square", "overlap": True}, "striped"),
    "ring_self_attention": ("ring_self_attention", "striped"),
}


def case(name: str, size: int, tokens: int):
    """(schedule, mask) of a case, for so many ranks of so many tokens."""
    options, layout, *window = CASES[name]
    if isinstance(options, dict) and options.get("columns") == "square":
        options = options | {"columns": 2 ** (size.bit_length() // 2)}  # of 8 ranks two rows of four
    return get_schedule(options, size, layout), Mask(window=window[0] * tokens if window else None)


def compile_pass(schedule, mask, size, devices, block, backward: bool, tile: int = 128, kernel: str = "xla") -> str:
    """The compiled text of one pass of a schedule alone, over lines of `size` of the `devices`, each with one Block."""
    rows = len(devices) // size
    mesh = Mesh(np.array(devices).reshape(rows, size), ("fsdp", "sequence"))
    kernel = get_kernel(kernel, query_tile=tile, key_tile=tile)
    options = {"ranks": Ranks("sequence", size), "mask": mask, "scale": block.head_dim ** -0.5}
    tokens, statistics = PartitionSpec("fsdp", "sequence"), PartitionSpec("fsdp", None, "sequence")

    def forward(q, k, v, index, segment_ids):
        coords = TokenCoords(index, segment_ids)
        return tuple(schedule.forward(kernel, q, k, v, coords, coords, **options))

    def gradients(q, k, v, index, segment_ids, dout, lse, delta):
        coords = TokenCoords(index, segment_ids)
        return schedule.backward(kernel, q, k, v, dout, lse, delta, coords, coords, **options)

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


def count_bytes(name: str, size: int, block, topology: str = "", kernel: str = "xla") -> dict:
    """What the compiled text says that devices receive in each pass, beside the plan: bytes, hops, kinds of collectives."""
    schedule, mask = case(name, size, block.tokens)
    planned = schedule.plan(size, block, mask)
    devices = sorted(topology_devices(topology or PODS[size]), key=lambda device: device.id)
    row = {"schedule": name, "ranks": size}
    for which, rounds in zip(("forward", "backward"), planned, strict=True):
        text = compile_pass(schedule, mask, size, devices, block, which == "backward", kernel=kernel)
        found = transfers(text, len(devices))
        got, expected = received(found)[:size], plan.received(rounds, size)
        row[which] = {
            "max_bytes": float(got.max()), "mean_bytes": float(got.mean()),
            "planned_max_bytes": float(expected.max()), "planned_mean_bytes": float(expected.mean()),
            "kinds": sorted({one.kind for one in found}), "planned_kinds": sorted(plan.kinds(rounds)),
            "permutes": sum(one.times for one in found if one.kind == "collective-permute"),
        }
    return row


def bytes_table(names, ranks, tokens: int, topology: str = "", kernel: str = "xla") -> list[dict]:
    """Bytes of each schedule for each number of ranks, printed as they are found."""
    block = plan.Block(batch=1, tokens=tokens, query_heads=32, kv_heads=8, head_dim=128)
    print(f"{block}\nbytes received per device and layer, in units of the device's own q ({block.queries:,} bytes)")
    print(f"{'':19} {'':4}  {'forward':^32}  {'backward':^32}\n{'schedule':19} {'P':>4}"
          + f"  {'max':>8} {'mean':>8} {'plan max':>8} {'off':>5}" * 2)
    rows = []
    for size, name in itertools.product(ranks, names):
        row = count_bytes(name, size, block, topology, kernel)
        rows.append(row)
        print(f"{name:19} {size:4}  " + "  ".join(_columns(row[which], block.queries) for which in ("forward", "backward")),
              flush=True)
    return rows


def _columns(one: dict, unit: int) -> str:
    shown = " ".join(f"{one[key] / unit:8.3f}" for key in ("max_bytes", "mean_bytes", "planned_max_bytes"))
    off = max(abs(one[f"{kind}_bytes"] / one[f"planned_{kind}_bytes"] - 1) for kind in ("max", "mean"))
    return f"{shown} {off:5.1%}"


BALANCE = [("ring", "contiguous"), ("ring", "striped"), ("ring", "zigzag"), ("balanced", "contiguous"),
           ({"name": "balanced", "split": True}, "contiguous"), ("attention2d", "striped"), ("ulysses", "contiguous")]


def balance_table(ranks, tiles: int) -> list[dict]:
    """Imbalance of schedules and layouts: the busiest rank's tiles, summed over rounds, over the sum of the means."""
    jax.config.update("jax_num_cpu_devices", max(ranks))
    rows = []
    print(f"{tiles} tiles a side of a block\n{'schedule':40} {'layout':12} {'P':>3} {'forward':>8} {'backward':>8}")
    for size, (schedule, layout) in itertools.product(ranks, BALANCE):
        row = {"schedule": str(schedule), **measure(schedule, layout, size, tiles)}
        rows.append(row)
        found = " ".join(f"{row[which]['imbalance']:8.4f}" for which in ("forward", "backward"))
        print(f"{row['schedule']:40} {layout:12} {size:3} {found}", flush=True)
    return rows


def small_step(topology: str, tokens: int = 2048, schedule="ring") -> str:
    """The compiled text of a small model's training step, the whole pod on the sequence axis.

    As many permutes may be under way as the launchers allow.
    """
    devices = topology_devices(topology)
    config = LlamaConfig(vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2)
    mesh = MeshConfig(sequence=len(devices))
    permutes = {flag.name: flag.value for flag in FLAGS["tpu"] if flag.name.endswith("collective_permutes")}
    return compile_step(config, devices, tokens * len(devices), mesh=mesh, schedule=schedule, flags=permutes).as_text()


def overlap_table(names, topology: str, tokens: int) -> list[dict]:
    """Every collective of the steps that runs in each layer, and what runs while it is under way."""
    rows = []
    for name in names:
        schedule, _ = case(name, len(topology_devices(topology)), tokens)
        for one in sorted(crossings(small_step(topology, tokens, schedule)), key=lambda one: (one.kind, one.backward)):
            if not one.loops:
                continue
            rows.append({"schedule": name, "nbytes": one.nbytes, "backward": one.backward, **dataclasses.asdict(one)})
            behind = ", ".join((*one.kernels, *one.products)) or "nothing"
            which = "backward" if one.backward else "forward"
            print(f"{name}: {one.kind:18} {one.times:5.0f} x {one.nbytes:11,} bytes  {which:8}"
                  f"  behind {behind}", flush=True)
    return rows


def volume_table(ranks) -> list[dict]:
    """Elements that a device receives with full heads, in units of N d (N tokens of width d), beside Appendix C's.

    From the plan, whose bytes the compiled texts confirm (`bytes`), in float32 so that everything counts alike; coordinates,
    lse and delta are in it, and not in the paper's.
    """
    block = plan.Block(batch=1, tokens=1024, query_heads=8, kv_heads=8, head_dim=128, itemsize=4)
    rows = []
    print("DistFlashAttn, Appendix C: forward 1, backward 2, together 3; Megatron-LM with recomputation 14. Found, on average:")
    for size in ranks:
        planned = case("balanced", size)[0].plan(size, block)
        found = {which: float(plan.received(rounds, size).mean() / (size * block.queries))
                 for which, rounds in zip(("forward", "backward"), planned, strict=True)}
        rows.append({"ranks": size, **found, "together": sum(found.values())})
        print(f"P {size:4}  " + "  ".join(f"{name} {x:.3f}" for name, x in rows[-1].items() if name != "ranks")
              + f"  (the paper's, at this P: 3 (P - 1) / P = {3 * (size - 1) / size:.3f})", flush=True)
    return rows


def parse(argv):
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.bench_schedules", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, told):
        added = commands.add_parser(name, help=told, description=told, allow_abbrev=False)
        added.add_argument("--output", help="also write this JSON file")
        return added

    bytes_ = command("bytes", "bytes received per device and layer, from compiled texts for TPU pods")
    bytes_.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64, 256], choices=PODS)
    bytes_.add_argument("--schedules", nargs="+", default=list(CASES), choices=CASES)
    bytes_.add_argument("--tokens", type=int, default=2048, help="tokens of a rank (default 2048)")
    bytes_.add_argument("--topology", default="", help="another pod, such as v5e:16x16: as many chips as ranks, or a multiple")
    bytes_.add_argument("--kernel", default="xla", choices=("xla", "reference"),
                        help="it moves nothing; `reference` compiles soonest, with few tokens (default xla)")
    balance = command("balance", "imbalance of each schedule, from counts that the running kernels emit")
    balance.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8])
    balance.add_argument("--tiles", type=int, default=16, help="on a side of each rank's block (default 16)")
    overlap = command("overlap", "which transfers of a small model's training step a kernel hides")
    overlap.add_argument("--topology", default="v5e:2x4", help="all chips on the sequence axis (default v5e:2x4)")
    overlap.add_argument("--schedules", nargs="+", default=["ring"], choices=CASES)
    overlap.add_argument("--tokens", type=int, default=2048, help="tokens of a rank (default 2048)")
    volume = command("distflashattn", "elements received beside DistFlashAttn's Appendix C, 3 N d and 14 N d")
    volume.add_argument("--ranks", type=int, nargs="+", default=[4, 16], choices=PODS)
    time = command("time", "what balance is worth in seconds, on two devices of one CPU thread each")
    time.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768], help="tokens in all")
    time.add_argument("--tiles", type=int, default=16, help="on a side of each device's block (default 16)")
    time.add_argument("--repeats", type=int, default=5, help="times each case is run; the median counts (default 5)")
    time.add_argument("--heads", type=int, default=2)
    time.add_argument("--head-dim", type=int, default=64)
    time.add_argument("--picture", help="also draw speed-ups against length into this PNG file")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    """Prints a table, and with --output writes JSON."""
    args = parse(argv)
    return entry.run(lambda: run(args))


def run(args) -> None:
    """One command's table."""
    for path in (args.output, getattr(args, "picture", None)):
        if path:
            output_file(path)
    jax.config.update("jax_platforms", "cpu")
    if args.command == "bytes":
        rows = bytes_table(args.schedules, args.ranks, args.tokens, args.topology, args.kernel)
    elif args.command == "balance":
        rows = balance_table(args.ranks, args.tiles)
    elif args.command == "overlap":
        rows = overlap_table(args.schedules, args.topology, args.tokens)
    elif args.command == "time":
        rows = balance_time.time_table(args.lengths, args.tiles, args.repeats, args.heads, args.head_dim)
        if args.picture:
            balance_time.draw(rows, args.picture)
    else:
        rows = volume_table(args.ranks)
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    sys.exit(main())
