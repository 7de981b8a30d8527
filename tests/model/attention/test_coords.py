"""The tile rule never contradicts the mask, and layouts are permutations."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention.coords import (
    FULL,
    SKIP,
    Mask,
    TokenCoords,
    document_starts,
    one_document,
    tile_bounds,
    tile_kind,
    visible,
)
from model.attention.layout import LAYOUTS, inverse, permutation

from . import dense


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans(), st.one_of(st.none(), st.integers(1, 30)), st.integers(0, 6))
def test_the_tile_rule_agrees_with_the_mask(data, causal, window, global_tokens):
    mask = Mask(causal, window, global_tokens)
    tiles = []
    for _ in "qk":
        index = np.array(
            [data.draw(st.lists(st.integers(0, 40), min_size=6, max_size=6))], np.int32
        )
        segments = data.draw(
            st.one_of(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.just([1] * 6))
        )
        starts = data.draw(st.lists(st.integers(0, 10), min_size=4, max_size=4))
        start = np.minimum(index, np.array(starts, np.int32)[segments])
        tiles.append(TokenCoords(index, np.array([segments], np.int32), start))
    q, kv = tiles
    kind = int(tile_kind(*(tile_bounds(x, 6) for x in tiles), mask)[0, 0])
    seen = np.asarray(visible(q, kv, mask))
    assert not (kind == SKIP and seen.any())
    assert not (kind == FULL and not seen.all())


def test_the_tile_rule_skips_and_fills_what_it_can():
    """The rule is also tight: causal tiles below the diagonal are FULL, those above SKIP."""
    coords = TokenCoords(np.arange(32, dtype=np.int32)[None], np.ones((1, 32), np.int32))
    bounds = tile_bounds(coords, 8)
    kinds = kinds_of(bounds, Mask())
    np.testing.assert_array_equal(kinds, np.tril(np.ones((4, 4)), -1) + 2 * np.eye(4))
    # Query 16, the first of tile 2, is 9 tokens behind key 7, the last of tile 0; query 23 is 15
    # behind key 8.
    assert kinds_of(bounds, Mask(window=9))[2, 0] == SKIP != kinds_of(bounds, Mask(window=10))[2, 0]
    assert kinds_of(bounds, Mask(window=16))[2, 1] == FULL
    assert kinds_of(bounds, Mask(window=15))[2, 1] not in (SKIP, FULL)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=3), Mask(causal=False, window=2)])
def test_tiles_of_one_token_are_never_masked(mask):
    """The rule then equals the mask, at its edges too."""
    coords = TokenCoords(np.arange(9, dtype=np.int32)[None], np.ones((1, 9), np.int32))
    seen = np.asarray(visible(coords, coords, mask)).reshape(9, 9)
    kinds = kinds_of(tile_bounds(coords, 1), mask)
    np.testing.assert_array_equal(kinds, np.where(seen, FULL, SKIP))


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 40))
def test_the_windows_reach_is_the_farthest_shard_with_a_visible_key(tokens, shards, window):
    index = np.arange(tokens * shards)
    near = abs(index[:, None] - index) < window
    farthest = (abs(index[:, None] // tokens - index // tokens) * near).max()
    assert Mask(window=window).reach(tokens, shards) == farthest


def test_tiles_share_one_document_only_if_all_their_tokens_do():
    """By hand: tiles of two tokens; 0 is padding."""
    tiles = {"a": (1, 1), "b": (2, 2), "ab": (1, 2), "a and padding": (1, 0), "padding": (0, 0)}
    bounds = {
        name: tile_bounds(TokenCoords(np.arange(2)[None], np.array([segments], np.int32)), 2)
        for name, segments in tiles.items()
    }
    same_document = {
        (q, kv) for q in tiles for kv in tiles if one_document(bounds[q], bounds[kv])[0, 0]
    }
    assert same_document == {("a", "a"), ("b", "b")}


def kinds_of(bounds, mask):
    q, kv = (jax.tree.map(lambda x, at=at: np.expand_dims(x, at), bounds) for at in (2, 1))
    return np.asarray(tile_kind(q, kv, mask))[0]


def test_global_tokens_add_only_the_tiles_that_contain_them():
    """Window 4 and 2 global tokens over tiles of 8: beyond its neighbours, a query tile needs only
    the first key tile."""
    index, segments = np.arange(40, dtype=np.int32)[None], np.ones((1, 40), np.int32)
    bounds = tile_bounds(TokenCoords(index, segments, document_starts(index, segments)), 8)
    near = np.eye(5) + np.eye(5, k=-1)
    first = np.zeros((5, 5))
    first[:, 0] = 1
    np.testing.assert_array_equal(kinds_of(bounds, Mask(window=4)) != SKIP, near > 0)
    np.testing.assert_array_equal(
        kinds_of(bounds, Mask(window=4, global_tokens=2)) != SKIP, near + first > 0
    )


@settings(max_examples=50, deadline=None)
@given(st.data(), st.booleans(), st.one_of(st.none(), st.integers(1, 12)), st.integers(0, 5))
def test_masks_and_document_starts_agree_with_the_definition(data, causal, window, global_tokens):
    """Documents of any length in any order of tokens, against loops over pairs in numpy."""
    segments = np.sort(
        np.array(data.draw(st.lists(st.integers(0, 4), min_size=16, max_size=16)), np.int32)
    )
    order = np.array(data.draw(st.permutations(range(16))))
    index, segments = np.arange(16, dtype=np.int32)[order][None], segments[order][None]
    starts = document_starts(index, segments)
    for document in set(segments[0].tolist()):
        in_document = segments == document
        assert (np.asarray(starts)[in_document] == index[in_document].min()).all()
    coords = TokenCoords(index, segments, starts)
    expected = dense.visible(index, segments, causal, window, global_tokens)
    np.testing.assert_array_equal(
        visible(coords, coords, Mask(causal, window, global_tokens)), expected
    )


def test_invalid_masks_are_refused():
    for window in (0, 2**31):
        with pytest.raises(ValueError, match=f"Mask.window: found {window}; a window is 1 to 214"):
            Mask(window=window)
    with pytest.raises(ValueError, match=r"Mask.global_tokens: found -1; needs 0 to 2147483647"):
        Mask(global_tokens=-1)


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from(LAYOUTS))
def test_layouts_are_permutations(shards, tokens, layout):
    length = 2 * shards * tokens
    order = permutation(length, shards, layout)
    np.testing.assert_array_equal(np.sort(order), np.arange(length))
    np.testing.assert_array_equal(order[inverse(order)], np.arange(length))


def test_striped_distributes_tokens_round_robin():
    """Striped Attention, section 3.1: with 4 devices, device 1 holds tokens 1, 5, 9, 13."""
    np.testing.assert_array_equal(permutation(16, 4, "striped").reshape(4, 4)[1], [1, 5, 9, 13])


def test_zigzag_pairs_an_early_chunk_with_a_late_one():
    """Llama 3, section 3.3.2: of 2 x 4 chunks, rank i holds chunks i and 7 - i, so that all ranks
    have equally many causal pairs of chunks."""
    shards = permutation(16, 4, "zigzag").reshape(4, 4)
    np.testing.assert_array_equal(
        shards, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    )
    assert len(set((shards + 1).sum(1))) == 1


def test_an_invalid_length_is_refused_with_the_next_valid_one():
    with pytest.raises(ValueError, match=r"104 is not divisible by 2 x 8 .* next good one is 112"):
        permutation(104, 8, "zigzag")
    with pytest.raises(ValueError, match="next good one is 104"):
        permutation(100, 8, "striped")
