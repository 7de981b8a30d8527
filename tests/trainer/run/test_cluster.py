"""A cluster that JAX detects is joined: its coordinator listens on the interface of its address, and
a host's only process uses all GPUs."""

import functools
import os
import re
import socket
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from data.errors import TransientError, UserError
from scripts.launch_local import free_port
from trainer.config.schema import DistributedConfig
from trainer.run import cluster, rendezvous
from trainer.run.outcome import WRONG_INPUT, outcome_of
from trainer.run.rendezvous import meet


@pytest.fixture
def joined(monkeypatch):
    """The arguments of jax.distributed.initialize."""
    calls = []
    monkeypatch.setattr(cluster.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(cluster.jax.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "meet", lambda *arguments, **options: None)
    monkeypatch.setattr(
        cluster.jax.distributed, "initialize", lambda **arguments: calls.append(arguments)
    )
    monkeypatch.setenv("no_grpc_proxy", "")  # `join` sets it
    for name in ("ADDRESS", "BIND_ADDRESS", "PORT"):
        monkeypatch.delenv(f"JAX_COORDINATOR_{name}", raising=False)
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
    return calls


def in_slurm(monkeypatch, node, **others):
    values = {"JOB_ID": "7", "STEP_NODELIST": node, "NTASKS": "2", "PROCID": "0", "LOCALID": "0"}
    for name, value in {**values, **others}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def join():
    cluster.join(DistributedConfig(), simulated=False, run="run")


@pytest.mark.parametrize(
    ("node", "bound"),
    # The second is no interface of this machine, as behind a load balancer.
    [("127.0.0.1", "127.0.0.1:61447"), ("192.0.2.7,other", "[::]:61447")],
)
def test_a_detected_coordinator_listens_on_its_own_interface(joined, monkeypatch, node, bound):
    in_slurm(monkeypatch, node)
    join()
    [call] = joined
    assert call["coordinator_address"] == f"{node.split(',')[0]}:61447"
    assert call["coordinator_bind_address"] == bound
    assert (call["num_processes"], call["process_id"]) == (2, 0)


def test_a_detected_coordinators_name_is_awaited(joined, monkeypatch, capsys):
    """A pod has a name once it runs; JAX would ask for it in silence."""
    in_slurm(monkeypatch, "nowhere.invalid,other")
    pauses = []
    monkeypatch.setattr(cluster.time, "sleep", pauses.append)
    monkeypatch.setattr(cluster.time, "monotonic", lambda: 200.0 * len(pauses))
    problem = "the coordinator's host has the name nowhere.invalid, which this machine cannot"
    with pytest.raises(TransientError, match=re.escape(problem)):
        join()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" resolve ")[0] for line in lines] == [problem]
    assert not joined and len(pauses) == 2
    known = iter([socket.gaierror(), []])

    def look_up(*_):
        if isinstance(answer := next(known), OSError):
            raise answer
        return answer

    monkeypatch.setattr(cluster.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(cluster, "bind_address", lambda address: address)
    join()
    assert joined


def test_a_machine_that_does_not_know_its_own_name_says_so(monkeypatch):
    """Gloo would end with a traceback."""
    monkeypatch.setattr(cluster.jax.distributed, "initialize", lambda **_: None)
    monkeypatch.setattr(cluster.distributed.global_state, "num_processes", 2)
    monkeypatch.setattr(cluster.socket, "gethostname", lambda: "nowhere.invalid")
    monkeypatch.setenv("no_grpc_proxy", "")
    monkeypatch.setattr(cluster, "_end_with_others", lambda: None)
    monkeypatch.setattr(cluster, "before_the_end", lambda tell: None)
    with pytest.raises(UserError, match=r"this machine has the name nowhere\.invalid, which"):
        cluster._initialize(coordinator_address="127.0.0.1:1234")
    platforms = cluster.jax.config.jax_platforms
    cluster.jax.config.update("jax_platforms", "cuda")  # without Gloo
    try:
        cluster._initialize(coordinator_address="127.0.0.1:1234")
    finally:
        cluster.jax.config.update("jax_platforms", platforms)


PROXY = """
import sys
from trainer import entry
from trainer.config.schema import DistributedConfig
from trainer.run import cluster

cluster.JOIN_SECONDS = 10
config = DistributedConfig(coordinator=sys.argv[1], process_id=0, num_processes=1)
sys.exit(entry.run(lambda: cluster.join(config, simulated=True, run="run")))
"""


def test_processes_join_without_the_clusters_proxy(repository):
    """gRPC would connect by it, where the others are not."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-c", PROXY, f"127.0.0.1:{free_port()}"],
        cwd=repository,
        env={**os.environ, **proxies, "no_proxy": "example.org"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_jaxs_environment_variable_decides_where_the_coordinator_listens(joined, monkeypatch):
    in_slurm(monkeypatch, "127.0.0.1")
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0:61447")
    join()
    assert joined[0]["coordinator_bind_address"] == "0.0.0.0:61447"


def test_a_single_process_joins_nothing(joined, monkeypatch):
    """Nor does a step's only task: of two commands in its shell, the second would be a second
    process 0, and end the first."""
    join()
    assert not joined
    in_slurm(monkeypatch, "nowhere.invalid", NTASKS="1")
    join()
    assert not joined
    # An indexed Kubernetes job may also have more completions than parallel pods.
    in_slurm(monkeypatch, "127.0.0.1", NTASKS="1", PROCID="1")
    with pytest.raises(UserError, match="this process has number 1 in a cluster of 1; one process"):
        join()
    assert not joined


@pytest.mark.parametrize(
    ("tasks", "nodes", "devices", "unused"),
    [
        ("2", "2", None, ""),
        ("16", "2", [3], ""),
        ("4", "2", [3], "4 tasks use one GPU each of 16; with srun --ntasks-per-node=1"),
    ],
)
def test_slurms_only_task_on_a_node_uses_all_of_its_gpus(
    joined, monkeypatch, capsys, tasks, nodes, devices, unused
):
    """JAX gives one GPU to each task."""
    in_slurm(
        monkeypatch, "127.0.0.1", NTASKS=tasks, STEP_NUM_NODES=nodes, LOCALID="3", GPUS_ON_NODE="8"
    )
    join()
    assert joined[0]["local_device_ids"] == devices
    stderr = capsys.readouterr().err
    assert unused in stderr and ("one GPU each" in stderr) == bool(unused)


@pytest.mark.parametrize(("on_host", "devices"), [("1", None), ("2", [1])])
def test_open_mpis_only_process_on_a_host_uses_all_of_its_gpus(
    joined, monkeypatch, on_host, devices
):
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1314521088.0;tcp://127.0.0.1:34911")
    values = {"SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_SIZE": on_host}
    for name, value in values.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    join()
    assert joined[0]["local_device_ids"] == devices


@pytest.mark.parametrize(
    ("visible", "per_task", "devices"),
    [
        (None, "1", [3]),
        ("0", "1", None),  # srun --gpus-per-task=1
        ("3", None, None),  # a script that sets it to the local rank
        ("GPU-6a7c", None, None),
        ("0,1,2,3", "4", None),  # srun --gpus-per-task=4
        ("0,1,2,3", "a100:4", None),
        ("0,1,2,3", "1", [3]),  # srun --gpus-per-task=1 --gpu-bind=none
    ],
)
def test_a_task_that_sees_only_its_own_gpus_uses_all_of_them(
    joined, monkeypatch, visible, per_task, devices
):
    """JAX takes the GPU with the task's number on its node, which such a task does not see: "no
    supported devices found for platform CUDA" (github.com/jax-ml/jax/issues/28194)."""
    in_slurm(monkeypatch, "127.0.0.1", NTASKS="8", STEP_NUM_NODES="2", LOCALID="3")
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("SLURM_GPUS_PER_TASK", per_task)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    join()
    assert joined[0]["local_device_ids"] == devices


def test_the_shell_of_an_allocation_waits_for_nobody(joined, monkeypatch, capsys):
    """salloc's shell on a node is a step of one task that keeps the allocation's SLURM_NTASKS: by
    slurm.conf's default, InteractiveStepOptions="--interactive --preserve-env --pty $SHELL"."""
    in_slurm(monkeypatch, "127.0.0.1", NTASKS="4", STEP_NUM_TASKS="1", STEP_NUM_NODES="1")
    join()
    assert not joined
    assert "trains alone, but SLURM_NTASKS is 4; start it by srun; or" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    join()
    assert joined.pop()["num_processes"] == 4
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1314521088.0;tcp://127.0.0.1:34911")
    for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.setenv(
            f"OMPI_COMM_WORLD_{name}", {"SIZE": "2", "LOCAL_SIZE": "2"}.get(name, "1")
        )
    join()
    assert joined[0]["num_processes"] == 2


def test_given_devices_are_kept(joined, monkeypatch):
    """JAX reads them."""
    in_slurm(monkeypatch, "127.0.0.1", STEP_NUM_NODES="1", GPUS_ON_NODE="8")
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,3")
    join()
    assert joined.pop()["local_device_ids"] is None
    monkeypatch.setenv("SLURM_NTASKS", "1")
    given = {}
    monkeypatch.setattr(cluster.jax.config, "update", given.__setitem__)
    join()
    assert not joined and set(given.values()) == {"2,3"} and "jax_cuda_visible_devices" in given


def test_a_detected_cluster_whose_processes_do_not_come_is_one_line(joined, monkeypatch, capsys):
    """JAX waits silently for five minutes and aborts with a C++ stack and code 134. A process of
    another step of the same job, which JAX would take, is told to go elsewhere."""
    port = free_port()
    in_slurm(monkeypatch, "127.0.0.1", NTASKS="4")
    monkeypatch.setenv("JAX_COORDINATOR_PORT", str(port))
    monkeypatch.setattr(cluster, "meet", functools.partial(meet, seconds=4))
    monkeypatch.setattr(rendezvous, "REPORT_SECONDS", 1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join)
        with pytest.raises(
            TransientError,
            match="trains the run run, and a process of the run b reached it; each needs its own p",
        ):
            meet(f"127.0.0.1:{port}", 1, 4, 20, run="b", words=cluster.DETECTED)
        with pytest.raises(TransientError) as caught:
            first.result()
    assert str(caught.value) == (
        f"processes 1, 2, 3 of 4 did not reach process 0 at 127.0.0.1:{port} within 4 s; start all "
        "of them together"
    )
    assert "process 0: processes 1, 2, 3 of 4 missing; waiting for up to" in capsys.readouterr().err
    assert not joined


def test_a_port_that_a_detected_cluster_cannot_have_is_one_line(joined, monkeypatch):
    """JAX raises "Failed to start RPC server"."""
    in_slurm(monkeypatch, "127.0.0.1")
    monkeypatch.setattr(cluster, "meet", meet)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("JAX_COORDINATOR_PORT", str(port))
        with pytest.raises(
            TransientError,
            match=f"^process 0: cannot listen at the detected address 127.0.0.1:{port} .Address "
            "already in use.*; JAX_COORDINATOR_PORT sets another port, the same for all processes$",
        ):
            join()
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0")
    with pytest.raises(
        UserError, match=r"^JAX_COORDINATOR_BIND_ADDRESS: found 0\.0\.0\.0, needs HOST:PORT"
    ):
        join()
    assert not joined


VISIBLE = """
from jax._src import xla_bridge
from trainer.config.schema import DistributedConfig
from trainer.run import cluster

cluster.join(DistributedConfig(), False, "run")
print(cluster.processes(), xla_bridge.CUDA_VISIBLE_DEVICES.value)
"""


def test_jax_itself_sees_all_gpus_in_a_step_of_one_task(repository):
    step = {"JOB_ID": "7", "STEP_NODELIST": "127.0.0.1", "STEP_NUM_NODES": "1", "GPUS_ON_NODE": "8"}
    variables = {**step, "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}
    done = subprocess.run(
        [sys.executable, "-c", VISIBLE],
        cwd=repository,
        env={**os.environ, **{f"SLURM_{name}": value for name, value in variables.items()}},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "1 all\n", done.stderr


KUBERNETES = """
class config:
    @staticmethod
    def load_incluster_config():
        raise RuntimeError("Service token file does not exist.\\nSee the documentation.")
"""


@pytest.mark.parametrize("indexed", [False, True])
def test_a_cluster_that_cannot_be_read_is_one_line(joined, tmp_path, monkeypatch, capsys, indexed):
    (tmp_path / "kubernetes.py").write_text(KUBERNETES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    if indexed:
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
        with pytest.raises(
            TransientError, match=r"could not be found \(Service token .*N; a process"
        ):
            join()
    else:
        join()
        line = capsys.readouterr().err
        assert "trains alone, since its Kubernetes job could not be read (Service token" in line
        assert "--distributed.num_processes N" in line and line.count("\n") == 1
    monkeypatch.delitem(sys.modules, "kubernetes")
    assert not joined


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_JOB_ID": "x7"}, r"Slurm's variables .*\(ValueError: .*'x7'\); .*N; a process"),
        (
            {"OMPI_MCA_orte_hnp_uri": "1314521088.0;usock"},
            r"Open MPI's variables .*\(RuntimeError: Could not parse coordinator IP",
        ),
        (
            {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://127.0.0.1:34911"},
            r"Open MPI's variables .*\(KeyError: 'OMPI_COMM_WORLD_SIZE'\)",
        ),
    ],
    ids=["Slurm", "Open MPI", "variable missing"],
)
def test_variables_that_no_restart_would_mend_are_a_users_error(
    joined, monkeypatch, variables, words
):
    if "SLURM_JOB_ID" in variables:
        in_slurm(monkeypatch, "127.0.0.1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words) as caught:
        join()
    assert outcome_of(caught.value).code == WRONG_INPUT and not joined


def test_a_pod_needs_no_package_for_kubernetes(joined, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with warnings.catch_warnings(record=True) as warned:
        join()
    assert not joined and not warned and capsys.readouterr().err == ""
