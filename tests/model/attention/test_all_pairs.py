"""Schedules x shards x heads x masks x layouts x kernels, each with one document and with packed
ones, against the dense truth.

A covering set has every pair of values that can meet in one case at least. `make test` runs its
cases on 1, 2, 3, 4 and 8 shards, `make soak` those on 5 and 6, and every case with the reference
kernel.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import Keys, Mask, Queries, TokenCoords, get_kernel
from model.attention.layout import permutation
from model.attention.schedules import Local, get_schedule

from .cases import (
    HEADS,
    MASKS,
    SCHEDULES,
    SIZES,
    admitted,
    check,
    documents,
    inputs,
    out_and_gradients,
    truth,
)
from .jaxprs import counts

LENGTH = 240  # every one of SIZES divides it, and its half: zigzag too
# Which layouts one compiled function serves: only "contiguous" is told to the schedules.
LAYOUTS = {"contiguous": ("contiguous",), "dealt": ("striped", "zigzag")}
FACTORS = (SCHEDULES, SIZES, HEADS, MASKS, LAYOUTS, ("reference", "xla"))


def possible(case):
    """With one shard every schedule is `Local`, which is met once, as the ring."""
    schedule, size = case[:2]
    return admitted(schedule, size) and (size > 1 or schedule == "ring")


def pairs(case):
    return itertools.combinations(enumerate(case), 2)


@functools.cache
def covering():
    """Cases that hold every possible pair of values: greedily, first one for each schedule with
    each number of shards."""
    others = list(itertools.product(*reversed(FACTORS[2:])))
    firsts = [first for first in itertools.product(*FACTORS[:2]) if possible(first)]
    missing = {
        pair for first in firsts for other in others for pair in pairs((*first, *reversed(other)))
    }
    cases = []
    while missing:
        for first in firsts:
            options = [(*first, *reversed(other)) for other in others]
            best = max(options, key=lambda case: len(missing.intersection(pairs(case))))
            if missing.intersection(pairs(best)):
                cases.append(best)
                missing.difference_update(pairs(best))
    return cases


def check_case(schedule, size, heads, mask, layouts, kernel, length=LENGTH):
    """One compiled function: each of its layouts, with one document and with packed ones."""
    mask = MASKS[mask]
    run = out_and_gradients(
        SCHEDULES[schedule], size, mask, LAYOUTS[layouts][0], kernel, tiles=(20, 10)
    )
    for layout, kind in itertools.product(LAYOUTS[layouts], ("one", "packed")):
        order = permutation(length, size, layout)
        arrays = (x[:, order] for x in inputs(heads, length))
        coords = TokenCoords(*(x[:, order] for x in documents(kind, length)))
        check(run(*arrays, coords), truth(heads, kind, mask, length), order)


@pytest.mark.parametrize(
    ("schedule", "size", "heads", "mask", "layouts", "kernel"),
    [
        pytest.param(*case, marks=pytest.mark.slow) if case[1] in (5, 6) else case
        for case in covering()
    ],
)
def test_all_pairs_are_exact(schedule, size, heads, mask, layouts, kernel):
    check_case(schedule, size, heads, mask, layouts, kernel)


@pytest.mark.parametrize(("size", "tokens"), [(2, 15), (5, 7), (3, 1)])
def test_halves_of_odd_blocks_are_exact(size, tokens):
    """Each way of a bidirectional ring gets at least one token, or there is but one way."""
    check_case(
        "ring bidirectional", size, "8/2", "causal", "contiguous", "reference", size * tokens
    )


def test_a_length_that_tiles_do_not_divide_is_padded():
    """239 is prime: 12 tiles of 20 queries, the last one filled up, not 239 tiles of one."""
    check_case("ring", 1, "8/2", "global", "contiguous", "xla", 239)
    kernel, q = get_kernel("xla", query_tile=20, key_tile=10), jnp.zeros((1, 239, 1, 8))
    coords = TokenCoords(*(x[:1] for x in documents("one", 239)))
    forward = jax.make_jaxpr(
        lambda q: kernel.forward(Queries(q, coords), Keys(q, q, coords), mask=Mask(), scale=1.0)
    )(q)
    assert counts(forward.jaxpr)["while"] == 2 * 12, (
        "for each tile of queries one loop without and one with a mask"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "size", "heads", "mask", "layouts"),
    [case for case in itertools.product(*FACTORS[:-1]) if possible(case)],
)
def test_everything_is_exact(schedule, size, heads, mask, layouts):
    check_case(schedule, size, heads, mask, layouts, "reference")


def test_one_shard_needs_no_schedule():
    assert all(isinstance(get_schedule(schedule, 1), Local) for schedule in SCHEDULES.values())


def test_the_covering_set_holds_every_pair():
    """Counted without the generator's own bookkeeping: for any two factors, every pair of values
    that a possible case has."""
    cases = covering()
    for a, b in itertools.combinations(range(len(FACTORS)), 2):
        met = {(case[a], case[b]) for case in cases}
        if (a, b) == (0, 1):
            assert met == {pair for pair in itertools.product(SCHEDULES, SIZES) if possible(pair)}
        else:
            assert met == set(itertools.product(FACTORS[a], FACTORS[b]))


def test_packed_documents_cross_shard_borders_and_leave_padding():
    _, segments = documents("packed", LENGTH)
    for size in SIZES[1:]:
        borders = np.arange(1, size) * LENGTH // size
        assert (
            (segments[:, borders - 1] == segments[:, borders]) & (segments[:, borders] > 0)
        ).any()
    assert (segments == 0).any(1).all()
