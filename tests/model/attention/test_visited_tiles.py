"""Which tiles the kernels visit, observed from outside: a NaN in an input tile reaches the results
of all tiles that visited it.

A kernel that visits a hidden tile and masks it computes 0 x NaN, which is NaN: its results are
right, but it has wasted the work. Each row of the batch has its NaN in a different tile, so that
one call shows every pair of tiles.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

from model.attention import Keys, Mask, Queries, TokenCoords, attention
from model.attention.blocks import BackwardInputs
from model.attention.coords import tile_bounds
from model.attention.kernels import (
    GpuKernel,
    ReferenceKernel,
    TpuKernel,
    XlaKernel,
    get_kernel,
    tpu_options,
)
from model.attention.kernels.gpu import _tile_ranges
from model.attention.layout import permutation
from model.attention.names import LAYOUTS
from planning.costs.tiles import tile_counts

from .cases import QUICK, SCHEDULES, mesh_of
from .mosaic_interpreter import KERNEL as MOSAIC
from .mosaic_interpreter import compile_once

HEAD_DIM = 16
TILE = 16
GPU = GpuKernel(TILE, TILE, interpret=True)
KERNELS = {
    "tpu": TpuKernel(128, 128, fused=True, interpret=True),
    "tpu pair": TpuKernel(128, 128, fused=False, interpret=True),
    "gpu": GPU,
    "xla": XlaKernel(TILE, TILE),
    "auto": get_kernel("auto", query_tile=TILE, key_tile=TILE),
}


def needed_tiles(order, tile):
    """Returns [i, j] whether any key of tile j is visible to any query of tile i, by the tokens'
    indices in their order."""
    tiles = order.reshape(-1, tile)
    return tiles.max(1)[:, None] >= tiles.min(1)[None]


def with_nan(x, tile):
    """Repeats a one-row x once per tile, with NaN in tile b of row b."""
    count = x.shape[1] // tile
    rows = np.repeat(x, count, 0)
    for number in range(count):
        rows[number, number * tile : (number + 1) * tile] = np.nan
    return rows


def nan_tiles(results, tile):
    """Returns [b, i] whether tile i of row b of a result has a NaN."""
    return (
        np.isnan(np.asarray(results))
        .reshape(len(results), -1, tile, *results.shape[2:])
        .any((2, 3, 4))
    )


def inputs(tokens):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, tokens, 1, HEAD_DIM), dtype=np.float32) for _ in "qkvd"]


def visited_tiles(kernel, order, tile):
    """Returns whether the forward, dq and dk, dv kernels visit tile j of the keys for tile i of the
    queries, each [i, j]."""
    return {
        part: visited[0]
        for part, visited in visited_in_rounds(kernel, order[None], order[None], tile).items()
    }


def visited_in_rounds(kernel, q_orders, kv_orders, tile):
    """Returns the same for several rounds in one call per kernel, [round, i, j], for queries and
    keys with indices [round, tokens]."""
    rounds, tokens = q_orders.shape
    count = tokens // tile
    segments = np.ones((rounds * count, tokens), np.int32)
    q_coords, kv_coords = (
        TokenCoords(np.repeat(x.astype(np.int32), count, 0), segments)
        for x in (q_orders, kv_orders)
    )
    statistic = np.zeros((rounds * count, 1, tokens), np.float32)

    @functools.partial(jax.jit, static_argnames="method", compiler_options=QUICK)
    def call(method, q, k, v, *saved):
        blocks = Queries(q, q_coords), Keys(k, v, kv_coords)
        saved = (BackwardInputs(*saved, statistic, statistic),) if saved else ()
        return getattr(kernel, method)(*blocks, *saved, mask=Mask(), scale=1.0)

    def nan_of_rounds(results):
        return nan_tiles(results, tile).reshape(rounds, count, -1)

    _, k, v, dout = arrays = inputs(tokens)
    clean = [np.repeat(x, rounds * count, 0) for x in arrays]
    k_nan, v_nan, dout_nan = (np.tile(with_nan(x, tile), (rounds, 1, 1, 1)) for x in (k, v, dout))
    forward = call("forward", *clean[:2], v_nan).out
    dq = call("backward", clean[0], k_nan, *clean[2:]).dq
    dv = call("backward", *clean[:3], dout_nan).dv
    by_query = {
        "forward": nan_of_rounds(forward).swapaxes(1, 2),
        "dq": nan_of_rounds(dq).swapaxes(1, 2),
    }
    return {**by_query, "dk, dv": nan_of_rounds(dv)}


QUICK_CASES = [
    ("tpu", 2, "striped"),
    ("gpu", 4, "zigzag"),
    ("gpu", 8, "striped"),
    ("xla", 8, "striped"),
]
ALL_CASES = [
    (name, shards, layout) for name in KERNELS for shards in (2, 3, 4, 8) for layout in LAYOUTS
]


@pytest.mark.parametrize(
    ("name", "shards", "layout"),
    [
        *QUICK_CASES,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ALL_CASES
            if case not in QUICK_CASES
        ),
    ],
)
def test_kernels_visit_exactly_the_needed_tiles(name, shards, layout):
    """For a block with the tokens of all shards, as after a gather; the cost model counts as
    many."""
    tile, tiles = 128 if name.startswith("tpu") else TILE, 2
    order = permutation(shards * tiles * tile, shards, layout)
    needed = needed_tiles(order, tile)
    visited = visited_tiles(KERNELS[name].over_shards(shards, shards), order, tile)
    for part, part_tiles in visited.items():
        assert (part_tiles == needed).all(), (
            f"{part}: {part_tiles.sum()} tiles, {needed.sum()} are needed"
        )
    assert needed.sum() == tile_counts(shards, tiles, tiles, layout).sum()


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "layout",
    [
        "striped",
        *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "striped"),
    ],
)
def test_the_tpu_kernel_skips_hidden_parts_of_a_masked_tile(layout, fused, monkeypatch):
    """Tiles of 256 tokens in parts of 128, over the tokens of two shards."""
    monkeypatch.setattr(tpu_options, "SUB_TILE", 128)
    order = permutation(1024, 2, layout)
    needed = needed_tiles(order, 128)
    for part, tiles in visited_tiles(
        TpuKernel(256, 256, fused=fused, interpret=True), order, 128
    ).items():
        assert (tiles == needed).all(), (
            f"{part}: {tiles.sum()} parts of tiles, {needed.sum()} are needed"
        )


MOSAIC_CASES = [(shards, layout) for shards in (2, 3) for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("shards", "layout"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in MOSAIC_CASES],
)
def test_the_mosaic_kernel_visits_exactly_the_needed_tiles_in_every_round(
    shards, layout, monkeypatch
):
    """In a ring's rounds, each rank's queries against each rank's keys; it reorders gathered shards
    first."""
    tile, tiles = 128, 2
    ranks = permutation(shards * tiles * tile, shards, layout).reshape(shards, -1)
    needed = needed_tiles(ranks.reshape(-1), tile)
    rounds = list(itertools.product(range(shards), repeat=2))
    with compile_once(monkeypatch):
        parts = visited_in_rounds(
            MOSAIC, *(ranks[list(side)] for side in zip(*rounds, strict=True)), tile
        )
    for part, visited in parts.items():
        for (queries, keys), round_tiles in zip(rounds, visited, strict=True):
            expected = needed[
                queries * tiles : (queries + 1) * tiles, keys * tiles : (keys + 1) * tiles
            ]
            assert (round_tiles == expected).all(), (
                f"{part}, queries of {queries}, keys of {keys}: {round_tiles}"
            )


def test_dense_attention_visits_all_tiles():
    """The method of these tests detects a kernel that visits and masks every tile."""
    order = permutation(4 * TILE, 1, "contiguous")
    for tiles in visited_tiles(ReferenceKernel(), order, TILE).values():
        assert tiles.all() and not needed_tiles(order, TILE).all()


def test_the_gpu_kernel_needs_the_number_of_gathered_shards():
    """Without it the kernel walks from the first to the last needed tile, 1.77 times as many at P =
    8."""
    order = permutation(8 * 16 * TILE, 8, "striped")
    coords = TokenCoords(order[None].astype(np.int32), np.ones((1, len(order)), np.int32))
    bounds = tile_bounds(coords, TILE)

    def walked(shards):
        ranges = _tile_ranges(bounds, bounds, Mask(), shards=shards)
        return int((ranges[..., 3] - ranges[..., 0]).sum())

    needed = needed_tiles(order, TILE).sum()
    assert walked(8) == needed and walked(1) / needed == pytest.approx(1.77, abs=0.01)


GATHERED = ["all_gather", "ulysses", "attention2d 2"]


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        *((schedule, "striped") for schedule in GATHERED),
        *(
            pytest.param(schedule, layout, marks=pytest.mark.slow)
            for schedule in (
                *GATHERED,
                "attention2d overlap 2",
                "ring",
                "usp ring",
                "usp attention2d",
                "balanced",
            )
            for layout in LAYOUTS
            if schedule not in GATHERED or layout != "striped"
        ),
    ],
)
def test_under_every_schedule_the_gpu_kernel_visits_no_hidden_tile(schedule, layout):
    """Forward, on four devices, whichever keys a call has together."""
    shards, tiles = 4, 2
    order = permutation(shards * tiles * TILE, shards, layout)
    q, k, v, _ = inputs(len(order))
    count = len(order) // TILE
    heads = 4  # one per device under ulysses

    def rows(x):
        return np.repeat(np.repeat(x, count, 0) if len(x) == 1 else x, heads, 2)

    coords = (
        np.repeat(order[None].astype(np.int32), count, 0),
        np.ones((count, len(order)), np.int32),
    )
    options = {
        "mesh": mesh_of(shards),
        "layout": layout,
        "schedule": SCHEDULES[schedule],
        "kernel": GPU,
    }
    attend = jax.jit(functools.partial(attention, **options), compiler_options=QUICK)
    visited = nan_tiles(attend(rows(q), rows(k), rows(with_nan(v, TILE)), coords), TILE).T
    needed = needed_tiles(order, TILE)
    assert (visited == needed).all(), f"{visited.sum()} tiles, {needed.sum()} are needed"
