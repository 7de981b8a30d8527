"""Reads the sizes from a compiler's out-of-memory message.

JAX raises a `JaxRuntimeError` whose code is RESOURCE_EXHAUSTED. Only the message's text says how
much the program needs and how much there is. The tests hold recorded messages.
"""

from __future__ import annotations

import re

from . import GIB

# The TPU compiler's abbreviations, in GiB.
_UNITS = {"K": 2**-20, "M": 2**-10, "G": 1.0, "T": 2.0**10}
_ABBREVIATED = (
    # The device's memory: "... required for HLO temporaries (129.06G) exceeds available HBM
    # (15.75G). ..."
    r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)",
    # A core's scalar memory, which holds a kernel's tables of tiles: "... in memory space smem.
    # Used 25.2K of 16.0K smem. ..."
    r"Ran out of memory in memory space smem. Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT])",
)
# The host's memory, in bytes: "Allocation (size=171798691840) would exceed memory
# (size=137438953472) :: ..."
_IN_BYTES = r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)"


def refused_gib(message: str) -> tuple[float, float]:
    """Returns (needed, available) GiB of the exhausted memory.

    Args:
      message: of the TPU compiler's JaxRuntimeError with the code RESOURCE_EXHAUSTED.

    Raises:
      RuntimeError: the message has another form.
    """
    if match := re.search(_IN_BYTES, message):
        return int(match[1]) / GIB, int(match[2]) / GIB
    for pattern in _ABBREVIATED:
        if match := re.search(pattern, message):
            return float(match[1]) * _UNITS[match[2]], float(match[3]) * _UNITS[match[4]]
    raise RuntimeError(
        "the compiler ran out of memory, but planning/compiled/refusal.py does not know this "
        f"wording: {message[:500]}"
    )
