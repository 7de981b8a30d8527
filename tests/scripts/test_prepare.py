"""scripts.prepare makes the data that training uses; the module data.prepare says that it is not a command."""

import subprocess
import sys

import pytest
import yaml

from data import prepare as data_prepare
from scripts import prepare
from tests.conftest import REPOSITORY
from trainer.config import load as configuration
from trainer.model_source import choose_model
from trainer.text import prepare_text

FIXTURES = REPOSITORY / "data/fixtures"


def test_training_uses_what_it_made(tmp_path, capsys, monkeypatch):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump({
        "model": {"tokenizer": str(FIXTURES / "tiny_tokenizer"), "preset": "tiny"},
        "data": {"path": str(FIXTURES / "conversations_held_out.json"), "prepared": str(tmp_path / "prepared")}}))
    flags = ["--config", str(recipe), "--data.context_length", "512"]
    assert prepare.main(flags) == 0
    output = capsys.readouterr().out
    monkeypatch.setattr(data_prepare, "_build", lambda *_: pytest.fail("it was prepared again"))
    config = configuration.load(flags)
    prepared = prepare_text(config, choose_model(config.model).tokenizer())
    assert f"prepared in {prepared.folder}" in output and f"train: {len(prepared.train):,} documents" in output
    assert prepare.main(["--config", str(recipe), "--data.context_lenght", "512"]) == 2
    assert "did you mean --data.context_length?" in capsys.readouterr().err


def test_data_prepare_names_the_command():
    command = [sys.executable, "-m", "data.prepare", "--help"]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert finished.returncode == 1 and len(finished.stderr.splitlines()) == 1
    assert "python -m scripts.prepare" in finished.stderr
