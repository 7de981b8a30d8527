"""What compiled texts say about schedules: the bytes that devices receive, and hidden transfers."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.attention import Keys, Mask, Queries, TokenCoords, get_kernel, get_schedule
from model.attention.blocks import BackwardInputs
from model.attention.schedules import Context, Ranks, plan
from model.config import TransformerConfig
from planning.compiled.overlap import crossings
from planning.compiled.transfers import received, transfers
from planning.plan import Job, compile_run
from planning.topology import topology_devices
from trainer.xla_flags import FLAGS

# Pods with twice as many chips as ranks: as in training, there is a second mesh axis. (The TPU
# compiler may turn a reduce-scatter over all chips of a pod into an all-reduce.)
PODS = {4: "v4:2x2x2", 8: "v4:2x2x4", 16: "v4:4x4x2", 64: "v4:4x4x8", 256: "v4:8x8x8"}
# Name in the table: schedule, layout, and the window in blocks if there is one. The layout matters
# for windows and for `balanced`.
CASES: dict[str, tuple] = {
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
    "attention2d overlap": (
        {"name": "attention2d", "columns": "square", "overlap": True},
        "striped",
    ),
    "ring_self_attention": ("ring_self_attention", "striped"),
}


def case(name: str, size: int, tokens: int):
    """Returns the schedule and the mask of a case of CASES, for `size` ranks of `tokens` tokens."""
    options, layout, *window = CASES[name]
    if isinstance(options, dict) and options.get("columns") == "square":
        options = options | {"columns": 2 ** (size.bit_length() // 2)}  # 8 ranks: two rows of four
    return get_schedule(options, size, layout), Mask(window=window[0] * tokens if window else None)


def compile_pass(schedule, mask, size, devices, block, backward: bool, kernel: str = "xla") -> str:
    """Returns the compiled text of one pass of a schedule alone.

    Args:
      size: number of ranks; `devices` are divided into lines of this length, each with its own
        batch.
      block: `plan.Block` of one rank.
      backward: whether to compile the backward instead of the forward pass.
    """
    rows = len(devices) // size
    mesh = Mesh(np.array(devices).reshape(rows, size), ("fsdp", "sequence"))
    tiles = {} if kernel == "reference" else {"query_tile": 128, "key_tile": 128}
    tiled = get_kernel(kernel, **tiles)
    context = Context(Ranks("sequence", size), mask, block.head_dim**-0.5)
    tokens, statistics = PartitionSpec("fsdp", "sequence"), PartitionSpec("fsdp", None, "sequence")

    def forward(q, k, v, index, segment_ids):
        coords = TokenCoords(index, segment_ids)
        return tuple(schedule.forward(tiled, Queries(q, coords), Keys(k, v, coords), context))

    def gradients(q, k, v, index, segment_ids, dout, lse, delta):
        coords = TokenCoords(index, segment_ids)
        inputs = BackwardInputs(dout, lse, delta)
        return tuple(
            schedule.backward(tiled, Queries(q, coords), Keys(k, v, coords), inputs, context)
        )

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    batch, length = rows * block.batch, size * block.tokens
    dtype = {2: jnp.bfloat16, 4: jnp.float32}[block.itemsize]
    q = array((batch, length, block.query_heads, block.head_dim), dtype, tokens)
    k = array((batch, length, block.kv_heads, block.head_dim), dtype, tokens)
    coords = array((batch, length), jnp.int32, tokens)
    lse = array((batch, block.query_heads, length), jnp.float32, statistics)
    arrays = (q, k, k, coords, coords, *((q, lse, lse) if backward else ()))
    run = jax.shard_map(
        gradients if backward else forward,
        mesh=mesh,
        in_specs=tuple(x.sharding.spec for x in arrays),
        out_specs=(tokens,) * 3 if backward else (tokens, statistics),
        check_vma=False,
    )
    return jax.jit(run).lower(*arrays).compile().as_text() or ""


def count_bytes(name: str, size: int, block, topology: str = "", kernel: str = "xla") -> dict:
    """Returns the bytes that devices receive in each pass, by the compiled text and by the plan."""
    schedule, mask = case(name, size, block.tokens)
    planned = schedule.plan(size, block, mask)
    devices = sorted(topology_devices(topology or PODS[size]), key=lambda device: device.id)
    row = {"schedule": name, "ranks": size}
    for direction, rounds in zip(("forward", "backward"), planned, strict=True):
        text = compile_pass(
            schedule, mask, size, devices, block, direction == "backward", kernel=kernel
        )
        compiled = transfers(text, len(devices))
        counted, expected = received(compiled)[:size], plan.received(rounds, size)
        row[direction] = {
            "max_bytes": float(counted.max()),
            "mean_bytes": float(counted.mean()),
            "planned_max_bytes": float(expected.max()),
            "planned_mean_bytes": float(expected.mean()),
            "kinds": sorted({transfer.kind for transfer in compiled}),
            "planned_kinds": sorted(plan.kinds(rounds)),
            "permutes": sum(
                transfer.times for transfer in compiled if transfer.kind == "collective-permute"
            ),
        }
    return row


def bytes_table(
    schedules, ranks, tokens: int, topology: str = "", kernel: str = "xla"
) -> list[dict]:
    """Prints and returns the bytes received with each schedule and number of ranks.

    Cases that exceed a chip's memory (Ring Self-Attention keeps all scores) are skipped.
    """
    block = plan.Block(batch=1, tokens=tokens, query_heads=32, kv_heads=8, head_dim=128)
    print(
        f"{block}\nbytes received per device and layer, in units of the device's own q "
        f"({block.queries:,} bytes)"
    )
    print(
        f"{'':19} {'':4}  {'forward':^32}  {'backward':^32}\n{'schedule':19} {'P':>4}"
        + f"  {'max':>8} {'mean':>8} {'plan max':>8} {'off':>5}" * 2
    )
    rows = []
    for size, name in itertools.product(ranks, schedules):
        try:
            row = count_bytes(name, size, block, topology, kernel)
        except jax.errors.JaxRuntimeError as error:
            if error.error_code_string != "RESOURCE_EXHAUSTED":
                raise
            print(f"{name:19} {size:4}  needs more memory than a chip has", flush=True)
            continue
        rows.append(row)
        directions = (
            _columns(row[direction], block.queries) for direction in ("forward", "backward")
        )
        print(f"{name:19} {size:4}  " + "  ".join(directions), flush=True)
    return rows


def _columns(counts: dict, unit: int) -> str:
    """Returns one pass's columns, in units of `unit` bytes, and the deviation from the plan."""
    columns = " ".join(
        f"{counts[key] / unit:8.3f}" for key in ("max_bytes", "mean_bytes", "planned_max_bytes")
    )
    deviation = max(
        abs(counts[f"{kind}_bytes"] / counts[f"planned_{kind}_bytes"] - 1)
        for kind in ("max", "mean")
    )
    return f"{columns} {deviation:5.1%}"


