"""Several real processes on this machine train as one does; losing one ends the others, and the
next start resumes."""

import errno
import itertools
import os
import pathlib
import pty
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax._src.lib import _jax

import train
from data.batch import permute
from data.encode import EncodingRules
from data.errors import TransientError, UserError
from data.loader import Loader
from data.prepare import prepare
from data.prepared import Documents
from data.sources import Source, Sources
from data.tokenizer import Tokenizer
from model.attention.layout import permutation
from scripts import launch_local
from tests import small_run
from trainer.checkpoint import readers as checkpoint
from trainer.checkpoint import saving
from trainer.config.schema import DistributedConfig, MeshConfig
from trainer.mesh import batch_sharding, local_order, make_mesh, part_of_slices, simulate
from trainer.run import cluster
from trainer.run.outcome import outcome_of

# 2 processes with 2 devices each, and a program that compiles fast: twelve starts compile it.
SMALLER = ("--mesh.tensor", "1", "--mesh.simulate", "4")


@pytest.fixture(autouse=True)
def compiled_as_the_tests_programs(monkeypatch):
    """The launched processes compile with the tests' flags, like the runs that they are compared
    with."""
    monkeypatch.setenv("XLA_FLAGS", small_run.XLA_FLAGS)


def test_two_processes_train_as_one_and_one_resumes_from_their_checkpoint(
    whole_run, small_recipe, repository
):
    """4 devices in 2 processes, fsdp 2 x sequence 2, and 8 in one before and after; one of them
    prepares the data; process 1 is killed after the first checkpoint, and the next start after a
    few more steps, across an evaluation."""
    run = small_recipe.parent / "two processes"
    prepared, building = run.with_name("prepared by two"), set()

    def saved():
        building.update(prepared.glob(".[0-9a-f]*"))  # not the folder that tries a rename
        return list(run.glob("checkpoints/[0-9]*/manifest.json"))

    flags = small_run.command(small_recipe, run)
    running = launch_local.start(2, [*flags, "--data.prepared", str(prepared), *SMALLER])
    try:
        wait_for(saved, running)
        [made] = prepared.iterdir()
        assert len(building) <= 1 and (whole_run.with_name("prepared") / made.name).is_dir()
        running[1].kill()
        killed = time.monotonic()
        assert launch_local.wait(running) == 128 + 9
        assert time.monotonic() - killed < 60
    finally:
        launch_local.end(running)
    alone, logged = small_run.rows(whole_run / "metrics.jsonl"), small_run.steps_logged(run)
    assert logged >= small_run.SAVE_EVERY
    agree(small_run.rows(run / "metrics.jsonl"), alone[:logged])
    resumed = small_run.start(repository, small_recipe, run)
    assert small_run.kill_when(
        resumed, run, lambda: small_run.steps_logged(run) > small_run.EVALUATE_EVERY + 2
    )
    assert "continuing from step" in run.with_name(f"{run.name}.log").read_text()
    logged = small_run.steps_logged(run)
    agree(small_run.rows(run / "metrics.jsonl"), alone[:logged])


@pytest.mark.slow
def test_ctrl_c_to_one_process_saves_the_same_step_on_all(whole_run, small_recipe, tmp_path, capfd):
    """Only process 1 gets the signal; one process with all 8 devices resumes from their
    checkpoint."""
    run = tmp_path / "run"
    running = launch_local.start(2, small_run.command(small_recipe, run))
    try:
        wait_for(lambda: small_run.steps_logged(run) >= 2, running)
        running[1].send_signal(signal.SIGINT)
        assert [process.wait(60) for process in running] == [130, 130]
    finally:
        launch_local.end(running)
    saved = max(int(path.name) for path in (run / "checkpoints").iterdir())
    expected = (
        f"stopped (Ctrl-C): saved {run / 'checkpoints' / str(saved)}; the same command resumes "
        "the run"
    )
    assert (
        capfd.readouterr().err.count(expected) == 1
        and small_run.steps_logged(run) == saved < small_run.STEPS
    )
    assert train.main(small_run.command(small_recipe, run)) == 0
    agree(small_run.rows(run / "metrics.jsonl"), small_run.rows(whole_run / "metrics.jsonl"))


