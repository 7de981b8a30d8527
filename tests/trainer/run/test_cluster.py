"""A cluster that JAX detects is joined: its coordinator listens on the interface of its address, and
a host's only process uses all GPUs."""

import os
import re
import socket
import subprocess
import sys
import warnings

import pytest

from data.errors import TransientError, UserError
from scripts.launch_local import free_port
from trainer.config.schema import DistributedConfig
from trainer.run import cluster
from trainer.run.outcome import WRONG_INPUT, outcome_of


@pytest.fixture
def joined(monkeypatch):
    """The arguments of jax.distributed.initialize."""
    calls = []
    monkeypatch.setattr(cluster.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(cluster.jax.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(
        cluster.jax.distributed, "initialize", lambda **arguments: calls.append(arguments)
    )
    monkeypatch.setenv("no_grpc_proxy", "")  # `join` sets it
    names = "COORDINATOR_ADDRESS", "COORDINATOR_BIND_ADDRESS", "LOCAL_DEVICE_IDS"
    for name in names:
        monkeypatch.delenv(f"JAX_{name}", raising=False)
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
    in_slurm(monkeypatch, "127.0.0.1", NTASKS="1", PROCID="1")  # JAX refuses it
    join()
    assert joined


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
