"""scripts.prepare makes the data that training uses; running the module data.prepare names the
command."""

import re
import subprocess
import sys

import pytest
import yaml

from data import prepare as data_prepare
from data.trajectories import builder
from scripts import inspect_data, prepare
from tests.conftest import REPOSITORY
from tests.data.trajectories.made import TASK, folder_of
from trainer.config import load as configuration
from trainer.model_source import choose_model, for_templates
from trainer.text import prepare_text

FIXTURES = REPOSITORY / "data/fixtures"


def test_training_uses_the_prepared_data(tmp_path, capsys, monkeypatch):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "model": {"tokenizer": str(FIXTURES / "tiny_tokenizer"), "preset": "tiny"},
                "data": {
                    "path": str(FIXTURES / "conversations_held_out.json"),
                    "prepared": str(tmp_path / "prepared"),
                },
            }
        )
    )
    flags = ["--config", str(recipe), "--data.context_length", "512"]
    assert prepare.main(flags) == 0
    output = capsys.readouterr().out
    monkeypatch.setattr(data_prepare, "_build", lambda *_: pytest.fail("it was prepared again"))
    config = configuration.load(flags)
    source = choose_model(config.model)
    prepared = prepare_text(config, source.config, source.tokenizer())
    assert (
        f"prepared in {prepared.folder}" in output
        and f"train: {len(prepared.train):,} documents" in output
    )
    assert prepare.main(["--config", str(recipe), "--data.context_lenght", "512"]) == 2
    assert "did you mean --data.context_length?" in capsys.readouterr().err


def test_episodes_are_prepared_without_a_tokenizer(tmp_path, capsys, monkeypatch):
    """Training finds the folder; the returns are those of the made episodes. Other commands on data
    name what shows episodes."""
    folder_of(tmp_path / "data", count=4)
    recipe = tmp_path / "mine.yaml"
    trajectories = {"path": str(tmp_path / "data"), "task": TASK.name}
    data = {"prepared": str(tmp_path / "prepared"), "context_length": 128}
    recipe.write_text(
        yaml.safe_dump(
            {
                "model": {"preset": "tiny"},
                "trajectories": trajectories,
                "data": data,
                "mesh": {"sequence": 1},
            }
        )
    )
    assert prepare.main(["--config", str(recipe)]) == 0
    output = capsys.readouterr().out
    assert "least 2.0, quartiles 3.5 5.0 6.5, best 8.0, mean 5.0" in output
    monkeypatch.setattr(builder, "_build", lambda *_: pytest.fail("it was prepared again"))
    prepared = builder.prepare_trajectories(*trajectories.values(), data["prepared"])
    assert f"prepared in {prepared.folder}" in output
    assert prepare.main(["--config", str(recipe), "--engine", "beam"]) == 2
    assert "--engine: found beam, which prepares no episodes" in capsys.readouterr().err
    assert inspect_data.main([str(recipe)]) == 2
    assert "scripts.inspect_trajectories shows them" in capsys.readouterr().err


def test_what_train_reads_without_a_recipe_is_previewed_and_prepared(
    hf_model, tmp_path, capsys, monkeypatch
):
    flags = [
        "--model.path",
        str(hf_model),
        "--data.path",
        str(FIXTURES / "conversations_held_out.json"),
    ]
    flags += ["--data.context_length", "256", "--data.prepared", str(tmp_path / "prepared")]
    assert prepare.main(flags) == 0
    folder = re.search("prepared in (.*)", capsys.readouterr().out)[1]
    monkeypatch.setattr(data_prepare, "_build", lambda *_: pytest.fail("it was prepared again"))
    config = configuration.load(flags)
    source, tokenizer = for_templates(choose_model(config.model), config.data)
    prepared = prepare_text(config, source.config, tokenizer)
    assert str(prepared.folder) == folder
    for words in ([*flags, "--rows", "1"], ["--rows", "1", *flags]):
        assert inspect_data.main(words) == 0
        output = capsys.readouterr().out
        assert prepared.report.summary() in output and "row 0" in output and "row 1" not in output
        assert f"train: {len(prepared.train):,} documents" in output and "rows of 256" in output
    for main in (prepare.main, inspect_data.main):
        assert main(flags[:2]) == 2
        assert "--model.path and --data.path suffice without one" in capsys.readouterr().err


@pytest.mark.parametrize("before", [[], ["--rows", "1"], ["--data.context_length", "512"]])
def test_a_recipe_may_follow_flags(before, small_recipe, tmp_path, capsys):
    words = [str(small_recipe), "--data.prepared", str(tmp_path)]
    assert inspect_data.main([*before, *words]) == 0
    assert "row 0" in capsys.readouterr().out


def test_every_stage_is_prepared(tmp_path, capsys, monkeypatch):
    """A stage begins with the previous stage's checkpoint, from which its data could not be read
    yet."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "model": {"tokenizer": str(FIXTURES / "tiny_tokenizer"), "preset": "tiny"},
                "run_dir": str(tmp_path / "run"),
                "data": {
                    "path": str(FIXTURES / "conversations_held_out.json"),
                    "prepared": str(tmp_path / "prepared"),
                },
                "stages": [
                    {"context_length": 256, "steps": 1},
                    {"context_length": 512, "steps": 1},
                ],
            }
        )
    )
    assert prepare.main(["--config", str(recipe)]) == 0
    stdout = capsys.readouterr().out
    assert "stage 1 of 2: 256 tokens" in stdout and "rows of 256 in the first epoch" in stdout
    assert "stage 2 of 2: 512 tokens" in stdout and "rows of 512 in the first epoch" in stdout
    assert (
        inspect_data.main([str(recipe), "--rows", "1"]) == 0
        and "stage 2 of 2" in capsys.readouterr().out
    )
    assert (
        inspect_data.main([str(recipe), "--stage", "1"]) == 0
        and "rows of 256" in capsys.readouterr().out
    )
    assert inspect_data.main([str(recipe), "--stage", "3"]) == 2
    assert "--stage: found 3; the recipe has 2, counted from 1" in capsys.readouterr().err


def test_data_prepare_names_the_command():
    command = [sys.executable, "-m", "data.prepare", "--help"]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert finished.returncode == 1 and len(finished.stderr.splitlines()) == 1
    assert "python -m scripts.prepare" in finished.stderr
