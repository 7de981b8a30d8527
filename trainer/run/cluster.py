"""Several processes as one program: how a process finds the others, and that none outlives them."""
from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from typing import TypeVar

import jax
from jax._src import distributed, xla_bridge  # as Orbax does: jax.distributed has no barrier, and nothing else can tell

from data.errors import UserError
from trainer.config.schema import DistributedConfig

# A process that is gone is noticed after so long, and ends the others with a message of JAX's.
HEARTBEAT_SECONDS = 30
# A process that ends by an error does not wait longer than this for the others, which may wait for it.
SHUTDOWN_SECONDS = 30
# So long a process waits for the others, who may have hours of data to prepare. Those that are gone end it much sooner.
WAIT_MILLISECONDS = 24 * 3_600_000

_turns = itertools.count()  # of `first_then_others`, the same in every process: nothing is told twice under one name

T = TypeVar("T")


def join(config: DistributedConfig, simulated: bool) -> int:
    """Joins the cluster that the flags describe, or else the one that JAX finds itself in (Cloud TPU, Slurm, GKE, Open MPI);
    gives the number of processes that the flags name, 1 without. Only works before JAX has started its backend.

    simulated: the devices are simulated on this machine's CPU, where no cluster is looked for.

    Raises:
      UserError: some of the three flags without the others, or numbers that do not fit.
    """
    given = {"coordinator": config.coordinator, "process_id": config.process_id, "num_processes": config.num_processes}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) < len(given):
        if missing:
            raise UserError(f"distributed.{missing[0]}: missing; coordinator, process_id and num_processes are given together, "
                            "or none of them where JAX finds its cluster by itself")
        if not 0 <= config.process_id < config.num_processes:
            raise UserError(f"distributed.process_id: found {config.process_id}; with {config.num_processes} processes it is "
                            f"one of 0 .. {config.num_processes - 1}")
        if ":" not in config.coordinator:
            raise UserError(f"distributed.coordinator: found {config.coordinator!r}; HOST:PORT of process 0 would work")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        _initialize(coordinator_address=config.coordinator, process_id=config.process_id,
                    num_processes=config.num_processes, cluster_detection_method="deactivate")
        return config.num_processes
    # A second training in one process, or one in a notebook that has used JAX: what is joined by now stays so.
    if not (simulated or jax.distributed.is_initialized() or xla_bridge.backends_are_initialized()):
        with contextlib.suppress(ValueError):  # no cluster around us: this process is alone
            _initialize()
    return 1


def meet(name: str) -> None:
    """Waits until every process is here, for a day at most, and without a collective: these wait for each other 30 seconds
    only (gloo), and compiling may take one process that much longer than another."""
    if jax.process_count() > 1:
        distributed.global_state.client.wait_at_barrier(name, timeout_in_ms=WAIT_MILLISECONDS)


def first_then_others(work: Callable[[str | None], T], tell: Callable[[T], str]) -> T:
    """`work(None)` by process 0 alone, and when that is done `work(what process 0 tells of its result)` by each of the others;
    gives each its own result when all have theirs. By all processes, in the same order.

    Raises:
      whatever `work` raises; UserError with the same message in the processes where it did not fail.
    """
    if jax.process_count() == 1:
        return work(None)
    client, name = distributed.global_state.client, f"turn {next(_turns)}"
    if jax.process_index() == 0:
        try:
            made = work(None)
        except BaseException as error:
            client.key_value_set(name, json.dumps({"error": str(error) or type(error).__name__}))
            raise
        client.key_value_set(name, json.dumps({"made": tell(made)}))
    else:
        told = json.loads(client.blocking_key_value_get(name, WAIT_MILLISECONDS))
        if "error" in told:
            raise UserError(told["error"])
        try:
            made = work(told["made"])
        except Exception as error:
            client.key_value_set(f"{name} failed/{jax.process_index()}", str(error) or type(error).__name__)
            meet(name)
            raise
    meet(name)
    for _, error in client.key_value_dir_get(f"{name} failed"):
        raise UserError(error)
    return made


def _initialize(**how) -> None:
    jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=SHUTDOWN_SECONDS, **how)
