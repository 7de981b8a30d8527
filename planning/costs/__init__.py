"""The cost model: a training step's time on absent hardware, and its wait for the network.

    from planning.costs import HARDWARE, Sizes, TrainingStep, estimate
    estimate(TrainingStep(Sizes.of(TransformerConfig.preset("llama-7b")), HARDWARE["v4"], length=1
    << 20, sequence=64)).mfu

`hardware` lists the machines, `kernel_rates` reads how fast our kernels are on TPUs, `network`
times transfers, `tiles` counts the tiles that a kernel cannot skip, `rounds` reads from each
schedule's plan what it computes and sends, and `step` adds these up. `measured` lists steps that
others measured, and turns an estimate into a range. `python -m scripts.benchmarks.papers` compares
the estimates with the papers' numbers.
"""

from .hardware import HARDWARE, Hardware
from .measured import TimeRange, time_range
from .network import Network
from .rounds import Round, rounds
from .step import Estimate, Sizes, TrainingStep, estimate

__all__ = [
    "HARDWARE",
    "Estimate",
    "Hardware",
    "Network",
    "Round",
    "Sizes",
    "TimeRange",
    "TrainingStep",
    "estimate",
    "rounds",
    "time_range",
]
