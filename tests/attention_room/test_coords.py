"""The tile rule never contradicts the mask, and layouts are permutations."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention.coords import FULL, SKIP, Mask, TokenCoords, tile_bounds, tile_kind, visible
from model.attention.layout import LAYOUTS, inverse, permutation


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans(), st.one_of(st.none(), st.integers(1, 30)))
def test_the_tile_rule_agrees_with_the_mask(data, causal, window):
    mask = Mask(causal, window)
    tiles = []
    for _ in "qk":
        index = data.draw(st.lists(st.integers(0, 40), min_size=6, max_size=6))
        segments = data.draw(st.one_of(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.just([1] * 6)))
        tiles.append(TokenCoords(np.array([index], np.int32), np.array([segments], np.int32)))
    q, kv = tiles
    kind = int(tile_kind(*(tile_bounds(x, 6) for x in tiles), mask)[0, 0])
    seen = np.asarray(visible(q, kv, mask))
    assert not (kind == SKIP and seen.any())
    assert not (kind == FULL and not seen.all())


def test_the_rule_skips_and_fills_what_it_can():
    """The rule is not only safe: causal tiles below the diagonal are FULL, above SKIP."""
    coords = TokenCoords(np.arange(32, dtype=np.int32)[None], np.ones((1, 32), np.int32))
    bounds = tile_bounds(coords, 8)
    q, kv = ([x[:, :, None] for x in bounds], [x[:, None] for x in bounds])
    kinds = np.asarray(tile_kind(type(bounds)(*q), type(bounds)(*kv), Mask()))[0]
    np.testing.assert_array_equal(kinds, np.tril(np.ones((4, 4)), -1) + 2 * np.eye(4))


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from(LAYOUTS))
def test_layouts_are_permutations(shards, tokens, layout):
    length = 2 * shards * tokens
    order = permutation(length, shards, layout)
    np.testing.assert_array_equal(np.sort(order), np.arange(length))
    np.testing.assert_array_equal(order[inverse(order)], np.arange(length))


def test_striped_deals_tokens_out():
    """Striped Attention, section 3.1: with 4 devices, device 1 holds tokens 1, 5, 9, 13."""
    np.testing.assert_array_equal(permutation(16, 4, "striped").reshape(4, 4)[1], [1, 5, 9, 13])


def test_zigzag_pairs_an_early_run_with_a_late_one():
    """Llama 3, section 3.3.2: 2 x 4 runs, rank i holds runs i and 7 - i; so all have the same causal pairs, to a run."""
    shards = permutation(16, 4, "zigzag").reshape(4, 4)
    np.testing.assert_array_equal(shards, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]])
    assert len(set((shards + 1).sum(1))) == 1


def test_a_bad_length_names_the_next():
    with pytest.raises(ValueError, match=r"104 is not divisible by 2 x 8 .* next good one is 112"):
        permutation(104, 8, "zigzag")
    with pytest.raises(ValueError, match="next good one is 104"):
        permutation(100, 8, "striped")
