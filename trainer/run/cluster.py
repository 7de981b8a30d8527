"""Several processes as one program: joining, waiting, and sharing results."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax

# As Orbax does: the public API has no barrier and no view of the backends.
from jax._src import clusters, distributed, xla_bridge

from data.errors import TransientError, UserError, first_line, is_transient
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
from trainer.run.rendezvous import IN_FLAGS, Words, bind_address, meet

# After this time without a heartbeat a process counts as dead, and JAX ends the others with its own
# message. Heartbeats are half of it apart, so a process may pause for 20 seconds.
HEARTBEAT_SECONDS = 45
# After the rendezvous, processes join within this time unless one is lost; JAX waits for 300
# seconds and then aborts.
JOIN_SECONDS = 50
DETECT_SECONDS = 300  # wait for a detected cluster's coordinator address, as in JAX
# A failed process waits at most this long for the others, which may be waiting for it.
SHUTDOWN_SECONDS = 30
# The limit of every wait: another process may prepare data for hours. Its death ends the wait much
# sooner.
WAIT_MILLISECONDS = 24 * 3_600_000

# Numbers the calls of `first_then_others`, equally in every process, to give each call a key.
_calls = itertools.count()

# Key of the first failed process's error, and how often the others look for it.
_FAILURE = "failure"
_LOOK_SECONDS = 1
_leaving = threading.Event()

# Launchers that JAX does not detect, or not always: the variable that shows several processes, and
# the values of --distributed.process_id and --distributed.num_processes.
_LAUNCHERS = (
    ("SLURM_NTASKS", "$SLURM_PROCID", "$SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_SIZE", "$OMPI_COMM_WORLD_RANK", "$OMPI_COMM_WORLD_SIZE"),  # Open MPI 5
    ("PMI_SIZE", "$PMI_RANK", "$PMI_SIZE"),  # MPICH, Intel MPI
    ("TPU_WORKER_HOSTNAMES", "$TPU_WORKER_ID", "N"),
    ("SKYPILOT_NUM_NODES", "$SKYPILOT_NODE_RANK", "$SKYPILOT_NUM_NODES"),
    ("WORLD_SIZE", "$RANK", "$WORLD_SIZE"),  # torchrun, accelerate
    ("JOB_COMPLETION_INDEX", "$JOB_COMPLETION_INDEX", "N"),  # an indexed Kubernetes job
)

# The port is computed from the job's number (Slurm, Open MPI), so two steps of a job share it. A
# host may have been replaced without a word to process 0. A restart cures both.
DETECTED = Words(
    address="the detected address",
    together="start all of them together",
    other_port="JAX_COORDINATOR_PORT sets another port, the same for all processes",
    own_port="each needs its own port in JAX_COORDINATOR_PORT",
    reach="start it too; JAX_COORDINATOR_BIND_ADDRESS=[::]:PORT makes it listen on all interfaces",
    section="",
    error=TransientError,
)

T = TypeVar("T")


def join(config: DistributedConfig, simulated: bool, run: str) -> None:
    """Joins the configured cluster, or the one that JAX detects.

    JAX detects Cloud TPU, Slurm, GKE and Open MPI 4.

    Must be called before JAX starts its backend.

    Args:
      simulated: whether devices are simulated on this machine's CPU; then no cluster is detected.
      run: the run's name, by which process 0 tells its processes from another run's.
    """
    if config.num_processes is not None:
        if jax.distributed.is_initialized():  # by an earlier call
            return
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        _join_at(
            cast(str, config.coordinator), cast(int, config.process_id), config.num_processes, run
        )
        return
    # A second training run in one process, or a notebook that has used JAX, cannot join again.
    if not (simulated or jax.distributed.is_initialized() or xla_bridge.backends_are_initialized()):
        _join_detected(run)
        if processes() == 1 and (sign := _sign_of_others()):
            print(f"warning: this process trains alone, but {sign}", file=sys.stderr)


def _join_detected(run: str) -> None:
    """Joins the cluster that JAX detects, if there is one, in which all processes are of `run`."""
    if (detected := _detected()) is None:
        return
    address, number, count, devices = detected
    if (number, count) == (0, 1):
        # Two commands in one step of Slurm would be two processes 0 at the same address, where the
        # second start aborts the first.
        _use_given_gpus()
        return
    if number >= count:  # an indexed job of Kubernetes with more completions than parallel pods
        raise UserError(f"this process has number {number} in a cluster of {count}; {_flags()}")
    host = address.rpartition(":")[0].strip("[]")
    _require_known(host, "the coordinator's host", DETECT_SECONDS)
    listen = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    _join_at(address, number, count, run, listen, DETECTED, devices)
    if number == 0 and devices is not None and (unused := _unused_gpus(count)):
        print(f"warning: {unused}", file=sys.stderr)


def _join_at(
    address: str,
    number: int,
    count: int,
    run: str,
    listen: str | None = None,
    words: Words = IN_FLAGS,
    devices: Sequence[int] | None = None,
) -> None:
    """Meets the other processes of the run at process 0's address, then joins them there.

    Before JAX's own rendezvous, which is silent for five minutes if a process is missing, then
    aborts, and takes processes of another run, whose start it would end.

    Args:
      listen: where process 0 listens, if not at the interface of its address.
    """
    meet(address, number, count, run=run, listen=listen, words=words)
    with _at_most(
        JOIN_SECONDS,
        f"process {number}: not all {count} processes joined within {JOIN_SECONDS} s, although all "
        f"had reached {address}; one was lost, start them again",
    ):
        _initialize(
            coordinator_address=address,
            # JAX's coordinator would listen on all interfaces.
            coordinator_bind_address=listen or bind_address(address),
            process_id=number,
            num_processes=count,
            local_device_ids=devices,
            cluster_detection_method="deactivate",
        )


def _use_given_gpus() -> None:
    """Limits a process that joins no others to JAX_LOCAL_DEVICE_IDS, as JAX does when it joins."""
    if given := os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        jax.config.update("jax_cuda_visible_devices", given)
        jax.config.update("jax_rocm_visible_devices", given)


def _require_known(host: str, what: str, seconds: float = 0) -> None:
    """Waits until a host's name resolves; a pod's does only once the pod runs.

    Raises:
      UserError, TransientError: it does not resolve within `seconds`.
    """
    deadline, has_printed = time.monotonic() + seconds, False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            problem = (
                f"{what} has the name {printable(host)}, which this machine cannot resolve "
                f"({first_line(error)})"
            )
            kind = TransientError if seconds or is_transient(error) else UserError
        if time.monotonic() >= deadline:
            raise kind(f"{problem}; an entry in /etc/hosts or in the cluster's DNS would work")
        if not has_printed:
            print(f"{problem}; waiting for up to {seconds:.0f} s", file=sys.stderr, flush=True)
            has_printed = True
        time.sleep(_LOOK_SECONDS)


def _detected() -> tuple[str, int, int, Sequence[int] | None] | None:
    """Detects the cluster, as JAX does.

    Returns:
      The coordinator's address, the number of this process, that of all, and the devices to use;
      None instead of devices for all of them, or for those of JAX_LOCAL_DEVICE_IDS. None if this
      process is alone.

    Raises:
      TransientError: there are other processes, but JAX could not find out about them.
      UserError: the variables of Slurm or Open MPI do not describe them, as after every restart.
    """
    try:
        with warnings.catch_warnings():
            # It advises every pod to install a package, which most do not need.
            warnings.filterwarnings("ignore", message=r"\s*Kubernetes environment detected")
            address, count, number, devices = (
                clusters.ClusterEnv.auto_detect_unset_distributed_params(
                    os.environ.get("JAX_COORDINATOR_ADDRESS"),
                    None,
                    None,
                    None,
                    None,
                    DETECT_SECONDS,
                )
            )
    except Exception as error:
        # A pod may be no job's, such as a notebook's, and may lack the rights to ask.
        if _raised_by(clusters.K8sCluster, error) and "JOB_COMPLETION_INDEX" not in os.environ:
            print(
                "warning: this process trains alone, since its Kubernetes job could not be read "
                f"({first_line(error)}); {_flags()}",
                file=sys.stderr,
            )
            return None
        advice = f"{_flags()}; a process alone is number 0 of 1"
        if launcher := _launcher_misread(error):
            raise UserError(
                f"{launcher}'s variables do not describe the processes "
                f"({type(error).__name__}: {first_line(error)}); {advice}"
            ) from error
        raise TransientError(
            f"the other processes could not be found ({first_line(error)}); {advice}"
        ) from error
    if address is None or number is None or count is None:  # an address alone is not a cluster
        return None
    if _is_shell_of_an_allocation():
        return address, 0, 1, None
    # JAX gives one GPU to each process of Slurm and Open MPI, even if it is its host's only one, or
    # sees only its own.
    chosen = (
        _only_one_on_its_host()
        or os.environ.get("JAX_LOCAL_DEVICE_IDS")
        or _sees_only_its_own_gpus(devices)
    )
    return address, number, count, None if chosen else devices


def _raised_by(cluster: type[clusters.ClusterEnv], error: Exception) -> bool:
    return any(
        frame.f_globals.get("__name__") == cluster.__module__
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _launcher_misread(error: Exception) -> str:
    """Returns the launcher whose environment variables, all that JAX reads of it, made JAX raise
    this error; "" for other errors."""
    launchers = {"Slurm": clusters.SlurmCluster, "Open MPI": clusters.OmpiCluster}
    return next((name for name, cluster in launchers.items() if _raised_by(cluster, error)), "")


def _only_one_on_its_host() -> bool:
    """Whether Open MPI or Slurm started no other process on this host."""
    if (on_host := os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")) is not None:
        return on_host == "1"
    # Each node of a step has at least one of its tasks.
    nodes = os.environ.get("SLURM_STEP_NUM_NODES")
    return nodes is not None and nodes == os.environ.get("SLURM_NTASKS")


def _is_shell_of_an_allocation() -> bool:
    """Whether this is the one task of the shell that `salloc` opens on a node. Its SLURM_NTASKS is
    the allocation's (srun --preserve-env), whose other tasks nobody has started."""
    return (
        os.environ.get("SLURM_STEP_NUM_TASKS") == "1"
        and clusters.SlurmCluster.is_env_present()
        and not clusters.OmpiCluster.is_env_present()  # by mpirun from that shell
    )


