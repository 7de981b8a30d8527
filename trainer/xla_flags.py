"""The compiler's flags for each platform, and why: python -m trainer.xla_flags tpu | gpu | cpu prints them for a shell.

Only the launchers apply them, before Python starts (`eval "$(python -m trainer.xla_flags tpu)"`): an import changes nothing,
and who starts train.py by hand has the compiler's own defaults. What the user has set already comes last, and so wins. Their
names are tested against the compilers; what they bring is to be measured on the machine at hand.
"""
from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """name=value of the compiler, and why we set it."""

    name: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"--{self.name}={self.value}"


# Where each platform's compiler reads its flags.
VARIABLES = {"tpu": "LIBTPU_INIT_ARGS", "gpu": "XLA_FLAGS", "cpu": "XLA_FLAGS"}
FLAGS = {
    "tpu": (
        Flag("xla_tpu_enable_async_collective_fusion", "true",
             "gathers and scatters of weights run inside fusions with the matrix products beside them"),
        Flag("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true",
             "so do FSDP's all-gathers, the most frequent of them"),
        Flag("xla_tpu_enable_async_collective_fusion_multiple_steps", "true",
             "a gather may spread over several fusions: one product is too short for a layer's weights"),
        Flag("xla_tpu_overlap_compute_collective_tc", "true", "the TensorCore computes while it drives such a collective"),
        Flag("xla_enable_async_all_gather", "true", "all-gathers outside of fusions are split into start and done"),
        Flag("xla_max_concurrent_async_collective_permutes", "8",
             "a round of `balanced`, or of the ring both ways, has six transfers under way; by default five may be"),
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


def shell_line(platform: str, given: str = "") -> str:
    """The line that sets the platform's flags in a shell, before those `given` by the user."""
    flags = " ".join([*map(str, FLAGS[platform]), *filter(None, [given])])
    return f"export {VARIABLES[platform]}={shlex.quote(flags)}"


def main(argv: list[str] | None = None) -> int:
    """Prints the line to evaluate, or with --why the table."""
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m trainer.xla_flags", description=about, allow_abbrev=False)
    parser.add_argument("platform", choices=sorted(FLAGS))
    parser.add_argument("--why", action="store_true", help="print each flag with its reason instead")
    args = parser.parse_args(argv)
    if args.why:
        for flag in FLAGS[args.platform]:
            print(f"{flag}\n    {flag.why}")
    else:
        print(shell_line(args.platform, os.environ.get(VARIABLES[args.platform], "")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
