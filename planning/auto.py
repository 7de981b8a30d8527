"""`mesh: auto` and `memory: auto`: the planner's answer for the available devices.

Nothing is compiled: the estimates of `planning.answer` decide, in a second. The answer depends only
on the recipe and the machine, so a restart on the same devices plans the same, and one on others
continues with the same batches, in parts if necessary.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from data.errors import UserError
from model.memory.options import MemoryConfig
from trainer.config.checks import check
from trainer.config.fields import AUTO
from trainer.config.schema import MeshConfig, RunConfig
from trainer.devices import GPUS, TPUS
from trainer.host import host_bytes
from trainer.mesh import require_devices, start_devices
from trainer.model_source import choose_model
from trainer.run.cluster import first_then_others

from . import answer
from .compiled import GIB
from .machines import ANY_GPU, device_count, host_gib
from .memory_estimate import estimate_memory
from .plan import Job, across_slices
from .positions import with_extended_positions, without_earlier_answer
from .search import best_job, choices, most_common, no_mesh, refusal

HOST_SHARE = 0.9  # share of a host's memory that a run may fill, as in the launchers' flags
PINNED_GIB = 64.0  # GiB a process may pin by default with JAX on GPUs


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of a run.

    Attributes:
      topology: as `planning.machines` names it; CPUs and unlisted GPUs are `gpu:N`.
      named: for people.
      device_gib: memory that a program may use on each; None if unknown.
      host_gib: each device's share of host memory, for offloading; 0 on CPUs, where it would be the
        same memory.
    """

    topology: str
    named: str
    device_gib: float | None
    host_gib: float | None


class NothingFits(UserError):
    """No choice of mesh and memory options makes the run fit on the machine; says what would."""


def resolve(config: RunConfig) -> RunConfig:
    """Returns the configuration with the planner's answer for its sections `auto`, on the devices
    of all processes; joins them first.

    Process 0 decides, prints the answer with its reason, and sends it to the others.

    Raises:
      UserError: the model cannot be opened, or nothing fits; the message says what would.
    """
    if not config.auto:
        return config
    start_devices(config)

    def chosen(message: str | None) -> RunConfig:
        if message is not None:
            return _with_answer(config, json.loads(message))
        machine = machine_of(jax.devices()) if planned_for_machine(config) else None
        return planned_run(config, machine, functools.partial(print, file=sys.stderr, flush=True))

    return first_then_others(chosen, lambda planned: json.dumps(_answer_of(planned)))


def planned_for_machine(config: RunConfig) -> list[str]:
    """Returns the sections of the configuration's `auto` that depend on the devices."""
    return [section for section in config.auto if section in AUTO]


def planned_run(
    config: RunConfig, machine: Machine | None, say: Callable[[str], object]
) -> RunConfig:
    """Returns the configuration with all of the planner's answers for a machine; errors as in
    `resolve`.

    Args:
      machine: None if nothing is `planned_for_machine`.
      say: called with each answer, as a line, as soon as it is known: that on mesh and memory
        before the data are prepared, which only `positions` need.
    """
    planned = without_earlier_answer(config) if "positions" in config.auto else config
    if planned_for_machine(config):
        assert machine is not None
        planned, reason = plan_on(planned, machine)
        say(reason)
    if "positions" in config.auto:
        planned, reason = with_extended_positions(planned)
        say(reason)
    return planned


def require_text(config: RunConfig) -> None:
    """Raises UserError for a run on trajectories, whose mesh and memory are not planned."""
    if config.trajectories.path:
        raise UserError(
            "mesh: auto cannot plan a run on trajectories; set the axes, for example {fsdp: 8}"
        )


