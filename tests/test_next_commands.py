"""The line that ends a training names existing commands with flags that they accept."""

import functools
import shlex

import pytest

import train
from eval import in_context, needle, report
from scripts import export_hf
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
    config = load(
        [
            "--config",
            "configs/quickstart.yaml",
            "--run_dir",
            str(folder),
            "--mesh.data",
            "2",
            "--mesh.fsdp",
            "2",
            "--mesh.tensor",
            "1",
            "--mesh.sequence",
            "2",
        ]
    )
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


def test_a_run_on_trajectories_is_played_and_reported(repository):
    recipe = next(
        path
        for path in sorted((repository / "configs").rglob("*.yaml"))
        if "trajectories:" in path.read_text()
    )
    config = load(
        [
            "--config",
            str(recipe),
            "--mesh.fsdp",
            "2",
            "--mesh.sequence",
            "2",
            "--mesh.simulate",
            "4",
        ]
    )
    commands = parsed(train.next_commands(config, 1))
    assert list(commands) == ["eval.in_context", "eval.report"]
    args = commands["eval.in_context"]
    assert (args.simulate, args.seeds, args.fsdp, args.sequence) == (4, 2, 2, 2)
