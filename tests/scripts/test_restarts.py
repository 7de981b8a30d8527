"""The rule for restarts, and how the state of a run is read."""

import errno
import json
import os
import pathlib
import shutil
import tempfile

import pytest

from data.errors import TransientError
from scripts import launch_local, restarts, run_status
from scripts.restarts import Restarts, may_pass, pause_before
from trainer.run import outcome


def test_exit_codes_match_the_products():
    """Launchers run without the product's requirements, so they cannot import these constants."""
    assert (restarts.CANNOT_PASS, restarts.TRANSIENT, restarts.STOPPED, restarts.PREEMPTED) == (
        outcome.WRONG_INPUT,
        outcome.TRY_AGAIN,
        outcome.STOPPED,
        outcome.TERMINATED,
    )


def test_which_exit_codes_are_worth_another_start():
    assert [code for code in range(256) if may_pass(code)] == [
        1,
        75,
        *(code for code in range(129, 256) if code != 130),
    ]


def test_pauses_double_up_to_ten_minutes():
    assert [pause_before(start) for start in range(1, 9)] == [0, 15, 30, 60, 120, 240, 480, 600]


def test_a_new_checkpoint_resets_the_count():
    counted = Restarts(limit=2)
    assert [
        counted.after(75, step).restart for step in (None, None, 10, 10, 10, 20, 20, 20, 20)
    ] == [True, True, True, True, True, True, True, True, False]
    assert not Restarts().after(2, None).restart and Restarts().after(143, 5).pause == 15


def test_starts_are_counted_in_a_file(tmp_path, monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(restarts.time, "sleep", slept.append)
    record = tmp_path / "sub/run.starts"
    ends = [
        restarts.main([str(record), "--checkpoint", step, "--limit", "1", "--longest-pause", "20"])
        for step in ("", "", "10", "10", "10")
    ]
    assert ends == [0, 0, 0, 0, 2] and slept == [15, 15]
    assert json.loads(record.read_text()) == {"checkpoint": 10, "starts": 3}
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: 2 starts without one after the checkpoint of step 10: the reason is in the log; "
        f"fix it and remove {record}"
    )


def test_starts_are_counted_in_a_bucket(gcs, capsys):
    record = "gs://bucket/runs/mine.starts"
    for starts in (1, 2):
        assert restarts.main([record, "--longest-pause", "0"]) == 0
        content, _ = gcs.store.objects["bucket", "runs/mine.starts"]
        assert json.loads(content) == {"checkpoint": -1, "starts": starts}
    gcs.store.refused = lambda *_: 403
    assert restarts.main([record]) == 2
    assert f"error: {record}: no permission" in capsys.readouterr().err


@pytest.mark.parametrize("torn", ["", '{"checkpoint": 7, "sta'])
def test_a_torn_record_counts_as_none(tmp_path, torn):
    record = tmp_path / "run.starts"
    record.write_text(torn)
    assert restarts.main([str(record), "--checkpoint", "7"]) == 0
    assert json.loads(record.read_text()) == {"checkpoint": 7, "starts": 1}


@pytest.mark.parametrize("content", ["notes\n", "[]", '{"checkpoint": "a", "starts": 1}'])
def test_another_file_is_not_overwritten(tmp_path, capsys, content):
    record = tmp_path / "run.starts"
    record.write_text(content)
    assert restarts.main([str(record)]) == 2 and record.read_text() == content
    assert f"{record}: exists, but was not written by this command" in capsys.readouterr().err


def test_a_full_disk_leaves_the_record_as_it_was(tmp_path, monkeypatch, capsys):
    record = tmp_path / "run.starts"
    restarts.main([str(record), "--checkpoint", "7"])
    before = record.read_text()

    def full(source, target):
        pathlib.Path(target).write_bytes(b"")
        raise OSError(errno.ENOSPC, "No space left on device", target)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        assert restarts.main([str(record), "--checkpoint", "9"]) == 75
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and "No space left" in stderr and str(tmp_path) in stderr
    assert record.read_text() == before and [path.name for path in tmp_path.iterdir()] == [
        record.name
    ]
    # The copy from which it appears is on another disk.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "write_bytes", full_disk)
        assert restarts.main([str(record), "--checkpoint", "9"]) == 75
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/temporary: No space left")
    assert record.read_text() == before


