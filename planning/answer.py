"""An immediate answer: memory by component, a time range and its source, price, advice.

Nothing is compiled. `scripts.plan` prints these lines before it compiles, `train.py --dry-run`
along with counts of the data.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Collection, Iterator
from typing import Any

from data.errors import UserError
from model.adapter import Quantization
from model.attention.names import MESH_AXES
from model.memory.options import MemoryConfig
from trainer.config.fields import AUTO
from trainer.config.mesh import dcn_text

from .costs.hardware import Hardware
from .costs.measured import highest_mfu, kind, slowest, worst_over_upper_end
from .machines import device_count, several_of
from .memory_estimate import MemoryEstimate
from .memory_options import MEMORY_OPTIONS
from .plan import Job, changed
from .search import best_job

MOST_CONTEXT = 1 << 30
MORE = (2, 4, 8, 16, 32, 64)  # times a machine's devices, tried for a job that does not fit
RANK = 16  # rank of proposed adapters, as in the shipped recipes
FITS = {"yes": "fits", "perhaps": "may fit"}


def longest(job: Job, free: Collection[str] = AUTO) -> Job | None:
    """Returns the best job at the longest context that fits, by doubling; None if none does.

    Args:
      free: the sections to choose, as for `best_job`.
    """
    found = None
    while job.context <= MOST_CONTEXT:
        best = best_job(job, free)
        if best.fits != "yes":
            break
        found, job = best.job, job.changed(data={"context_length": 2 * job.context})
    return found


def heading(job: Job) -> str:
    """Returns the job in one line."""
    rows = "1 row" if job.batch == 1 else f"{job.batch:,} rows"
    count = device_count(job.topology)
    devices = "1 device" if count == 1 else f"{count:,} devices"
    return f"{job.name}, {rows} of {job.context:,} tokens, on {job.topology}: {devices}"


def settings(job: Job) -> str:
    """Returns the job's mesh, schedule, memory policy and accumulation in one line."""
    schedule = "" if job.run.mesh.sequence == 1 else f", schedule {job.run.attention.schedule}"
    adapter = f", {_adapters(job)} of rank {job.run.adapter.rank}" if job.run.adapter.rank else ""
    dcn = f", dcn {dcn_text(job.run.mesh.dcn)}" if job.run.mesh.dcn else ""
    parts = job.run.train.accumulation
    in_parts = "" if parts == 1 else f", batches in {parts} parts"
    return f"mesh {job.axes}{dcn}{schedule}, remat {job.policy}{adapter}{in_parts}"


def _adapters(job: Job) -> str:
    """Returns the name of the job's kind of adapter."""
    return {"none": "LoRA", "nf4": "QLoRA", "int8": "LoRA over int8"}[job.run.adapter.quantize]


def plan_flags(job: Job, found: Job) -> str:
    """Returns the options that turn `scripts.plan` of a job into that of a found one."""
    mesh, memory, parts = found.run.mesh, found.run.memory, found.run.train.accumulation
    axes = [f"{axis}={getattr(mesh, axis)}" for axis in MESH_AXES if getattr(mesh, axis) > 1]
    axes += [f"dcn.{axis}={factor}" for axis, factor in mesh.dcn.items()]
    words = [f"--context {found.context}"] * (found.context != job.context)
    if (adapter := found.run.adapter) != job.run.adapter:
        words.append(f"--{'qlora' if adapter.quantize == 'nf4' else 'lora'} {adapter.rank}")
    words += [f"--mesh {','.join(axes) or 'sequence=1'}", f"--remat {memory.remat}"]
    for name in MEMORY_OPTIONS:
        value = getattr(memory, name)
        if (
            name != "remat"
            and value != getattr(MemoryConfig, name)
            and (name != "every_k" or memory.policy.every_k)
        ):
            words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    words += ["--attention-groups 0"] * found.group_per_key_head
    return " ".join(words + [f"--accumulation {parts}"] * (parts > 1))


