"""Any layout with any schedule equals dense float64 attention: out, lse and all gradients, within 1e-5."""
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from model.attention import Mask, TokenCoords, attention, get_kernel
from model.attention.layout import LAYOUTS, permutation

from .dense import dense_attention

TOLERANCE = 1e-5
HEADS = {"4/4": (4, 4), "8/2": (8, 2), "4/1": (4, 1), "9/3": (9, 3)}
SCHEDULES = {
    "ring": "ring",
    "all_gather": "all_gather",
    "balanced": "balanced",
    "balanced split": {"name": "balanced", "split": True},
    "ulysses": "ulysses",
    "usp 2": {"name": "ulysses", "degree": 2},
    "usp 2 balanced": {"name": "ulysses", "degree": 2, "inner": "balanced"},
    "attention2d": "attention2d",
    "attention2d 2": {"name": "attention2d", "columns": 2},
}
SIZES = (2, 3, 4, 5, 6, 8)
# What `make test` runs beside the ring on every size: each schedule on an odd and an even number of shards, each kind of heads.
COVERING = [
    ("all_gather", 3, "8/2"), ("all_gather", 4, "9/3"), ("balanced", 2, "4/4"), ("balanced", 5, "8/2"), ("balanced", 4, "9/3"),
    ("balanced split", 4, "8/2"), ("ulysses", 3, "8/2"), ("ulysses", 4, "9/3"), ("ulysses", 8, "4/1"), ("usp 2", 4, "8/2"),
    ("usp 2", 6, "9/3"), ("usp 2 balanced", 8, "4/1"), ("attention2d", 6, "8/2"), ("attention2d", 5, "4/1"),
    ("attention2d 2", 8, "9/3"),
]


def admitted(schedule, size):
    """Whether the schedule can serve so many shards (a degree or a grid must divide them)."""
    return size % 2 == 0 or not schedule.endswith((" 2", "usp 2 balanced"))


EVERYTHING = [case for case in itertools.product(SCHEDULES, SIZES, HEADS) if admitted(*case[:2]) and case not in COVERING]
LENGTH = 840  # divisible by 1..8 and by 2..14 for zigzag; 16 runs need a little less, see `length_of`


def length_of(size):
    """The most tokens up to LENGTH that every layout deals out to so many shards."""
    return LENGTH // (2 * size) * (2 * size)


def documents(kind, length=LENGTH):
    """index and segment_ids [2, length] in the row's order."""
    index = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    segments = np.ones((2, length), np.int32)
    if kind == "packed":
        for row, ends in enumerate(((97, 100, 420, 700, 801), (311, 613))):
            segments[row] = np.searchsorted(ends, np.arange(length), side="right") + 1
            segments[row, ends[-1]:] = 0  # padding at the end of the row
    return index, segments


def mesh_of(size):
    return Mesh(np.array(jax.devices()[:size]), ("sequence",))


@functools.cache
def compiled(size, kernel="xla", mask=Mask(), schedule="ring", layout="striped"):
    """One compiled function for a number of shards: layout, packing and coordinates are runtime inputs."""
    kernel = get_kernel(kernel, query_tile=64, key_tile=32)

    def run(q, k, v, dout, coords):
        def out_and_lse(q, k, v):
            return attention(q, k, v, coords, mesh=mesh_of(size), layout=layout, schedule=SCHEDULES[schedule], kernel=kernel,
                             mask=mask, return_lse=True)

        (out, lse), pull = jax.vjp(out_and_lse, q, k, v)
        return out, lse, *pull((dout, jnp.zeros_like(lse)))

    return jax.jit(run)


def inputs(heads, length=LENGTH, head_dim=8, seed=0):
    rng = np.random.default_rng(seed)
    query_heads, kv_heads = HEADS[heads]
    shape = (2, length, query_heads, head_dim), (2, length, kv_heads, head_dim)
    return [rng.standard_normal(s, dtype=np.float32) * 2 for s in (shape[0], shape[1], shape[1], shape[0])]


