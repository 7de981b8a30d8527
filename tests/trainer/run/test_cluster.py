"""A cluster that JAX detects is joined, and its coordinator listens on the interface of its
address."""

import pytest

from trainer.config.schema import DistributedConfig
from trainer.run import cluster


@pytest.fixture
def joined(monkeypatch):
    """The arguments of jax.distributed.initialize."""
    calls = []
    monkeypatch.setattr(cluster.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(cluster.jax.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(
        cluster.jax.distributed, "initialize", lambda **arguments: calls.append(arguments)
    )
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return calls


def in_slurm(monkeypatch, node):
    values = {"JOB_ID": "7", "STEP_NODELIST": node, "NTASKS": "2", "PROCID": "0", "LOCALID": "0"}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


@pytest.mark.parametrize(
    ("node", "bound"),
    [("127.0.0.1", "127.0.0.1:61447"), ("nowhere.invalid,other", "[::]:61447")],
)
def test_a_detected_coordinator_listens_on_its_own_interface(joined, monkeypatch, node, bound):
    in_slurm(monkeypatch, node)
    cluster.join(DistributedConfig(), simulated=False, folder=None)
    [call] = joined
    assert call["coordinator_address"] == f"{node.split(',')[0]}:61447"
    assert call["coordinator_bind_address"] == bound
    assert not {"num_processes", "process_id", "local_device_ids"} & call.keys()  # JAX detects


def test_jaxs_environment_variable_decides_where_the_coordinator_listens(joined, monkeypatch):
    in_slurm(monkeypatch, "127.0.0.1")
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0:61447")
    cluster.join(DistributedConfig(), simulated=False, folder=None)
    assert joined[0]["coordinator_bind_address"] == "0.0.0.0:61447"


def test_a_single_process_joins_nothing(joined):
    cluster.join(DistributedConfig(), simulated=False, folder=None)
    assert not joined