def _sees_only_its_own_gpus(devices: Sequence[int] | None) -> bool:
    """Whether Slurm (--gpus-per-task, --gpu-bind) or a script shows this process only its own GPUs:
    numbered from 0, so that `devices`, its number on the host, names none of them, or only one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible or not devices:
        return False
    count = len(visible.split(","))
    per_task = os.environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]  # also of a100:2
    return count <= max(devices) or per_task == str(count)


def _unused_gpus(tasks: int) -> str:
    """Says so if Slurm's nodes have more GPUs than tasks, which use one each; "" otherwise."""
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "")
    nodes = os.environ.get("SLURM_STEP_NUM_NODES", "")
    if not (on_node.isdigit() and nodes.isdigit() and tasks < int(on_node) * int(nodes)):
        return ""
    return (
        f"{tasks} tasks use one GPU each of {int(on_node) * int(nodes)}; with srun "
        "--ntasks-per-node=1 one task uses all GPUs of its node"
    )


def _flags(number: str = "I", count: str = "N") -> str:
    """Advice for processes that JAX does not detect."""
    return (
        "one process per host uses all its devices, and several hosts need --distributed."
        f"coordinator HOST:PORT --distributed.process_id {number} --distributed.num_processes "
        f"{count}"
    )


def _sign_of_others() -> str:
    """Returns the variable that shows that a launcher started other processes too, and how they
    join; "" if none."""
    for name, number, count in _LAUNCHERS:
        value = os.environ.get(name, "")
        # libtpu writes a sentence there on machines without TPUs.
        listed = "," in value and " " not in value
        least = 1 if name == "JOB_COMPLETION_INDEX" else 2  # it is a number, not a count
        if listed or (value.isdigit() and int(value) >= least):
            srun = "start it by srun; or " if name == "SLURM_NTASKS" else ""
            return f"{name} is {printable(value)}; {srun}{_flags(number, count)}"
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        return f"JAX_COORDINATOR_ADDRESS is {printable(address)}; {_flags()}"
    return ""


