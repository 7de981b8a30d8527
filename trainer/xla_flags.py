"""Compiler flags by platform: python -m trainer.xla_flags tpu | gpu | cpu, for a shell.

For GPUs it also prints how much memory JAX may take: by default 75% of a GPU and 64 GiB of pinned
host memory per process. With --plan the host memory is what the plan needs, and a plan that does
not fit this machine is refused.

Only the launchers apply the flags, before Python starts (`eval "$(python -m trainer.xla_flags
tpu)"`). Importing this module changes nothing, and train.py started by hand uses the compiler's
defaults. The user's flags come last, so they win. The compiler refuses for one TPU generation what
another needs: this host's chips decide, or --generation. The tests compile with each generation's
flags; the time they save has not been measured.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.printable import printable_output
from data.untrusted_files import read_json

from .arguments import CommandParser
from .devices import GPU_MEMORY_SHARE, GPUS, TPUS
from .host import host_bytes


@dataclass(frozen=True)
class Flag:
    """A compiler flag and its reason; `only`: its TPU generations, all of them if empty."""

    name: str
    value: str
    why: str
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"--{self.name}={self.value}"


# The variable with each platform's compiler flags.
VARIABLES = {"tpu": "LIBTPU_INIT_ARGS", "gpu": "XLA_FLAGS", "cpu": "XLA_FLAGS"}
# Chips with SparseCores: their compilers do not overlap gathers driven by the TensorCore.
_SPARSE_CORES = ("v5p", "v6e", "tpu7x")
FLAGS = {
    "tpu": (
        Flag(
            "xla_max_concurrent_async_collective_permutes",
            "8",
            "a round of `balanced`, or of the bidirectional ring, has six transfers in flight; "
            "the default allows five",
        ),
        Flag(
            "xla_enable_async_all_gather",
            "true",
            "FSDP's gathers overlap with matrix products; v5e's compiler does that by default",
            ("v3", "v4"),
        ),
        Flag(
            "xla_tpu_enable_sparse_core_collective_offload_all_gather",
            "true",
            "the SparseCores drive FSDP's gathers, which overlap with matrix products",
            _SPARSE_CORES,
        ),
        Flag(
            "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
            "true",
            "the same for the gradients' reduce-scatters",
            _SPARSE_CORES,
        ),
        Flag(
            "xla_tpu_use_tc_device_shape_on_sc",
            "true",
            "the SparseCores see the same topology as the TensorCores",
            _SPARSE_CORES,
        ),
        Flag(
            "xla_sc_disable_megacore_partitioning",
            "true",
            "one SparseCore handles a collective",
            _SPARSE_CORES,
        ),
    ),
    "gpu": (
        Flag(
            "xla_gpu_enable_latency_hiding_scheduler",
            "true",
            "the ring's transfers and FSDP's gathers start early, and are awaited when needed",
        ),
        Flag(
            "xla_gpu_enable_pipelined_all_gather",
            "true",
            "the gather of a layer's weights moves to the previous layer",
        ),
        Flag(
            "xla_gpu_enable_pipelined_reduce_scatter",
            "true",
            "a layer's gradient is scattered during the next one",
        ),
        Flag(
            "xla_gpu_all_gather_combine_threshold_bytes",
            "268435456",
            "a layer's small matrices are gathered together, not one by one",
        ),
        Flag(
            "xla_gpu_reduce_scatter_combine_threshold_bytes",
            "268435456",
            "the same for their gradients",
        ),
    ),
    "cpu": (
        Flag(
            "xla_cpu_collective_call_terminate_timeout_seconds",
            "600",
            "simulated devices that share few cores wait long for each other; the default soon "
            "aborts",
        ),
    ),
}


# PCI ids of Google's chips (nothing else distinguishes v5e and v5p hosts).
_GOOGLE = "0x1ae0"
_CHIPS = {
    "0x0027": "v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "tpu7x",
}


def generation(bus: Path = Path("/sys/bus/pci/devices")) -> str | None:
    """Returns the generation of this host's TPUs; None if there are no known ones."""
    for device in bus.glob("*"):
        vendor, chip = ((device / name).read_text().strip() for name in ("vendor", "device"))
        if vendor == _GOOGLE and chip in _CHIPS:
            return _CHIPS[chip]
    return None


def flags(platform: str, generation: str | None = None) -> list[Flag]:
    """Returns the platform's flags; only the shared ones for an unknown TPU generation."""
    return [flag for flag in FLAGS[platform] if not flag.only or generation in flag.only]


def shell_line(platform: str, given: str = "", generation: str | None = None) -> str:
    """Returns the `export` line for a platform's flags, followed by those `given` by the user.

    Args:
      platform: cpu, gpu or tpu.
      generation: of TPUs, such as v4; None takes the flags shared by all generations.
    """
    words = " ".join([*map(str, flags(platform, generation)), *filter(None, [given])])
    return f"export {VARIABLES[platform]}={shlex.quote(words)}"


