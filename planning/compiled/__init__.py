"""Reads a compiled step: its memory, its collectives, their bytes, and what hides them.

XLA reports a program's memory as numbers, but the program only as text (HLO). `text` parses it into
computations and instructions; from these `transfers` counts the bytes that each device receives,
and `overlap` finds the compute that runs between a collective's start and its end. `refusal` reads
the message of a compiler that is out of memory.
"""

from __future__ import annotations

from typing import Any

import jax

GIB = 2**30


def memory(compiled: jax.stages.Compiled) -> dict[str, float]:
    """The compiler's memory plan in GiB per device.

    `arguments`, `outputs`, `aliased` (outputs stored in donated arguments) and `temporaries` are
    device memory; `host` is all host memory; `peak` is the device's total, in which donated buffers
    count once.
    """
    plan: Any = compiled.memory_analysis()
    sizes = {
        "arguments": plan.argument_size_in_bytes,
        "outputs": plan.output_size_in_bytes,
        "aliased": plan.alias_size_in_bytes,
        "temporaries": plan.temp_size_in_bytes,
        "host": plan.host_argument_size_in_bytes
        + plan.host_temp_size_in_bytes
        + plan.host_output_size_in_bytes
        - plan.host_alias_size_in_bytes,
    }
    sizes["peak"] = sizes["arguments"] + sizes["temporaries"] + sizes["outputs"] - sizes["aliased"]
    return {name: size / GIB for name, size in sizes.items()}
