"""Searches for a job's fastest mesh, schedule and policy that fit, and its longest context.

The cost model orders the candidates. `best_job` goes by the estimates alone, for train.py and
`scripts.plan` alike; in `search` the compiler decides what fits.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from data.errors import UserError
from model.memory.options import MemoryConfig
from model.memory.policies import PREFETCH_POLICIES
from model.norms import QK_NORMS
from trainer.build import build_language_model
from trainer.config.checks import check
from trainer.config.fields import AUTO
from trainer.config.schema import MeshConfig
from trainer.mesh import abstract_mesh

from . import plan as planning
from .machines import device_count
from .memory_estimate import estimate_memory
from .parts import host_parts_gib, parts_gib
from .plan import DoesNotFit, Job, across_slices, changed

# The schedules to try; ties in the cost model go to the first.
SCHEDULES = ("ring", "ulysses", "attention2d")
QUERY_CHUNKS = 8


def best_every_k(layers: int, period: int = 1, divides: bool = True) -> int | None:
    """The `every_k` that keeps the fewest layer inputs: layers / k, and k of the current group.

    None if no multiple of the period divides the layers.

    Args:
      period: after how many layers their kinds repeat.
      divides: whether it has to divide the layers, as in models with one stack of them.
    """
    possible = (k for k in range(period, layers + 1, period) if not (divides and layers % k))
    return min(possible, key=lambda k: layers / k + k, default=None)


def policies(job: Job) -> list[Job]:
    """The job under each memory policy, from the fastest to the smallest in device memory."""
    job = job.changed(memory={"every_k": MemoryConfig.every_k})  # only some policies read it
    norm = QK_NORMS[job.model.qk_norm]
    in_groups = norm is None or not norm.needs_all_heads
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
    offload: dict[str, Any] = {"remat": "offload"}
    smallest = [offload] * in_groups + [{**offload, "moments_on_host": True}]
    layers, period = job.model.num_hidden_layers, len(job.model.layer_kinds)
    if k := best_every_k(layers, period, divides=len(job.model.stacks) == 1):
        every_k = {"remat": "offload_every_k", "every_k": k}
        smallest += [every_k, {**every_k, "moments_on_host": True}]
    grouped = dataclasses.replace(job, group_per_key_head=in_groups)
    jobs += [grouped.changed(memory=options) for options in smallest]
    # The TPU compiler cannot take a frozen base's bfloat16 layers from host memory.
    if not job.run.adapter.rank:
        jobs.append(jobs[-1].changed(memory={"parameters_on_host": True}))
    local_tokens = job.context // job.run.mesh.sequence
    if local_tokens % QUERY_CHUNKS == 0 and job.run.attention.schedule == "ring":
        jobs.append(jobs[-1].changed(memory={"query_chunks": QUERY_CHUNKS}))
    return jobs


class Best(NamedTuple):
    """The best job of many.

    Attributes:
      job: the job; None if none fits.
      fits: as in `MemoryEstimate`; "no" without a job.
      tried: how many jobs were estimated.
    """

    job: Job | None
    fits: Literal["yes", "perhaps", "no"]
    tried: int


def best_job(job: Job, free: Collection[str] = AUTO) -> Best:
    """Returns the fastest job that fits, by the estimates, of those that train.py accepts.

    Jobs that certainly fit precede those that may fit; then the fewest parts of a batch win
    (`train.accumulation`, from the job's on), then the upper end of the time range. On each mesh
    the first policy that fits is the fastest. The schedule stays.

    Args:
      free: the sections to choose, of `mesh` and `memory`; the others stay the job's.
    """
    perhaps, tried = None, 0
    for in_parts in _accumulations(job):
        fitting: dict[str, dict[str, Job]] = {"yes": {}, "perhaps": {}}
        for candidate in choices(in_parts, free):
            tried += 1
            fits = estimate_memory(candidate).fits
            if fits != "no" and candidate.axes not in fitting[fits] and refusal(candidate) is None:
                fitting[fits][candidate.axes] = candidate
        if fitting["yes"]:
            return Best(min(fitting["yes"].values(), key=_seconds), "yes", tried)
        perhaps = perhaps or min(fitting["perhaps"].values(), key=_seconds, default=None)
    return Best(perhaps, "perhaps" if perhaps else "no", tried)


def choices(job: Job, free: Collection[str] = AUTO) -> Iterator[Job]:
    """Yields the job with each mesh and memory policy to choose from, on each mesh the fastest
    first; train.py may refuse some.

    Args:
      free: as for `best_job`.
    """
    given = job.run.mesh
    for mesh in meshes(job) if "mesh" in free else [given]:
        if mesh.devices == device_count(job.topology):
            on_mesh = job.changed(mesh=dataclasses.replace(mesh, simulate=given.simulate))
            yield from policies(on_mesh) if "memory" in free else [on_mesh]


def _accumulations(job: Job) -> Iterator[Job]:
    """Yields the job with the batch in its number of parts, then in each larger possible one."""
    rows, least = job.batch, job.run.train.accumulation
    for parts in range(least, rows + 1):
        if rows % parts == parts % least == 0:
            yield job.changed(train={"accumulation": parts})


def refusal(job: Job) -> str | None:
    """Returns why train.py would refuse the job's configuration; None if it would not."""
    try:
        run = check(changed(job.run, memory=job.memory))
        build_language_model(run, job.model, abstract_mesh(run.mesh))
    except (UserError, ValueError) as error:
        return str(error)
    return None


def _seconds(job: Job) -> float:
    """Returns the upper end of the job's time range; 0 if the cost model estimates none."""
    seconds = job.time_range()
    return seconds.high if seconds else 0.0


def every_choice(job: Job) -> Iterator[tuple[int, Job]]:
    """Yields the job on every mesh, with every schedule and memory policy, and the policy's
    number; train.py may refuse some."""
    for mesh, schedule in itertools.product(meshes(job), SCHEDULES):
        if mesh.sequence > 1 or schedule == SCHEDULES[0]:
            yield from enumerate(policies(job.changed(mesh=mesh, attention={"schedule": schedule})))


def candidates(job: Job) -> list[Job]:
    """The job on every mesh, with every schedule and memory policy, the fastest first.

    The upper end of the cost model's range decides; those without a rule there come last. Left out
    are candidates that train.py refuses, and those whose parameters, moments and kept activations
    alone are too large.
    """
    ranked = []
    for number, candidate in every_choice(job):
        if _too_large(candidate) is not None:
            continue
        try:
            high = _seconds(candidate)
        except ValueError:
            high = math.inf
        # Estimates within a percent or so count as equal: then the policy that keeps more goes
        # first, and the schedule named first.
        rank = float(f"{high:.2g}"), number
        # The cost model assumes that weights arrive during compute; prefetching, which achieves
        # that, goes first.
        mesh, prefetches = candidate.run.mesh, candidate.run.memory.remat in PREFETCH_POLICIES
        variants = [candidate]
        if candidate.run.attention.schedule == "ring" and mesh.sequence > 1 and prefetches:
            variants.insert(0, candidate.changed(memory={"prefetch": True}))
        ranked += [(rank, variant) for variant in _allowed(variants)]
    return [candidate for _, candidate in sorted(ranked, key=lambda pair: pair[0])]


def allowed_policies(job: Job) -> list[Job]:
    """Returns those of `policies` that train.py does not refuse."""
    return _allowed(policies(job))


def _allowed(jobs: Iterable[Job]) -> list[Job]:
    return [job for job in jobs if refusal(job) is None]


def _too_large(job: Job) -> DoesNotFit | None:
    """Returns how much of the device's or the host's memory the known parts need, whichever they
    exceed more; None if they fit."""
    errors = []
    for parts_of, limit, memory in (
        (parts_gib, job.device_gib, ""),
        (host_parts_gib, job.host_gib, "the host's memory"),
    ):
        parts = parts_of(job.run, job.model)
        if limit is not None and (needs := sum(parts.values())) > limit:
            errors.append(DoesNotFit(needs, limit, parts, memory, by="its known parts"))
    return max(errors, key=_times_too_large, default=None)


def _times_too_large(error: DoesNotFit) -> float:
    return error.needs_gib / error.has_gib if error.has_gib else math.inf


def no_candidate(job: Job, choices: Iterable[Job]) -> Exception:
    """Returns the error that says why a job has none of `candidates` or `allowed_policies`.

    If train.py refuses all choices: its most common reasons, which say what would work. Else what
    the smallest of the others needs.
    """
    reasons = [(choice, refusal(choice)) for choice in choices]
    if not reasons:
        return ValueError(no_mesh(job, job.topology))
    needs = [_too_large(choice) for choice, reason in reasons if reason is None]
    if not needs:
        return ValueError(most_common(reason for _, reason in reasons if reason))
    return min(filter(None, needs), key=_times_too_large)


def most_common(reasons: Iterable[str]) -> str:
    """Returns the two most common reasons for refusing choices, with their numbers; or the only
    one."""
    counts = collections.Counter(reasons)
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(
        f"{reason} ({count} of {counts.total()} choices)" for reason, count in counts.most_common(2)
    )


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
    """Returns the line that refuses a job if `meshes` finds none for it.

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


def search(
    job: Job,
    candidates: Callable[[Job], list[Job]] = allowed_policies,
    on_try: Callable[[Job, Any], object] = lambda job, result: None,
    most: int = 1 << 31,
) -> tuple[Job | None, dict[str, Any] | None, DoesNotFit | None]:
    """The longest context that fits, doubling from the job's up to `most`.

    Args:
      candidates: makes a job's candidates, which train.py accepts, in the order to try; one that
        does not fit is not tried at longer contexts.
      on_try: called with each tried job and its plan or refusal.

    Returns:
      (the longest job that fits, its plan, the last refusal of the next longer one). The job and
      the plan are None if not even the first context fits.
    """
    longest, best, last = None, None, None
    refused: list[Job] = []
    while job.context <= most:
        for candidate in candidates(job):
            at_any_length = candidate.changed(data={"context_length": 1})
            if at_any_length in refused:
                continue
            try:
                result = planning.plan(candidate)
            except DoesNotFit as error:
                last = error
                refused.append(at_any_length)
                on_try(candidate, error)
                continue
            on_try(candidate, result)
            longest, best = candidate, result
            break
        else:
            break
        job = job.changed(data={"context_length": 2 * job.context})
    return longest, best, last
