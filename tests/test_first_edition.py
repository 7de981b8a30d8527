"""A run that the first edition of the code began: its recipe, prepared data, run folder and checkpoint still work.

`tests/fixtures/first_edition` holds a run of 16 steps as a kill after step 8 left it: its checkpoint of step 8, and the metrics
of all 16 steps as they were when nobody stopped it.
"""

import json
import shutil
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def continued(tmp_path_factory, repository):
    """(folder with run and prepared_data, what train.py printed), after the same command went on with the run."""
    folder = tmp_path_factory.mktemp("first_edition")
    shutil.copytree(repository / "tests/fixtures/first_edition", folder, dirs_exist_ok=True)
    command = [sys.executable, "train.py", "--config", "tests/fixtures/first_edition/recipe.yaml", "--run_dir", folder / "run",
               "--data.prepared", folder / "prepared_data", "--logging.console", "true"]  # fmt: skip
    finished = subprocess.run(list(map(str, command)), cwd=repository, text=True, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return folder, finished.stdout + finished.stderr


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_goes_on_from_its_checkpoint(continued):
    folder, printed = continued
    assert f"going on from step 8 ({folder}/run/checkpoints/8)" in printed
    assert sorted(path.name for path in (folder / "run/checkpoints").iterdir()) == ["16", "8"]


def test_prepared_data_is_reused(continued, repository):
    names = [path.name for path in (repository / "tests/fixtures/first_edition/prepared_data").iterdir()]
    assert [path.name for path in (continued[0] / "prepared_data").iterdir()] == names


@pytest.mark.parametrize("file, loss", [("metrics.jsonl", "loss_nats_per_target"),
                                        ("held_out.jsonl", "held_out_loss_nats_per_target")])
def test_losses_are_those_of_the_uninterrupted_run(continued, repository, file, loss):
    expected = rows(repository / "tests/fixtures/first_edition/run" / file)
    measured = rows(continued[0] / "run" / file)
    assert [row["step"] for row in measured] == [row["step"] for row in expected]
    assert [row[loss] for row in measured] == pytest.approx([row[loss] for row in expected], rel=1e-5)


def test_checkpoint_is_exported(continued, repository, tmp_path):
    command = [sys.executable, "-m", "scripts.export_hf", continued[0] / "run/checkpoints/8", tmp_path / "exported"]
    finished = subprocess.run(list(map(str, command)), cwd=repository, text=True, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert (tmp_path / "exported/model.safetensors").exists()
