"""Reads a compiled step: its memory, its collectives, the bytes that they move, and what runs while they do.

XLA reports a program's memory in figures, but describes the program itself only as text (HLO). `text` parses it into
computations and instructions; from these `transfers` counts the bytes that each device receives, and `overlap` finds the
compute that runs between a collective's start and its end. `refusal` reads the message of a compiler that is out of memory.
"""

from __future__ import annotations

from typing import Any

import jax

GIB = 2**30


def memory(compiled: jax.stages.Compiled) -> dict[str, float]:
    """The compiler's memory plan in GiB a device.

    `arguments`, `outputs`, `aliased` (outputs that take the place of donated arguments) and `temporaries` are on the device;
    `host` is all of the host's memory; `peak` is the device's sum, which counts donated buffers once.
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