def process() -> int:
    """The number of this process; 0 if alone. Unlike JAX's, it starts no backend."""
    return distributed.global_state.process_id if client() is not None else 0


def processes() -> int:
    """The number of all processes; 1 if alone. Unlike JAX's, it starts no backend."""
    return distributed.global_state.num_processes if client() is not None else 1


def client() -> Any:
    """JAX's client for the cluster's key-value store and barriers; None outside a cluster."""
    return distributed.global_state.client


def coordinator_address() -> str:
    """HOST:PORT of process 0, as all processes of the cluster know it."""
    return cast(str, distributed.global_state.coordinator_address)


def warn(text: str) -> None:
    """Prints a warning, in process 0 for all."""
    if jax.process_index() == 0:
        print(f"warning: {text}", file=sys.stderr, flush=True)


def barrier(name: str) -> None:
    """Waits, for a day at most, until every process has called this with the same name.

    Not a collective: gloo's wait only 30 seconds, and one process may compile that much longer than
    another.
    """
    if jax.process_count() > 1:
        client().wait_at_barrier(name, timeout_in_ms=WAIT_MILLISECONDS)


def first_then_others(work: Callable[[str | None], T], encode: Callable[[T], str]) -> T:
    """Runs `work` in process 0, then in the others with its message.

    All processes call this in the same order.

    Args:
      work: takes None in process 0, and in the others the encoded result of process 0.
      encode: makes the message to the others from process 0's result.

    Returns:
      This process's result, once all processes have theirs.

    Raises:
      Exception: whatever `work` raises in this process.
      UserError, TransientError: with the message of `work`'s error in another process.
    """
    if jax.process_count() == 1:
        return work(None)
    key = f"call {next(_calls)}"
    if jax.process_index() == 0:
        try:
            result = work(None)
        except BaseException as error:
            client().key_value_set(key, encoded_error(error))
            raise
        client().key_value_set(key, json.dumps({"result": encode(result)}))
    else:
        message = json.loads(client().blocking_key_value_get(key, WAIT_MILLISECONDS))
        if "code" in message:
            raise decoded_error(message)
        try:
            result = work(message["result"])
        except Exception as error:
            client().key_value_set(f"{key} failed/{jax.process_index()}", encoded_error(error))
            barrier(key)
            raise
    barrier(key)
    for _, failure in client().key_value_dir_get(f"{key} failed"):
        raise decoded_error(json.loads(failure))
    return result