# The share of a GPU's memory that JAX takes (jaxlib/xla_client.py of 0.10.2, which refuses it
# together with its older name).
MEMORY_SHARE, OLD_MEMORY_SHARE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
# The pinned host memory of a process in GiB, 64 by default, allocated on demand:
# GetGpuHostAllocator in XLA's pjrt/gpu/gpu_helpers.cc (openxla/xla#20633).
HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
# The share of host memory that may be pinned, and a margin for a plan's host memory, since the
# allocator does not merge free blocks.
HOST_SHARE, FRAGMENTS = 0.9, 1.1


def gpu_memory(
    plan: Mapping[str, Any] | None, host_gib: float, environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables that set JAX's memory, except those the user has set.

    Args:
      plan: from `python -m scripts.plan --compile --output`, for GPUs; None allows all of the
        machine's memory.
      host_gib: the memory of this host.

    Raises:
      UserError: the plan is not for GPUs, or needs more GPU or host memory than available.
    """
    limit = math.floor(HOST_SHARE * host_gib)
    if plan is not None:
        chip, _, shape = str(plan["topology"]).partition(":")
        if chip not in GPUS:
            raise UserError(
                f"--plan: found a plan for {plan['topology']}; needs one for {', '.join(GPUS)}"
            )
        usable, gpus = GPUS[chip].usable_gib, int(shape.rpartition("x")[2])
        assert usable is not None
        if plan["peak_gib"] > usable:
            raise UserError(
                f"--plan: needs {plan['peak_gib']:.2f} GiB of each {chip}, where JAX may take "
                f"{usable:.2f} ({GPU_MEMORY_SHARE:g} of its memory); python -m scripts.plan finds "
                "one that fits"
            )
        needed = plan["host_gib"] * gpus
        if needed > limit:
            raise UserError(
                f"--plan: needs {needed:.0f} GiB of pinned memory for the host's {gpus} GPUs, but "
                f"{limit} of its {host_gib:.0f} GiB may be pinned; python -m scripts.plan "
                f"--host-gib {limit // gpus} finds one that fits"
            )
        limit = min(limit, max(64, math.ceil(FRAGMENTS * needed)))
    settings = {MEMORY_SHARE: f"{GPU_MEMORY_SHARE:g}", HOST_LIMIT: str(limit)}
    if environment.get(OLD_MEMORY_SHARE):
        del settings[MEMORY_SHARE]
    return {name: value for name, value in settings.items() if not environment.get(name)}


def read_plan(path: str) -> dict[str, Any]:
    """Returns a plan from `scripts.plan --compile --output`, or the longest one of a --search.

    Raises:
      UserError: the file is not a plan.
    """
    try:
        plan = read_json(path)
        plan = plan.get("longest", plan)
        if isinstance(plan["topology"], str) and plan["peak_gib"] + plan["host_gib"] >= 0:
            return plan
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    raise UserError(
        f"--plan: found no compiled plan in {path}; python -m scripts.plan --compile --output FILE "
        "writes one"
    )


@printable_output()
def main(argv: list[str] | None = None) -> int:
    """Prints lines for a shell to evaluate, or with --why each flag and its reason."""
    about = __doc__.splitlines()[0]
    parser = CommandParser(
        prog="python -m trainer.xla_flags", description=about, allow_abbrev=False
    )
    parser.add_argument("platform", choices=sorted(FLAGS))
    parser.add_argument(
        "--generation",
        choices=TPUS,
        default=generation(),
        help="of the TPUs (default: this host's)",
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="print each flag with its reason, for all generations",
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help=(
            "for gpu: this run's plan, from scripts.plan --compile --output; allows the memory "
            "it needs, and refuses a plan that needs more than this machine has"
        ),
    )
    args = parser.parse_args(argv)
    if args.why:
        _print_reasons(args.platform)
        return 0
    try:
        memory = _memory(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        print("(exit 2)")  # evaluated by a launcher's shell: its `eval` must fail too
        return 2
    print(shell_line(args.platform, os.environ.get(VARIABLES[args.platform], ""), args.generation))
    for name, value in memory.items():
        print(f"export {name}={value}")
    return 0


def _print_reasons(platform: str) -> None:
    """Prints what is set for a platform, with the reasons."""
    if platform == "gpu":
        print(
            f"{MEMORY_SHARE}={GPU_MEMORY_SHARE:g}\n"
            "    JAX takes 75% of a GPU's memory by default\n"
            f"{HOST_LIMIT}={HOST_SHARE:g} of the host's\n"
            "    a process may pin 64 GiB by default, less than most plans with offloading need"
        )
    for flag in FLAGS[platform]:
        print(f"{flag}{' (' + ', '.join(flag.only) + ')' if flag.only else ''}\n    {flag.why}")


def _memory(args: argparse.Namespace) -> dict[str, str]:
    """Returns the variables of `gpu_memory`; none for other platforms. Raises UserError."""
    if args.platform != "gpu":
        if args.plan:
            raise UserError(f"--plan: found platform {args.platform}; only gpu has memory to allow")
        return {}
    return gpu_memory(read_plan(args.plan) if args.plan else None, host_bytes() / 2**30, os.environ)


if __name__ == "__main__":
    sys.exit(main())
