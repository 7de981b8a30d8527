"""Searches for a job's fastest mesh, schedule and policy that fit, and its longest context.

The cost model orders the candidates; the compiler decides what fits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

from model.memory.options import MemoryConfig
from model.memory.policies import PREFETCH_POLICIES
from trainer.config.schema import MeshConfig

from . import plan as planning
from .machines import device_count
from .parts import host_parts_gib, parts_gib
from .plan import DoesNotFit, Job, across_slices

# The schedules to try; ties in the cost model go to the first.
SCHEDULES = ("ring", "ulysses", "attention2d")
QUERY_CHUNKS = 8


def best_every_k(layers: int) -> int:
    """The `every_k` that keeps the fewest layer inputs: layers / k, and k of the current group."""
    return min((k for k in range(1, layers + 1) if layers % k == 0), key=lambda k: layers / k + k)


def policies(job: Job) -> list[Job]:
    """The job under each memory policy, from the fastest to the smallest in device memory."""
    job = job.changed(memory={"every_k": MemoryConfig.every_k})  # only some policies read it
    grouped = dataclasses.replace(job, group_per_key_head=True)
    every_k = {"remat": "offload_every_k", "every_k": best_every_k(job.model.num_hidden_layers)}
    jobs = [
        job.changed(memory={"remat": remat})
        for remat in (
            "everything",
            "save_attention",
            "offload_save_attention",
            "offload_attention",
            "nothing",
            "offload",
        )
    ]
    jobs += [
        grouped.changed(memory=options)
        for options in (
            {"remat": "offload"},
            {"remat": "offload", "moments_on_host": True},
            every_k,
            {**every_k, "moments_on_host": True},
        )
    ]
    # The TPU compiler cannot take a frozen base's bfloat16 layers from host memory.
    if not job.run.adapter.rank:
        jobs.append(jobs[-1].changed(memory={"parameters_on_host": True}))
    local_tokens = job.context // job.run.mesh.sequence
    if local_tokens % QUERY_CHUNKS == 0 and job.run.attention.schedule == "ring":
        jobs.append(jobs[-1].changed(memory={"query_chunks": QUERY_CHUNKS}))
    return jobs


def candidates(job: Job) -> list[Job]:
    """The job on every mesh, with every schedule and memory policy, the fastest first.

    The high end of the cost model's range decides.

    Candidates whose parameters, moments and kept activations alone are too large are left out, as
    are those without a rule in the cost model.
    """
    ranked = []
    for mesh, schedule in itertools.product(meshes(job), SCHEDULES):
        if mesh.sequence == 1 and schedule != SCHEDULES[0]:
            continue
        for number, candidate in enumerate(
            policies(job.changed(mesh=mesh, attention={"schedule": schedule}))
        ):
            if not _may_fit(candidate):
                continue
            try:
                seconds = candidate.time_range()
            except ValueError:
                continue
            # Estimates within a percent or so count as equal: then the policy that keeps more goes
            # first, and the schedule named first.
            rank = float(f"{seconds.high:.2g}") if seconds else 0, number
            # The cost model assumes that weights arrive during compute; prefetching, which achieves
            # that, goes first.
            if (
                schedule == "ring"
                and mesh.sequence > 1
                and candidate.run.memory.remat in PREFETCH_POLICIES
            ):
                ranked.append((rank, candidate.changed(memory={"prefetch": True})))
            ranked.append((rank, candidate))
    return [candidate for _, candidate in sorted(ranked, key=lambda pair: pair[0])]


def _may_fit(job: Job) -> bool:
    """Whether the known parts fit on the device and on the host."""
    for parts, limit in ((parts_gib, job.device_gib), (host_parts_gib, job.host_gib)):
        if limit is not None and sum(parts(job.run, job.model).values()) > limit:
            return False
    return True


def meshes(job: Job) -> list[MeshConfig]:
    """The meshes of all devices.

    Tensor parallelism splits key heads evenly, and a microbatch's rows (of `train.accumulation`) go
    to fsdp (with a mixture also to expert) before a row is split.

    Raises:
      ValueError: the batch does not divide into microbatches, so train.py refuses it on every mesh.
    """
    devices, key_heads = device_count(job.topology), job.model.num_key_value_heads
    rows, remainder = divmod(job.batch, job.run.train.accumulation)
    if remainder:
        raise ValueError(
            f"train.batch_size: found {job.batch}; a multiple of train.accumulation = "
            f"{job.run.train.accumulation} would work"
        )
    made = []
    for tensor in (n for n in range(1, key_heads + 1) if key_heads % n == devices % n == 0):
        fsdp = math.gcd(rows, devices // tensor)
        sequence = devices // tensor // fsdp
        is_split = sequence > 1 or job.run.attention.layout == "zigzag"  # else of any length
        if is_split and job.context % (2 * sequence):
            continue
        for expert in _expert_sizes(job, fsdp):
            mesh = MeshConfig(fsdp=fsdp // expert, expert=expert, tensor=tensor, sequence=sequence)
            made.append(across_slices(mesh, job.topology))
    return made


def no_mesh(job: Job, machine: str) -> str:
    """Returns the line that refuses a job for which `meshes` finds none.

    Args:
      machine: the devices' name, for people.
    """
    devices, parts = device_count(job.topology), job.run.train.accumulation
    batches = (parts * rows for rows in range(1, devices + 1) if devices % rows == 0)
    batch = next((n for n in batches if meshes(job.changed(train={"batch_size": n}))), None)
    return (
        f"data.context_length: found {job.context}, which no mesh of {machine} divides; a multiple "
        f"of {2 * devices} would work" + ("" if batch is None else f", or a batch of {batch} rows")
    )


def _expert_sizes(job: Job, devices: int) -> list[int]:
    """The sizes of `expert` that divide the experts and the devices rows are split over."""
    experts = job.model.num_experts
    return [
        n
        for n in range(1, devices + 1)
        if devices % n == 0 and (n == 1 or experts % n == 0 < experts)
    ]


def _ignore(job: Job, result: Any) -> None:
    """Ignores a tried job."""


def search(
    job: Job,
    candidates: Callable[[Job], list[Job]] = policies,
    on_try: Callable[[Job, Any], None] = _ignore,
    most: int = 1 << 31,
) -> tuple[Job | None, dict[str, Any] | None, DoesNotFit | None]:
    """The longest context that fits, doubling from the job's up to `most`.

    Args:
      candidates: makes a job's candidates, in the order to try; one that does not fit is not tried
        at longer contexts.
      on_try: called with each tried job and its plan or refusal.

    Returns:
      (the longest job that fits, its plan, the last refusal of the next longer one). The job and
      the plan are None if not even the first context fits.
    """
    longest, best, refusal = None, None, None
    refused: list[Job] = []
    while job.context <= most:
        for candidate in candidates(job):
            at_any_length = candidate.changed(data={"context_length": 1})
            if at_any_length in refused:
                continue
            try:
                result = planning.plan(candidate)
            except DoesNotFit as error:
                refusal = error
                refused.append(at_any_length)
                on_try(candidate, error)
                continue
            on_try(candidate, result)
            longest, best = candidate, result
            break
        else:
            break
        job = job.changed(data={"context_length": 2 * job.context})
    return longest, best, refusal