@functools.cache
def truth(heads, kind, causal=True, window=None, length=LENGTH):
    q, k, v, dout = inputs(heads, length)
    return dense_attention(q, k, v, *documents(kind, length), dout, causal=causal, window=window)


def check(got, expected, order):
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        x = np.asarray(x, np.float64)
        y = y[:, :, order] if name == "lse" else y[:, order]
        if name == "lse":
            hidden = np.isneginf(y)
            assert (np.isneginf(x) == hidden).all()
            error = np.abs(x[~hidden] - y[~hidden]).max()
        else:
            # Documents of one token have no gradient at all: there the inputs' own magnitude, 1, is the measure.
            error = np.abs(x - y).max() / max(np.abs(y).max(), 1.0)
        assert error <= TOLERANCE, f"{name}: error {error:.2e}"


def check_everywhere(schedule, size, heads, mask=Mask()):
    """Every layout, one document and packed ones, against the dense truth."""
    length = length_of(size)
    for layout in LAYOUTS:
        order = permutation(length, size, layout)
        # The layout's name matters to `balanced` alone; the others share one compiled function.
        known = layout if schedule.startswith("balanced") and layout == "contiguous" else "striped"
        run = compiled(size, mask=mask, schedule=schedule, layout=known)
        for kind in ("one", "packed"):
            q, k, v, dout = (x[:, order] for x in inputs(heads, length))
            coords = TokenCoords(*(x[:, order] for x in documents(kind, length)))
            check(run(q, k, v, dout, coords), truth(heads, kind, mask.causal, mask.window, length), order)


@pytest.mark.parametrize("heads", ["4/4", "8/2", "9/3"])
@pytest.mark.parametrize("size", range(1, 9))
def test_ring_is_exact_under_every_layout(size, heads):
    check_everywhere("ring", size, heads)


@pytest.mark.parametrize(("schedule", "size", "heads"), COVERING)
def test_every_schedule_is_exact_under_every_layout(schedule, size, heads):
    check_everywhere(schedule, size, heads)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "size", "heads"), EVERYTHING)
def test_every_schedule_with_any_number_of_shards_and_heads_is_exact(schedule, size, heads):
    check_everywhere(schedule, size, heads)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [Mask(causal=False), Mask(window=50), Mask(causal=False, window=50)], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_exact_with_other_masks(schedule, mask):
    check_everywhere(schedule, 4, "8/2", mask)


@pytest.mark.parametrize("mask", [Mask(causal=False), Mask(window=50), Mask(causal=False, window=50)], ids=str)
@pytest.mark.parametrize("kernel", ["xla", "reference"])
def test_masks_are_exact(kernel, mask):
    order = permutation(LENGTH, 2, "striped")
    q, k, v, dout = (x[:, order] for x in inputs("8/2"))
    coords = TokenCoords(*(x[:, order] for x in documents("packed")))
    expected = truth("8/2", "packed", mask.causal, mask.window)
    check(compiled(2, kernel, mask)(q, k, v, dout, coords), expected, order)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), layout=st.sampled_from(LAYOUTS), size=st.sampled_from([1, 3, 4]),
       schedule=st.sampled_from(["ring", "all_gather"]))
def test_any_packing_is_exact(data, layout, size, schedule):
    """Any documents, with padding anywhere between them."""
    index = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    segments = np.zeros((2, LENGTH), np.int32)
    for row in range(2):
        cuts = sorted(data.draw(st.lists(st.integers(0, LENGTH), max_size=12)))
        for number, (start, end) in enumerate(itertools.pairwise(cuts), 1):
            segments[row, start:end] = number if data.draw(st.booleans()) else 0
    order = permutation(LENGTH, size, layout)
    arrays = inputs("8/2")
    q, k, v, dout = arrays
    expected = dense_attention(q, k, v, index, segments, dout)
    if not segments.any():
        return
    got = compiled(size, schedule=schedule)(
        *(x[:, order] for x in arrays), TokenCoords(index[:, order], segments[:, order]))
    check(got, expected, order)


