"""Several processes as one program: how a process joins the others, waits for them and shares results with them."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import jax
from jax._src import (
    distributed,
    xla_bridge,
)  # as Orbax does: the public API has no barrier and no view of the backends

from data.errors import UserError
from data.printable import printable
from data.signals import before_the_end
from trainer.config.schema import DistributedConfig
from trainer.run.outcome import (
    MAX_MESSAGE,
    STOPPED,
    TERMINATED,
    TRY_AGAIN,
    WRONG_INPUT,
    Outcome,
    error_with,
    outcome_of,
)
from trainer.run.rendezvous import bind_address, meet

# A process without a heartbeat for so long is taken for dead, and JAX ends the others with a message of its own. Heartbeats are
# half of it apart, so that a process which stands still for 20 seconds is not lost.
HEARTBEAT_SECONDS = 45
# Processes that have met join within this time, or one has been lost since; JAX itself waits for 300 seconds and then aborts.
JOIN_SECONDS = 50
# A process that ends by an error waits no longer than this for the others, which may be waiting for it.
SHUTDOWN_SECONDS = 30
# The limit of every wait: another process may have hours of data to prepare. A dead one ends the wait much sooner.
WAIT_MILLISECONDS = 24 * 3_600_000

# Numbers the calls of `first_then_others`, alike in every process, so that each call has a key of its own.
_calls = itertools.count()

# Key of the error of the first process that failed alone, and how often the others look for it.
_FAILURE = "failure"
_LOOK_SECONDS = 1
_leaving = threading.Event()

T = TypeVar("T")


def join(config: DistributedConfig, simulated: bool) -> None:
    """Joins the cluster that the configuration names, or else the one that JAX detects (Cloud TPU, Slurm, GKE, Open MPI).

    Must be called before JAX starts its backend.

    Args:
      simulated: devices are simulated on this machine's CPU, for which no cluster is looked for.
    """
    if config.num_processes is not None:
        if jax.distributed.is_initialized():  # for an earlier stage
            return
        meet(cast(str, config.coordinator), cast(int, config.process_id), config.num_processes)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        with _at_most(
            JOIN_SECONDS,
            f"process {config.process_id}: not all {config.num_processes} processes joined within "
            f"{JOIN_SECONDS} s, though all had come to {config.coordinator}; one was lost, start them again",
        ):
            _initialize(
                coordinator_address=config.coordinator,
                coordinator_bind_address=bind_address(cast(str, config.coordinator)),
                process_id=config.process_id,
                num_processes=config.num_processes,
                cluster_detection_method="deactivate",
            )
        return
    # A second training in one process, or one in a notebook that has used JAX, cannot join again.
    if not (simulated or jax.distributed.is_initialized() or xla_bridge.backends_are_initialized()):
        with contextlib.suppress(ValueError):  # no cluster is detected: this process is alone
            _initialize()


def process() -> int:
    """The number of this process; 0 alone. Unlike JAX's own, it starts no backend."""
    return distributed.global_state.process_id if client() is not None else 0


def processes() -> int:
    """The number of all processes; 1 alone. Unlike JAX's own, it starts no backend."""
    return distributed.global_state.num_processes if client() is not None else 1


def client() -> Any:
    """JAX's client of the cluster's key-value store and barriers; only a process that has joined a cluster has one."""
    return distributed.global_state.client


def barrier(name: str) -> None:
    """Waits until every process has called this with the same name, for a day at most; alone it returns at once.

    No collective is used: gloo's wait only 30 seconds, and compiling may take one process that much longer than another.
    """
    if jax.process_count() > 1:
        client().wait_at_barrier(name, timeout_in_ms=WAIT_MILLISECONDS)


def first_then_others(work: Callable[[str | None], T], encode: Callable[[T], str]) -> T:
    """Runs `work` in process 0, then, with a message from process 0, in the others. All processes call it in the same order.

    Args:
      work: takes None in process 0, and in the others what `encode` made of process 0's result.
      encode: the message to the others, from process 0's result.

    Returns:
      This process's own result, once all processes have theirs.

    Raises:
      Exception: whatever `work` raises in this process.
      UserError, TransientError: with the message of an error that `work` raised in another process.
    """
    if jax.process_count() == 1:
        return work(None)
    key = f"call {next(_calls)}"
    if jax.process_index() == 0:
        try:
            result = work(None)
        except BaseException as error:
            client().key_value_set(key, _encoded(error))
            raise
        client().key_value_set(key, json.dumps({"result": encode(result)}))
    else:
        message = json.loads(client().blocking_key_value_get(key, WAIT_MILLISECONDS))
        if "code" in message:
            raise _decoded(message)
        try:
            result = work(message["result"])
        except Exception as error:
            client().key_value_set(f"{key} failed/{jax.process_index()}", _encoded(error))
            barrier(key)
            raise
    barrier(key)
    for _, failure in client().key_value_dir_get(f"{key} failed"):
        raise _decoded(json.loads(failure))
    return result