# The launcher, whose stdin is its controlling terminal.
IN_A_TERMINAL = """
import fcntl, sys, termios
from scripts import launch_local
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(launch_local.main())
"""


@pytest.mark.slow
def test_a_closed_terminal_saves_the_same_step_on_all(
    whole_run, small_recipe, tmp_path, repository
):
    """The user started the launcher in the terminal, which can no longer be written to."""
    run, (terminal, inside) = tmp_path / "run", pty.openpty()
    flags = small_run.command(small_recipe, run)
    launcher = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, "--processes", "2", *flags],
        cwd=repository,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
    )
    os.close(inside)
    try:
        while small_run.steps_logged(run) < 2:
            assert launcher.poll() is None
            if select.select([terminal], [], [], 0.02)[0]:
                os.read(terminal, 1 << 12)
        training = children(launcher.pid)
        assert len(training) == 2
    finally:
        os.close(terminal)
    assert launcher.wait(60) == 128 + signal.SIGTERM  # what it is handled as
    assert not any(pathlib.Path(f"/proc/{process}").exists() for process in training)
    saved = max(int(path.name) for path in (run / "checkpoints").iterdir())
    assert 2 <= saved == small_run.steps_logged(run) < small_run.STEPS
    assert train.main(small_run.command(small_recipe, run)) == 0
    agree(small_run.rows(run / "metrics.jsonl"), small_run.rows(whole_run / "metrics.jsonl"))


# Stands in for train.py: reports that it has compiled, and waits for a file before it continues.
WAITS = """
import pathlib, sys, time
import train
from trainer.loop import _Training

compile, run = _Training.compile, sys.argv[sys.argv.index("--run_dir") + 1]
number = sys.argv[sys.argv.index("--distributed.process_id") + 1]

def waiting(training):
    compile(training)
    pathlib.Path(f"{run}.compiled.{number}").touch()
    while not pathlib.Path(f"{run}.go").exists():
        time.sleep(0.02)

_Training.compile = waiting
sys.exit(train.main())
"""


@pytest.mark.slow
def test_two_processes_resume_from_what_another_start_saved_meanwhile(
    whole_run,
    small_recipe,
    tmp_path,
    repository,
    monkeypatch,
    capfd,
):
    """That start was killed after its checkpoint at 35."""
    run = tmp_path / "run"
    (tmp_path / "waits.py").write_text(WAITS)
    monkeypatch.setattr(launch_local, "TRAIN", tmp_path / "waits.py")
    monkeypatch.setenv("PYTHONPATH", str(repository))
    running = launch_local.start(2, small_run.command(small_recipe, run))
    try:
        wait_for(lambda: len(list(tmp_path.glob("run.compiled.*"))) == 2, running)
        shutil.copytree(whole_run, run)
        shutil.rmtree(run / "checkpoints/40")
        (tmp_path / "run.go").touch()
        assert launch_local.wait(running) == 0
    finally:
        launch_local.end(running)
    assert "continuing from step 35" in capfd.readouterr().err
    agree(small_run.rows(run / "metrics.jsonl"), small_run.rows(whole_run / "metrics.jsonl"))