def full_disk(*_):
    """Fails as a write to a full disk does."""
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def run(tmp_path):
    """A run's folder: step 30 was saved, 40 is being saved, 42 was logged, and the last line is
    half written."""
    for step, files in ((30, ["manifest.json"]), (40, []), (9, ["manifest.json"])):
        (tmp_path / f"checkpoints/{step}").mkdir(parents=True)
        for name in files:
            (tmp_path / f"checkpoints/{step}" / name).write_text("{}")
            os.utime(tmp_path / f"checkpoints/{step}" / name, (1000, 1000))
    row = {
        "step": 42,
        "loss_nats_per_target": 1.25,
        "tokens_per_second": 81234.5,
        "wall_seconds": 7200.0,
    }
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 41}) + "\n" + json.dumps(row) + '\n{"step": 4'
    )
    os.utime(tmp_path / "metrics.jsonl", (4600, 4600))
    return tmp_path


def test_the_state_of_a_run(run):
    assert run_status.describe(
        "r", run_status.read_status(str(run)), 4608, price_per_hour=100
    ).splitlines() == [
        "run          r",
        "step         42, 8 s ago",
        "loss         1.2500 nats per target",
        "speed        81,234 tokens/s",
        "checkpoint   30, 60 min ago",
        "cost         200.00 for 2.0 hours of training; idle time is billed too",
    ]


def test_the_newest_checkpoint_of_a_run(run, tmp_path, capsys):
    assert run_status.main([str(run), "--checkpoint"]) == 0 and capsys.readouterr().out == "30\n"
    assert (
        run_status.main([str(tmp_path / "none"), "--checkpoint"]) == 0
        and capsys.readouterr().out == "\n"
    )
    assert (
        run_status.main(
            ["--config", "configs/quickstart.yaml", "--run_dir", str(run), "--checkpoint"]
        )
        == 0
    )
    assert capsys.readouterr().out == "30\n"
    assert run_status.main([]) == 2 and "no run was named" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    missing = str(tmp_path / "none")
    for name in (missing, "memory://bucket/none"):
        assert run_status.main([name]) == 2
        assert f"{name}: not a run (config.yaml is missing)" in capsys.readouterr().err
    # A run that has only begun, and one that a recipe names and that has not.
    for begun in ("config.yaml", "stages/1/config.yaml"):
        path = tmp_path / begun.replace("/", "_") / begun
        path.parent.mkdir(parents=True)
        path.write_text("name: x")
        assert run_status.main([str(tmp_path / begun.replace("/", "_"))]) == 0
    assert run_status.main(["--config", "configs/quickstart.yaml", "--run_dir", missing]) == 0
    assert "none logged yet" in capsys.readouterr().out


def test_a_run_in_s3_is_read_without_s3fs(s3, monkeypatch):
    def without_s3fs(_):
        raise ImportError

    monkeypatch.setattr("fsspec.get_filesystem_class", without_s3fs)
    assert run_status.read_status("s3://bucket/run") == run_status.Status(*[None] * 4)
    assert run_status.main(["s3://bucket/run"]) == 2
    files = {
        "checkpoints/7/manifest.json": b"{}",
        "checkpoints/9/model/x": b"",  # being written
        "local.json": b'{"run": "a", "step": 8}',
        "metrics.jsonl/000000-000000000000000": b'{"step": 7}\n{"step": 8}\n',
    }
    for name, content in files.items():
        s3.store.objects["bucket", f"run/{name}"] = content, 0
    status = run_status.Status(7, None, {"step": 8}, None, 8)
    assert run_status.read_status("s3://bucket/run") == status
    # An earlier stage of a run whose next stage has not begun, and then has.
    for name, content in files.items():
        s3.store.objects["bucket", f"all/stages/2/{name}"] = content, 0
    s3.store.objects["bucket", "all/stages/1/checkpoints/5/manifest.json"] = b"{}", 0
    curriculum = run_status.read_status("s3://bucket/all")
    assert curriculum == status._replace(stage=2, earlier=5) and curriculum.reached == 13


def test_a_launcher_sees_what_was_saved_since_it_last_looked(gcs):
    """fsspec keeps listings of gs:// for as long as the process runs."""
    for step in (3, 7):
        gcs.store.objects["bucket", f"run/checkpoints/{step}/manifest.json"] = b"{}", step
        assert run_status.read_status("gs://bucket/run").reached == step


@pytest.mark.parametrize("status", [401, 403])
def test_a_store_that_refuses_is_not_a_run_without_checkpoints(gcs, capsys, status):
    """A launcher would count starts without a new checkpoint, and give the run up."""
    gcs.store.objects["bucket", "run/checkpoints/3/manifest.json"] = b"{}", 1
    gcs.store.refused = lambda method, path: status
    assert run_status.main(["gs://bucket/run", "--checkpoint"]) == 2
    printed, errors = capsys.readouterr()
    assert not printed.strip() and "\n" not in errors.strip()
    assert errors.startswith("error: gs://bucket/run: no permission")