def require_same(values: Mapping[str, Any]) -> None:
    """Returns if all processes have called this with the same values, which JSON must express, by name.

    Raises:
      UserError: in every process; names a process and the first value in which it differs from process 0.
    """

    def compare(encoded: str | None) -> None:
        """Compares with the values of process 0; `encoded` is None in that process itself."""
        if encoded is None:
            return
        expected, own = json.loads(encoded), json.loads(json.dumps(values))
        for name in {**expected, **own}:
            if own.get(name) != expected.get(name):
                raise UserError(
                    f"process {jax.process_index()}: {name} is {own.get(name)!r} there and {expected.get(name)!r} "
                    "in process 0; all processes need the same code, recipe, flags, model and data"
                )

    first_then_others(compare, lambda _: json.dumps(values))


def _encoded(error: BaseException, prefix: str = "") -> str:
    """An error of this process as the others are told of it: its exit code, and its message."""
    message = f"{prefix}{str(error) or type(error).__name__}"
    return json.dumps(
        {"code": outcome_of(error).code, "message": " ".join(message.split())[:MAX_MESSAGE]}
    )


def _decoded(told: Mapping[str, Any]) -> UserError:
    """The error that ends this process after what another one has told."""
    return error_with(told["code"], printable(told["message"]))


@contextlib.contextmanager
def _at_most(seconds: float, message: str) -> Iterator[None]:
    """Ends this process with TRY_AGAIN and an error line if the block takes longer, whatever it waits for."""

    def end() -> None:
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(TRY_AGAIN)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _initialize(**arguments: Any) -> None:
    # JAX's handler of SIGTERM takes the place of ours, and only notes it: `trainer.run.preemption` installs it when training
    # begins, and a SIGTERM before that ends the process at once.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        **arguments,
    )
    if distributed.global_state.num_processes > 1:
        before_the_end(end_others)
        threading.Thread(
            target=_end_with_others, name=_end_with_others.__name__, daemon=True
        ).start()


def _failure() -> dict[str, Any] | None:
    """What the first process that failed alone has told the others."""
    try:
        return json.loads(client().key_value_try_get(_FAILURE))
    except (
        Exception
    ):  # not found; or the cluster has ended, of which the caller has an error of its own
        return None


def first_failure() -> Outcome | None:
    """How the first process that failed alone has ended all; None if none has, or the cluster is gone."""
    if (told := _failure()) is None:
        return None
    # What would be wrong again is wrong in all, and a signal to one is one to all; the rest another start may pass.
    code = told["code"] if told["code"] in (WRONG_INPUT, STOPPED, TERMINATED) else TRY_AGAIN
    return Outcome(code, printable(told["message"]))


def leave_others(error: BaseException, code: int) -> None:
    """Ends this process with an exit code after telling the others of its error, which ends them too.

    JAX would wait for them at the end, in vain, and then abort. In a process that has joined no others, nothing happens.
    """
    state = distributed.global_state
    if state.client is None or state.num_processes == 1:
        return
    _leaving.set()
    # All may have failed by the same error: the first to say so is enough.
    with contextlib.suppress(Exception):
        state.client.key_value_set(
            _FAILURE,
            _encoded(error, f"process {state.process_id} of {state.num_processes} failed: "),
        )
    if state.process_id == 0:
        time.sleep(
            4 * _LOOK_SECONDS
        )  # for the others to read it: this process has the key-value store
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_others(code: int, line: str) -> None:
    """Ends the other processes, if there are any, as a signal ends this one without a save."""
    state = distributed.global_state
    if state.client is None or state.num_processes == 1:
        return
    _leaving.set()
    with contextlib.suppress(Exception):
        client().key_value_set(
            _FAILURE,
            json.dumps(
                {
                    "code": code,
                    "message": f"process {state.process_id} of {state.num_processes}: {line}",
                }
            ),
        )
    if state.process_id == 0:
        time.sleep(4 * _LOOK_SECONDS)


def end_all(message: str) -> None:
    """Tells the other processes that all stand still: each prints its threads' stacks and ends with TRY_AGAIN."""
    state = distributed.global_state
    if state.client is None or state.num_processes == 1:
        return
    _leaving.set()
    with contextlib.suppress(Exception):
        state.client.key_value_set(
            _FAILURE, json.dumps({"code": TRY_AGAIN, "message": message, "stacks": True})
        )
    if state.process_id == 0:
        time.sleep(4 * _LOOK_SECONDS)


def _end_with_others() -> None:
    """Ends this process when another one has failed, wherever this one waits for it; see `first_failure` for its code."""
    while not _leaving.wait(_LOOK_SECONDS):
        # After the second wait, as this process may be about to report the same error itself.
        if (failure := first_failure()) is not None and not _leaving.wait(_LOOK_SECONDS):
            if (_failure() or {}).get("stacks"):
                faulthandler.dump_traceback(file=2, all_threads=True)
            print(f"error: {failure.message}", file=sys.stderr, flush=True)
            os._exit(failure.code)
