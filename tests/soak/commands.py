"""Attacks on whole commands: their exit code and output with a damaged model, checkpoint, recipe or
data file."""

import contextlib
import io
import json
import pathlib
from collections.abc import Callable

import numpy as np
import yaml

from eval import line_cases, line_retrieval
from scripts import export_hf, import_hf, inspect_data
from scripts import prepare as prepare_command
from tests import small_model, small_run
from tests.soak.attacks import ROOT, Case, error_line
from tests.soak.damage import copied, damage_bytes, damage_file, damage_json, damage_json_file


def commands(base: pathlib.Path) -> Case:
    """Returns the case: a command with one damaged file ends with 0, or with 2 and one line that
    begins with `error:`."""
    model = small_model.write(base)
    with contextlib.redirect_stdout(io.StringIO()):
        assert import_hf.main([str(model), str(base / "checkpoint")]) == 0
    recipe = small_run.recipe(base, ROOT, conversations=12)
    line_cases.write(line_cases.generate(4, 2, key_style="short"), base / "cases.jsonl")

    def damaged_model(folder: pathlib.Path, generator: np.random.Generator) -> pathlib.Path:
        copy = copied(model, folder / "hf")
        files = sorted(path for path in copy.iterdir() if path.name != "README.md")
        _damage(files[generator.integers(len(files))], generator)
        return copy

    def imports(folder: pathlib.Path, generator: np.random.Generator) -> tuple[Callable, list[str]]:
        return import_hf.main, [str(damaged_model(folder, generator)), str(folder / "imported")]

    def exports(folder: pathlib.Path, generator: np.random.Generator) -> tuple[Callable, list[str]]:
        copy = copied(base / "checkpoint", folder / "checkpoint")
        files = sorted(path for path in copy.rglob("*") if path.is_file())
        _damage(files[generator.integers(len(files))], generator)
        return export_hf.main, [str(copy), str(folder / "exported")]

    def damaged_recipe(folder: pathlib.Path, generator: np.random.Generator) -> list[str]:
        fields = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        path = folder / "recipe.yaml"
        fields["data"]["prepared"] = str(folder / "prepared")
        if generator.random() < 0.5:
            data = folder / "conversations.json"
            data.write_bytes((base / "conversations.json").read_bytes())
            damage_json_file(data, generator)
            fields["data"]["sources"] = [{"path": str(data)}]
        else:
            fields = damage_json(fields, generator)
        path.write_text(
            yaml.safe_dump(fields) if generator.random() < 0.9 else json.dumps(fields)[:-9],
            encoding="utf-8",
        )
        return ["--config", str(path)]

    def prepares(
        folder: pathlib.Path, generator: np.random.Generator
    ) -> tuple[Callable, list[str]]:
        return prepare_command.main, damaged_recipe(folder, generator)

    def inspects(
        folder: pathlib.Path, generator: np.random.Generator
    ) -> tuple[Callable, list[str]]:
        _, path = damaged_recipe(folder, generator)
        return inspect_data.main, [path]

    def retrieves(
        folder: pathlib.Path, generator: np.random.Generator
    ) -> tuple[Callable, list[str]]:
        cases, checkpoint = folder / "cases.jsonl", model
        cases.write_bytes((base / "cases.jsonl").read_bytes())
        if generator.random() < 0.5:
            cases.write_bytes(damage_bytes(cases.read_bytes(), generator))
        else:
            checkpoint = damaged_model(folder, generator)
        words = ["--checkpoint", str(checkpoint), "--cases", str(cases)]
        words += ["--output", str(folder / "out"), "--max-new-tokens", "2"]
        return line_retrieval.main, [*words, "--compute-dtype", "float32"]

    def case(generator: np.random.Generator, folder: pathlib.Path) -> str:
        kind = (imports, exports, prepares, inspects, retrieves)[generator.integers(5)]
        main, arguments = kind(folder, generator)
        stderr, stdout = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
            try:
                code = main(arguments)
            except SystemExit as left:
                code = left.code
        refused = error_line(code or 0, stdout.getvalue() + stderr.getvalue(), kind.__name__)
        return f"{kind.__name__}: {'refused' if refused else 'done'}"

    return case


def _damage(path: pathlib.Path, generator: np.random.Generator) -> None:
    if path.suffix == ".json" and generator.random() < 0.7:
        damage_json_file(path, generator)
    else:
        damage_file(path, generator)
