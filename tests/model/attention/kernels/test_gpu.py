"""The GPU kernel, interpreted, against dense float64 attention: out, lse and all gradients, within
1e-5."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import TokenCoords
from model.attention.coords import FULL, MASKED, SKIP, tile_bounds, tile_kind
from model.attention.kernels import gpu
from model.attention.kernels.gpu import GpuKernel, _tile_ranges

from .test_tpu import (
    EVERYTHING,
    MASKS,
    check_case,
    check_no_visible_keys,
    check_rounded,
    compiled,
    documents,
)

KERNEL = GpuKernel(interpret=True)
TABLES = ("HOPPER_TILES", "ANY", "FLOAT32")
COVERING = [
    (64, MASKS[0], "contiguous", "packed"),
    (80, MASKS[2], "striped", "packed"),
    (96, MASKS[1], "striped", "one"),
    (100, MASKS[3], "contiguous", "packed"),
]


@pytest.fixture(params=["HOPPER_TILES"])
def tiles(request, monkeypatch):
    """Makes the float32 operands of these tests use the tiles of another table."""
    monkeypatch.setattr(gpu, "FLOAT32", getattr(gpu, request.param))
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def with_tables(cases):
    """Pairs each case with the next table in turn."""
    return [(table, *case) for table, case in zip(itertools.cycle(TABLES), cases, strict=False)]


@pytest.mark.parametrize(
    ("tiles", "head_dim", "mask", "layout", "kind"),
    with_tables(COVERING),
    ids=str,
    indirect=["tiles"],
)
def test_kernel_is_exact(tiles, head_dim, mask, layout, kind):
    check_case(head_dim, mask, layout, kind, KERNEL)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["32 bits", "16 bits"])
def test_a_result_with_nothing_to_merge_has_the_queries_dtype(dtype):
    check_rounded(KERNEL, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiles", "head_dim", "mask", "layout", "kind"),
    with_tables(case for case in EVERYTHING if case not in COVERING),
    ids=str,
    indirect=["tiles"],
)
def test_kernel_is_exact_in_every_case(tiles, head_dim, mask, layout, kind):
    check_case(head_dim, mask, layout, kind, KERNEL)


def test_queries_that_see_no_key_are_zero(tiles):
    check_no_visible_keys(KERNEL)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("transpose", [False, True])
def test_tile_ranges_contain_the_needed_tiles_and_mask_all_but_full_ones(mask, transpose):
    """Tile by tile: no needed tile is outside the range, and none that needs a mask is in its
    unmasked part."""
    coords = TokenCoords(*documents("packed", 2, 500))
    bounds = tile_bounds(coords, 20)
    ranges = np.asarray(_tile_ranges(bounds, bounds, mask, transpose))[:, :, 0]
    queries, keys = (
        jax.tree.map(lambda x, axis=axis: np.expand_dims(x, axis), bounds) for axis in (2, 1)
    )
    kinds = np.asarray(tile_kind(queries, keys, mask))
    for row, tile in np.ndindex(2, 25):
        first, first_full, last_full, last = ranges[row, tile]
        kind = kinds[row, :, tile] if transpose else kinds[row, tile]
        assert (kind[:first] == SKIP).all() and (kind[last:] == SKIP).all()
        assert (
            kind[first_full:last_full] == FULL
        ).all() and first <= first_full <= last_full <= last
        assert first_full == last_full or not (kind == FULL).any() or kind[first_full] == FULL
        assert (kind[first:last] != SKIP).any() or first == last
    assert {SKIP, FULL, MASKED} <= set(kinds.ravel().tolist())


def tunings(kind, dtype, monkeypatch, kernel=KERNEL):
    """Returns the tuning for a kind of device, by kernel and head size."""
    monkeypatch.setattr(gpu, "device_kind", lambda: kind)
    return {
        (name, size): kernel.tuning(name, jnp.zeros((1, 1, 1, size), dtype))
        for name in gpu.ANY
        for size in gpu.ANY[name]
    }


def test_tiles_follow_the_device_and_the_operands(monkeypatch):
    by_device = {
        kind: tunings(kind, jnp.bfloat16, monkeypatch)
        for kind in ("NVIDIA H200", "NVIDIA B200", "NVIDIA GeForce RTX 4090")
    }
    hopper, blackwell, consumer = by_device.values()
    assert hopper["forward", 128] == (128, 128, 8, 3) != consumer["forward", 128]
    assert (
        blackwell["forward", 128] == hopper["forward", 128]
        and blackwell["dkv", 128] == consumer["dkv", 128]
    )
    assert (
        tunings("NVIDIA H200", jnp.float32, monkeypatch)
        == tunings("NVIDIA A100", jnp.float32, monkeypatch)
        != hopper
    )
    assert (
        KERNEL.tuning("dq", jnp.zeros((1, 1, 1, 80), jnp.bfloat16))
        == tunings("cpu", jnp.bfloat16, monkeypatch)["dq", 128]
    )


def test_requested_tiles_are_rounded_to_powers_of_two_and_capped_by_the_defaults(monkeypatch):
    defaults = tunings("NVIDIA H200", jnp.bfloat16, monkeypatch)
    assert tunings("NVIDIA H200", jnp.bfloat16, monkeypatch, GpuKernel(1024, 512)) == defaults
    small = tunings("NVIDIA H200", jnp.bfloat16, monkeypatch, GpuKernel(7, 60))
    assert small["forward", 64] == (16, 32, 8, 3) and small["dkv", 64] == (32, 16, 4, 2)
