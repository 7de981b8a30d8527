"""This version opens and continues a run made by an earlier release
(tests/fixtures/make_run.py)."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.fixtures.make_run import KILLED, STEPS, losses, sums, train
from trainer.checkpoint.store import CheckpointStore
from trainer.config.load import load

RUNS = sorted((REPOSITORY / "tests" / "fixtures").glob("run_*"))


def expected(run: Path) -> dict[str, dict[str, float]]:
    return json.loads((run / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_its_recipe_and_weights_are_read(run):
    config = load(["--config", str(run / "config.yaml")])
    assert config.train.steps == STEPS and config.data.context_length == 64
    with CheckpointStore(run) as store:
        assert store.latest_good() == KILLED
    checkpoint = run / "checkpoints" / str(KILLED)
    for path in checkpoint.rglob("commit_success.txt"):  # names no folder of this machine
        assert f" to {checkpoint.relative_to(REPOSITORY)}" in path.read_text(encoding="utf-8")
    digests = sums(checkpoint)
    assert digests == pytest.approx(expected(run)["sums"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_it_resumes_with_the_losses_that_the_release_logged(run, tmp_path):
    copy = tmp_path / run.name
    shutil.copytree(run, copy)
    train(copy / "config.yaml", copy)
    assert losses(copy) == pytest.approx(expected(run)["losses"], abs=1e-4)
