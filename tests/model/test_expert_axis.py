"""Experts split over ranks of `expert`: for any routing, and the bytes that ranks send."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from planning.compiled.transfers import transfers
from tests.model.build import mesh_of
from tests.model.test_experts import KINDS, NAMES, check_routing, layer_of, mixture

CONFIG = mixture()
RANKS, TOKENS = 4, 40


@functools.cache
def compiled():
    """Returns a function of weights and inputs that computes output and gradients, for tokens and
    experts on four ranks."""
    spec = PartitionSpec("expert")
    weight_specs = {name: PartitionSpec() if name == "gate" else spec for name in NAMES.values()}
    weights, output = layer_of(CONFIG)
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

    return run.lower(weights, *arrays()).compile()


def arrays():
    """Returns x and the gradient of the output: [ranks, tokens per rank, E]."""
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(RANKS, TOKENS // RANKS, 64)).astype(np.float32) for _ in range(2))
    x[..., 0] = 1.0
    return x, dy


@pytest.mark.parametrize("kind", KINDS)
def test_split_experts_are_exact_for_any_routing(kind):
    """All tokens on one rank, none on another, or ties: one program, outputs and gradients."""
    check_routing(CONFIG, kind, compiled(), *arrays())


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
