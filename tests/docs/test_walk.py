"""ARCHITECTURE.md's list of calls from train.py to a kernel matches the calls of a step."""

import re
import traceback
from pathlib import Path

import pytest
import yaml

import train
from model.attention.kernels import chosen
from model.attention.kernels.xla import XlaKernel
from tests.conftest import REPOSITORY
from tests.fixtures.make_run import RECIPE

# Files that a step passes through but that nobody has to read: error codes, a wrapper, an abstract
# class.
PASSED = {
    "trainer/entry.py",
    "model/runners/remat.py",
    "model/attention/kernels/kernel.py",
}


class KernelCalledError(BaseException):
    """Ends the run at its first kernel call; no handler in train.py catches it."""


def listed() -> list[str]:
    """Returns the files of the list, in order."""
    text = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("## From `train.py`")[2].partition("\n## ")[0]
    names = re.findall(r"^\d+\. `([\w.]+)`", section, re.MULTILINE)
    return [name if name == "train.py" else f"{name.replace('.', '/')}.py" for name in names]


def test_the_listed_calls_match_a_traced_step(tmp_path, monkeypatch, request):
    """Every file of a traced step is listed in the order of the calls, except those in PASSED."""
    stack: list[str] = []

    def stop(*_, **__):
        files = [Path(frame.filename) for frame in traceback.extract_stack()]
        stack.extend(
            path.relative_to(REPOSITORY).as_posix()
            for path in files
            if path.is_relative_to(REPOSITORY) and "site-packages" not in path.parts
        )
        raise KernelCalledError

    # Traced kernels are cached: this test must not reuse those of others, nor leave `stop` to them.
    chosen._traced_once.cache_clear()
    request.addfinalizer(chosen._traced_once.cache_clear)
    monkeypatch.setattr(XlaKernel, "forward", stop)
    monkeypatch.setattr(XlaKernel, "extend", stop)
    recipe = tmp_path / "recipe.yaml"
    source = str(REPOSITORY / RECIPE["data"]["sources"][0]["path"])
    changes = {
        "data": {
            "sources": [{"path": source}],
            "context_length": 64,
            "prepared": str(tmp_path / "p"),
        },
        "attention": {"kernel": "auto"},
        "mesh": {"sequence": 8, "simulate": 8},
    }
    recipe.write_text(yaml.safe_dump(RECIPE | changes), encoding="utf-8")
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(KernelCalledError):
        train.main(["--config", str(recipe), "--run_dir", str(tmp_path / "run")])
    traced = [file for file in dict.fromkeys(stack) if not file.startswith(("tests/", ".venv/"))]
    assert [file for file in traced if file not in PASSED] == listed()[:-1]
    assert listed()[-1] == "model/attention/kernels/xla.py" and len(listed()) <= 15
