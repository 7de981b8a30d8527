"""The GPU kernel, interpreted, against dense float64 attention: out, lse and all gradients, within 1e-5."""
import jax
import numpy as np
import pytest

from model.attention import TokenCoords
from model.attention.coords import FULL, MASKED, SKIP, tile_bounds, tile_kind
from model.attention.kernels.gpu import GpuKernel, _tile_ranges

from .test_tpu import EVERYTHING, MASKS, check_case, check_nothing_to_see, documents

KERNEL = GpuKernel(query_tile=128, key_tile=64, interpret=True)
COVERING = [(64, MASKS[0], "contiguous", "packed"), (80, MASKS[2], "striped", "packed"), (96, MASKS[1], "striped", "one"),
            (100, MASKS[3], "contiguous", "packed")]


@pytest.mark.parametrize(("head_dim", "mask", "layout", "kind"), COVERING, ids=str)
def test_kernel_is_exact(head_dim, mask, layout, kind):
    check_case(head_dim, mask, layout, kind, KERNEL)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "mask", "layout", "kind"), [case for case in EVERYTHING if case not in COVERING], ids=str)
def test_kernel_is_exact_in_every_case(head_dim, mask, layout, kind):
    check_case(head_dim, mask, layout, kind, KERNEL)


def test_rows_that_see_nothing():
    check_nothing_to_see(KERNEL)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("transpose", [False, True])
def test_tile_ranges_have_the_needed_tiles_and_mask_those_that_are_not_full(mask, transpose):
    """No needed tile lies outside the range, and none that needs a mask lies in its part without one; checked tile by tile."""
    coords = TokenCoords(*documents("packed", 2, 500))
    bounds = tile_bounds(coords, 20)
    ranges = np.asarray(_tile_ranges(bounds, bounds, mask, transpose))[:, :, 0]
    queries, keys = (jax.tree.map(lambda x, axis=axis: np.expand_dims(x, axis), bounds) for axis in (2, 1))
    kinds = np.asarray(tile_kind(queries, keys, mask))
    for row, tile in np.ndindex(2, 25):
        first, first_full, last_full, last = ranges[row, tile]
        kind = kinds[row, :, tile] if transpose else kinds[row, tile]
        assert (kind[:first] == SKIP).all() and (kind[last:] == SKIP).all()
        assert (kind[first_full:last_full] == FULL).all() and first <= first_full <= last_full <= last
        assert first_full == last_full or not (kind == FULL).any() or kind[first_full] == FULL
        assert (kind[first:last] != SKIP).any() or first == last
    assert {SKIP, FULL, MASKED} <= set(kinds.ravel().tolist())


def test_tiles_are_powers_of_two():
    large, small = GpuKernel(1024, 100), GpuKernel(7, 24)
    assert (large.query_tile, large.key_tile, small.query_tile, small.key_tile) == (128, 64, 16, 16)
