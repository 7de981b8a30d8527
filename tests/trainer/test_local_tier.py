"""Runs that resume from local checkpoints, with four processes in separate folders acting as four
hosts."""

import json
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import train
from scripts import launch_local
from tests import small_run
from tests.model.build import mesh_of
from tests.trainer.test_processes import wait_for
from trainer.checkpoint import local_tier, readers
from trainer.checkpoint.local_record import place_of

PROCESSES, STEPS, EVERY, LOCAL_EVERY, KILLED_AFTER = 4, 20, 10, 2, 12
FLAGS = (
    *("--mesh.tensor", "1", "--mesh.sequence", "2", "--mesh.fsdp", "2", "--mesh.simulate", "4"),
    *("--train.steps", str(STEPS), "--train.evaluate_every", "0"),
    *("--checkpoint.every", str(EVERY), "--checkpoint.local_every", str(LOCAL_EVERY)),
)


@pytest.mark.slow
def test_training_continues_when_local_saves_fail(small_recipe, tmp_path, monkeypatch, capfd):
    """The second and third saves fail; there are never more than two checkpoints, and none after
    the end."""
    write_part, checkpoints = local_tier.write_part, []

    def fails_twice(path, header, shards):
        if header.step in (2, 3):
            raise OSError(28, "No space left on device")
        write_part(path, header, shards)
        checkpoints.append((header.step, len(list((tmp_path / "host").glob("*/*/step_*")))))

    monkeypatch.setattr(local_tier, "write_part", fails_twice)
    flags = ("--mesh.fsdp", "4", "--mesh.tensor", "1")
    flags += ("--checkpoint.local", str(tmp_path / "host"), "--checkpoint.local_every", "1")
    flags += ("--run_dir", str(tmp_path / "run"), "--train.steps", "6", "--checkpoint.every", "0")
    assert train.main(["--config", str(small_recipe), *flags]) == 0
    stderr = capfd.readouterr().err
    assert (
        stderr.count("the local checkpoint of step 2 could not be saved: [Errno 28] No space") == 1
    )
    assert "checkpoint of step 3 could not" not in stderr, "the same reason again"
    assert checkpoints == [(1, 1), (4, 2), (5, 2)]
    assert not list((tmp_path / "host").glob("*/*/*"))


def tier(folder, name):
    """The local tier of a run on one device."""
    (folder / name).mkdir(exist_ok=True)
    return local_tier.LocalTier(
        str(folder / "host"), folder / name, str(folder / name), mesh_of({})
    )


def abstract(arrays):
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in arrays.items()
    }


def trained_to(step, folder, name):
    """A tier with a local checkpoint of a step, restored before; and the step restored."""
    run, model = tier(folder, name), {"w": jnp.full(4, step, jnp.float32)}
    restored = run.restore(abstract(model), abstract(model), 0)
    run.claim()
    run.save(step, model, model, {"step": step})
    run.wait()
    run.close()
    return run, restored and restored.step


def test_a_copied_run_leaves_the_originals_local_checkpoints(tmp_path, capsys):
    original, _ = trained_to(7, tmp_path, "original")
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    copy, restored = trained_to(5, tmp_path, "copy")
    assert restored is None and copy.run != original.run
    stderr = capsys.readouterr().err
    assert f"{tmp_path}/copy is a copy of {tmp_path}/original; its local checkpoints" in stderr
    assert f"found a local checkpoint of another run ({tmp_path}/original); if that" in stderr
    copy.finish()
    (tmp_path / "original").rename(tmp_path / "renamed")
    renamed, restored = trained_to(9, tmp_path, "renamed")
    assert restored == 7 and renamed.run == original.run
    assert "is a copy" not in capsys.readouterr().err
    (tmp_path / "copy").rename(tmp_path / "original")
    assert trained_to(6, tmp_path, "original")[0].run == copy.run, "by its own record now"


def test_a_run_moved_to_another_disk_finds_its_local_checkpoints_as_its_warning_says(
    tmp_path, capsys
):
    """Also after a start that went on without them."""
    original, _ = trained_to(7, tmp_path, "original")
    shutil.copytree(tmp_path / "original", tmp_path / "moved")
    shutil.rmtree(tmp_path / "original")
    _, restored = trained_to(5, tmp_path, "moved")
    own = f'"run": "{original.run}", "location": "{tmp_path}/moved"'
    assert restored is None
    assert (
        f"{tmp_path}/moved was moved or copied from {tmp_path}/original; its local checkpoints "
        "stay that run's, and this one goes on without them. If it was moved, end this start, and "
        f"set {own} in its local.json\n"
    ) in capsys.readouterr().err
    path = tmp_path / "moved" / "local.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | json.loads(f"{{{own}}}")))
    moved, restored = trained_to(9, tmp_path, "moved")
    assert restored == 7 and moved.run == original.run