def plan_on(config: RunConfig, machine: Machine) -> tuple[RunConfig, str]:
    """Returns the configuration with the mesh and memory options planned for a machine, and the
    answer with its reason on two lines; errors as in `resolve`."""
    require_text(config)
    if "mesh" not in config.auto:
        require_devices(config.mesh, device_count(machine.topology))
    model = choose_model(config.model, config.adapter.path, weights=False).config
    job = Job(
        config,
        dataclasses.replace(model, adapter=None),
        machine.topology,
        config.name,
        host_gib=machine.host_gib,
        own_device_gib=machine.device_gib,
    )
    best = best_job(job, config.auto)
    if best.job is None:
        raise _nothing_fits(job, machine)
    run = dataclasses.replace(best.job.run, memory=best.job.memory)
    run = dataclasses.replace(run, mesh=across_slices(run.mesh, machine.topology))
    reason = _reason(best.job, machine, best.tried)
    return check(dataclasses.replace(run, planned=reason)), reason


def spread(config: RunConfig, devices: int) -> RunConfig:
    """Returns the configuration on a mesh of all devices with the recipe's memory options, for
    commands that train nothing: whether gradients and moments would fit does not matter to them.

    Every such mesh splits the parameters over all devices; a mesh that the recipe gives stays.

    Raises:
      UserError, ValueError: the model cannot be opened, or no mesh suits rows and batch.
    """
    if "mesh" not in config.auto:
        return config
    model = choose_model(config.model, config.adapter.path, weights=False).config
    model = dataclasses.replace(model, adapter=None)
    job = Job(config, model, f"{ANY_GPU}:{devices}", config.name)
    reasons = []
    for each in choices(job, ("mesh",)):
        if (reason := refusal(each)) is None:
            return dataclasses.replace(config, mesh=each.run.mesh)
        reasons.append(reason)
    raise UserError(most_common(reasons) if reasons else no_mesh(job, f"{devices} devices"))


