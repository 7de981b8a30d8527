"""Tests of scripts/prepare.py: what it makes is what training finds; a module that is no command says which one is."""

import subprocess
import sys

import pytest
import yaml

from data import prepare as data_room
from scripts import prepare
from tests.conftest import REPOSITORY
from trainer.config import load as configuration
from trainer.model_source import choose_model
from trainer.text import prepare_text

FIXTURES = REPOSITORY / "data/fixtures"


def test_training_finds_what_it_made(tmp_path, capsys, monkeypatch):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump({
        "model": {"tokenizer": str(FIXTURES / "tiny_tokenizer"), "preset": "tiny"},
        "data": {"path": str(FIXTURES / "conversations_held_out.json"), "prepared": str(tmp_path / "prepared")}}))
    flags = ["--config", str(recipe), "--data.context_length", "512"]
    assert prepare.main(flags) == 0
    said = capsys.readouterr().out
    monkeypatch.setattr(data_room, "_build", lambda *_: pytest.fail("it was prepared again"))
    config = configuration.load(flags)
    found = prepare_text(config, choose_model(config.model).tokenizer())
    assert f"prepared in {found.folder}" in said and f"train: {len(found.train):,} documents" in said
    assert prepare.main(["--config", str(recipe), "--data.context_lenght", "512"]) == 2
    assert "did you mean --data.context_length?" in capsys.readouterr().err


def test_no_command_says_which_one_is():
    command = [sys.executable, "-m", "data.prepare", "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "python -m scripts.prepare" in done.stderr and len(done.stderr.splitlines()) == 1