def small_step(topology: str, tokens: int = 2048, schedule="ring") -> str:
    """Returns a small model's compiled training step, with all chips on the sequence axis.

    As many permutes may be in flight as the launchers allow.
    """
    devices = topology_devices(topology)
    config = TransformerConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    permutes: dict[str, str | bool] = {
        flag.name: flag.value for flag in FLAGS["tpu"] if flag.name.endswith("collective_permutes")
    }
    run = Job.of(config, topology, tokens * len(devices)).run
    step = compile_run(run, config, devices, schedule=schedule, flags=permutes)
    return step.as_text() or ""


def overlap_table(schedules, topology: str, tokens: int) -> list[dict]:
    """Prints and returns each layer's collectives, and what runs while they are in flight."""
    rows = []
    for name in schedules:
        schedule, _ = case(name, len(topology_devices(topology)), tokens)
        crossed = crossings(small_step(topology, tokens, schedule))
        for transfer in sorted(crossed, key=lambda transfer: (transfer.kind, transfer.backward)):
            if not transfer.loops:
                continue
            rows.append(
                {
                    "schedule": name,
                    "nbytes": transfer.nbytes,
                    "backward": transfer.backward,
                    **dataclasses.asdict(transfer),
                }
            )
            behind = ", ".join((*transfer.kernels, *transfer.products)) or "nothing"
            direction = "backward" if transfer.backward else "forward"
            print(
                f"{name}: {transfer.kind:18} {transfer.times:5.0f} x {transfer.nbytes:11,} bytes  "
                f"{direction:8}  behind {behind}",
                flush=True,
            )
    return rows