def train_flags(job: Job, found: Job) -> str:
    """Returns the options that turn train.py's run of a job into that of a found one."""
    run, words = changed(found.run, memory=found.memory), []
    for section in ("data", "train", "mesh", "memory", "adapter"):
        for name, value in vars(getattr(run, section)).items():
            if value != getattr(getattr(job.run, section), name):
                text = value if isinstance(value, str) else json.dumps(value)
                words.append(f"--{section}.{name} {shlex.quote(text)}")
    return " ".join(words)


def memory_lines(memory: MemoryEstimate) -> list[str]:
    """Returns device and host memory by component, and the range of their sum."""
    digits = 2 if memory.total >= 1 else 4
    lines = [
        "memory per device, GiB (working memory: gradients, a layer's weights and activations, "
        "logits)"
    ]
    lines += [f"  {name:20} {size:9.{digits}f}" for name, size in memory.parts.items()]
    ends = f"{memory.low:.{digits}f} to {memory.high:.{digits}f}"
    share = f"{memory.low_share:g} to {memory.high_share:g}"
    lines.append(
        f"  {'estimate':20} {memory.total:9.{digits}f}   {ends}: compiled plans took {share} of "
        "their estimates"
    )
    if memory.device_gib is not None:
        lines.append(f"  {'a program may use':20} {memory.device_gib:9.2f}")
    if memory.host_parts:
        limit = "" if memory.host_gib is None else f" of {memory.host_gib:.2f}"
        named = ", ".join(f"{name} {size:.2f}" for name, size in memory.host_parts.items())
        lines.append(f"  {'of the host':20} {memory.on_host:9.2f}{limit}   {named}")
        lines += [f"  {'':20} {memory.host_note}"] if memory.host_note else []
    return lines


def verdict(memory: MemoryEstimate) -> str:
    """Returns whether the job fits, in one line."""
    if memory.host_gib is not None and memory.on_host > memory.host_gib:
        return (
            f"does not fit: {memory.on_host:.2f} GiB of host memory per device, of "
            f"{memory.host_gib:.2f}{f' ({memory.host_note})' if memory.host_note else ''}"
        )
    if memory.device_gib is None:
        return "unknown whether it fits, since this machine's memory is; --gpu-memory GIB gives it"
    return {
        "yes": "fits, by the estimate",
        "no": "does not fit, by the estimate",
        "perhaps": (
            "may fit: a device's memory is within the estimate's range, and only the "
            "compiler can tell"
        ),
    }[memory.fits]


def time_figures(
    job: Job, *, tokens: float | None = None, price: float | None = None
) -> dict[str, tuple[float, float]]:
    """Returns (low, high) of a step's time and derived figures, by their names in reports.

    These are "seconds of a step", "tokens a second" over all devices, and "MFU", a share from 0 to
    1; empty if the cost model estimates none (`Job.untimed`).

    Args:
      tokens: to train on; adds "hours".
      price: per device-hour; adds the cost of all devices: the "price" of training on `tokens`, or
        without them the "price of 1,000 steps".
    """
    seconds, estimate = job.time_range(), job.estimate()
    if seconds is None or estimate is None:
        return {}
    step_tokens = estimate.tokens_per_second * estimate.seconds
    ranges = {
        "seconds of a step": (seconds.low, seconds.high),
        "tokens a second": (step_tokens / seconds.high, step_tokens / seconds.low),
        "MFU": (
            estimate.mfu * estimate.seconds / seconds.high,
            estimate.mfu * estimate.seconds / seconds.low,
        ),
    }
    if tokens:
        hours = tuple(tokens / step_tokens * end / 3600 for end in seconds)
        ranges["hours"] = hours[0], hours[1]
    hourly = price * device_count(job.topology) if price else 0.0
    if hourly and tokens:
        ranges["price"] = ranges["hours"][0] * hourly, ranges["hours"][1] * hourly
    elif hourly:
        ranges["price of 1,000 steps"] = seconds.low / 3.6 * hourly, seconds.high / 3.6 * hourly
    return ranges


