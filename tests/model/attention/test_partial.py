"""Merging partial attention: the laws that it must satisfy."""

import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.attention import (
    AttentionOp,
    AttentionPartial,
    Keys,
    Mask,
    Queries,
    TokenCoords,
    get_kernel,
)
from model.attention.kernels import ReferenceKernel
from model.attention.partial import merge, with_sinks

from .cases import empty

numbers = st.one_of(st.just(-np.inf), st.floats(-300, 300, width=32))


def part(lse, seed):
    lse = np.asarray(lse, np.float32).reshape(1, 2, 2)
    out = np.random.default_rng(seed).standard_normal((1, 2, 2, 3)).astype(np.float32)
    return AttentionPartial(
        jnp.where(jnp.isneginf(lse).swapaxes(1, 2)[..., None], 0.0, out), jnp.asarray(lse)
    )


def assert_close(a, b):
    """Checks equality up to rounding. A merged lse is float32: weights computed from it are off by
    its last digit, which grows with it."""
    lse = np.abs(np.where(np.isneginf(a.lse), 0, a.lse)).max()
    np.testing.assert_allclose(
        a.out, b.out, rtol=0, atol=2e-6 + np.spacing(np.float32(lse)) * np.abs(a.out).max()
    )
    np.testing.assert_allclose(a.lse, b.lse, rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@example(
    [-np.inf, -np.inf, 245, -np.inf],
    [-np.inf, -np.inf, 256, -np.inf],
    [-np.inf, -np.inf, 255, -np.inf],
)
@given(*[st.lists(numbers, min_size=4, max_size=4)] * 3)
def test_merge_is_associative_and_commutative(a, b, c):
    a, b, c = part(a, 0), part(b, 1), part(c, 2)
    assert_close(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_close(merge(a, b), merge(b, a))
    assert not np.isnan(merge(a, b).out).any()


@settings(max_examples=30, deadline=None)
@given(st.lists(numbers, min_size=4, max_size=4))
def test_merging_an_empty_partial_changes_nothing(a):
    a = part(a, 0)
    assert_close(merge(a, empty(1, 2, 2, 3)), a)
    assert_close(merge(empty(1, 2, 2, 3), a), a)


def test_a_sink_is_an_extra_key_with_value_zero():
    """Against the softmax in float64; a query that sees no key stays empty."""
    rng = np.random.default_rng(0)
    scores, values = rng.normal(0, 3, (1, 2, 4, 5)), rng.standard_normal((5, 3))
    scores[0, :, 3] = -np.inf
    sinks = rng.normal(0, 3, 2)
    exponentials = np.exp(scores)
    totals = exponentials.sum(-1)
    without = exponentials / np.where(totals == 0, 1, totals)[..., None]
    with np.errstate(divide="ignore"):
        partial = AttentionPartial(
            np.float32(np.einsum("bhtk,kd->bthd", without, values)), np.float32(np.log(totals))
        )
    got = with_sinks(partial, np.float32(sinks))
    shares = exponentials / (totals + np.exp(sinks)[:, None])[..., None]
    np.testing.assert_allclose(got.out, np.einsum("bhtk,kd->bthd", shares, values), atol=1e-5)
    expected = np.log(totals + np.exp(sinks)[:, None])
    np.testing.assert_allclose(got.lse[:, :, :3], expected[:, :, :3], rtol=1e-5)
    assert np.isneginf(got.lse[:, :, 3]).all() and (np.asarray(got.out)[:, 3] == 0).all()


class RoundedOnly(ReferenceKernel):
    """A kernel that cannot return its output in float32."""

    def forward(self, queries, keys, **options):
        raise AssertionError("called for an output in float32")

    def rounded_forward(self, queries, keys, **options):
        partial = super().forward(queries, keys, **options)
        return AttentionPartial(partial.out.astype(queries.q.dtype), partial.lse)


def test_the_kernel_rounds_where_there_is_one_rank_and_no_sink():
    x = jnp.ones((1, 8, 1, 4), jnp.bfloat16)
    coords = TokenCoords(jnp.arange(8, dtype=jnp.int32)[None], jnp.ones((1, 8), jnp.int32))
    op = AttentionOp.create(4, schedule="ring", kernel=RoundedOnly(), axis="sequence", size=1)
    out, _ = op.forward(Queries(x, coords), Keys(x, x, coords))
    assert out.dtype == jnp.bfloat16 and (out == 1).all()


def test_sinks_scale_the_output_before_it_is_rounded():
    """In bfloat16, so that rounding twice would show."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 32, 2, 16)), jnp.bfloat16) for _ in range(3))
    sinks, kernel = jnp.asarray([0.5, 1.5]), get_kernel("reference")
    coords = TokenCoords(jnp.arange(32, dtype=jnp.int32)[None], jnp.ones((1, 32), jnp.int32))
    blocks = Queries(q, coords), Keys(k, v, coords)
    op = AttentionOp.create(16, schedule="ring", kernel=kernel, axis="sequence", size=1)
    exact = with_sinks(kernel.forward(*blocks, mask=Mask(), scale=0.25), sinks)
    out, lse = op.forward(*blocks, sinks)
    np.testing.assert_array_equal(out, exact.out.astype(jnp.bfloat16))
    np.testing.assert_array_equal(lse, exact.lse)
