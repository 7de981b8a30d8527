"""Measured training steps, mostly by others, and the time ranges that follow from them.

The lower end of a range is the step's matrix products at the machine's full rate, without waiting,
or the step at the highest MFU measured on such a chip, if that is longer. The upper end adds
the cost model's waiting, times the worst factor by which a measured step on that kind of machine
(TPUs or GPUs) exceeded it; or it is the estimate, if that is longer. So no measured step is above
its range, and the range's width shows how little is known. Five steps are ours, on one H200.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from model.config import TransformerConfig

from .hardware import HARDWARE, Hardware
from .step import Estimate, Sizes, TrainingStep, estimate

THOUSAND, MILLION = 1 << 10, 1 << 20


class Measured(NamedTuple):
    """A training step that was measured.

    Attributes:
      label: program, model and machine.
      source: the public repository and its issue, pull request or recipe, or our result file.
      job: our step with the same model, rows and machine, and the closest schedule and remat
        policy.
      seconds: of their step.
    """

    label: str
    source: str
    job: TrainingStep
    seconds: float

    @property
    def system(self) -> str:
        """The program, and for MaxText the model: steps left out together when a range is judged by
        steps that did not set it."""
        program, model, *_ = self.label.split(", ")
        return f"MaxText, {model.partition('-')[0]}" if program == "MaxText" else program

    @property
    def mfu(self) -> float:
        """The share of the chips' peak that the step's needed work took, from 0 to 1."""
        return self.job.seconds_at_peak / self.seconds


class TimeRange(NamedTuple):
    """A step's seconds: the fastest that can be assumed, and as slow as the slowest measured."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g}"


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int) -> Sizes:
    """A dense Qwen3's sizes (config.json on Hugging Face); its norms cost nothing here."""
    return Sizes.of(
        TransformerConfig(
            vocab_size=151936,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            head_dim=128,
        )
    )


def _short(length: int) -> str:
    return f"{length // MILLION}M" if length >= MILLION else f"{length // THOUSAND}K"


# Ulysses' side of the grid; the ring has the other.
_USP_16_4, _USP_8_8 = {"name": "ulysses", "degree": 4}, {"name": "ulysses", "degree": 8}
# MaxText on 64 v5p chips, llama3-8b, one row over all chips: seconds at 64K, 128K and 256K.
_MAXTEXT_8B: tuple[tuple[str, Any, tuple[float, ...]], ...] = (
    ("all-gather", "all_gather", (1.09, 2.98, 9.71)),
    ("ring", "ring", (1.42, 3.71, 10.78)),
    ("USP 16 x 4", _USP_16_4, (1.04, 2.88, 9.50)),
    ("USP 8 x 8", _USP_8_8, (1.20, 2.93, 9.34)),
)
# The same machine, llama2-7b, 64 rows of 32K, context axis 16.
_MAXTEXT_7B = (
    ("Ulysses", "ulysses", 8.90),
    ("all-gather", "all_gather", 8.83),
    ("ring", "ring", 16.38),
)
# MaxText's ring on 64 chips, a llama3.1-8b whose attention has 16 heads of 256 and 4 key heads:
# chip, tokens, rows, FSDP and context axes, our closest remat policy, seconds (the faster run).
_MAXTEXT_WIDE_HEADS = (
    ("v5p", 64 * THOUSAND, 32, 16, 4, "save_attention", 10.25),
    ("v5p", 256 * THOUSAND, 8, 4, 16, "offload_save_attention", 26.31),
    ("v5p", MILLION, 2, 1, 64, "save_attention", 90.30),
    ("v5p", 2 * MILLION, 2, 1, 64, "offload_save_attention", 346.18),
    ("v5p", 4 * MILLION, 2, 1, 64, "offload_save_attention", 1358.40),
    ("v5p", 10 * MILLION, 1, 1, 64, "nothing", 8056.40),
    ("v5p", 14 * MILLION, 1, 1, 64, "offload", 15623.09),
    ("tpu7x", 64 * THOUSAND, 64, 64, 2, "save_attention", 5.31),
    ("tpu7x", 256 * THOUSAND, 16, 16, 8, "save_attention", 14.08),
    ("tpu7x", MILLION, 4, 4, 32, "save_attention", 48.54),
    ("tpu7x", 2 * MILLION, 2, 2, 64, "save_attention", 94.60),
    ("tpu7x", 4 * MILLION, 1, 1, 128, "save_attention", 186.48),
    ("tpu7x", 10 * MILLION, 1, 1, 128, "save_attention", 1124.12),
    ("tpu7x", 14 * MILLION, 1, 1, 128, "offload_save_attention", 2361.05),
    ("tpu7x", 16 * MILLION, 1, 1, 128, "offload_save_attention", 3082.71),
)
_QWEN3 = {
    "0.6B": _qwen3(28, 1024, 16, 3072),
    "8B": _qwen3(36, 4096, 32, 12288),
    "32B": _qwen3(64, 5120, 64, 25600),
}
# TRL on H100s, one row over all GPUs, layer inputs offloaded: model, GPUs, tokens, seconds; and the
# issue and a note, if not the first one's.
_TRL: tuple[tuple[Any, ...], ...] = (
    ("0.6B", 8, MILLION, 137),
    ("8B", 8, MILLION, 364),
    ("8B", 16, 2 * MILLION, 696),
    ("8B", 32, 4 * MILLION, 1346),
    ("32B", 8, MILLION, 1295),
    ("0.6B", 8, 4 * MILLION, 2135),
    ("8B", 8, MILLION, 380, 6846, ", released versions"),
)
# Ours: 8 of LLaMA-3.1-8B's layers on one H200, one row: tokens, remat policy, seconds.
_OURS = (
    (32 * THOUSAND, "save_attention", 1.495),
    (32 * THOUSAND, "everything", 1.293),
    (128 * THOUSAND, "save_attention", 13.13),
)
# The same steps after fixing the work around the kernels (docs/results/gpu_steps.json).
_OURS_AFTER_FIX = (
    (32 * THOUSAND, "everything", 1.276),
    (128 * THOUSAND, "save_attention", 11.87),
)