def exchange(value: Any) -> list[Any]:
    """Returns every process's argument, in order; JSON values of at most some kilobytes each."""
    if jax.process_count() == 1:
        return [value]
    key = f"call {next(_calls)}"
    client().key_value_set(f"{key}/{jax.process_index()}", json.dumps(value))
    return [
        json.loads(client().blocking_key_value_get(f"{key}/{number}", WAIT_MILLISECONDS))
        for number in range(jax.process_count())
    ]


def require_same(values: Mapping[str, Any], error: type[UserError] = UserError) -> None:
    """Returns if all processes call this with equal values (by name, valid in JSON).

    Raises:
      error: in every process; names a process and its first difference from process 0.
    """

    def compare(encoded: str | None) -> None:
        """Compares with the values of process 0, whose `encoded` is None."""
        if encoded is None:
            return
        expected, found = json.loads(encoded), json.loads(json.dumps(values))
        for name in {**expected, **found}:
            if found.get(name) != expected.get(name):
                raise error(
                    f"process {jax.process_index()}: {name} is {found.get(name)!r} there and "
                    f"{expected.get(name)!r} in process 0; all processes need the same code, "
                    "recipe, flags, model and data"
                )

    first_then_others(compare, lambda _: json.dumps(values))


def encoded_error(error: BaseException, prefix: str = "") -> str:
    """An error of this process for the others: its exit code and message."""
    message = f"{prefix}{str(error) or type(error).__name__}"
    return json.dumps(
        {"code": outcome_of(error).code, "message": " ".join(message.split())[:MAX_MESSAGE]}
    )


def decoded_error(failure: Mapping[str, Any]) -> UserError:
    """The error that ends this process on another one's message."""
    return error_with(failure["code"], printable(failure["message"]))


