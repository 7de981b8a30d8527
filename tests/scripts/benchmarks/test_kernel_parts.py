"""The kernels for Hopper GPUs, timed separately: what runs without such a GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest

from model.attention import TokenCoords
from model.attention.blocks import BackwardInputs
from scripts.benchmarks.kernel_parts import HEADS, KV_HEADS, PRODUCTS, main, run_kernel


def test_a_hopper_gpu_is_needed(tmp_path, capsys):
    assert main(["--output", str(tmp_path)]) == 2
    assert "found cpu; these kernels run on Hopper GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_each_kernel_accepts_its_arguments(head_dim):
    length = 512
    q, k, v, dout = (
        jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    per_query = jax.ShapeDtypeStruct((1, HEADS, length), jnp.float32)
    integers = jax.ShapeDtypeStruct((1, length), jnp.int32)
    arguments = (
        q,
        k,
        v,
        BackwardInputs(dout, per_query, per_query),
        TokenCoords(integers, integers),
    )
    results = {
        kernel: jax.eval_shape(functools.partial(run_kernel, kernel), *arguments)
        for kernel in PRODUCTS
        if kernel != "backward" or head_dim <= 128
    }
    assert results["forward"].out.shape == results["dq"].shape == q.shape
    assert results["dkv"].shape == (2, *k.shape)
    if head_dim <= 128:
        dq, dkv = results["backward"]
        assert (dq.shape, dkv.shape) == (q.shape, (2, *k.shape))
