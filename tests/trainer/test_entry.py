"""Common to all commands: where compiled programs are kept, and what is printed when memory runs
out."""

import errno
import importlib
import logging
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.errors import UserError
from eval import adapters, in_context
from planning.topology import topology_devices
from trainer import entry
from trainer.huggingface.table import check_numbers
from trainer.run import cluster

PROGRAM = """
import sys
from trainer import entry

entry.keep_compiled(sys.argv[1] if sys.argv[1:] else None)
import jax

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: x + 1)(1.0).block_until_ready()
"""


@pytest.mark.parametrize(
    ("recipe", "variables", "kept"),
    [
        ("~/shared", {"JAX_COMPILATION_CACHE_DIR": "~/jax"}, "shared"),
        (None, {"JAX_COMPILATION_CACHE_DIR": "~/jax"}, "jax"),
        (None, {}, "own"),
    ],
    ids=["by the recipe", "by JAX's variable", "by ours"],
)
def test_compiled_programs_are_kept_where_configured(tmp_path, repository, recipe, variables, kept):
    subprocess.run(
        [sys.executable, "-c", PROGRAM, *([recipe] if recipe else [])],
        cwd=repository,
        check=True,
        env={**os.environ, "LONGSTRIPE_CACHE": "~/own", "HOME": str(tmp_path), **variables},
    )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path).parts[0] for path in files} == {kept}


