"""Schedules x shards x heads x masks x layouts x kernels, each with one document and with packed
ones, against the dense reference.

A covering set has every possible pair of values in at least one case. `make test` runs its cases on
1, 2, 3, 4 and 8 shards, `make soak` those on 5 and 6, and every triple with the reference kernel.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import Keys, Mask, Queries, TokenCoords, get_kernel
from model.attention.layout import permutation
from model.attention.schedules import Local, get_schedule
from tests.covering import covering

from .cases import (
    HEADS,
    MASKS,
    SCHEDULES,
    SIZES,
    check,
    documents,
    inputs,
    is_supported,
    out_and_gradients,
    truth,
)
from .jaxprs import counts

LENGTH = 240  # SIZES divide it and, for zigzag, its half
# The layouts that one compiled function serves: schedules distinguish only "contiguous".
LAYOUTS = {"contiguous": ("contiguous",), "dealt": ("striped", "zigzag")}
FACTORS = (SCHEDULES, SIZES, HEADS, MASKS, LAYOUTS, ("reference", "xla"))


def possible(case):
    """With one shard every schedule is `Local`, which one schedule covers."""
    schedule, size = case[:2]
    return is_supported(schedule, size) and (size > 1 or schedule == "ring")


CASES = [case for case in itertools.product(*FACTORS) if possible(case)]
PAIRS = covering(CASES, 2)
TRIPLES = covering((case[:-1] for case in CASES if case[-1] == "reference"), 3)


def check_case(schedule, size, heads, mask, layouts, kernel, length=LENGTH):
    """Checks one compiled function with each of its layouts, with one document and with packed
    ones."""
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
    [pytest.param(*case, marks=pytest.mark.slow) if case[1] in (5, 6) else case for case in PAIRS],
)
def test_all_pairs_are_exact(schedule, size, heads, mask, layouts, kernel):
    check_case(schedule, size, heads, mask, layouts, kernel)


@pytest.mark.parametrize(("size", "tokens"), [(2, 15), (5, 7), (3, 1)])
def test_a_bidirectional_ring_of_odd_blocks_is_exact(size, tokens):
    """Each direction gets at least one token, or only one direction is used."""
    check_case(
        "ring bidirectional", size, "8/2", "causal", "contiguous", "reference", size * tokens
    )


def test_a_length_not_divisible_by_tiles_is_padded():
    """239 is prime: 12 tiles of 20 queries with the last one padded, not 239 tiles of one."""
    check_case("ring", 1, "8/2", "global", "contiguous", "xla", 239)
    kernel, q = get_kernel("xla", query_tile=20, key_tile=10), jnp.zeros((1, 239, 1, 8))
    coords = TokenCoords(*(x[:1] for x in documents("one", 239)))
    forward = jax.make_jaxpr(
        lambda q: kernel.forward(Queries(q, coords), Keys(q, q, coords), mask=Mask(), scale=1.0)
    )(q)
    assert counts(forward.jaxpr)["while"] == 2 * 12, (
        "per tile of queries, one loop without and one with a mask"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "size", "heads", "mask", "layouts"), TRIPLES)
def test_all_triples_are_exact(schedule, size, heads, mask, layouts):
    check_case(schedule, size, heads, mask, layouts, "reference")


def test_one_shard_needs_no_schedule():
    assert all(isinstance(get_schedule(schedule, 1), Local) for schedule in SCHEDULES.values())


def test_the_covering_set_has_every_pair():
    """Counted independently of the generator: for any two factors, every pair of values of a
    possible case."""
    for a, b in itertools.combinations(range(len(FACTORS)), 2):
        covered = {(case[a], case[b]) for case in PAIRS}
        if (a, b) == (0, 1):
            assert covered == {
                pair for pair in itertools.product(SCHEDULES, SIZES) if possible(pair)
            }
        else:
            assert covered == set(itertools.product(FACTORS[a], FACTORS[b]))


def test_packed_documents_cross_shard_borders_and_leave_padding():
    _, segments = documents("packed", LENGTH)
    for size in SIZES[1:]:
        borders = np.arange(1, size) * LENGTH // size
        assert (
            (segments[:, borders - 1] == segments[:, borders]) & (segments[:, borders] > 0)
        ).any()
    assert (segments == 0).any(1).all()
