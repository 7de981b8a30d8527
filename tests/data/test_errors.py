"""The first line of an error's message, as our own errors quote it; and a Python in which nothing
works: too old, or without the packages."""

import subprocess
import sys

import pytest

from data.errors import first_line
from tests.conftest import REPOSITORY


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n one"), "one"),
        (ValueError("what:\n  Why: x\nmore"), "what: Why: x"),
        (ValueError("what:"), "what:"),
        (ValueError(), "ValueError"),
        (ValueError(" \n"), "ValueError"),
        (FileNotFoundError(2, "No such file", "a.npy"), "No such file"),
        (OSError("a store's"), "a store's"),
        (ValueError("x" * 300), "x" * 200),
    ],
)
def test_the_first_line_is_never_empty(error, expected):
    assert first_line(error) == expected


@pytest.mark.parametrize(
    "command",
    [
        ["train.py", "--config", "configs/quickstart.yaml"],
        ["-m", "scripts.plan", "--model", "llama-7b"],
        ["-m", "eval.needle", "--help"],
    ],
)
def test_a_python_without_the_packages_is_named(command):
    # -S: without site-packages, as the system's Python if the environment is not activated
    done = subprocess.run(
        [sys.executable, "-S", *command], cwd=REPOSITORY, capture_output=True, text=True
    )
    [line] = done.stderr.splitlines()
    assert done.returncode == 2
    assert f" is not installed for {sys.executable}" in line and "make install" in line
    assert ". .venv/bin/activate" in line


@pytest.mark.parametrize("version", [(3, 8, 10), (3, 10, 12)])
def test_an_old_python_is_named(version):
    code = f"import sys; sys.version_info = {version}; import data.errors"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and "3.11 or newer" in line and sys.executable in line
    assert line.startswith("error: ") and ".".join(map(str, version)) in line
