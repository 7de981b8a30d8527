"""The comparison of kernels on a device: right kernels pass it, and a wrong one, or one that fails, does not."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from model.attention.kernels import XlaKernel
from scripts.benchmarks import kernel_exactness
from scripts.benchmarks.kernel_exactness import CASES, LENGTH, RESULTS, documents, main, truth
from tests.model.attention.dense import dense_attention

ONE = ["--kernels", "xla", "--dtypes", "float32", "--head-dims", "64"]


@pytest.mark.parametrize(
    ("mask", "packing", "options"),
    [
        ("causal", "interrupted", {}),
        ("window 300", "packed", {"window": 300}),
        ("full", "one", {"causal": False}),
    ],
)
def test_its_truth_is_the_tests(mask, packing, options):
    q, k, v, dout = kernel_exactness.arrays(64, "float32")
    expected = dense_attention(q, k, v, *documents(packing), dout, **options)
    for name, values in zip(RESULTS, expected, strict=True):
        np.testing.assert_allclose(truth(64, "float32", mask, packing)[name], values, atol=1e-12)


def test_a_right_kernel_is_within_the_limits(tmp_path, capsys):
    assert main([*ONE, "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "kernel_exactness.json").read_text())["rows"]
    assert len(rows) == len(CASES) and all(
        row["held"] and max(row[name] for name in RESULTS) < 1e-5 for row in rows
    )
    assert f"{len(CASES)} of {len(CASES)} cases within the limits" in capsys.readouterr().out


class Wrong(XlaKernel):
    """Rounds its output, as a kernel with operands of fewer bits would."""

    def forward(self, queries, keys, **options):
        out, lse = super().forward(queries, keys, **options)
        return type(super().forward(queries, keys, **options))(
            out.astype(jnp.bfloat16).astype(jnp.float32), lse
        )


class Failing(XlaKernel):
    """Is refused by its compiler."""

    def forward(self, queries, keys, **options):
        raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("kernel", "said"),
    [(Wrong(), "ABOVE THE LIMIT"), (Failing(), "RuntimeError: no such instruction")],
)
def test_a_wrong_kernel_is_not(kernel, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kernel_exactness, "get_kernel", lambda name: kernel)
    monkeypatch.setattr(kernel_exactness, "CASES", CASES[:1])
    kernel_exactness.compiled.cache_clear()
    assert main([*ONE, "--output", str(tmp_path)]) == 0
    kernel_exactness.compiled.cache_clear()
    said_all = capsys.readouterr().out
    assert said in said_all and "0 of 1 cases within the limits" in said_all


def test_a_long_row_is_compared_at_three_places(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_exactness, "LONG_WINDOW", 50)
    monkeypatch.setattr(kernel_exactness, "LONG_HEADS", 4)
    monkeypatch.setattr(kernel_exactness, "LONG_KV_HEADS", 2)
    assert main([*ONE, "--long", "1024", "--output", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "kernel_exactness.json").read_text())["rows"]
    assert row["held"] and row["case"] == "window 50, 1,024 tokens"


def test_lengths_are_no_multiple_of_a_tile():
    assert LENGTH % 64 and (LENGTH // 2) % 64
