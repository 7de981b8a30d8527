"""The comparison of kernels on a device: correct kernels pass, and a wrong or failing one does
not."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import Mask
from model.attention.kernels import XlaKernel
from scripts.benchmarks import kernel_exactness
from scripts.benchmarks.kernel_exactness import CASES, LENGTH, RESULTS, dense, main
from tests.model.attention.dense import dense_attention

ONE = ["--kernels", "xla", "--dtypes", "float32", "--head-dims", "64"]


@pytest.mark.parametrize("options", [{}, {"window": 30}, {"causal": False}], ids=str)
def test_its_reference_is_that_of_the_tests(options):
    rng, length = np.random.default_rng(0), 100
    q, k, v, dout = (rng.standard_normal((2, length, heads, 16)) for heads in (4, 2, 2, 4))
    index = np.tile(np.arange(length), (2, 1))
    segments = np.repeat([[1, 2, 0, 2, 3], [1, 1, 1, 2, 0]], length // 5, axis=1)
    actual = dense(q, k, v, dout, index, segments, Mask(**options))
    expected = dense_attention(q, k, v, index, segments, dout, **options)
    for name, values in zip(RESULTS, expected, strict=True):
        np.testing.assert_allclose(actual[name], values, atol=1e-12)


def test_a_correct_kernel_is_within_the_limits(tmp_path, capsys, monkeypatch):
    chosen = (CASES[2], CASES[3])  # every kind of gap in a row, a window, two layouts
    monkeypatch.setattr(kernel_exactness, "CASES", chosen)
    assert main([*ONE, "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "kernel_exactness.json").read_text())["rows"]
    assert len(rows) == 2 and all(
        row["held"] and max(row[name] for name in RESULTS) < 1e-5 for row in rows
    )
    assert "2 of 2 cases within the limits" in capsys.readouterr().out


class Wrong(XlaKernel):
    """Rounds its output, as a kernel with lower-precision operands would."""

    def forward(self, queries, keys, **options):
        out, lse = super().forward(queries, keys, **options)
        return type(super().forward(queries, keys, **options))(
            out.astype(jnp.bfloat16).astype(jnp.float32), lse
        )


class Failing(XlaKernel):
    """Its compiler refuses it."""

    def forward(self, queries, keys, **options):
        raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [(Wrong(), "ABOVE THE LIMIT"), (Failing(), "RuntimeError: no such instruction")],
)
def test_a_wrong_kernel_is_outside_the_limits(kernel, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kernel_exactness, "get_kernel", lambda name: kernel)
    monkeypatch.setattr(kernel_exactness, "CASES", CASES[:1])
    kernel_exactness.compiled.cache_clear()
    assert main([*ONE, "--output", str(tmp_path)]) == 0
    kernel_exactness.compiled.cache_clear()
    stdout = capsys.readouterr().out
    assert message in stdout and "0 of 1 cases within the limits" in stdout


def test_a_long_row_is_compared_at_three_places(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_exactness, "LONG_WINDOW", 50)
    monkeypatch.setattr(kernel_exactness, "LONG_HEADS", 4)
    monkeypatch.setattr(kernel_exactness, "LONG_KV_HEADS", 2)
    assert main([*ONE, "--long", "1024", "--output", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "kernel_exactness.json").read_text())["rows"]
    assert row["held"] and row["case"] == "window 50, 1,024 tokens"


def test_lengths_are_not_multiples_of_a_tile():
    assert LENGTH % 64 and (LENGTH // 2) % 64
