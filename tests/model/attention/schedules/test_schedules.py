"""What schedules send and recompute, counted in the traced program: both directions, windows,
Attention2D's overlap, remat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from model.attention import (
    AttentionOp,
    Keys,
    Mask,
    Queries,
    TokenCoords,
    attend,
    attention,
    get_kernel,
)
from model.attention.blocks import BackwardInputs, StackedKeys
from model.attention.kernels import KERNELS, ReferenceKernel
from model.attention.schedules import Attention2D, Context, Payload, Ranks, Ring, plan
from model.attention.schedules.attention2d import fewest_bytes
from model.runners.remat import scan_layers
from tests.model.attention.cases import SCHEDULES, mesh_of
from tests.model.attention.jaxprs import counts, operations, sent

SIZE, TOKENS, HEADS, DIM = 8, 30, 2, 4
LENGTH = SIZE * TOKENS
KEYS = 2 * TOKENS * HEADS * DIM * 4  # bytes of a rank's K and V
COORDS = 2 * TOKENS * 4


def traced(schedule, mask=Mask(), layout="contiguous", size=SIZE, heads=HEADS, kernel="reference"):
    """Returns (sent, counts) of the forward and of the backward of one attention: its bytes and its
    primitives."""
    x = jnp.zeros((1, LENGTH, heads, DIM))
    coords = (jnp.zeros((1, LENGTH), jnp.int32),) * 2

    def run(q, k, v):
        return attention(
            q,
            k,
            v,
            coords,
            mesh=mesh_of(size),
            layout=layout,
            schedule=schedule,
            kernel=kernel,
            mask=mask,
        )

    def both(q, k, v, dout):
        return jax.vjp(run, q, k, v)[1](dout)

    forward, both = jax.make_jaxpr(run)(x, x, x).jaxpr, jax.make_jaxpr(both)(x, x, x, x).jaxpr
    return (sent(forward), counts(forward)), (
        sent(both) - sent(forward),
        counts(both) - counts(forward),
    )


def test_a_ring_sends_in_one_direction():
    (forward, _), (backward, _) = traced("ring")
    hops = SIZE - 1
    assert forward == {1: hops * (KEYS + COORDS)}
    assert backward == {1: hops * (KEYS + COORDS) + SIZE * KEYS}


def test_a_bidirectional_ring_sends_half_in_each_direction():
    """P - 1 hops of half a block in each direction; half of dK and dV in each direction too."""
    (forward, _), (backward, _) = traced(Ring(bidirectional=True))
    hops = SIZE - 1
    assert forward == {1: hops * (KEYS + COORDS) // 2, hops: hops * (KEYS + COORDS) // 2}
    assert backward == dict.fromkeys((1, hops), (hops * (KEYS + COORDS) + SIZE * KEYS) // 2)


@pytest.mark.parametrize(
    ("window", "reach"),
    [(1, 0), (2, 1), (TOKENS + 1, 1), (TOKENS + 2, 2), (3 * TOKENS + 1, 3), (LENGTH, 7)],
)
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_visits_only_ranks_in_reach(window, reach, causal):
    """There are as many rounds as ranks whose last key is within the window of a rank's first
    query; plus hops home."""
    assert reach == max(d for d in range(SIZE) if d == 0 or (d - 1) * TOKENS + 1 < window)
    (forward, forward_counts), (backward, backward_counts) = traced("ring", Mask(causal, window))
    ways, hops = (1, reach) if causal else (2, reach) if 2 * reach < SIZE - 1 else (1, SIZE - 1)
    assert sum(forward.values()) == ways * hops * (KEYS + COORDS)
    assert sum(backward.values()) == ways * (hops * (KEYS + COORDS) + (hops + 1) * KEYS)
    assert forward_counts["dot_general"] == 2 * (hops + 1)
    assert backward_counts["dot_general"] == 5 * (hops + 1) + 1  # one more for delta


def test_a_window_does_not_shorten_a_striped_ring():
    """Nor a contiguous one with so many global tokens that sending all keys is cheaper."""
    coords = TokenCoords(*(jnp.zeros((1, LENGTH), jnp.int32),) * 3)
    x = jnp.zeros((1, LENGTH, HEADS, DIM))
    for layout, mask in (
        ("striped", Mask(window=5)),
        ("striped", Mask(window=5, global_tokens=2)),
        ("contiguous", Mask(window=5, global_tokens=TOKENS)),
    ):
        run = functools.partial(
            attention,
            coords=coords,
            mesh=mesh_of(SIZE),
            layout=layout,
            kernel="reference",
            mask=mask,
        )
        assert counts(jax.make_jaxpr(run)(x, x, x).jaxpr)["dot_general"] == 2 * SIZE


@pytest.mark.parametrize("causal", [True, False])
def test_global_tokens_are_gathered_besides_a_windowed_ring(causal):
    """Blocks visit the ranks in reach, and all ranks gather the few global tokens: the plan's
    bytes."""
    mask, slots, ways = Mask(causal, TOKENS, 3), 3, 1 if causal else 2
    x = jnp.zeros((1, LENGTH, HEADS, DIM))
    coords = TokenCoords(*(jnp.zeros((1, LENGTH), jnp.int32),) * 3)
    block = plan.Block(1, TOKENS, HEADS, HEADS, DIM, itemsize=4, coordinates=3)
    run = functools.partial(
        attention,
        coords=coords,
        mesh=mesh_of(SIZE),
        layout="contiguous",
        kernel="reference",
        mask=mask,
    )
    forward = jax.make_jaxpr(run)(x, x, x).jaxpr
    both = jax.make_jaxpr(lambda x, dout: jax.vjp(run, x, x, x)[1](dout))(x, x).jaxpr
    assert counts(forward)["dot_general"] == 2 * (2 + 1), (
        "its own block, those in reach together, the global tokens"
    )
    planned = Ring(ordered=True).plan(SIZE, block, mask)
    assert sum(sent(forward).values()) == ways * (KEYS + COORDS * 3 // 2)
    gathered = sum(
        equation.invars[0].aval.size * 4
        for equation, _ in operations(forward)
        if equation.primitive.name == "all_gather"
    )
    assert gathered == slots * (KEYS + COORDS * 3 // 2) // TOKENS
    permutes = sum(sent(forward).values()) + (SIZE - 1) * gathered
    np.testing.assert_allclose(plan.received(planned.forward, SIZE), permutes)
    scattered = sum(
        equation.outvars[0].aval.size * 4
        for equation, _ in operations(both)
        if equation.primitive.name == "reduce_scatter"
    )
    assert scattered == slots * KEYS // TOKENS
    backward = (
        sum(sent(both).values()) - sum(sent(forward).values()) + (SIZE - 1) * (gathered + scattered)
    )
    np.testing.assert_allclose(plan.received(planned.backward, SIZE), backward)


def test_a_window_skips_rounds_of_balanced():
    """8 ranks, keys within 2: the own block and the rounds of distance 1 and 2, without helpers
    (distances 7 and 6)."""
    (_, windowed), _ = traced("balanced", Mask(window=TOKENS + 2))
    (_, whole), _ = traced("balanced")
    assert (windowed["dot_general"], whole["dot_general"]) == (2 * 3, 2 * 5)


@pytest.mark.parametrize("columns", [2, 4, 8])
def test_attention2d_with_overlap_only_permutes(columns):
    """Section 3.3's count for R rows and C columns: forward, Q and partials C - 1 times, K and V R
    - 1 times."""
    rows = SIZE // columns
    (forward, primitives), (backward, more) = traced(
        Attention2D(columns, overlap=True), layout="striped"
    )
    collectives = ("all_", "psum", "pmax", "reduce_scatter", "ppermute")
    assert {name for name in {*primitives, *more} if name.startswith(collectives)} == {"ppermute"}
    vectors, lse = KEYS // 2, TOKENS * HEADS * 4  # bytes of a rank's Q or float32 out; of its lse
    assert sum(forward.values()) == (columns - 1) * (2 * vectors + lse + COORDS) + (rows - 1) * (
        KEYS + COORDS
    )
    assert sum(backward.values()) == (columns - 1) * (3 * vectors + 2 * lse + COORDS) + (
        rows - 1
    ) * (2 * KEYS + COORDS)


def test_attention2d_chooses_the_grid_of_fewest_bytes():
    """With equal heads nearly as many columns as rows; with few KV heads fewer columns, because K
    and V are cheap to send."""
    best = {heads: fewest_bytes(64, *heads, 2) for heads in ((32, 32), (32, 8), (32, 1))}
    assert 1 <= best[32, 1] < best[32, 8] < best[32, 32] <= 8
    for (query, kv), columns in best.items():

        def total(
            c, query=query, kv=kv
        ):  # per token: q, out; q, dout, dq along rows; k, v; k, v, dk, dv along columns
            return (c - 1) * query * (2 + 4 + 2 + 2 + 4) + (64 // c - 1) * 2 * kv * (2 + 2 + 4)

        assert total(columns) == min(total(c) for c in (1, 2, 4, 8, 16, 32, 64))


@pytest.mark.parametrize(
    "name", [name for name in KERNELS if name not in ("reference", "mosaic", "cudnn")]
)  # these have no tile size
def test_equal_kernel_options_give_equal_kernels(name):
    assert (
        get_kernel(name, query_tile=64)
        == get_kernel(name, query_tile=64)
        != get_kernel(name, query_tile=32)
    )


class StackedOnly(ReferenceKernel):
    """Accepts only stacked K and V, as they are sent: slicing the stack would copy both."""

    def extend(self, so_far, queries, keys, **options):
        assert isinstance(keys, StackedKeys) and keys.kv.ndim == 5
        return super().extend(so_far, queries, keys, **options)

    def gradients(self, so_far, queries, keys, saved, **options):
        assert isinstance(keys, StackedKeys) and keys.kv.ndim == 5
        return super().gradients(so_far, queries, keys, saved, **options)


@pytest.mark.parametrize(
    "schedule", ["ring", "ring bidirectional", "balanced", "all_gather", "attention2d overlap 2"]
)
def test_stacked_keys_and_values_are_never_sliced(schedule):
    traced(SCHEDULES[schedule], size=4, kernel=StackedOnly())


@pytest.mark.parametrize("heads", [2, 8])
def test_ulysses_sums_gradients_without_a_scatter(heads):
    """With as many KV heads as ranks, or replicated ones: on TPUs a scatter by constant indices
    stays one, even for 0, 1, 2, ..."""
    _, (_, backward) = traced("ulysses", heads=heads)
    assert backward["all_to_all"] and not [name for name in backward if name.startswith("scatter")]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_save_attention_never_recomputes_attention(schedule):
    """With attention's output and lse kept, two layers run as many exponentials and transfers as
    without remat."""
    mesh, heads = mesh_of(4), 4
    coords = TokenCoords(jnp.zeros((1, 32), jnp.int32), jnp.ones((1, 32), jnp.int32))
    op = AttentionOp.create(
        DIM, schedule=SCHEDULES[schedule], kernel=get_kernel("reference"), axis="sequence", size=4
    )

    def loss(layers, x, coords, policy):
        def body(carry, weights):
            x, coords = carry
            q, k, v = jnp.einsum("bte,ehdn->nbthd", x, weights)
            attended, _ = attend(op, Queries(q, coords), Keys(k, v, coords))
            return (x + attended.reshape(x.shape), coords), None

        def run(layers, x, coords):
            (x, _), _ = scan_layers([body], (x, coords), layers, policy)
            return x

        tokens = PartitionSpec(None, "sequence")
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(PartitionSpec(), tokens, tokens),
            out_specs=tokens,
            check_vma=False,
        )
        return jnp.sum(run(layers, x, coords))

    def work(policy):
        layers, x = jnp.zeros((2, heads * DIM, heads, DIM, 3)), jnp.zeros((1, 32, heads * DIM))
        primitives = counts(
            jax.make_jaxpr(jax.grad(loss), static_argnums=3)(layers, x, coords, policy).jaxpr
        )
        return {
            name: n
            for name, n in primitives.items()
            if name in ("exp", "ppermute", "all_gather", "all_to_all", "reduce_scatter", "pmax")
        }

    assert work("save_attention") == work("everything")
    recomputed = work("nothing")
    assert recomputed["exp"] > work("everything")["exp"]


@pytest.mark.parametrize("window", [None, 8], ids=["no window", "a window of one shard"])
def test_arrays_that_ride_along_reach_every_rank(window):
    """Also where a window lets the ring skip ranks; by hand: rank r contributes r and 10 r + p."""
    size, mask = 4, Mask(window=window)
    context = Context(Ranks("sequence", size), mask, 1.0)
    schedule, kernel = Ring(ordered=True), ReferenceKernel()
    coords = TokenCoords(jnp.arange(32, dtype=jnp.int32)[None], jnp.ones((1, 32), jnp.int32))
    x = jax.random.normal(jax.random.key(0), (1, 32, 1, DIM))

    def run(x, coords, shard, shares):
        queries, keys = Queries(x, coords), Keys(x, x, coords)
        alone = schedule.forward(kernel, queries, keys, context)
        partial, gathered = schedule.forward_and_gather(kernel, queries, keys, shard, context)
        saved = BackwardInputs(x, alone.lse, jnp.zeros_like(alone.lse))
        _, regathered, total = schedule.backward_and_exchange(
            kernel, queries, keys, saved, Payload(shard, shares), context
        )
        _, nothing, same_total = schedule.backward_and_exchange(
            kernel, queries, keys, saved, Payload(None, shares), context
        )
        assert nothing is None
        difference = jnp.abs(partial.out - alone.out).max() + jnp.abs(total - same_total)
        return difference[None], gathered, regathered, total[None]

    tokens, ranks = PartitionSpec(None, "sequence"), PartitionSpec("sequence")
    run = jax.shard_map(
        run,
        mesh=mesh_of(size),
        in_specs=(tokens, tokens, ranks, ranks),
        out_specs=ranks,
        check_vma=False,
    )
    shard, shares = jnp.arange(4.0), (10 * jnp.arange(4.0)[:, None] + jnp.arange(4.0)).reshape(-1)
    difference, gathered, regathered, total = jax.jit(run)(x, coords, shard, shares)
    assert difference.max() < 1e-6
    for got in (gathered, regathered):
        np.testing.assert_array_equal(np.reshape(got, (size, size)), np.tile(np.arange(4), (4, 1)))
    np.testing.assert_array_equal(total, 60 + 4 * np.arange(4))
