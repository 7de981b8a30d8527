"""Fixtures for all tests: 8 simulated CPU devices, a folder kept between runs, a small run and a
small model."""

import contextlib
import fcntl
import gc
import os
import pathlib
import resource
import signal
from collections.abc import Iterator

from tests import quick_compiler

# Before jax is imported: tests must not use a GPU or TPU of the machine, and several processes must
# be able to load the TPU compiler, which would otherwise abort because of its lock file.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# XLA_FLAGS in the environment, even if empty, replaces these flags. It is removed below, before
# pytest-xdist starts its processes, so those get its value in another variable.
if "PYTEST_XDIST_WORKER" in os.environ and "TESTS_XLA_FLAGS" in os.environ:
    os.environ["XLA_FLAGS"] = os.environ["TESTS_XLA_FLAGS"]
FLAGS = os.environ.setdefault("XLA_FLAGS", quick_compiler.XLA_FLAGS)
os.environ["TESTS_XLA_FLAGS"] = FLAGS
# On several threads torch, which many tests compare with, may compute a function's first call to
# only a few digits (github.com/pytorch/pytorch/issues/188792). Two test files run at a time anyway.
os.environ["OMP_NUM_THREADS"] = "1"
CACHE = pathlib.Path(
    os.environ.get("LONGSTRIPE_CACHE") or pathlib.Path.home() / ".cache" / "longstripe"
)

import jax  # noqa: E402
import pytest  # noqa: E402

from tests import gcs_server, s3_server, small_model, small_run  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
# Where each operation was called is recorded only for messages, and takes a sixth of the time of
# tracing.
jax.config.update("jax_traceback_in_locations_limit", 0)
# Compiled programs for several CPU devices must not be read from a cache: see
# trainer.mesh.simulate.
jax.config.update("jax_enable_compilation_cache", False)
# The CPU compiler has read its flags once its devices exist. The TPU compiler, which ends the
# process at an unknown flag, must not see them; runs started by tests get them from small_run.
jax.devices()
os.environ.pop("XLA_FLAGS")
small_run.XLA_FLAGS = FLAGS

# A shell lets background processes ignore Ctrl-C; the processes that tests start and interrupt
# would inherit this.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
pytest_plugins = ["tests.skips", "tests.share", "tests.errors"]


def pytest_collection_finish():
    """Makes Python collect cyclic garbage rarely: each collection walks through all loaded modules,
    and took a fifth of the time of tests that trace a model."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


PEAKS = pytest.StashKey[list[float]]()


def pytest_sessionfinish(session):
    """Sends this process's peak memory, in GiB, to the process that prints the summary (which may
    be this one)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = peak
    else:
        session.config.stash.setdefault(PEAKS, []).append(peak)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Records the peak memory of a pytest-xdist process, unless it died."""
    if "peak" in getattr(node, "workeroutput", {}):
        node.config.stash.setdefault(PEAKS, []).append(node.workeroutput["peak"])


def pytest_terminal_summary(terminalreporter, config):
    """Prints the peak memory of each test process; it excludes the processes of runs."""
    peaks = sorted(config.stash.get(PEAKS, []), reverse=True)
    terminalreporter.write_line(
        f"largest resident memory of each process: {', '.join(f'{peak:.2f}' for peak in peaks)} GiB"
    )


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_freed():
    """Frees a file's compiled programs and cyclic garbage; kept until the end, the programs would
    take several GiB."""
    yield
    jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """Returns the root folder of the project."""
    return REPOSITORY


@pytest.fixture(scope="session")
def cache() -> pathlib.Path:
    """Returns a folder that is kept between runs, for models that take long to make."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return CACHE


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory, repository, worker_id):
    """Returns the recipe of a very small run, shared by all test processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "small"
    with only_one_process(folder.with_suffix(".lock")):
        if not folder.exists():
            folder.mkdir()
            small_run.recipe(folder, repository)
    return folder / "recipe.yaml"


@pytest.fixture
def gcs(monkeypatch, tmp_path):
    """Returns an empty Google Cloud Storage on the loopback, which gs:// refers to in the test and
    in processes that it starts."""
    with gcs_server.Server() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path / "cache"))
        # Imported only now, since it reads the environment when it is imported.
        gcsfs = pytest.importorskip(
            "gcsfs", reason="gs:// needs gcsfs, which requirements-tpu.txt brings"
        )
        gcsfs.GCSFileSystem.clear_instance_cache()  # with listings of earlier tests' buckets
        yield running


@pytest.fixture
def s3(monkeypatch, tmp_path):
    """Returns an empty S3 on the loopback, like `gcs`."""
    with s3_server.Server() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("LONGSTRIPE_CACHE", str(tmp_path / "cache"))
        yield running


@pytest.fixture(params=["gs", "s3"])
def store_and_url(request):
    """Returns each kind of store in turn, empty, and the address of its bucket."""
    name = "gcs" if request.param == "gs" else "s3"
    return request.getfixturevalue(name), f"{request.param}://bucket"


@pytest.fixture(scope="session")
def whole_run(small_recipe, repository):
    """Returns the folder of that run, trained without interruption; tests copy what they change."""
    run = small_recipe.parent / "whole"
    with only_one_process(run.with_suffix(".lock")):
        if not run.exists():
            small_run.finish(small_run.start(repository, small_recipe, run), run)
    return run


@contextlib.contextmanager
def only_one_process(path: pathlib.Path) -> Iterator[None]:
    """Waits until no other process is in a block with this lock file."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory):
    """Returns a Hugging Face folder of a very small LLaMA."""
    return small_model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def saved_figures(monkeypatch) -> list:
    """Returns the figures that the test saves, as a growing list."""
    from matplotlib.figure import Figure

    figures: list = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, *args, **options: figures.append(figure) or save(figure, *args, **options),
    )
    return figures
