"""What every test shares: 8 simulated CPU devices, and a folder kept between runs."""

import os
import pathlib
import signal

# Before jax is imported: a GPU or TPU on the machine must not change what is tested, and two processes that load the
# TPU compiler (workers of the tests, scripts they start) abort each other on its lock file otherwise.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
CACHE = pathlib.Path(os.environ.get("LONGSTRIPE_CACHE") or pathlib.Path.home() / ".cache" / "longstripe")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
# Programs of several CPU devices must not come back from a cache: see trainer.mesh.simulate.
jax.config.update("jax_enable_compilation_cache", False)

# What runs in a shell's background ignores Ctrl-C, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """The project's root."""
    return REPOSITORY


@pytest.fixture(scope="session")
def cache() -> pathlib.Path:
    """A folder kept between runs, for what is dear to make: models."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return CACHE