@pytest.mark.slow
def test_a_run_of_four_processes_resumes_on_two_and_then_on_one(whole_run, small_recipe, tmp_path):
    """Each start but the last ends on SIGTERM. Batches, their order and losses are those of one
    process alone."""
    run = tmp_path / "run"
    for processes in (4, 2):
        before = small_run.steps_logged(run)
        running = launch_local.start(processes, small_run.command(small_recipe, run))
        try:
            wait_for(lambda before=before: small_run.steps_logged(run) >= before + 3, running)
            running[-1].send_signal(signal.SIGTERM)
            assert [process.wait(60) for process in running] == [143] * processes
        finally:
            launch_local.end(running)
    assert small_run.steps_logged(run) < small_run.STEPS
    assert train.main(small_run.command(small_recipe, run)) == 0
    rows, alone = (small_run.rows(folder / "metrics.jsonl") for folder in (run, whole_run))
    agree(rows, alone)
    for name in ("target_tokens", "padding_share"):  # differs for another order of the batches
        assert [row[name] for row in rows] == [row[name] for row in alone] and len(
            {row[name] for row in alone}
        ) > 10


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_without_a_launcher_losing_one_process_ends_the_other_within_a_minute(
    small_recipe, tmp_path, victim, capfd
):
    running = launch_local.start(2, small_run.command(small_recipe, tmp_path / "run"))
    try:
        wait_for(lambda: small_run.steps_logged(tmp_path / "run"), running)
        running[victim].kill()
        assert running[1 - victim].wait(60) != 0
    finally:
        launch_local.end(running)
    stderr, patience = "", time.monotonic() + 10  # the launcher's thread passes it on
    # Either the next collective fails, or JAX first misses the other's heartbeat and ends the
    # process itself.
    while (
        "the connection to another process was lost" not in stderr
        and "another task died" not in stderr
    ):
        assert time.monotonic() < patience, stderr
        stderr += capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_one_failing_process_ends_all_with_its_message(small_recipe, tmp_path, repository, victim):
    address, running = f"127.0.0.1:{launch_local.free_port()}", []
    for number in range(2):
        flags = ["--distributed.coordinator", address, "--distributed.num_processes", "2"]
        flags += ["--distributed.process_id", str(number)]
        flags += ["--model.tokenizer", "/missing"] if number == victim else []
        running.append(
            small_run.start(
                repository, small_recipe, tmp_path / "run", *flags, log=tmp_path / f"log{number}"
            )
        )
    start = time.monotonic()
    assert [process.wait(120) for process in running] == [2, 2] and time.monotonic() - start < 60
    logs = [(tmp_path / f"log{number}").read_text().splitlines() for number in range(2)]
    assert [len(lines) for lines in logs] == [1, 1]
    assert logs[victim][0].startswith("error: /missing: no such file or folder")
    assert logs[1 - victim][0].startswith(
        f"error: process {victim} of 2 failed: /missing: no such file or folder"
    )


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_stalls_for_20_seconds_is_waited_for(
    small_recipe, whole_run, tmp_path, victim
):
    running = launch_local.start(2, small_run.command(small_recipe, tmp_path / "run"))
    try:
        wait_for(lambda: small_run.steps_logged(tmp_path / "run") >= 2, running)
        running[victim].send_signal(signal.SIGSTOP)
        time.sleep(20)
        running[victim].send_signal(signal.SIGCONT)
        assert launch_local.wait(running) == 0
    finally:
        running[victim].send_signal(signal.SIGCONT)
        launch_local.end(running)
    agree(
        small_run.rows(tmp_path / "run/metrics.jsonl"), small_run.rows(whole_run / "metrics.jsonl")
    )


@pytest.mark.slow
def test_ten_kills_of_either_process_change_nothing(small_recipe, tmp_path, monkeypatch):
    """Ten times over, kill -9 hits either process one to three steps (by a fixed seed) after the
    previous kill: the other always ends within a minute, and the last start ends bitwise like an
    uninterrupted run of two processes."""

    def start(run):
        return launch_local.start(2, small_run.command(small_recipe, run, *SMALLER))

    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    whole, run, random = tmp_path / "whole", tmp_path / "run", np.random.default_rng(10)
    assert launch_local.wait(start(whole)) == 0
    step, seconds = 0, []
    for victim, steps in zip(
        random.integers(2, size=10), random.integers(1, 4, size=10), strict=True
    ):
        step += int(steps)
        running = start(run)
        try:
            wait_for(lambda step=step: small_run.steps_logged(run) >= step, running)
            running[victim].kill()
            killed = time.monotonic()
            assert running[1 - victim].wait(60) != 0
            seconds.append(time.monotonic() - killed)
            step = small_run.steps_logged(run)
            print(
                f"process {victim} killed after step {step}; the other ended after "
                f"{seconds[-1]:.1f} s"
            )
        finally:
            launch_local.end(running)
    assert step < small_run.STEPS and launch_local.wait(start(run)) == 0
    assert max(seconds) < 60
    last = f"checkpoints/{small_run.STEPS}"
    for item in ("model", "optimizer"):
        after, expected = (
            {
                name: np.asarray(x)
                for name, x in checkpoint.stored_arrays(folder / last, item).items()
            }
            for folder in (run, whole)
        )
        assert after.keys() == expected.keys() and all(
            after[name].tobytes() == expected[name].tobytes() for name in expected
        )
    for name in ("metrics.jsonl", "held_out.jsonl"):
        after, expected = (
            list(map(small_run.without_measured, small_run.rows(folder / name)))
            for folder in (run, whole)
        )
        assert after == expected


