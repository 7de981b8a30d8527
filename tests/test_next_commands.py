"""The line that ends a training names existing commands with flags that they accept."""

import functools
import json
import shlex
from pathlib import Path

import pytest

import train
from eval import in_context, needle, report
from scripts import export_hf
from tests import small_model
from tests.conftest import REPOSITORY
from trainer.config.load import load
from trainer.options import parse


def parsed(line):
    """The module and the parsed flags of each command in the line."""
    parsers = {
        "scripts.export_hf": functools.partial(parse, export_hf.Options),
        "eval.needle": needle.parse,
        "eval.report": report.parse,
        "eval.in_context": in_context.parse,
    }
    commands = [shlex.split(command) for command in line.removeprefix("next: ").split("; ")]
    assert all(command[:2] == ["python", "-m"] for command in commands)
    return {module: parsers[module](flags) for _, _, module, *flags in commands}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_on_text_is_exported_evaluated_and_reported(tmp_path, processes):
    folder = tmp_path / "my run"
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "1", "--mesh.sequence", "2"]
    config = load(["--config", "configs/quickstart.yaml", "--run_dir", str(folder), *mesh])
    commands = parsed(train.next_commands(config, processes))
    assert list(commands) == ["scripts.export_hf", "eval.needle", "eval.report"]
    export, evaluation, page = commands.values()
    assert (export.checkpoint, export.hf_dir, page.runs) == (
        str(folder),
        folder / "exported",
        [str(folder)],
    )
    assert evaluation.checkpoint == str(folder) and evaluation.tokens == [512], (
        "no case is as short as the recipe's 256"
    )
    assert (
        evaluation.simulate,
        evaluation.rows,
        evaluation.fsdp,
        evaluation.tensor,
        evaluation.sequence,
    ) == ((8, 4, 4, 1, 2) if processes == 1 else (0, 1, 1, 1, 1))


@pytest.mark.parametrize(
    ("rows", "overrides", "tokens"),
    [
        ("4096", {}, 2048),  # rows may hold several documents
        ("1024", {}, 1024),
        ("4096", {"rope_theta": 90000.0}, 4096),
        ("4096", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 4096),
    ],
)
def test_a_run_is_evaluated_within_the_length_that_it_has_positions_for(
    tmp_path, rows, overrides, tokens
):
    model = small_model.write(tmp_path)
    config_file = model / "config.json"
    written = json.loads(config_file.read_text()) | {"max_position_embeddings": 2048}
    config_file.write_text(json.dumps(written))
    words = ["--model.path", str(model), "--data.path", "chats.jsonl"]
    words += ["--data.context_length", rows, "--model.overrides", json.dumps(overrides)]
    assert parsed(train.next_commands(load(words), 1))["eval.needle"].tokens == [tokens]


def test_a_run_whose_base_is_gone_is_evaluated_as_far_as_its_rows(tmp_path):
    words = ["--model.path", str(tmp_path / "gone"), "--data.path", "chats.jsonl"]
    config = load([*words, "--data.context_length", "4096"])
    assert parsed(train.next_commands(config, 1))["eval.needle"].tokens == [4096]


def test_a_run_begun_in_another_folder_is_evaluated_from_the_project_s(tmp_path, monkeypatch):
    """`python -m eval.needle` finds the module there alone, and its paths are not relative to it."""
    words = ["--config", str(REPOSITORY / "configs/quickstart.yaml"), "--run_dir", "my run"]
    monkeypatch.chdir(tmp_path)
    line = train.next_commands(load(words), 1)
    change, folder = shlex.split(line.removeprefix("next: ").partition("; ")[0])
    assert (change, Path(folder)) == ("cd", REPOSITORY)
    export, evaluation, page = parsed(line.replace(f"cd {shlex.quote(folder)}; ", "")).values()
    run = str(tmp_path / "my run")
    assert (export.checkpoint, evaluation.checkpoint, page.runs) == (run, run, [run])
    assert export.hf_dir == tmp_path / "my run/exported"


def test_the_best_checkpoint_is_exported_and_evaluated(tmp_path):
    """As by transformers with load_best_model_at_end."""
    flags = ["--run_dir", str(tmp_path / "run"), "--checkpoint.best", "accuracy"]
    config = load(["--config", "configs/quickstart.yaml", *flags])
    export, evaluation, page = parsed(train.next_commands(config, 1)).values()
    assert export.checkpoint == evaluation.checkpoint == f"{tmp_path}/run/best"
    assert page.runs == [str(tmp_path / "run")] and export.hf_dir == tmp_path / "run" / "exported"


def test_a_run_on_trajectories_is_played_and_reported(repository):
    recipe = next(
        path
        for path in sorted((repository / "configs").rglob("*.yaml"))
        if "trajectories:" in path.read_text()
    )
    mesh = ["--mesh.fsdp", "2", "--mesh.sequence", "2", "--mesh.simulate", "4"]
    config = load(["--config", str(recipe), *mesh])
    commands = parsed(train.next_commands(config, 1))
    assert list(commands) == ["eval.in_context", "eval.report"]
    args = commands["eval.in_context"]
    assert (args.simulate, args.seeds, args.fsdp, args.sequence) == (4, 2, 2, 2)
