"""Any layout with any schedule equals dense float64 attention within 1e-5: special inputs,
precisions and errors.

All pairs of schedules, shards, heads, masks, layouts and kernels are in test_all_pairs.py.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention import Keys, Mask, Queries, TokenCoords, attention, document_starts, get_kernel
from model.attention.blocks import BackwardInputs
from model.attention.layout import LAYOUTS, permutation
from tests.errors import within

from .cases import (
    HEADS,
    MASKS,
    QUICK,
    SCHEDULES,
    check,
    documents,
    inputs,
    mesh_of,
    out_and_gradients,
    tiled,
    truth,
)
from .dense import dense_attention

QUICK_SINKS = ("ring", "balanced", "ulysses", "attention2d overlap")
LENGTH = 240  # 1 to 6 and 8 shards divide it and, for zigzag, its half


@functools.cache
def compiled(size, schedule="ring", mask=Mask(), kernel="xla"):
    """Returns one compiled function per number of shards: layout, packing and coordinates are
    runtime inputs."""
    return out_and_gradients(SCHEDULES[schedule], size, mask, kernel=kernel, tiles=(20, 10))


@functools.cache
def compiled_contiguous(size, mask):
    """Returns one compiled function for contiguous shards."""
    return out_and_gradients("ring", size, mask, "contiguous", kernel="xla", tiles=(20, 10))


@pytest.mark.parametrize(
    ("kernel", "schedule"),
    [("xla", "ring"), ("reference", "ring"), ("xla", "ring_self_attention"), ("auto", "balanced")],
)
def test_softcap_is_exact(kernel, schedule):
    order = permutation(LENGTH, 2, "striped")
    arrays, coords = inputs("8/2", LENGTH), documents("packed", LENGTH)
    expected = dense_attention(*arrays[:3], *coords, arrays[3], 1.5)
    capped = tiled(kernel, 20, 10).with_softcap(1.5)
    run = out_and_gradients(schedule, 2, Mask(), kernel=capped)
    check(
        run(*(x[:, order] for x in arrays), TokenCoords(*(x[:, order] for x in coords))),
        expected,
        order,
    )


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        pytest.param(
            schedule, LAYOUTS[number % 3], marks=[pytest.mark.slow] * (schedule not in QUICK_SINKS)
        )
        for number, schedule in enumerate(SCHEDULES)
    ],
)
def test_sinks_are_exact(schedule, layout):
    """Checks out, lse and all gradients for packed documents with padding; every second schedule
    has a window."""
    mask = Mask(window=50) if list(SCHEDULES).index(schedule) % 2 else Mask()
    order = permutation(LENGTH, 4, layout)
    arrays, coords = inputs("8/2", LENGTH), documents("packed", LENGTH)
    sinks = np.random.default_rng(3).standard_normal(8).astype(np.float32) * 3
    *expected, d_expected = dense_attention(
        *arrays[:3], *coords, arrays[3], sinks=sinks, window=mask.window
    )

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(q, k, v, dout, coords, sinks):
        def out_and_lse(*arrays):
            *arrays, sinks = arrays
            kernel = get_kernel("xla", query_tile=20, key_tile=10)
            options = {"schedule": SCHEDULES[schedule], "layout": layout, "mask": mask}
            return attention(
                *arrays,
                coords,
                mesh=mesh_of(4),
                kernel=kernel,
                sinks=sinks,
                return_lse=True,
                **options,
            )

        (out, lse), pullback = jax.vjp(out_and_lse, q, k, v, sinks)
        return out, lse, *pullback((dout, jnp.zeros_like(lse)))

    permuted = [x[:, order] for x in (*arrays, *coords)]
    *got, d_got = run(*permuted[:4], TokenCoords(*permuted[4:]), sinks)
    check(got, expected, order)
    np.testing.assert_allclose(d_got, d_expected, rtol=1e-5, atol=1e-5 * np.abs(d_expected).max())


def test_a_sink_far_above_all_scores_takes_all_weight():
    """Scores so low that exp(sink - score) has no float64: nothing overflows, in ours or in the
    reference."""
    q, k, v, dout = (np.full((1, 4, 2, 4), value, np.float32) for value in (-25, 25, 1, 1))
    coords, sinks = documents("one", 4), np.array([0.5, 2], np.float32)
    coords = [x[:1] for x in coords]
    out, lse = attention(
        q, k, v, TokenCoords(*coords), mesh=mesh_of(1), sinks=sinks, return_lse=True
    )
    expected_out, expected_lse, *_ = dense_attention(q, k, v, *coords, dout, sinks=sinks)
    np.testing.assert_array_equal(out, expected_out)
    np.testing.assert_array_equal(lse, expected_lse)
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks[:, None], (1, 2, 4)))


def test_sinks_of_a_wrong_shape_are_refused():
    q, k, v, _ = inputs("4/4", LENGTH)
    with pytest.raises(ValueError, match=r"sinks: found float32 \(3,\); needs float32 \(4,\)"):
        attention(q, k, v, documents("one", LENGTH), mesh=mesh_of(4), sinks=np.zeros(3, np.float32))


def test_a_softcap_that_a_kernel_does_not_serve_is_refused():
    others = "'auto', 'tpu', 'xla' and 'reference'"
    with pytest.raises(
        ValueError, match=rf"'gpu' does not serve a soft-cap of scores \(50\.0\); {others} do"
    ):
        get_kernel("gpu").with_softcap(50.0)


def test_global_tokens_that_a_kernel_does_not_serve_are_refused():
    arrays, (index, segments) = inputs("8/2", LENGTH), documents("packed", LENGTH)
    with pytest.raises(
        ValueError,
        match=r"'gpu' does not serve global_tokens = 3; 'auto', 'xla' and 'reference' do",
    ):
        compiled(2, mask=Mask(window=17, global_tokens=3), kernel=get_kernel("gpu"))(
            *arrays, TokenCoords(index, segments, np.zeros_like(index))
        )


def test_global_tokens_without_a_window_change_nothing_and_need_no_starts():
    order = permutation(LENGTH, 2, "striped")
    arrays = (x[:, order] for x in inputs("8/2", LENGTH))
    coords = TokenCoords(*(x[:, order] for x in documents("packed", LENGTH)))
    check(
        compiled(2, mask=Mask(global_tokens=3))(*arrays, coords),
        truth("8/2", "packed", Mask(), LENGTH),
        order,
    )


def random_documents(data, most, gaps):
    """Draws documents for two rows; with `gaps` there may be padding anywhere between them."""
    index = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    segments = np.zeros((2, LENGTH), np.int32)
    for row in range(2):
        cuts = sorted(data.draw(st.lists(st.integers(0, LENGTH), max_size=most)))
        for number, (start, end) in enumerate(itertools.pairwise(cuts), 1):
            segments[row, start:end] = number if not gaps or data.draw(st.booleans()) else 0
    return index, segments


def check_documents(index, segments, layout, size, schedule, heads="8/2", mask=Mask()):
    if not segments.any():
        return
    order = permutation(LENGTH, size, layout)
    arrays = inputs(heads, LENGTH)
    expected = dense_attention(
        *arrays[:3],
        index,
        segments,
        arrays[3],
        causal=mask.causal,
        window=mask.window,
        global_tokens=mask.global_tokens,
    )
    run = compiled(size, schedule, mask)
    check(
        run(*(x[:, order] for x in arrays), TokenCoords(index[:, order], segments[:, order])),
        expected,
        order,
    )


@settings(max_examples=15, deadline=None)
@given(
    data=st.data(),
    layout=st.sampled_from(LAYOUTS),
    size=st.sampled_from([1, 3, 4]),
    schedule=st.sampled_from(["ring", "all_gather"]),
)
def test_any_packing_is_exact(data, layout, size, schedule):
    check_documents(*random_documents(data, 12, gaps=True), layout, size, schedule)


@settings(max_examples=10, deadline=None)
@given(data=st.data(), layout=st.sampled_from(LAYOUTS))
def test_any_packing_with_global_tokens_is_exact(data, layout):
    check_documents(*random_documents(data, 12, gaps=True), layout, 3, "ring", mask=MASKS["global"])


@settings(max_examples=10, deadline=None)
@given(data=st.data(), size=st.sampled_from([4, 8]), causal=st.booleans(), restart=st.booleans())
def test_any_packing_with_replicated_global_tokens_is_exact(data, size, causal, restart):
    """A windowed ring of contiguous shards visits few of them: documents begin on other shards, or
    end and begin within one."""
    mask = Mask(causal, window=17, global_tokens=5)
    index, segments = random_documents(data, 6, gaps=True)
    if restart:
        index = index - np.asarray(document_starts(index, segments))
    if segments.any():
        q, k, v, dout = inputs("8/2", LENGTH)
        expected = dense_attention(
            q, k, v, index, segments, dout, causal=causal, window=17, global_tokens=5
        )
        check(
            compiled_contiguous(size, mask)(q, k, v, dout, TokenCoords(index, segments)),
            expected,
            np.arange(LENGTH),
        )


@pytest.mark.parametrize("global_tokens", [1, 29, 30, 45])
def test_global_tokens_that_cross_a_shard_boundary_are_exact(global_tokens):
    """A document's first tokens are the last of one shard of 30 and the first of the next; also
    more global tokens than a shard holds."""
    index = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    segments = np.where(index < 43, 1, 2)
    segments[1] = np.where(index[1] < 59, 1, np.where(index[1] < 235, 2, 0))
    q, k, v, dout = inputs("8/2", LENGTH)
    expected = dense_attention(
        q, k, v, index, segments, dout, window=8, global_tokens=global_tokens
    )
    run = compiled_contiguous(8, Mask(window=8, global_tokens=global_tokens))
    check(run(q, k, v, dout, TokenCoords(index, segments)), expected, np.arange(LENGTH))


def test_an_index_may_restart_with_each_document():
    """Also with global tokens."""
    index, segments = documents("packed", LENGTH)
    starts = np.asarray(document_starts(index, segments))
    check_documents(index - starts, segments, "striped", 3, "ring", mask=MASKS["global"])


def test_the_gradient_of_lse_is_exact():
    """Against finite differences of the float64 reference."""
    q, k, v, dout = inputs("4/4", LENGTH)
    index, segments = documents("packed", LENGTH)
    coords = TokenCoords(index, segments)
    weight = np.random.default_rng(1).standard_normal((2, 4, LENGTH)) * (segments[:, None] > 0)

    def total(q):
        _, lse = attention(q, k, v, coords, mesh=mesh_of(2), return_lse=True)
        return jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse) * weight)

    gradient = np.asarray(jax.jit(jax.grad(total))(jnp.asarray(q)))
    direction = np.random.default_rng(2).standard_normal(q.shape)
    step = 1e-4

    def truth_at(q):
        lse = dense_attention(q, k, v, index, segments, dout)[1]
        return (np.where(np.isneginf(lse), 0.0, lse) * weight).sum()

    slope = (truth_at(q + step * direction) - truth_at(q - step * direction)) / (2 * step)
    assert abs((gradient * direction).sum() - slope) <= 1e-4 * abs(slope)


def test_bfloat16_error_does_not_grow_with_the_ring():
    """Partial results and accumulators are float32: P = 8 is as accurate as P = 1 (P = 16:
    test_sixteen.py)."""
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in inputs("8/2", LENGTH)]
    expected = dense_attention(*arrays[:3], *documents("one", LENGTH), arrays[3])
    errors = {}
    for size in (1, 8):
        order = permutation(LENGTH, size, "striped")
        coords = TokenCoords(*(x[:, order] for x in documents("one", LENGTH)))
        got = compiled(size)(*(x[:, order] for x in arrays), coords)
        errors[size] = [
            np.abs(np.asarray(x, np.float64) - y[:, order]).mean()
            for x, y in (
                (got[0], expected[0]),
                (got[2], expected[2]),
                (got[3], expected[3]),
                (got[4], expected[4]),
            )
        ]
    assert all(ring <= 1.1 * single for single, ring in zip(errors[1], errors[8], strict=True)), (
        errors
    )


def test_bfloat16_in_one_tile_of_keys():
    """XLA's CPU backend could not run the gradient of q in bfloat16 for several rows whose keys are
    one tile."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        jnp.asarray(rng.standard_normal((2, 64, heads, 64)), jnp.bfloat16) for heads in (4, 2, 2, 4)
    )
    out, _, *gradients = out_and_gradients("ring", 1, kernel="xla", tiles=(64, 64))(
        q, k, v, dout, TokenCoords(*documents("one", 64))
    )
    expected = dense_attention(q, k, v, *documents("one", 64), dout)
    pairs = zip((out, *gradients), (expected[0], *expected[2:]), strict=True)
    for actual, right in pairs:
        error = np.abs(np.asarray(actual, np.float64) - right).max()
        within(error / np.abs(right).max(), 0.02, "attention in bfloat16")