def wait_for(condition, running):
    """Waits until `condition` holds; no process may end before."""
    while not condition():
        assert all(process.poll() is None for process in running)
        time.sleep(0.02)


def agree(rows, expected):
    """The same steps, tokens and padding, and losses equal within a relative 1e-6."""
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, right in zip(rows, expected, strict=True):
        for name in small_run.without_measured(right):
            np.testing.assert_allclose(
                row[name], right[name], rtol=2e-6 if name == "grad_norm" else 1e-6, err_msg=name
            )


def test_the_launcher_ends_all_when_the_first_one_fails(capsys):
    def processes(*codes):
        return [subprocess.Popen([sys.executable, "-c", code]) for code in codes]

    slow = "import time; time.sleep(100)"
    assert launch_local.wait(processes("pass", "pass")) == 0
    start = time.monotonic()
    assert launch_local.wait(processes(slow, "raise SystemExit(3)", slow)) == 3
    assert "process 1 ended with 3" in capsys.readouterr().err
    assert launch_local.wait(processes("import os; os.kill(os.getpid(), 9)", slow)) == 137
    assert (
        "process 0 was lost (signal 9)" in capsys.readouterr().err and time.monotonic() - start < 20
    )


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("SLURM_NTASKS", "4", "start it by srun"),
        ("SLURM_NTASKS", "1", False),
        ("OMPI_COMM_WORLD_SIZE", "2", "process_id $OMPI_COMM_WORLD_RANK --distributed.num_proc"),
        ("PMI_SIZE", "2", "process_id $PMI_RANK --distributed.num_processes $PMI_SIZE"),
        ("WORLD_SIZE", "8", "one process per host uses all its devices"),
        ("WORLD_SIZE", "1", False),
        ("SKYPILOT_NUM_NODES", "2", "process_id $SKYPILOT_NODE_RANK"),
        ("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234", "--distributed.coordinator HOST:PORT"),
        ("TPU_WORKER_HOSTNAMES", "t1k-w-0,t1k-w-1", "process_id $TPU_WORKER_ID"),
        ("TPU_WORKER_HOSTNAMES", "localhost", False),
        ("TPU_WORKER_HOSTNAMES", "WARNING: could not determine names, please set", False),
        ("JOB_COMPLETION_INDEX", "3", "process_id $JOB_COMPLETION_INDEX"),
        ("JOB_COMPLETION_INDEX", "0", False),
    ],
)
def test_a_process_that_trains_alone_in_a_cluster_says_so(name, value, advice, monkeypatch, capsys):
    def no_cluster(**_):
        raise ValueError

    monkeypatch.setattr(cluster, "_initialize", no_cluster)
    monkeypatch.setattr(cluster.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setenv(name, value)
    cluster.join(DistributedConfig(), simulated=False, run="run")
    stderr = capsys.readouterr().err
    assert (f"trains alone, but {name} is {value};" in stderr) == bool(advice) == bool(stderr)
    assert not advice or advice in stderr


@pytest.fixture
def two_processes(monkeypatch):
    """Calls a function with 0 and 1 in two threads that act as two processes, joined by JAX's own
    service; returns their futures."""
    thread, address = threading.local(), f"127.0.0.1:{launch_local.free_port()}"
    service = _jax.get_distributed_runtime_service(address, 2)
    clients = [_jax.get_distributed_runtime_client(address, number) for number in range(2)]
    monkeypatch.setattr(cluster, "distributed", SimpleNamespace(global_state=thread))
    monkeypatch.setattr(cluster, "_calls", itertools.repeat(0))  # the two processes each count
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: thread.number)
    with ThreadPoolExecutor(2) as pool:

        def call(work):
            def process(number):
                thread.number, thread.client = number, clients[number]
                return work(number)

            return [pool.submit(process, number) for number in range(2)]

        list(pool.map(lambda client: client.connect(), clients))
        yield call
        list(pool.map(lambda client: client.shutdown(), clients))
    service.shutdown()


