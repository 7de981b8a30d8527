"""A layer in chunks of queries against its formula, which jax differentiates itself, on one device;
and the options it excludes."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention.kernels import get_kernel
from model.attention.schedules import Balanced, Ulysses
from model.layer import LayerOutput
from model.linear import product
from model.memory.chunked import passed_through
from model.memory.options import MemoryConfig
from model.runners.head_groups import HeadGroups
from model.runners.query_chunks import LayerInChunks
from tests.errors import within
from tests.model.build import MESHES, abstract, llama, mean_loss, packed_batch, tiny

from .small_layer import (
    HEAD_AXES,
    HIDDEN,
    arguments,
    attended,
    attention_op,
    projected,
    values_and_gradients,
)


def onward(weights, x, attended):
    """Returns the output, and an auxiliary sum over the tokens."""
    x = x + product("bthd,hde->bte", attended, weights["o_proj"])
    branch = product("bte,ef->btf", x, weights["mlp"])
    return LayerOutput(x + jnp.tanh(branch), {"squares": jnp.sum(jnp.square(branch), (0, 1))})


def total(output):
    return jnp.sum(jnp.sin(output.hidden)) + jnp.dot(
        jnp.arange(HIDDEN), output.auxiliary["squares"]
    )


def in_chunks(chunks, groups, weights, x, positions, coords):
    def project(which, weights, x, positions):
        return passed_through(
            lambda *part: projected(*part, which), weights, x, positions, dtype=jnp.float32, chunk=4
        )

    def queries(*arrays):
        x, (q,) = project("q", *arrays)
        return x, q

    def finish(weights, x, attended, info):
        return onward(weights, x, attended)

    layer = SimpleNamespace(
        queries_through=queries,
        keys_values_through=functools.partial(project, "kv"),
        finish=finish,
        attention=attention_op(),
        memory=MemoryConfig(query_chunks=chunks),
        dtype=jnp.float32,
    )
    layer_in_chunks = LayerInChunks(layer, HeadGroups(groups, HEAD_AXES))
    return total(layer_in_chunks(weights, x, positions, coords))


def by_formula(weights, x, positions, coords):
    return total(onward(weights, x, attended(weights, x, positions, coords)))


@pytest.mark.parametrize(("chunks", "groups"), [(2, 1), (4, 2)])
def test_a_layer_in_query_chunks_is_exact(chunks, groups):
    ours = functools.partial(in_chunks, chunks, groups)
    got, expected = values_and_gradients(ours, by_formula)
    for divided, whole in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        within(np.abs(divided - whole).max() / np.abs(whole).max(), 1e-5, "gradients")


def test_query_chunks_must_divide_a_devices_tokens():
    with pytest.raises(
        ValueError, match=r"query_chunks: 3 does not divide the 16 tokens of a device"
    ):
        in_chunks(3, 1, *arguments())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"remat": "save_attention"},
            "remat: found 'save_attention'; .* valid: nothing, offload, every_k, offload_every_k",
        ),
        ({"remat": "everything"}, "remat: found 'everything'"),
        ({"sequence_parallel": True}, "query_chunks: found 2; with mesh.sequence_parallel"),
        (
            {"schedule": Balanced(ordered=True)},
            "query_chunks: found 2; .* balanced trades .* as do ring, all_gather, ulysses, attention2d",
        ),
        (
            {"schedule": Ulysses(degree=2, inner=Balanced(ordered=True))},
            "query_chunks: found 2; .* balanced trades",
        ),
    ],
    ids=str,
)
def test_query_chunks_refuse_incompatible_options(options, words):
    with pytest.raises(ValueError, match=words) as error:
        llama(
            tiny(),
            MESHES["tensor 2 x sequence 4"],
            **{"query_chunks": 2, "remat": "nothing", **options},
        )
    assert "\n" not in str(error.value)


def test_keys_are_not_kept_for_all_groups_of_heads():
    """Each chunk repeats what all chunks do with the keys (a group's, stacked to be sent):
    differentiation would hoist it out of the loop over chunks and keep it for all groups."""
    model = llama(
        tiny(),
        {"sequence": 4},
        remat="nothing",
        attention_groups=2,
        query_chunks=2,
        kernel=get_kernel("xla"),
    )
    gradient = jax.grad(lambda params, batch: mean_loss(model)(params, batch)[0])
    text = str(jax.make_jaxpr(gradient)(abstract(model), packed_batch(model.config)))
    assert (
        "f32[2,8,32,1,8]" in text
    )  # a group's keys and values, stacked: 8 rows, 32 tokens per device, heads of 8
    assert "f32[2,2,8,32,1,8]" not in text
    assert (
        "f32[8,16,8,8]" in text and "f32[8,32,8,8]" not in text
    )  # queries, or attention's output: of a chunk, not of all tokens