@functools.cache
def measured_steps() -> tuple[Measured, ...]:
    """The measured steps, each with our closest step."""
    llama3, llama2 = (
        Sizes.of(TransformerConfig.preset(name)) for name in ("llama-3.1-8b", "llama-7b")
    )
    one_row = (
        _maxtext(
            4893,
            f"llama3-8b, {k}K, 64 v5p, {name}",
            llama3,
            k << 10,
            schedule,
            seconds,
            sequence=64,
        )
        for name, schedule, times in _MAXTEXT_8B
        for k, seconds in zip((64, 128, 256), times, strict=True)
    )
    rows, mesh = 64, {"fsdp": 4, "sequence": 16}
    label = "llama2-7b, 64 x 32K, 64 v5p"
    many_rows = (
        _maxtext(4687, f"{label}, {name}", llama2, 32 << 10, schedule, seconds, batch=rows, **mesh)
        for name, schedule, seconds in _MAXTEXT_7B
    )
    trl = (_trl(*row) for row in _TRL)
    return (*one_row, *many_rows, *trl, *_our_steps("docs/results/gpu.json", _OURS))


def _maxtext(
    issue: int, label: str, sizes: Sizes, length: int, schedule: Any, seconds: float, **mesh: Any
) -> Measured:
    job = TrainingStep(sizes, HARDWARE["v5p"], length, schedule=schedule, layout="zigzag", **mesh)
    return Measured(f"MaxText, {label}", f"AI-Hypercomputer/maxtext#{issue}", job, seconds)


def _trl(
    model: str, gpus: int, length: int, seconds: float, issue: int = 6845, note: str = ""
) -> Measured:
    job = TrainingStep(
        _QWEN3[model],
        HARDWARE["h100-infiniband"],
        length,
        sequence=gpus,
        layout="zigzag",
        remat="offload",
    )
    label = f"TRL, Qwen3-{model}, {length >> 20}M, {gpus} H100{note}"
    return Measured(label, f"huggingface/trl#{issue}", job, seconds)


def _our_steps(
    source: str, rows: tuple[tuple[int, str, float], ...], note: str = ""
) -> tuple[Measured, ...]:
    layers = Sizes.of(
        dataclasses.replace(TransformerConfig.preset("llama-3.1-8b"), num_hidden_layers=8)
    )
    return tuple(
        Measured(
            f"Longstripe, 8 layers of llama3-8b, {_short(length)}, 1 H200, {remat}{note}",
            source,
            TrainingStep(layers, HARDWARE["h200-infiniband"], length, remat=remat),
            seconds,
        )
        for length, remat, seconds in rows
    )


