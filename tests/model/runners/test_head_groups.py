"""Attention in groups of heads against the formula of attention, which jax differentiates itself,
on one device."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from model.memory.chunked import passed_through
from model.runners.head_groups import GroupedAttention, HeadGroups
from tests.model.build import llama, tiny

from .small_layer import HEAD_AXES, attended, attention_op, projected, values_and_gradients


def in_groups(weights, x, positions, coords):
    def project(weights, x, positions):
        return passed_through(projected, weights, x, positions, dtype=jnp.float32, chunk=4)

    layer = SimpleNamespace(project_through=project, attention=attention_op(), dtype=jnp.float32)
    x, out = GroupedAttention(layer, HeadGroups(2, HEAD_AXES))(weights, x, positions, coords)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(x))


def by_formula(weights, x, positions, coords):
    out = attended(weights, x, positions, coords)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(x))


def test_attention_in_head_groups_is_exact():
    got, expected = values_and_gradients(in_groups, by_formula)
    for grouped, whole in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert abs(grouped - whole).max() <= 1e-5 * abs(whole).max()


def test_head_groups_recompute_projections_so_remat_everything_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^memory\.remat: found 'everything'; .* = 2 each group is projected again",
    ):
        llama(tiny(), remat="everything", attention_groups=2)