def test_colons_in_a_local_path_are_no_chain_of_file_systems(run, capsys):
    shutil.copytree(run, run / "x::y")
    assert run_status.main([str(run / "x::y"), "--checkpoint"]) == 0
    assert capsys.readouterr().out == "30\n"


def test_the_first_checkpoint_of_a_later_stage_is_progress(run, capsys):
    """Otherwise a launcher would give up a curriculum whose stages are each preempted a few
    times."""
    stages = run / "stages"
    for number, steps in (("1", (50, 90)), ("2", (10,)), ("10", ())):
        for step in steps:
            (stages / number / "checkpoints" / str(step)).mkdir(parents=True)
            (stages / number / "checkpoints" / str(step) / "manifest.json").write_text("{}")
    assert run_status.main([str(run), "--checkpoint"]) == 0
    assert capsys.readouterr().out == "130\n"
    (run / "metrics.jsonl").unlink()
    for step in (9, 30):
        (run / "checkpoints" / str(step) / "manifest.json").unlink()
    status = run_status.read_status(str(run))
    assert (status.stage, status.earlier, status.checkpoint, status.reached) == (2, 90, 10, 100)
    lines = run_status.describe("r", status, 0).splitlines()
    assert lines[1] == "stage        2, after 90 steps of earlier ones"


def test_a_local_checkpoint_is_progress_too(run, capsys):
    for text, newest in (('{"run": "a", "step": null}', "30"), ('{"run": "a", "step": 38}', "38")):
        (run / "local.json").write_text(text)
        assert run_status.main([str(run), "--checkpoint"]) == 0
        assert capsys.readouterr().out == f"{newest}\n"
    lines = run_status.describe("r", run_status.read_status(str(run)), 4608).splitlines()
    assert lines[-2:] == [
        "checkpoint   30, 60 min ago",
        "local        38, on the hosts themselves (checkpoint.local)",
    ]


def test_a_run_that_has_not_begun(tmp_path):
    assert run_status.describe("r", run_status.read_status(str(tmp_path)), 0).splitlines() == [
        "run          r",
        "step         none logged yet",
        "checkpoint   none yet",
    ]


def test_the_local_launcher_restarts_under_the_same_rule(tmp_path, monkeypatch, capfd):
    program = tmp_path / "program.py"
    program.write_text(f"""import pathlib, sys
count = pathlib.Path({str(tmp_path / "count")!r})
starts = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(starts))
sys.exit(int(sys.argv[sys.argv.index("--ends") + 1].split(",")[starts - 1]))
""")
    monkeypatch.setattr(launch_local, "TRAIN", program)
    monkeypatch.setattr(launch_local, "run_folder", lambda flags: str(tmp_path / "run"))
    slept = []
    sleep = launch_local.time.sleep
    monkeypatch.setattr(
        launch_local.time,
        "sleep",
        lambda seconds: slept.append(seconds) if seconds > 1 else sleep(seconds),
    )
    for ends, restarted, code in (
        ("75,137,0", [15, 30], 0),
        ("75,75,75,75", [15, 30], 75),
        ("2", [], 2),
        ("130", [], 130),
    ):
        (tmp_path / "count").unlink(missing_ok=True)
        slept.clear()
        assert launch_local.main(["--processes", "1", "--restarts", "2", "--ends", ends]) == code
        assert slept == restarted
    assert "3 starts without a checkpoint" in capfd.readouterr().err
    (tmp_path / "count").unlink()
    assert launch_local.main(["--processes", "1", "--ends", "75"]) == 75, "by default none"


def test_a_temporarily_unresponsive_store_does_not_end_the_local_launcher(
    tmp_path, monkeypatch, capfd
):
    def fails(_):
        raise TransientError("gs://bucket/run: HTTP 503")

    monkeypatch.setattr(launch_local, "read_status", fails)
    flags = ["--run_dir", str(tmp_path / "run"), "--config", "configs/quickstart.yaml"]
    assert launch_local._reached(flags) is None
    assert "gs://bucket/run: HTTP 503" in capfd.readouterr().err


@pytest.mark.parametrize("value", [[], {"a": 1}, "x", True, 10**400, None])
def test_a_metric_that_is_not_a_number_is_left_out(value):
    names = ("loss_nats_per_target", "tokens_per_second", "wall_seconds")
    status = run_status.Status(5, 0.0, {"step": 5, **dict.fromkeys(names, value)}, 0.0)
    assert run_status.describe("r", status, 60, price_per_hour=2.0).splitlines() == [
        "run          r",
        "step         5, 60 s ago",
        "checkpoint   5, 60 s ago",
    ]
