"""Reads a compiled step: what memory it takes, which collectives it has, what they move, and what hides them.

`text` parses; on it `transfers` counts bytes, and `overlap` lists collectives with the compute between start and end.
"""
from __future__ import annotations

GIB = 2**30


def memory(compiled) -> dict[str, float]:
    """GiB a device by the compiler's plan: arguments, temporaries, host memory; the sums count donated buffers once."""
    plan = compiled.memory_analysis()
    parts = {"arguments": plan.argument_size_in_bytes, "outputs": plan.output_size_in_bytes,
             "aliased": plan.alias_size_in_bytes, "temporaries": plan.temp_size_in_bytes,
             "host": plan.host_argument_size_in_bytes + plan.host_temp_size_in_bytes
             + plan.host_output_size_in_bytes - plan.host_alias_size_in_bytes}
    parts["peak"] = parts["arguments"] + parts["temporaries"] + parts["outputs"] - parts["aliased"]
    return {name: size / GIB for name, size in parts.items()}
