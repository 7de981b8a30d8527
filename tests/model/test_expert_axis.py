"""Experts split over ranks of `expert`: for any routing, and the bytes that ranks send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from model.dropout import TokenInfo
from model.experts import MixtureOfExperts
from model.sharding import TensorParallel
from planning.compiled.transfers import transfers
from tests.model.build import mesh_of
from tests.model.test_experts import choices, mixture, skewed, token_by_token

CONFIG = mixture()
RANKS, TOKENS = 4, 40
KINDS = ("as drawn", "all choose the same, none choose another", "ties")
NAMES = {"gate.weight": "gate"} | {
    f"experts.{name}.weight": name for name in ("gate_proj", "up_proj", "down_proj")
}


@functools.cache
def initial():
    """Returns a mixture's graph and state, and its weights by short names."""
    graph, state = nnx.split(MixtureOfExperts(CONFIG, rngs=nnx.Rngs(0)))
    return (
        graph,
        state,
        {NAMES[".".join(path)]: leaf[...] for path, leaf in nnx.to_flat_state(state)},
    )


def output(weights, x):
    """Returns the mixture's output for a rank's tokens, from its own experts' matrices."""
    graph, state, _ = initial()
    leaves = [
        (path, leaf.replace(weights[NAMES[".".join(path)]]))
        for path, leaf in nnx.to_flat_state(state)
    ]
    layer = nnx.merge(graph, nnx.from_flat_state(leaves))
    return layer(x, TensorParallel.of(CONFIG, 1), TokenInfo(None))[0]


@functools.cache
def compiled():
    """Returns a function of weights and inputs that computes output and gradients, for tokens and
    experts on four ranks."""
    spec = PartitionSpec("expert")
    weight_specs = {name: PartitionSpec() if name == "gate" else spec for name in NAMES.values()}
    split = jax.shard_map(
        output,
        mesh=mesh_of({"expert": RANKS}),
        in_specs=(weight_specs, spec),
        out_specs=spec,
        check_vma=False,
    )

    @jax.jit
    def run(weights, x, dy):
        y, pullback = jax.vjp(split, weights, x)
        return y, *pullback(dy)

    return run.lower(initial()[2], *arrays()).compile()


def arrays():
    """Returns x and the gradient of the output: [ranks, tokens per rank, E]."""
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(RANKS, TOKENS // RANKS, 64)).astype(np.float32) for _ in range(2))
    x[..., 0] = 1.0
    return x, dy


@pytest.mark.parametrize("kind", KINDS)
def test_split_experts_are_exact_for_any_routing(kind):
    """All tokens on one rank, none on another, or ties: one program, outputs and gradients."""
    x, dy = arrays()
    weights = {**initial()[2], "gate": skewed(kind, initial()[2]["gate"])}
    plain = functools.partial(token_by_token, CONFIG, choices(CONFIG, weights, x))
    expected, pullback = jax.vjp(
        lambda w, x: plain(w, x.reshape(-1, 64)).reshape(x.shape), weights, x
    )
    y, dw, dx = compiled()(weights, x, dy)
    dw_expected, dx_expected = pullback(jnp.asarray(dy))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dx, dx_expected, rtol=1e-4, atol=1e-4)
    for name, gradient in dw_expected.items():
        bound = 1e-5 * np.abs(gradient).max() + 1e-6
        np.testing.assert_allclose(dw[name], gradient, rtol=1e-4, atol=bound, err_msg=name)


def test_ranks_send_tokens_and_sums_but_no_expert_weights():
    """The bytes that a rank receives, forward and backward: from the three others their tokens with
    their routes and the gradients of their sums, and the partial sums of its own tokens."""
    received = {}
    for transfer in transfers(compiled().as_text(), RANKS):
        kind = transfer.kind
        received[kind] = received.get(kind, 0) + transfer.nbytes.max() * transfer.times
    hidden = TOKENS // RANKS * 64 * 4
    routes = TOKENS // RANKS * CONFIG.num_experts_per_tok * 4
    others = RANKS - 1
    assert received["all-gather"] == others * (2 * hidden + 2 * routes)
    assert received["reduce-scatter"] == others * (2 * hidden + routes)
    router = 64 * CONFIG.num_experts * 4
    assert received.get("all-reduce", 0) <= 2 * router
    assert received.keys() <= {"all-gather", "reduce-scatter", "all-reduce"}
