"""The compiler's flags for each platform, and why: python -m trainer.xla_flags tpu | gpu | cpu prints them for a shell.

Only the launchers apply the flags, before Python starts (`eval "$(python -m trainer.xla_flags tpu)"`). Importing this
module changes nothing, and train.py started by hand has the compiler's own defaults. Flags that the user has set come
last, and so win. The compiler refuses for one generation of TPUs what another needs: the chips of this host tell the
generation, or --generation. The tests compile with each generation's flags; the time that they save has not been
measured.
"""
from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from .devices import TPUS


@dataclass(frozen=True)
class Flag:
    """A flag of the compiler and why it is set; `only`: the generations of TPUs that get it, all of them if empty."""

    name: str
    value: str
    why: str
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"--{self.name}={self.value}"


# Where each platform's compiler reads its flags.
VARIABLES = {"tpu": "LIBTPU_INIT_ARGS", "gpu": "XLA_FLAGS", "cpu": "XLA_FLAGS"}
# Chips with SparseCores: the compilers overlap no gather there that the TensorCore drives.
_SPARSE_CORES = ("v5p", "v6e")
FLAGS = {
    "tpu": (
        Flag("xla_max_concurrent_async_collective_permutes", "8",
             "a round of `balanced`, or of the ring both ways, has six transfers under way; by default five may be"),
        Flag("xla_enable_async_all_gather", "true",
             "FSDP's gathers run beside the matrix products; v5e's compiler does that by itself", ("v3", "v4")),
        Flag("xla_tpu_enable_sparse_core_collective_offload_all_gather", "true",
             "FSDP's gathers are driven by the SparseCores, beside the matrix products", _SPARSE_CORES),
        Flag("xla_tpu_enable_sparse_core_collective_offload_reduce_scatter", "true", "so are the gradients' reduce-scatters",
             _SPARSE_CORES),
        Flag("xla_tpu_use_tc_device_shape_on_sc", "true", "the SparseCores see the slice as the TensorCores do", _SPARSE_CORES),
        Flag("xla_sc_disable_megacore_partitioning", "true", "a collective is the work of one SparseCore", _SPARSE_CORES),
    ),
    "gpu": (
        Flag("xla_gpu_enable_latency_hiding_scheduler", "true",
             "the ring's transfers and FSDP's gathers are started early, and awaited where they are needed"),
        Flag("xla_gpu_enable_pipelined_all_gather", "true", "the gather of a layer's weights moves to the layer before"),
        Flag("xla_gpu_enable_pipelined_reduce_scatter", "true", "a layer's gradient is scattered during the next one"),
        Flag("xla_gpu_all_gather_combine_threshold_bytes", "268435456",
             "the small matrices of a layer are gathered together, not one by one"),
        Flag("xla_gpu_reduce_scatter_combine_threshold_bytes", "268435456", "the same for their gradients"),
    ),
    "cpu": (
        Flag("xla_cpu_collective_call_terminate_timeout_seconds", "600",
             "simulated devices that share few cores wait long for each other; the default soon ends the program"),
    ),
}


# What Google's chips call themselves on the PCI bus (v5e's and v5p's hosts are told apart by nothing else).
_GOOGLE, _CHIPS = "0x1ae0", {"0x0027": "v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e"}


def generation(bus: Path = Path("/sys/bus/pci/devices")) -> str | None:
    """Returns the generation of this host's TPUs, or None if it has none that are known."""
    for device in bus.glob("*"):
        vendor, chip = ((device / name).read_text().strip() for name in ("vendor", "device"))
        if vendor == _GOOGLE and chip in _CHIPS:
            return _CHIPS[chip]
    return None


def flags(platform: str, generation: str | None = None) -> list[Flag]:
    """Returns the platform's flags; for an unknown generation of TPUs those that all generations share."""
    return [flag for flag in FLAGS[platform] if not flag.only or generation in flag.only]


def shell_line(platform: str, given: str = "", generation: str | None = None) -> str:
    """Returns the `export` line that sets a platform's flags in a shell, before those `given` by the user.

    Args:
      platform: cpu, gpu or tpu.
      generation: of TPUs, such as v4; None takes the flags that all generations share.
    """
    words = " ".join([*map(str, flags(platform, generation)), *filter(None, [given])])
    return f"export {VARIABLES[platform]}={shlex.quote(words)}"


def main(argv: list[str] | None = None) -> int:
    """Prints the line to evaluate in a shell, or with --why each flag with its reason."""
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m trainer.xla_flags", description=about, allow_abbrev=False)
    parser.add_argument("platform", choices=sorted(FLAGS))
    parser.add_argument("--generation", choices=TPUS, default=generation(), help="of the TPUs (default: this host's)")
    parser.add_argument("--why", action="store_true", help="print each flag with its reason instead, those of all generations")
    args = parser.parse_args(argv)
    if not args.why:
        print(shell_line(args.platform, os.environ.get(VARIABLES[args.platform], ""), args.generation))
        return 0
    for flag in FLAGS[args.platform]:
        print(f"{flag}{' (' + ', '.join(flag.only) + ')' if flag.only else ''}\n    {flag.why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