def machine_of(devices: Sequence[jax.Device]) -> Machine:
    """Returns what is known of JAX's devices."""
    first, count = devices[0], len(devices)
    hosts = len({device.process_index for device in devices})
    here = sum(device.process_index == first.process_index for device in devices)
    host = HOST_SHARE * host_bytes() / GIB
    kind = first.device_kind if first.platform != "cpu" else "CPU"
    named = f"{count} x {kind}" + (f" of {hosts} hosts" if hosts > 1 else "")
    if first.platform == "cpu":
        return Machine(f"{ANY_GPU}:{count}", named, host / here, 0.0)
    limit = (first.memory_stats() or {}).get("bytes_limit")
    device_gib = limit / GIB if limit else None
    if first.platform == "tpu":
        return Machine(_tpu_topology(devices), named, device_gib, host / here)
    pinned = float(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB") or PINNED_GIB)
    chip = _listed(kind, GPUS) or ANY_GPU
    shape = f"{hosts}x{count // hosts}" if hosts > 1 else str(count)
    return Machine(f"{chip}:{shape}", named, device_gib, min(host, pinned) / here)


def machine_named(topology: str, usable_gib: float | None) -> Machine:
    """Returns an absent machine from the tables; `usable_gib` replaces its memory."""
    return Machine(topology, topology, usable_gib, host_gib(topology))


def _listed(kind: str, table: Any) -> str | None:
    """Returns the name of the listed device whose longest kind is a prefix of JAX's name."""
    found = [
        (len(prefix), name)
        for name, device in table.items()
        for prefix in device.kinds
        if kind.upper().startswith(prefix.upper())
    ]
    return max(found)[1] if found else None


def _tpu_topology(devices: Sequence[Any]) -> str:
    """Returns a topology such as v5p:2x2x4, or 2xv5e:4x4 for two slices."""
    kind = devices[0].device_kind
    generation = _listed(kind, TPUS)
    if generation is None:
        raise UserError(f"mesh: found auto on {kind}, which the planner does not list; give axes")
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    sizes = [max(axis) + 1 for axis in zip(*(device.coords for device in devices), strict=True)]
    if generation in ("v3", "v5e", "v6e"):
        sizes = sizes[:2]
    shape = "x".join(map(str, sizes))
    return f"{slices}x{generation}:{shape}" if slices > 1 else f"{generation}:{shape}"


def _reason(job: Job, machine: Machine, tried: int) -> str:
    """Returns a line with the answer, and one with its reason."""
    memory = estimate_memory(job)
    limit = "" if memory.device_gib is None else f" of {memory.device_gib:.3g}"
    certain = "" if memory.fits == "yes" else "; it may not fit, which only the compiler can tell"
    return (
        f"planned for {machine.named}: {answer.settings(job)}\n"
        f"  about {memory.total:.2g}{limit} GiB on each, the fastest of {tried} estimated{certain}"
    )


def _nothing_fits(job: Job, machine: Machine) -> UserError:
    """Returns the one-line error that nothing fits, with what would; or, if some rule refuses every
    mesh and memory option, the most common rules' errors."""
    free = job.run.auto
    smallest = [(each, refusal(each)) for each in choices(_in_most_parts(job), free)]
    least = min(
        (estimate_memory(each) for each, reason in smallest if reason is None),
        key=lambda memory: memory.low,
        default=None,
    )
    if least is None:
        on_mesh = f"{job.name}: no memory options suit {job.axes}"
        no_option = no_mesh(job, machine.named) if "mesh" in free else on_mesh
        reasons = [reason for _, reason in smallest if reason]
        return UserError(most_common(reasons) if reasons else no_option)
    needs = f"{least.low:.3g} GiB of {job.device_gib or 0:.3g}"
    if machine.host_gib is not None and least.on_host > machine.host_gib:
        needs += f", and {least.on_host:.3g} GiB of {machine.host_gib:.3g} of the host's"
    return NothingFits(
        f"{job.name}: rows of {job.context:,} tokens do not fit on {machine.named}: at least "
        f"{needs} on each; {'; '.join(_what_would(job)) or 'a smaller model would fit'}"
    )


def _in_most_parts(job: Job) -> Job:
    """Returns the job with one row at a time, or as many as a given mesh computes at once."""
    at_once = 1 if "mesh" in job.run.auto else job.run.mesh.rows
    return job.changed(train={"accumulation": job.batch // at_once})


def _what_would(job: Job) -> Iterator[str]:
    """Yields what would fit, as flags of train.py or as a machine."""
    if not job.run.adapter.rank:
        for quantize in ("none", "nf4"):
            adapter = job.run.adapter.with_rank(answer.RANK, quantize)
            if _fits(job.changed(adapter=adapter)):
                flag = "" if quantize == "none" else f" --adapter.quantize {quantize}"
                yield f"--adapter.rank {answer.RANK}{flag} would fit"
                break
    if shorter := next(filter(_fits, answer.shorter_rows(job)), None):
        yield f"--data.context_length {shorter.context} would fit"
    if count := answer.enough_devices(job):
        yield f"{count} such devices would be enough"


def _fits(job: Job) -> bool:
    """Returns whether the planner would find a job that certainly fits."""
    try:
        return best_job(job, job.run.auto).fits == "yes"
    except (UserError, ValueError):  # such as a rank impossible for this model
        return False


def _answer_of(config: RunConfig) -> dict[str, Any]:
    """Returns what the planner has changed, as plain values."""
    return {
        "mesh": dataclasses.asdict(config.mesh),
        "memory": dataclasses.asdict(config.memory),
        "planned": config.planned,
        "accumulation": config.train.accumulation,
        "overrides": config.model.overrides,
        "ref_overrides": config.preference.ref_overrides,
    }


def _with_answer(config: RunConfig, found: dict[str, Any]) -> RunConfig:
    """Returns the configuration with another process's `_answer_of`."""
    mesh = found["mesh"] | {"order": tuple(found["mesh"]["order"])}
    return dataclasses.replace(
        config,
        planned=found["planned"],
        mesh=MeshConfig(**mesh),
        memory=MemoryConfig(**found["memory"]),
        train=dataclasses.replace(config.train, accumulation=found["accumulation"]),
        model=dataclasses.replace(config.model, overrides=found["overrides"]),
        preference=dataclasses.replace(config.preference, ref_overrides=found["ref_overrides"]),
    )
