"""JAX's settings in the environment do not change what a seed draws, and runs record the others."""

import warnings

import jax
import numpy as np
import pytest

from data.errors import UserError
from trainer import entry
from trainer.config.schema import MeshConfig, RunConfig
from trainer.jax_settings import CHOSEN, FIXED, fix_random_numbers
from trainer.mesh import start_devices
from trainer.run import cluster, versions


@pytest.fixture
def setting(request):
    """Sets one of JAX's settings during a test, as a variable of the environment would."""

    def set_to(name, value):
        before = getattr(jax.config, name)
        request.addfinalizer(lambda: jax.config.update(name, before))
        jax.config.update(name, value)

    request.addfinalizer(versions.versions.cache_clear)
    return set_to


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("jax_default_prng_impl", "rbg"),
        ("jax_threefry_partitionable", False),
        ("jax_random_seed_offset", 7),
    ],
)
def test_a_seed_draws_the_same_numbers_under_all_settings(setting, name, other):
    def drawn():
        return np.asarray(jax.random.normal(jax.random.key(3), (4, 8)))

    assert len(FIXED) == 3
    config, expected = RunConfig(mesh=MeshConfig(simulate=8, fsdp=8)), drawn()
    setting(name, other)
    assert (drawn() != expected).any()
    with pytest.warns(RuntimeWarning, match=f"{name.upper()} is {other} and is not used: with"):
        start_devices(config)
    assert np.array_equal(drawn(), expected)
    with warnings.catch_warnings(action="error"):  # a later stage
        start_devices(config)


def test_each_process_says_that_its_setting_is_not_used(setting, monkeypatch, capfd):
    """It may be the only one with the variable, as on one machine of several."""
    monkeypatch.setattr(cluster, "client", lambda: object())
    monkeypatch.setattr(cluster, "process", lambda: 1)
    setting("jax_random_seed_offset", 7)
    assert entry.run(fix_random_numbers) == 0
    assert capfd.readouterr().err.startswith("warning: JAX_RANDOM_SEED_OFFSET is 7 and is not used")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_default_matmul_precision", "highest"),
        ("jax_enable_x64", True),
        ("jax_numpy_dtype_promotion", "strict"),
    ],
)
def test_settings_that_change_results_are_recorded_and_equal_in_all_processes(
    setting, monkeypatch, name, value
):
    assert len(CHOSEN) == 3
    versions.versions.cache_clear()
    recorded = versions.versions()
    assert not CHOSEN.keys() & recorded.keys()
    sent = []
    monkeypatch.setattr(cluster, "first_then_others", lambda work, encode: sent.append(encode(())))
    versions.require_same_code()  # as process 0
    setting(name, value)
    versions.versions.cache_clear()
    assert versions.difference(recorded) == f"{name} (none), now {value}"
    received = iter(sent)
    monkeypatch.setattr(cluster, "first_then_others", lambda work, encode: work(next(received)))
    message = f"{name.upper()} is {value!r} there and None in process 0; all processes need"
    with pytest.raises(UserError, match=message) as raised:
        versions.require_same_code()
    assert type(raised.value) is UserError  # no restart would mend it