def time_lines(job: Job, **options: Any) -> list[str]:
    """Returns the lines of `time_figures`, and the source of the range."""
    figures = time_figures(job, **options)
    if not figures or job.hardware is None:
        return [f"time: not estimated; {job.untimed}"]
    over = worst_over_upper_end(kind(job.hardware))
    lines = [
        f"time: from {_lower_end(job.hardware, figures['MFU'][1])},",
        f"      to {_upper_end(job)}",
        f"      (for a system not among those measured, this end was too low by up to {over:.2g}x)",
    ]
    return lines + [
        f"  {name:20} {number(low):>9} to {number(high)}" for name, (low, high) in figures.items()
    ]


def _lower_end(hardware: Hardware, mfu: float) -> str:
    """Returns the source of the lower end of a time range, given the step's MFU there."""
    highest = highest_mfu(hardware)
    if mfu < highest * (1 - 1e-9):
        return f"matrix products alone at the full rate of {hardware.peak / 1e12:,.0f} TFLOP/s"
    return f"the highest MFU measured on such machines, {highest:.1%} of the peak"


def _upper_end(job: Job) -> str:
    """Returns the source of the upper end of the job's time range."""
    estimate, seconds = job.estimate(), job.time_range()
    assert job.hardware is not None and estimate is not None and seconds is not None
    if seconds.high <= estimate.seconds:
        return (
            "the cost model's estimate at the kernels' published rates (planning/costs/hardware.py)"
        )
    factor, step = slowest(kind(job.hardware))
    return (
        f"{factor:.2g} times the step at full rate, the slowest that others measured\n"
        f"      ({step.label}, {step.source})"
    )


def number(value: float) -> str:
    """Returns a number to three digits, or to the nearest whole one from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def advice(job: Job, flags: Callable[[Job, Job], str]) -> Iterator[str]:
    """Yields changes that would make a job fit: mesh, policy, shorter rows, more devices.

    Args:
      flags: `plan_flags` or `train_flags`.
    """
    if job.device_gib is None:
        return
    best = best_job(job)
    if best.job is not None:
        yield f"{FITS[best.fits]} here with {settings(best.job)}: {flags(job, best.job)}"
        return
    yield from _adapter_advice(job, flags)
    for shorter in shorter_rows(job):
        best = best_job(shorter)
        if best.job is not None and best.fits == "yes":
            yield (
                f"rows of {shorter.context:,} tokens fit here, with {settings(best.job)}: "
                f"{flags(job, best.job)}"
            )
            break
    if count := enough_devices(job):
        yield f"a row of this length fits on {count:,} of these devices"


def shorter_rows(job: Job) -> Iterator[Job]:
    """Yields the job with rows of half the length, of a quarter, and so on."""
    for power in range(1, 12):
        if job.context % (1 << power):
            return
        yield job.changed(data={"context_length": job.context >> power})


def _adapter_advice(job: Job, flags: Callable[[Job, Job], str]) -> Iterator[str]:
    """Yields the adapters, LoRA before QLoRA, that make a job fit that does not fit without."""
    adapter = job.run.adapter
    if adapter.quantize != "none" or job.run.trajectories.path:
        return
    rank = adapter.rank or RANK
    tries: tuple[Quantization, ...] = ("nf4",) if adapter.rank else ("none", "nf4")
    for quantize in tries:
        changed_job = job.changed(adapter=adapter.with_rank(rank, quantize))
        try:
            best = best_job(changed_job)
        except (UserError, ValueError):  # such as a rank impossible for this model
            continue
        if best.job is not None:
            yield f"{_adapters(best.job)} {FITS[best.fits]}: {flags(job, best.job)}"
        if best.fits == "yes":
            return


def enough_devices(job: Job) -> int | None:
    """Returns how many devices a job certainly fits on; None if the most in `MORE` are too few."""
    for times in MORE:
        larger = dataclasses.replace(job, topology=several_of(job.topology, times))
        if best_job(larger).fits == "yes":
            return device_count(job.topology) * times
    return None