def test_lse_has_a_gradient():
    """The gradient of lse itself, against finite differences of the float64 truth."""
    q, k, v, dout = inputs("4/4")
    index, segments = documents("packed")
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
    """Partials and accumulators are float32: P = 8 is as exact as P = 1."""
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in inputs("8/2")]
    expected = dense_attention(*(np.asarray(x, np.float64) for x in arrays[:3]), *documents("one"), arrays[3])
    errors = {}
    for size in (1, 8):
        order = permutation(LENGTH, size, "striped")
        coords = TokenCoords(*(x[:, order] for x in documents("one")))
        got = compiled(size)(*(x[:, order] for x in arrays), coords)
        errors[size] = [np.abs(np.asarray(x, np.float64) - y[:, order]).mean() for x, y in
                        ((got[0], expected[0]), (got[2], expected[2]), (got[3], expected[3]), (got[4], expected[4]))]
    assert all(many <= 1.1 * one for one, many in zip(errors[1], errors[8], strict=True)), errors


@pytest.mark.parametrize(("change", "words"), [
    ({"schedule": "rings"}, "known: local, ring, all_gather, balanced, ulysses, attention2d"),
    ({"schedule": {"name": "ulysses", "degre": 2}}, "schedule.degre: ulysses has no such option; it has: degree, inner"),
    ({"schedule": {"name": "ulysses", "degree": 3}}, r"ulysses.degree: 3 does not divide 4 .* those do: \[1, 2, 4\]"),
    ({"schedule": {"name": "attention2d", "columns": 3}}, "attention2d.columns: 3 does not divide 4"),
    ({"kernel": "fast"}, "known: auto, tpu, xla, reference"),
    ({"layout": "zebra"}, "known: contiguous, striped, zigzag"),
    ({"schedule": "local"}, "'ring' and 'all_gather' serve any"),
])
def test_unknown_names_are_refused(change, words):
    q, k, v, _ = inputs("4/4")
    with pytest.raises(ValueError, match=words):
        attention(q, k, v, documents("one"), mesh=mesh_of(4), **change)


def test_a_length_that_does_not_divide_names_the_next():
    q, k, v, _ = (x[:, :829] for x in inputs("4/4"))
    coords = tuple(x[:, :829] for x in documents("one"))
    with pytest.raises(ValueError, match=r"length of q: 829 is not divisible by 4 .* good one is 832"):
        attention(q, k, v, coords, mesh=mesh_of(4))
    with pytest.raises(ValueError, match=r"length of q: 829 is not divisible by 2 x 3 \(zigzag\) .* good one is 834"):
        attention(q, k, v, coords, mesh=mesh_of(3), layout="zigzag")


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data(), layout=st.sampled_from(LAYOUTS), size=st.integers(1, 8), heads=st.sampled_from(list(HEADS)),
       schedule=st.sampled_from(["ring", "all_gather", "balanced", "ulysses", "attention2d"]))
def test_any_packing_on_any_ring_is_exact(data, layout, size, heads, schedule):
    """The property above, on every number of shards and kind of heads: for `make soak`."""
    length = length_of(size)
    index = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    segments = np.zeros((2, length), np.int32)
    for row in range(2):
        cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=20)))
        for number, (start, end) in enumerate(itertools.pairwise(cuts), 1):
            segments[row, start:end] = number
    order = permutation(length, size, layout)
    arrays = inputs(heads, length)
    if segments.any():
        got = compiled(size, schedule=schedule)(
            *(x[:, order] for x in arrays), TokenCoords(index[:, order], segments[:, order]))
        check(got, dense_attention(*arrays[:3], index, segments, arrays[3]), order)