@functools.cache
def compared_steps() -> tuple[Measured, ...]:
    """More measured steps, only for comparison: they are inside the ranges, and counting their long
    rings would cost each plan a second."""
    wide_heads = Sizes.of(
        dataclasses.replace(
            TransformerConfig.preset("llama-3.1-8b"),
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=256,
        )
    )
    theirs = tuple(
        Measured(
            f"MaxText, llama3.1-8b with 16 heads, {rows} x {_short(length)}, 64 {chip}",
            f"AI-Hypercomputer/tpu-recipes, {'ironwood' if chip == 'tpu7x' else chip}",
            TrainingStep(
                wide_heads,
                HARDWARE[chip],
                length,
                batch=rows,
                fsdp=fsdp,
                sequence=sequence,
                schedule="ring",
                layout="zigzag",
                remat=remat,
            ),
            seconds,
        )
        for chip, length, rows, fsdp, sequence, remat, seconds in _MAXTEXT_WIDE_HEADS
    )
    ours = _our_steps(
        "docs/results/gpu_steps.json", _OURS_AFTER_FIX, ", less work around the kernels"
    )
    return (*theirs, *ours)


def full_rate(job: TrainingStep) -> Estimate:
    """The estimate if all matrix products ran at the machine's full rate."""
    return estimate(
        dataclasses.replace(
            job,
            hardware=dataclasses.replace(
                job.hardware,
                matmul=1.0,
                attention=1.0,
                attention_backward=1.0,
                small_heads=None,
                between_products=0.0,
            ),
        )
    )


@functools.cache
def highest_mfu(hardware: Hardware) -> float:
    """The highest MFU of the measured steps on such a chip, or else on its kind of machine.

    Chips of one peak count as one: an H200 is an H100 with more memory.
    """
    steps = [
        step
        for step in (*measured_steps(), *compared_steps())
        if kind(step.job.hardware) == kind(hardware)
    ]
    same = [step for step in steps if step.job.hardware.peak == hardware.peak]
    return max(step.mfu for step in same or steps)


def kind(hardware: Hardware) -> str:
    """The kind of machine whose measured steps apply: TPU or GPU."""
    return "TPU" if hardware.network.torus else "GPU"


@functools.cache
def slowest(machines: str, without: str = "") -> tuple[float, Measured]:
    """The worst ratio of a measured step to ours at full rate on such machines, and that step.

    Args:
      machines: TPU or GPU.
      without: a `system` whose steps do not count.
    """
    return max(
        (
            (step.seconds / full_rate(step.job).seconds, step)
            for step in measured_steps()
            if kind(step.job.hardware) == machines and step.system != without
        ),
        key=lambda pair: pair[0],
    )


def time_range(job: TrainingStep, without: str = "") -> TimeRange:
    """The range of a job's step; with `expert`, from even loads to all tokens on one rank.

    Args:
      job: the step.
      without: a `Measured.system` whose steps do not count, to judge the range by them.

    Raises:
      ValueError: as for `estimate`.
    """
    uneven = dataclasses.replace(job, imbalance=job.largest_imbalance)
    slow = full_rate(uneven).seconds * slowest(kind(job.hardware), without)[0]
    low = max(full_rate(job).step.compute, job.seconds_at_peak / highest_mfu(job.hardware))
    return TimeRange(low, max(low, slow, estimate(uneven).seconds))


@functools.cache
def over_upper_end(system: str) -> tuple[float, ...]:
    """The seconds of a system's measured steps, each over the upper end of the range that the other
    systems' steps give: how far a range can be off for a program that nobody has measured."""
    return tuple(
        step.seconds / time_range(step.job, without=system).high
        for step in measured_steps()
        if step.system == system
    )


def worst_over_upper_end(machines: str) -> float:
    """The largest of `over_upper_end` among the systems measured on such machines: TPU or GPU."""
    systems = {step.system for step in measured_steps() if kind(step.job.hardware) == machines}
    return max(ratio for system in systems for ratio in over_upper_end(system))