def test_a_step_is_recorded_before_it_can_be_complete(tmp_path, monkeypatch):
    """A kill between its last part and the record of the whole must not hide it."""
    seen, write_part = [], local_tier.write_part

    def watched(path, header, shards):
        seen.append(json.loads((tmp_path / "run/local.json").read_text()))
        write_part(path, header, shards)

    monkeypatch.setattr(local_tier, "write_part", watched)
    run, _ = trained_to(3, tmp_path, "run")
    trained_to(4, tmp_path, "run")
    assert [(record["step"], record["begun"]) for record in seen] == [(None, 3), (3, 4)]
    run.finish()
    assert json.loads((tmp_path / "run/local.json").read_text())["begun"] is None


@pytest.fixture(autouse=True)
def compiled_as_the_tests_programs(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", small_run.XLA_FLAGS)


def start(repository, recipe, folder, *flags):
    """Starts one process per host of the folder."""
    address = f"127.0.0.1:{launch_local.free_port()}"
    return [
        small_run.start(
            repository,
            recipe,
            folder / "run",
            *FLAGS,
            *("--checkpoint.local", str(folder / f"host {number}")),
            *("--distributed.coordinator", address, "--distributed.process_id", str(number)),
            *("--distributed.num_processes", str(PROCESSES)),
            *flags,
            log=folder / f"{number}.log",
        )
        for number in range(PROCESSES)
    ]


def logs(folder):
    return "".join((folder / f"{number}.log").read_text() for number in range(PROCESSES))


def finish(processes, folder):
    try:
        codes = [process.wait(300) for process in processes]
    finally:
        launch_local.end(processes)
    assert codes == [0] * PROCESSES, logs(folder)
    return logs(folder)


def recorded(folder):
    path = folder / "run" / "local.json"
    return (json.loads(path.read_text())["step"] if path.exists() else None) or 0


def stand_for_the_original(run):
    """Makes a copy of a run's folder the one whose local checkpoints the hosts have."""
    path = run / "local.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | place_of(run, str(run))))


def trained(folder):
    """The bits of the whole last checkpoint."""
    last = folder / "run" / "checkpoints" / str(STEPS)
    return {
        name: np.asarray(x[...].read().result()).tobytes()
        for item in ("model", "optimizer")
        for name, x in readers.stored_arrays(last, item).items()
    }


@pytest.fixture(scope="module")
def killed(tmp_path_factory, repository):
    """A run whose processes were all killed at once after a local checkpoint that its run folder
    lacks; and the result of the same run undisturbed."""
    base = tmp_path_factory.mktemp("local tier")
    recipe = small_run.recipe(base, repository, conversations=40)
    fields = yaml.safe_load(recipe.read_text())
    fields["model"]["overrides"]["num_hidden_layers"] = 1  # compiled by each process of each start
    recipe.write_text(yaml.safe_dump(fields))
    whole, folder = base / "whole", base / "killed"
    whole.mkdir()
    folder.mkdir()
    finish(start(repository, recipe, whole), whole)
    assert not list(whole.glob("host */*/*")), "left behind by a run that has ended"
    running = start(repository, recipe, folder)
    try:
        wait_for(lambda: recorded(folder) >= KILLED_AFTER, running)
    finally:
        for process in running:
            process.send_signal(signal.SIGKILL)
        for process in running:
            process.wait(60)
    assert recorded(folder) < STEPS
    return recipe, folder, trained(whole), small_run.rows(whole / "run" / "metrics.jsonl")


LOST = {"two far apart": (0, 2), "two neighbours": (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("lost", LOST)
def test_a_killed_run_resumes_bitwise_from_the_hosts_that_return(
    killed, tmp_path, repository, lost
):
    recipe, killed_at, expected, rows = killed
    folder = tmp_path / "again"
    shutil.copytree(killed_at, folder)
    for number in LOST[lost]:
        shutil.rmtree(folder / f"host {number}")
    for log in folder.glob("*.log"):
        log.unlink()
    stand_for_the_original(folder / "run")
    step = recorded(folder)
    output = finish(start(repository, recipe, folder), folder)
    if lost == "two neighbours":
        assert (
            f"the local checkpoint of step {step} is incomplete: no host has the part of process 1"
            in output
        )
        assert f"continuing from step {EVERY} ({folder}/run/checkpoints/{EVERY})" in output
    else:
        assert f"continuing from step {step} (local checkpoint, {folder}/host 0/" in output
    for number in LOST[lost] if lost != "two neighbours" else ():
        assert (
            f"process {number} has its part of step {step} from process {(number + 1) % 4}"
            in output
        )
    assert trained(folder) == expected
    small_rows = small_run.rows(folder / "run" / "metrics.jsonl")
    loss = "loss_nats_per_target"
    assert [row[loss] for row in small_rows] == [row[loss] for row in rows]
    assert not list(folder.glob("host */*/*"))