@pytest.mark.parametrize("kernel", ["xla", "reference"])
def test_results_are_float32_where_jax_defaults_to_float64(kernel):
    vectors = jax.ShapeDtypeStruct((1, 24, 2, 4), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((1, 2, 24), jnp.float32)
    coords = TokenCoords(*[jax.ShapeDtypeStruct((1, 24), jnp.int32)] * 2)
    kernel, options = get_kernel(kernel), {"mask": Mask(window=5), "scale": 1.0}
    with jax.enable_x64(True):
        blocks = Queries(vectors, coords), Keys(vectors, vectors, coords)
        results = (
            jax.eval_shape(functools.partial(kernel.forward, **options), *blocks),
            jax.eval_shape(
                functools.partial(kernel.backward, **options),
                *blocks,
                BackwardInputs(vectors, rows, rows),
            ),
        )
    assert {x.dtype for x in jax.tree.leaves(results)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schedule": "rings"},
            "known: local, ring, all_gather, balanced, ulysses, attention2d, ring_self_attention",
        ),
        (
            {"schedule": {"name": "ulysses", "degre": 2}},
            "schedule.degre: ulysses has no such option; it has: degree, inner",
        ),
        (
            {"schedule": {"name": "ulysses", "degree": 3}},
            r"ulysses.degree: 3 does not divide 4 .* those do: \[1, 2, 4\]",
        ),
        (
            {"schedule": {"name": "attention2d", "columns": 3}},
            "attention2d.columns: 3 does not divide 4",
        ),
        ({"kernel": "fast"}, "known: auto, tpu, gpu, mosaic, cudnn, xla, reference"),
        (
            {"schedule": {"name": "ring", "both": True}},
            "schedule.both: ring has no such option; it has: bidirectional",
        ),
        ({"layout": "zebra"}, "known: contiguous, striped, zigzag"),
        ({"schedule": "local"}, "'ring' and 'all_gather' serve any"),
    ],
)
def test_unknown_names_are_refused(change, message):
    q, k, v, _ = inputs("4/4", LENGTH)
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, documents("one", LENGTH), mesh=mesh_of(4), **change)


