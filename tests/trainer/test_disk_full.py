"""A disk that fills up at any moment of a run: one line names the file or folder, and the same
command resumes once there is room."""

import shutil

import pytest

from tests import small_run
from tests.soak.attacks import Impossible
from tests.soak.disk import mounted

KIB = (4, 40, 300, 520, 650, 800, 1000)  # less than a whole run needs


@pytest.fixture
def small_disk(tmp_path):
    """A separate disk, whose size the test sets; only root may make one."""
    try:
        with mounted(tmp_path / "disk", 4) as resize:
            yield tmp_path / "disk", resize
    except Impossible as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.parametrize("tensorboard", ["false", "true"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_with_more_room(
    small_recipe, repository, small_disk, whole_run, tensorboard
):
    disk, resize = small_disk
    run, log = disk / "run", disk.with_name("run.log")
    flags = ("--data.prepared", str(disk / "prepared"), "--logging.tensorboard", tensorboard)
    messages = []
    for kib in (*KIB, 100_000):
        resize(kib)
        process = small_run.start(repository, small_recipe, run, *flags, log=log)
        code = process.wait(timeout=300)
        output, _ = log.read_text(), log.unlink()
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        messages.append((kib, code, errors))
        print(*messages[-1])
        assert not any(
            words in output
            for words in ("Traceback", "ERROR:absl", "Event loop", "warning: thread")
        ), output
        assert all(str(disk) in line for line in errors), errors
        assert (code, len(errors)) == ((75, 1) if kib < 100_000 else (0, 0)), output
        assert not list((disk / "prepared").glob(".*"))
    rows, expected = (small_run.rows(folder / "metrics.jsonl") for folder in (run, whole_run))
    assert [(row["step"], row["loss_nats_per_target"]) for row in rows] == [
        (row["step"], row["loss_nats_per_target"]) for row in expected
    ]
    shutil.rmtree(run)