def test_without_a_home_folder_one_line_says_what_would_work(monkeypatch):
    """As in a container with a random user, who is in no list of users."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("LONGSTRIPE_CACHE", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    with pytest.raises(UserError, match=r"^LONGSTRIPE_CACHE, .* HOME is not set, so ~ is no"):
        entry.keep_compiled()


def too_large_for_this_machine():
    jax.block_until_ready(jax.jit(lambda: jnp.zeros(1 << 44))())


def too_large_for_a_chip():
    sharding = jax.sharding.SingleDeviceSharding(topology_devices("v5e:2x2")[0])
    x = jax.ShapeDtypeStruct(
        (60_000, 60_000), jnp.float32, sharding=sharding
    )  # 13.4 GiB, and their product as much again
    jax.jit(lambda x: jnp.sin(x) @ x.T @ jnp.cos(x)).lower(x).compile()


@pytest.mark.parametrize(
    ("work", "needed"),
    [
        (too_large_for_this_machine, f"{4 << 44} bytes"),
        (too_large_for_a_chip, "15.75G"),
    ],
)
def test_out_of_memory_is_one_line_with_remedies(work, needed, capfd):
    """The messages of the CPU's runtime and of the TPU's compiler."""
    with pytest.raises(jax.errors.JaxRuntimeError):
        work()
    capfd.readouterr()
    assert entry.run(work) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith("error: out of memory: ")
    for word in (needed, "memory.remat", "chunks", "mesh.sequence", "python -m scripts.plan"):
        assert word in lines[0]


def test_the_exit_code_is_that_of_the_work_if_it_returns_one():
    assert [entry.run(lambda result=result: result) for result in (None, [3], 0, 3)] == [0, 0, 0, 3]


@pytest.mark.parametrize("library", ["gcsfs", "fsspec.prefetcher"])
def test_stores_libraries_log_no_errors_that_they_raise(library, caplog):
    def work():
        logging.getLogger(library).warning("slow")
        logging.getLogger(library).error("refused, 503")
        raise UserError("gs://bucket/a: refused, 503")

    assert entry.run(work) == 2 and [record.message for record in caplog.records] == ["slow"]


def test_other_errors_keep_their_traceback():
    def broken():
        raise RuntimeError("a mistake of ours")

    with pytest.raises(RuntimeError, match="a mistake of ours"):
        entry.run(broken)


def test_other_processes_are_notified_of_every_error(monkeypatch):
    def broken():
        raise KeyError("a mistake of ours")

    notified = []
    monkeypatch.setattr(cluster, "client", lambda: object())
    monkeypatch.setattr(
        cluster, "leave_others", lambda error, code: notified.append((type(error), code))
    )
    with pytest.raises(KeyError):
        entry.run(broken)
    assert notified == [(KeyError, 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["Unable to allocate 9 TiB"],
            "error: out of memory: Unable to allocate 9 TiB; a host with more memory",
        ),
        ([], "error: out of memory: the host has no more; a host with more memory"),
    ],
)
def test_a_host_without_memory_is_one_line(words, message, capsys):
    def work():
        raise MemoryError(*words)

    assert entry.run(work) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(
    "command", ["scripts.inspect_data", "eval.line_retrieval", "scripts.loss_by_position"]
)
def test_ctrl_c_during_a_commands_imports_is_one_line(command, tmp_path, repository):
    """A numpy that sends it comes first on the path."""
    (tmp_path / "numpy.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", command],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_an_error_is_one_line_of_bounded_length(capfd):
    def refuse():
        raise UserError("train.steps: found a\nb" + "x" * 10**6 + ", expects int")

    assert entry.run(refuse) == 2
    stderr = capfd.readouterr().err
    assert stderr.startswith("error: train.steps: found a bx") and stderr.endswith(
        "x, expects int\n"
    )
    assert stderr.count("\n") == 1 and len(stderr) < 5000


def test_a_warning_is_one_line_without_its_place_in_the_code(capfd):
    show = warnings.showwarning
    assert entry.run(lambda: warnings.warn("config.json:\na field", stacklevel=1)) == 0
    assert capfd.readouterr().err == "warning: config.json: a field\n"
    assert warnings.showwarning is show


@pytest.mark.parametrize("process", [0, 1])
def test_one_of_several_processes_prints_a_warning(process, monkeypatch, capfd):
    """Of numbers, such as an infinity in its own part of a tensor, each one that has them."""
    monkeypatch.setattr(cluster, "client", lambda: object())
    monkeypatch.setattr(cluster, "process", lambda: process)

    def work():
        warnings.warn("a field", stacklevel=1)
        check_numbers("x", np.array([np.inf]))

    assert entry.run(work) == 0
    field, tensor = capfd.readouterr().err.split("warning: tensor x holds infinity")
    assert tensor and field == ("warning: a field\n" if process == 0 else "")


def test_ctrl_c_that_a_library_turns_into_another_error_stops_the_command(capsys):
    def work():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise ImportError("initialization failed") from interrupt

    assert (entry.run(work), *capsys.readouterr()) == (130, "", "stopped\n")


def test_ctrl_c_is_one_line_even_when_a_destructor_fails(capsys):
    class HalfMade:
        def __del__(self):
            raise AttributeError("no attribute, since __init__ did not end")

    def interrupted():
        half_made = HalfMade()
        raise KeyboardInterrupt(half_made)

    hook = sys.unraisablehook
    assert entry.run(interrupted) == 130
    assert capsys.readouterr().err == "stopped\n" and sys.unraisablehook is hook


def test_a_full_disk_is_reported_with_the_commands_output(tmp_path, capsys):
    """Python's error for a full disk in the middle of a file names no file."""

    def work():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert entry.run(work, tmp_path / "out") == 75
    assert capsys.readouterr().err.startswith(
        f"error: {tmp_path / 'out'}: No space left on device; with more room"
    )


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("line_retrieval", ["--lines", "4"]),
        ("needle", ["--tokens", "64"]),
        ("ruler", ["--tokens", "64"]),
        ("coreference", ["--tokens", "64"]),
        ("in_context", []),
        ("harness", ["--tasks", "x"]),
    ],
)
def test_every_evaluation_names_its_output(name, arguments, tmp_path, monkeypatch, capsys):
    module = importlib.import_module(f"eval.{name}")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(adapters, "each_adapter", full)
    monkeypatch.setattr(in_context, "evaluate", full)
    assert module.main(["--checkpoint", "x", "--output", str(tmp_path / "out"), *arguments]) == 75
    assert str(tmp_path / "out") in capsys.readouterr().err


@pytest.mark.parametrize("joined", [True, False])
def test_a_lost_connection_is_one_line_with_several_processes(joined, monkeypatch, capsys):
    """Process 1 of two was killed during a gather."""

    def work():
        raise jax.errors.JaxRuntimeError(
            "UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer\nat x"
        )

    monkeypatch.setattr(cluster, "client", lambda: object() if joined else None)
    if not joined:
        with pytest.raises(jax.errors.JaxRuntimeError):
            entry.run(work)
        return
    assert entry.run(work) == 75
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert stderr.startswith(
        "error: the connection to another process was lost (UNKNOWN: Gloo AllGather"
    )
