"""The program in docs/attention.md runs as printed with only the installed package, outside the
checkout, and agrees with dense attention in float64."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.model.attention.dense import dense_attention

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5
NAMES = ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
# Appended to the program: saves its arrays, and the inputs in the row's order.
SAVE = """
inputs = {name: np.asarray(x)[:, inverse(order)] for name, x in dict(q=q, k=k, v=v, dout=dout).items()}
np.savez("arrays.npz", index=index, segment_ids=segment_ids, out=out, dq=dq, dk=dk, dv=dv, **inputs)
"""


def program() -> str:
    """Returns the only Python program of the page."""
    page = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return code


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder that the attention package's wheel is unpacked into, as by `pip install .`."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "model" / "attention", folder / "source" / "model" / "attention")
    # A build leaves its files next to them.
    for name in ("pyproject.toml", "LICENSE", "docs/attention.md"):
        (folder / "source" / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("longstripe-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_contains_only_the_attention_package(installed):
    modules = {
        path.relative_to(installed / "longstripe" / "attention") for path in installed.rglob("*.py")
    }
    source = ROOT / "model" / "attention"
    assert modules == {path.relative_to(source) for path in source.rglob("*.py")}
    (metadata,) = installed.glob("*.dist-info/METADATA")
    needs = re.findall(
        r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(needs) == ["jax", "jaxtyping", "numpy"]


def test_the_guides_program_agrees_with_dense_attention(tmp_path, installed):
    (tmp_path / "mine.py").write_text(program() + SAVE, encoding="utf-8")
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))
    }
    result = subprocess.run(
        [sys.executable, "mine.py"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    arrays = np.load(tmp_path / "arrays.npz")
    q, k, v, dout, out, *gradients = (arrays[name] for name in NAMES)
    expected = dense_attention(q, k, v, arrays["index"], arrays["segment_ids"], dout)
    for name, computed, reference in zip(
        NAMES[4:], (out, *gradients), (expected[0], *expected[2:]), strict=True
    ):
        error = np.abs(computed - reference).max() / np.abs(reference).max()
        assert error < TOLERANCE, f"{name}: off by {error:.2e} of its largest value"


def test_the_program_is_short():
    lines = [
        line
        for line in program().splitlines()
        if line.strip() and not line.startswith(("import", "from"))
    ]
    assert len(lines) <= 24