def test_the_first_process_works_first_and_passes_its_result_to_the_others(two_processes):
    done = []

    def work(received):
        time.sleep(0.5 if received is None else 0)
        done.append(received)
        return len(done)

    futures = two_processes(
        lambda number: cluster.first_then_others(work, lambda made: f"made {made}")
    )
    assert [future.result() for future in futures] == [1, 2] and done == [None, "made 1"]


def test_an_error_in_the_first_process_is_raised_in_all(two_processes):
    def work(received):
        assert received is None, "the other processes must not work"
        raise OSError("gone: no such file")

    first, other = two_processes(lambda number: cluster.first_then_others(work, str))
    with pytest.raises(OSError, match="gone: no such file"):
        first.result()
    with pytest.raises(UserError, match="gone: no such file"):
        other.result()


def test_an_error_in_another_process_is_raised_in_all(two_processes):
    def work(received):
        if received:
            raise OSError(f"{received}: not here")

    first, other = two_processes(
        lambda number: cluster.first_then_others(work, lambda made: "a folder")
    )
    with pytest.raises(UserError, match="a folder: not here"):
        first.result()
    with pytest.raises(OSError, match="a folder: not here"):
        other.result()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EIO, "Input/output error", "model/d/1"), 75),
        (TransientError("gs://bucket/run: HTTP 503"), 75),
        (PermissionError(errno.EACCES, "Permission denied", "model/d/1"), 2),
        (UserError("model/d/1: is damaged"), 2),
    ],
    ids=["a mount", "a store", "no permission", "damage"],
)
def test_a_save_that_fails_in_another_process_ends_both_with_its_code(
    two_processes, monkeypatch, tmp_path, error, code
):
    def seal(*_):
        if jax.process_index() == 1:
            raise error
        return {}

    monkeypatch.setattr(saving, "seal", seal)
    for future in two_processes(lambda number: saving.seal_together(tmp_path, 0)):
        outcome = outcome_of(future.exception())
        assert outcome.code == code and str(error) in outcome.message, outcome


def test_processes_that_agree_continue(two_processes):
    assert [
        future.result()
        for future in two_processes(lambda number: cluster.require_same({"a": (1, 2), "b": None}))
    ] == [None, None]


def test_processes_that_differ_are_named(two_processes):
    """All of them stop, either at the difference or with the message of the process that noticed
    it."""
    pattern = (
        r"process 1: data is 'x1' there and 'x0' in process 0; all processes need the same code, recipe, flags, model and "
        "data"
    )
    for future in two_processes(
        lambda number: cluster.require_same({"same": 1, "data": f"x{number}"})
    ):
        with pytest.raises(UserError, match=pattern):
            future.result()


def test_training_begins_by_comparing_the_processes(small_recipe, tmp_path, monkeypatch, capsys):
    """It compares fingerprints, and no fields that may differ between machines or paths."""

    def differ(values):
        assert values["the data's fingerprint"] and values["the model's fingerprint"] == ""
        assert {
            "optimizer.learning_rate",
            "mesh.fsdp",
            "memory.remat",
            "train.steps",
            "checkpoint.every",
        } <= values.keys()
        assert not {"run_dir", "data.prepared", "distributed", "model.path"} & values.keys()
        raise UserError("compared")

    monkeypatch.setattr("trainer.loop.require_same", differ)
    assert train.main(small_run.command(small_recipe, tmp_path / "run")) == 2
    assert capsys.readouterr().err.endswith("error: compared\n") and not (tmp_path / "run").exists()