def test_global_tokens_need_document_starts():
    q, k, v, _ = inputs("4/4", LENGTH)
    with pytest.raises(
        ValueError, match=r"coords.start: missing, and Mask.global_tokens = 4 needs it"
    ):
        attention(
            q, k, v, documents("one", LENGTH), mesh=mesh_of(4), mask=Mask(window=8, global_tokens=4)
        )


def test_an_indivisible_length_is_refused_with_the_next_valid_one():
    q, k, v, _ = (x[:, :239] for x in inputs("4/4", LENGTH))
    coords = tuple(x[:, :239] for x in documents("one", LENGTH))
    with pytest.raises(
        ValueError, match=r"length of q: 239 is not divisible by 4 .* good one is 240"
    ):
        attention(q, k, v, coords, mesh=mesh_of(4))
    with pytest.raises(
        ValueError,
        match=r"length of q: 239 is not divisible by 2 x 3 \(zigzag\) .* good one is 240",
    ):
        attention(q, k, v, coords, mesh=mesh_of(3), layout="zigzag")


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    layout=st.sampled_from(LAYOUTS),
    size=st.sampled_from([1, 2, 3, 4, 5, 6, 8]),
    heads=st.sampled_from(list(HEADS)),
    mask=st.sampled_from(list(MASKS)),
    schedule=st.sampled_from(
        [
            "ring",
            "ring bidirectional",
            "all_gather",
            "balanced",
            "ulysses",
            "attention2d",
            "attention2d overlap",
            "ring_self_attention",
        ]
    ),
)
def test_any_packing_on_any_ring_is_exact(data, layout, size, heads, mask, schedule):
    """The properties above for every number of shards, kind of heads and mask: for `make soak`."""
    check_documents(
        *random_documents(data, 20, gaps=False), layout, size, schedule, heads, MASKS[mask]
    )


