"""The cost model: how long a training step takes on hardware that is not there, and how much of it waits for the network.

    from planning.costs import HARDWARE, Job, Sizes, estimate
    estimate(Job(Sizes.of(LlamaConfig.preset("llama-7b")), HARDWARE["v4"], length=1 << 20, sequence=64)).mfu

`hardware` holds one sourced set of figures for each machine, `tiles` counts what the tile rule lets a kernel skip, `rounds`
reads each schedule's own plan of what it computes and sends, `step` adds it up. `python -m scripts.benchmarks.papers`
compares it with what the papers print.
"""
from .hardware import HARDWARE, Hardware, Network
from .rounds import Round, rounds
from .step import Estimate, Job, Sizes, estimate

__all__ = ["HARDWARE", "Estimate", "Hardware", "Job", "Network", "Round", "Sizes", "estimate", "rounds"]