# Stands in for train.py: how it handles its first Ctrl-C, and which process number prints the error
# that it ends with.
STAND_IN = """
import pathlib, signal, sys, time
number, told = int(sys.argv[sys.argv.index("--distributed.process_id") + 1]), []
signal.signal(signal.SIGINT, lambda *_: told.append(1))
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
pathlib.Path(f"{sys.argv[1]}.{number}").touch()
if sys.argv[2] == "ctrl_c":
    while not told:
        time.sleep(0.01)
    time.sleep(0.2 + 0.5 * number)
    sys.stderr.write(f"said by {number}\\nstopped (Ctrl-C): saved step 3\\n")
    sys.exit(130 if len(told) == 1 else 1)
if sys.argv[2] == "sigterm":
    while not told:
        time.sleep(0.01)
    time.sleep(0.5)
    pathlib.Path(f"{sys.argv[1]}.saved.{number}").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
if sys.argv[2] in ("all", str(number)):
    sys.stderr.write("error: found 7\\n")
    sys.exit(2)
time.sleep(100)
"""
LAUNCH = (  # as `python -m` begins
    "import pathlib, sys; from data.signals import end_at_once; end_at_once(); from scripts import launch_local; launch_local.TRAIN = "
    "pathlib.Path(sys.argv[1]); sys.exit(launch_local.main(['--processes', '3', *sys.argv[2:]]))"
)


@pytest.fixture
def launched(tmp_path, repository):
    """Starts a launcher of three stand-ins and waits until all of them run."""
    (tmp_path / "train.py").write_text(STAND_IN)

    def launch(how, hangup=signal.SIG_DFL):
        started = tmp_path / how
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(tmp_path / "train.py"), str(started), how],
            cwd=repository,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
        )
        wait_for(lambda: len(list(tmp_path.glob(f"{how}.*"))) == 3 or process.poll(), [])
        return process

    return launch


def test_the_launchers_ctrl_c_reaches_each_process_once_and_they_end_in_order(launched):
    launcher = launched("ctrl_c")
    os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
    lines = launcher.communicate(timeout=60)[1].splitlines()
    assert launcher.returncode == 130
    said = [f"said by {number}" for number in range(3)]
    assert sorted(lines) == [*said, "stopped (Ctrl-C): saved step 3"]


def test_the_launcher_waits_for_processes_that_save_on_sigterm(launched, tmp_path):
    """A container ends as soon as its first process does."""
    launcher = launched("sigterm")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 143 and len(list(tmp_path.glob("sigterm.saved.*"))) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_processes_save_and_end_when_their_launcher_is_killed(launched, tmp_path):
    launcher = launched("sigterm")
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 20
    wait_for(
        lambda: len(list(tmp_path.glob("sigterm.saved.*"))) == 3 or time.monotonic() > deadline,
        [],
    )
    assert time.monotonic() < deadline


def test_the_launcher_forwards_slurms_usual_signal(launched):
    launcher = launched("nothing")
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(60) == 128 + signal.SIGUSR1, (
        "that of the stand-ins, which do not handle it"
    )


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_ends_all_processes_unless_nohup_started_them(launched, nohup):
    launcher = launched("nothing", signal.SIG_IGN if nohup else signal.SIG_DFL)
    launcher.send_signal(signal.SIGHUP)
    if nohup:
        time.sleep(0.3)
        for process in children(launcher.pid):
            os.kill(process, signal.SIGHUP)
        time.sleep(0.3)
        assert launcher.poll() is None and len(children(launcher.pid)) == 3
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 128 + signal.SIGTERM
    else:
        assert launcher.wait(60) == 128 + signal.SIGHUP


def children(process):
    """Returns the ids of a process's children."""
    return list(
        map(int, pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split())
    )


@pytest.mark.parametrize("which", ["all", "2"])
def test_an_error_is_printed_once_whichever_process_raises_it(launched, which):
    launcher = launched(which)
    stderr = launcher.communicate(timeout=60)[1]
    assert (
        launcher.returncode == 2
        and stderr.count("error: found 7") == 1
        and stderr.count("ended with 2") == 1
    )