@pytest.mark.parametrize(
    ("axes", "change", "message"),
    [
        (
            ("seq",),
            {},
            "mesh: found the axis 'seq', over which nothing would be split; name it in batch_axes "
            "(data, fsdp, expert), head_axis (tensor) or sequence_axis (sequence)",
        ),
        (
            ("sequence",),
            {"index": lambda x: x.astype(jnp.float32)},
            "coords.index: found dtype float32; needs integers",
        ),
        (
            ("sequence",),
            {"segment_ids": lambda x: x[0]},
            r"coords.segment_ids: found shape (240,); needs [B, L] = (1, 240)",
        ),
        (("sequence",), {"index": lambda x: x[:, :100]}, "coords.index: found shape (1, 100)"),
    ],
)
def test_invalid_meshes_and_coordinates_are_refused(axes, change, message):
    q, k, v = (jnp.ones((1, LENGTH, 2, 8)) for _ in range(3))
    coords = TokenCoords(jnp.arange(LENGTH)[None], jnp.ones((1, LENGTH), int))
    coords = coords._replace(
        **{name: apply(getattr(coords, name)) for name, apply in change.items()}
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), axes)
    with pytest.raises(ValueError) as error:
        attention(q, k, v, coords, mesh=mesh, kernel="reference")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("axis", "q", "k", "message"),
    [
        (
            "sequence",
            (1, LENGTH, 2, 8),
            (1, LENGTH, 2, 4),
            "q and k: found shapes (1, 240, 2, 8) and (1, 240, 2, 4); D, the size",
        ),
        (
            "sequence",
            (2, LENGTH, 2, 8),
            (4, LENGTH, 2, 8),
            "q and k: found shapes (2, 240, 2, 8) and (4, 240, 2, 8); B, the",
        ),
        ("sequence", (2, LENGTH, 2, 8), (1, LENGTH, 2, 8), "B, the rows, must be equal"),
        (
            "sequence",
            (1, LENGTH, 3, 8),
            (1, LENGTH, 2, 8),
            "heads: 3 query heads are not a multiple of 2 key/value heads",
        ),
        (
            "tensor",
            (1, LENGTH, 2, 8),
            (1, LENGTH, 1, 8),
            "heads: 1 key/value heads are not divisible by tensor = 2",
        ),
    ],
)
def test_shapes_that_do_not_match_each_other_or_the_mesh_are_refused(axis, q, k, message):
    coords, kv_coords = (
        TokenCoords(jnp.tile(jnp.arange(LENGTH), (x[0], 1)), jnp.ones(x[:2], int)) for x in (q, k)
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), (axis,))
    with pytest.raises(ValueError) as error:
        attention(
            jnp.ones(q),
            jnp.ones(k),
            jnp.ones(k),
            coords,
            kv_coords=kv_coords,
            mesh=mesh,
            kernel="reference",
        )
    assert message in str(error.value) and "\n" not in str(error.value)
