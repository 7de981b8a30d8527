"""Searches for a job's best plan: which way to do it is fastest of those that fit, and how long a context can be.

The cost model says in which order ways are tried; the compiler says what fits.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

from model.config import LlamaConfig
from model.memory.policies import PREFETCH_POLICIES
from trainer.config.schema import MeshConfig

from . import plan as planning
from .plan import DoesNotFit, Job
from .topology import memory_gib, topology_devices

SCHEDULES = ("ring", "ulysses", "attention2d")
QUERY_CHUNKS = 8


def policies(job: Job) -> list[Job]:
    """The job under each policy, from the fastest to the one that takes the least of the device's memory."""
    layers = job.llama.num_hidden_layers
    k = min((k for k in range(1, layers + 1) if layers % k == 0), key=lambda k: layers / k + k)
    groups = {"attention_groups": 0}  # one for each key head
    every_k = {"remat": "offload_every_k", "every_k": k, **groups}
    told = [{"remat": "everything"}, {"remat": "save_attention"}, {"remat": "nothing"}, {"remat": "offload"},
            {"remat": "offload", **groups}, {"remat": "offload", **groups, "moments_on_host": True}, every_k,
            {**every_k, "moments_on_host": True}, {**every_k, "moments_on_host": True, "parameters_on_host": True}]
    found = [dataclasses.replace(job, **policy) for policy in told]
    tokens = job.context // job.whole_mesh.sequence
    if tokens % QUERY_CHUNKS == 0 and job.schedule == "ring":
        found.append(dataclasses.replace(found[-1], query_chunks=QUERY_CHUNKS))
    return found


def ways(job: Job) -> list[Job]:
    """The job on every mesh of its devices, with every schedule and policy, the fastest first by the cost model.

    Left out are those whose parameters, moments and kept activations are already too large, and those that the cost model has
    no rule for. Tensor parallelism splits key heads evenly, rows go to fsdp before a row is split.
    """
    found = []
    devices = len(topology_devices(job.topology))
    for mesh, schedule in itertools.product(_meshes(job, job.llama, devices), SCHEDULES):
        if mesh.sequence == 1 and schedule != SCHEDULES[0]:
            continue
        for number, way in enumerate(policies(dataclasses.replace(job, mesh=mesh, schedule=schedule))):
            if not _may_fit(way, devices):
                continue
            try:
                estimate = way.estimate()
            except ValueError:
                continue
            # Estimates that differ by less than a percent or so are alike: then the policy that holds more goes first, and
            # the schedule named first.
            order = float(f"{estimate.seconds:.2g}") if estimate else 0, number
            # The model takes weights to arrive under compute; where they can be made to, that way is tried first.
            prefetch = schedule == "ring" and mesh.sequence > 1 and way.remat in PREFETCH_POLICIES
            found += [(order, dataclasses.replace(way, prefetch=True))] * prefetch + [(order, way)]
    return [way for _, way in sorted(found, key=lambda pair: pair[0])]


def _may_fit(way: Job, devices: int) -> bool:
    """Whether what is known beforehand fits, of the device and of the host."""
    for parts, has in ((planning.parts_gib, memory_gib(way.topology)), (planning.host_parts_gib, way.host_gib)):
        if has is not None and sum(parts(way, way.llama, devices).values()) > has:
            return False
    return True


def _meshes(job: Job, config: LlamaConfig, devices: int) -> list[MeshConfig]:
    found = []
    for tensor in (n for n in range(1, config.num_key_value_heads + 1) if config.num_key_value_heads % n == devices % n == 0):
        fsdp = math.gcd(job.batch, devices // tensor)
        sequence = devices // tensor // fsdp
        if job.context % (2 * sequence) == 0:
            found.append(MeshConfig(fsdp=fsdp, tensor=tensor, sequence=sequence))
    return found


def search(job: Job, ways: Callable[[Job], list[Job]] = policies, on_try=lambda job, result: None,
           most: int = 1 << 31) -> tuple[Job | None, dict | None, DoesNotFit | None]:
    """The longest context, doubling from job.context up to `most`, in the first of its ways that fits.

    Args:
      ways: gives a job's ways in the order in which they are tried; one that is too large stays so at every longer context.
      on_try: called with each job tried, and its plan or refusal.

    Returns:
      the longest job that fits and its plan (None: not even the first context does), and the last refusal of the next.
    """
    longest, best, refusal, refused = None, None, None, []
    while job.context <= most:
        for way in ways(job):
            if (lasting := dataclasses.replace(way, context=0)) in refused:
                continue
            try:
                found = planning.plan(way)
            except DoesNotFit as error:
                refusal = error
                refused.append(lasting)
                on_try(way, error)
                continue
            on_try(way, found)
            longest, best = way, found
            break
        else:
            break
        job = dataclasses.replace(job, context=2 * job.context)
    return longest, best, refusal