@contextlib.contextmanager
def _at_most(seconds: float, message: str) -> Iterator[None]:
    """Ends this process with TRY_AGAIN and an error line if the block takes longer."""

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
    _reach_without_proxy(arguments["coordinator_address"])
    # JAX's handler of SIGTERM replaces ours and only notes the signal: `trainer.run.notices`
    # installs it when training begins, and an earlier SIGTERM ends the process at once.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        **arguments,
    )
    if distributed.global_state.num_processes > 1:
        # Gloo, through which CPUs communicate, looks up each process by its machine's name.
        if "cpu" in (cast(Any, jax.config).jax_platforms or "cpu"):
            _require_known(socket.gethostname(), "this machine")
        before_the_end(end_others)
        threading.Thread(
            target=_end_with_others, name=_end_with_others.__name__, daemon=True
        ).start()


def _reach_without_proxy(address: str) -> None:
    """Keeps gRPC, through which JAX connects the processes, from using the proxy in https_proxy or
    http_proxy: many clusters set one for downloads, and it does not lead back into the cluster."""
    jax.config.update("jax_check_proxy_envs", False)  # JAX's advice to unset them
    names = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
    others = next((os.environ[name] for name in names if os.environ.get(name)), "")
    host = address.rpartition(":")[0].strip("[]")
    listed = ",".join(filter(None, (others, host)))
    os.environ["no_grpc_proxy"] = listed  # noqa: SIM112 - gRPC reads no other spelling


def _failure() -> dict[str, Any] | None:
    """The message of the first process that failed alone."""
    try:
        return json.loads(client().key_value_try_get(_FAILURE))
    except Exception:  # not found; or the cluster has ended, which the caller reports
        return None


def first_failure() -> Outcome | None:
    """The outcome by which the first failed process ends all; None if none failed, or the cluster
    is gone."""
    if (failure := _failure()) is None:
        return None
    # A permanent error or a signal keeps its code everywhere; a restart may cure any other error.
    code = failure["code"] if failure["code"] in (WRONG_INPUT, STOPPED, TERMINATED) else TRY_AGAIN
    return Outcome(code, printable(failure["message"]))


def leave_others(error: BaseException, code: int) -> None:
    """Reports this process's error to the others, which ends them, and exits with a code.

    JAX would wait for them in vain and then abort. A process that has joined no others is
    unaffected.
    """
    if _report_failure(encoded_error(error, f"process {process()} of {processes()} failed: ")):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_others(code: int, line: str) -> None:
    """Ends the other processes, if any, when a signal ends this one without a save."""
    message = f"process {process()} of {processes()}: {line}"
    _report_failure(json.dumps({"code": code, "message": message}))


def end_now(line: str) -> None:
    """Prints why and ends all processes at once, with the code TRY_AGAIN; callable from any
    thread."""
    print(f"error: {line}", file=sys.stderr, flush=True)
    end_others(TRY_AGAIN, line)
    os._exit(TRY_AGAIN)


def end_all(message: str) -> None:
    """Tells the others that all are stalled: each prints its stacks and ends with TRY_AGAIN."""
    _report_failure(json.dumps({"code": TRY_AGAIN, "message": message, "stacks": True}))


def _report_failure(failure: str) -> bool:
    """Gives the others, who then end, this process's failure in JSON; returns whether there are
    others."""
    if processes() == 1:
        return False
    _leaving.set()
    # All may have the same error: the first one to report it is enough.
    with contextlib.suppress(Exception):
        client().key_value_set(_FAILURE, failure)
    if process() == 0:
        # Gives the others time to read it: this process holds the key-value store.
        time.sleep(4 * _LOOK_SECONDS)
    return True


def _end_with_others() -> None:
    """Ends this process, wherever it waits, when another one has failed; see `first_failure`."""
    while not _leaving.wait(_LOOK_SECONDS):
        # After the second wait, since this process may be about to report the same error.
        if (failure := first_failure()) is not None and not _leaving.wait(_LOOK_SECONDS):
            if (_failure() or {}).get("stacks"):
                faulthandler.dump_traceback(file=2, all_threads=True)
            print(f"error: {failure.message}", file=sys.stderr, flush=True)
            os._exit(failure.code)
