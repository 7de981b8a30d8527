"""Attention in groups of heads against the formula of attention, which jax differentiates itself,
on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import AttentionOp, TokenCoords
from model.attention.kernels import get_kernel
from model.linear import product
from model.memory.chunked import passed_through
from model.runners.head_groups import GroupedAttention, HeadGroups
from tests.model.build import llama, tiny

TOKENS, HIDDEN, HEADS, KEY_HEADS, SIZE = 8, 4, 4, 2, 2
GROUPS = HeadGroups(2, {"norm": None, "q_proj": 1, "k_proj": 1, "v_proj": 1})


def inward(weights, x, positions):
    """A norm before the projections whose weight all groups share, and a factor that depends on
    positions."""
    x = x * weights["norm"] * jnp.cos(positions)[..., None]
    return tuple(product("bte,ehd->bthd", x, weights[f"{name}_proj"]) for name in "qkv")


def in_groups(weights, x, positions, coords):
    def project(weights, x, positions):
        return passed_through(inward, weights, x, positions, dtype=jnp.float32, chunk=4)

    op = AttentionOp.create(
        SIZE, schedule="local", kernel=get_kernel("reference"), axis="sequence", size=1
    )
    x, out = GroupedAttention(project, op, GROUPS, jnp.float32)(weights, x, positions, coords)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(x))


def by_formula(weights, x, positions, coords):
    q, k, v = inward(weights, x, positions)
    k, v = (jnp.repeat(t, HEADS // KEY_HEADS, 2) for t in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5
    seen = coords.index[:, :, None] >= coords.index[:, None, :]
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(x))


def test_attention_in_head_groups_is_exact():
    rng = np.random.default_rng(0)
    shapes = {
        "norm": (HIDDEN,),
        "q_proj": (HIDDEN, HEADS, SIZE),
        "k_proj": (HIDDEN, KEY_HEADS, SIZE),
        "v_proj": (HIDDEN, KEY_HEADS, SIZE),
    }
    weights = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    x = rng.standard_normal((1, TOKENS, HIDDEN)).astype(np.float32)
    index = np.arange(TOKENS, dtype=np.int32)[None]
    arguments = (weights, x, index, TokenCoords(index, np.ones_like(index)))
    got, expected = jax.jit(
        lambda *a: tuple(jax.value_and_grad(f, (0, 1))(*a) for f in (in_groups, by_formula))
    )(*arguments)
    for grouped, whole in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(grouped - whole).max() <= 1e-5 * np.abs(whole).max()


def test_head_groups_recompute_projections_so_remat_everything_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^memory\.remat: found 'everything'; .* = 2 each group is projected again",
    ):
        llama(tiny(), remat="everything", attention_groups=2)