def test_the_launchers_help_says_that_flags_of_train_follow(capsys):
    with pytest.raises(SystemExit):
        launch_local.main(["--help"])
    stdout = capsys.readouterr().out
    assert (
        "--config RECIPE.yaml [--section.field value ...]" in stdout and "train.py --help" in stdout
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"coordinator": "here:1", "process_id": 0}, ["distributed.num_processes", "together"]),
        (
            {"coordinator": "here:1", "process_id": 2, "num_processes": 2},
            ["distributed.process_id", "found 2", "0 .. 1"],
        ),
        (
            {"coordinator": "here", "process_id": 0, "num_processes": 2},
            ["distributed.coordinator", "HOST:PORT"],
        ),
    ],
)
def test_inconsistent_flags_are_refused(fields, words):
    with pytest.raises(ValueError) as error:
        DistributedConfig(**fields)
    assert all(word in str(error.value) for word in words)


def test_simulated_devices_are_divided_among_the_processes():
    with pytest.raises(
        UserError, match=r"mesh\.simulate: found 8, which 3 processes do not divide; 9 would work"
    ):
        simulate(8, 3)


@pytest.mark.parametrize("layout", ["striped", "zigzag"])
@pytest.mark.parametrize(
    "sizes", [{"sequence": 8}, {"fsdp": 2, "sequence": 4}, {"data": 2, "tensor": 4}], ids=str
)
def test_a_process_makes_only_what_its_devices_hold(prepared, sizes, layout):
    """Four processes with two devices each, each checked separately: their parts put together are
    the whole batch."""
    rows, length = 4, 64
    mesh = make_mesh(MeshConfig(**sizes), jax.devices())
    sharding, loader = batch_sharding(mesh), Loader(prepared, length, rows, 0)
    order = permutation(length, mesh.shape["sequence"], layout)
    whole = permute(loader.batch(1), order)
    together = {name: np.full_like(x, -1) for name, x in whole.items()}
    for process in range(4):
        held = [
            sharding.devices_indices_map((rows, length))[device]
            for device in jax.devices()[2 * process : 2 * process + 2]
        ]
        part = part_of_slices(held, rows, length)
        natural, within = local_order(part, order)
        batch = permute(loader.batch(1, rows=part.rows, indices=natural), within)
        share = len(part.rows) * len(part.tokens)
        assert sum(x.nbytes for x in batch.values()) == 24 * share
        assert share <= 2 * rows * length // (8 // mesh.shape["tensor"]), (
            "at most the parts of two devices"
        )
        for name, x in batch.items():
            together[name][np.ix_(part.rows, part.tokens)] = x
    for name, x in whole.items():
        np.testing.assert_array_equal(together[name], x, err_msg=name)


def test_a_document_held_entirely_elsewhere_is_not_read(prepared, monkeypatch):
    loader, read, get = Loader(prepared, 64, 4, 0), [], Documents.__getitem__
    monkeypatch.setattr(
        Documents, "__getitem__", lambda self, number: read.append(number) or get(self, number)
    )
    places = np.arange(8)
    part = loader.batch(1, rows=[0, 3], indices=places)
    pieces = [loader._plan(0).row(number) for number in (4, 7)]
    assert read == [
        number
        for row in pieces
        for (number, _, _), at in zip(
            row, np.cumsum([0, *(length for _, _, length in row)]), strict=False
        )
        if at < 8
    ]
    np.testing.assert_array_equal(part["index"], [places, places])
    assert loader.lengths(1).sum() == (loader.batch(1)["segment_ids"] > 0).sum()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, repository):
    tokenizer = Tokenizer.load(repository / "data/fixtures/tiny_tokenizer")
    source = Source(str(repository / "data/fixtures/dirty.json"))
    return prepare(
        Sources((source,)),
        tokenizer,
        EncodingRules(64),
        tmp_path_factory.mktemp("prepared"),
        progress=False,
    )
