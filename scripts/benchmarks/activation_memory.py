"""Shows with the TPU compiler that activation memory depends on tokens per device, not devices.

    python -m scripts.benchmarks.activation_memory [--tokens 65536] [--output FILE.json]

Compiles train.py's step (ring, striped, remat `nothing`) for more and more chips with the same
tokens on each: Ring Attention's Table 1, "independent of the sequence length". Activations are the
compiler's temporaries. Parameters and their gradients are sharded over all devices and shrink with
them, so the model is small compared with its activations.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

from data.outputs import output_file
from scripts.benchmarks.commands import write_json
from trainer.options import Tokens, command, option

TOPOLOGIES = ("v4:2x2x2", "v4:2x2x4", "v4:4x4x4", "v4:4x8x8", "v4:8x8x8")


def measure(topology: str, tokens: int, layers: int, hidden: int) -> dict:
    """Returns the MiB per device of a step with `tokens` tokens on each.

    Raises:
      ValueError: the topology is unknown.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    from model.config import TransformerConfig
    from planning.compiled import memory
    from planning.plan import compile_step
    from planning.topology import topology_devices

    devices = topology_devices(topology)
    heads = hidden // 128
    config = TransformerConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    start = time.perf_counter()
    plan = memory(compile_step(config, devices, tokens * len(devices), remat="nothing"))
    # One block of tokens x hidden in bfloat16; c x h in the paper.
    block = tokens * hidden * 2 / 2**20
    return {
        "topology": topology,
        "devices": len(devices),
        "tokens_a_device": tokens,
        "length": tokens * len(devices),
        "activations_mib": plan["temporaries"] * 1024,
        "blocks_of_c_x_h": plan["temporaries"] * 1024 / block,
        "parameters_and_moments_mib": plan["arguments"] * 1024,
        "compile_seconds": time.perf_counter() - start,
    }


def spread(rows: list[dict]) -> float:
    """Returns the largest activation memory over the smallest, less one."""
    sizes = [row["activations_mib"] for row in rows]
    return max(sizes) / min(sizes) - 1


def work(args: Options) -> None:
    """Measures each topology and prints its row; writes all of them to --output."""
    if args.output:
        output_file(args.output, b'"rows"')
    rows: list[dict] = []
    for topology in args.topologies:
        rows.append(row := measure(topology, args.tokens, args.layers, args.hidden))
        print(
            f"{topology:8} {row['devices']:4} devices {row['length']:9} tokens, activations "
            f"{row['activations_mib']:.2f} MiB "
            f"= {row['blocks_of_c_x_h']:.2f} blocks of c x h  ({row['compile_seconds']:.0f} s)",
            flush=True,
        )
    print(f"spread {100 * spread(rows):.2f}%")
    if args.output:
        write_json(Path(args.output), {"rows": rows, "spread": spread(rows)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's options."""

    topologies: tuple[str, ...] = option("generation:shape, from few devices to many", TOPOLOGIES)
    tokens: Tokens = option("on each device", 65536)
    layers: int = option("of the model", 2)
    hidden: int = option("its width, a multiple of 128", 256)
    output: Path | None = option("also write the rows to this JSON file", None)


main = command(Options, work)


if __name__ == "__main__":
    sys.exit(main())
