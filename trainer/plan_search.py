"""Searches for a job's best plan: which way to do it is fastest of those that fit, and how long a context can be.

The cost model says in which order ways are tried; the compiler says what fits.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

from model.config import LlamaConfig
from model.llama import PREFETCHED

from . import plan as planning
from .plan import DoesNotFit, Job
from .schema import MeshConfig
from .topology import memory_gib, topology_devices

# From the fastest to the one that takes least; `offload` needs the host's memory. 0 groups are one for each key head.
POLICIES = ({"remat": "everything"}, {"remat": "save_attention"}, {"remat": "nothing"}, {"remat": "offload"},
            {"remat": "offload", "attention_groups": 0})
SCHEDULES = ("ring", "ulysses", "attention2d")


def policies(job: Job) -> list[Job]:
    """The job under each policy, the fastest first."""
    return [dataclasses.replace(job, **policy) for policy in POLICIES]


def ways(job: Job) -> list[Job]:
    """The job on every mesh of its devices, with every schedule and policy, the fastest first by the cost model.

    Left out are those whose parameters, moments and kept activations are already too large, and those that the cost model has
    no rule for. Tensor parallelism splits key heads evenly, rows go to fsdp before a row is split.
    """
    found = []
    has = memory_gib(job.topology)
    devices = len(topology_devices(job.topology))
    config = LlamaConfig.preset(job.model)
    for mesh, schedule, policy in itertools.product(_meshes(job, config, devices), SCHEDULES, POLICIES):
        if mesh.sequence == 1 and schedule != SCHEDULES[0]:
            continue
        way = dataclasses.replace(job, mesh=mesh, schedule=schedule, **policy)
        if has and sum(planning.parts_gib(way, config, devices).values()) > has:
            continue
        try:
            estimate = way.estimate()
        except ValueError:
            continue
        # Estimates that differ by less than a percent or so are alike: then the schedule named first goes first.
        order = float(f"{estimate.seconds:.2g}") if estimate else POLICIES.index(policy)
        # The model takes weights to arrive under compute; where they can be made to, that way is tried first.
        prefetch = schedule == "ring" and mesh.sequence > 1 and way.remat in PREFETCHED and way.attention_groups == 1
        found += [(order, dataclasses.replace(way, prefetch=True))] * prefetch + [(order, way)]
    return [way for _, way in sorted(found, key=lambda pair: pair[0])]


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
