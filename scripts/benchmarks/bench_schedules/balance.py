"""Counts the tiles that kernels compute, by round and rank, to measure balance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Int

from model.attention import TokenCoords, attention, get_schedule
from model.attention.kernels.xla import XlaKernel
from model.attention.layout import inverse, permutation
from model.attention.schedules.plan import Block, Round

# Tokens on a tile's side: two or more, so that a striped diagonal tile has a visible pair.
TILE = 4


@dataclasses.dataclass(frozen=True)
class CountedKernel(XlaKernel):
    """Calls `report(rank, query, key)` on the host for each tile it computes, in both passes.

    rank is the index on the mesh axis `sequence`; query and key are the coordinate `index` of the
    tile's first query and first key in the first row of the batch. A skipped tile is never
    reported, because the call is made where the scores are computed.
    """

    report: Callable[..., None] | None = None

    def _scores(self, q, k, q_coords, kv_coords, *options):
        assert self.report is not None
        rank = lax.axis_index("sequence")
        jax.debug.callback(self.report, rank, q_coords.index[0, 0], kv_coords.index[0, 0])
        return super()._scores(q, k, q_coords, kv_coords, *options)


def computed_tiles(
    schedule, layout: str, size: int, tiles: int
) -> dict[str, Int[np.ndarray, "n 5"]]:
    """Returns the tiles that kernels compute on `size` devices in both passes, for one document.

    Args:
      schedule: name or options of a schedule.
      tiles: number of tiles, of TILE tokens each, on a side of each rank's block.

    Returns:
      For "forward" and "backward", one line per computed tile and kernel call: the rank, the
      query's block and its tile in the block, the key's block and its tile in the block.
    """
    length = size * tiles * TILE
    order = permutation(length, size, layout)
    local_order = inverse(order)
    computed: list[tuple[int, ...]] = []  # rank, index of the first query and of the first key
    kernel = CountedKernel(TILE, TILE, lambda *tile: computed.append(tuple(map(int, tile))))
    mesh = Mesh(np.array(jax.devices()[:size]), ("sequence",))
    # As many heads as ranks, so that every schedule can divide them.
    q = jnp.ones((1, length, size, 2))
    coords = TokenCoords(jnp.asarray(order[None], jnp.int32), jnp.ones((1, length), jnp.int32))

    def forward(q, k, v):
        return attention(
            q, k, v, coords, mesh=mesh, layout=layout, schedule=schedule, kernel=kernel
        )

    def collect() -> np.ndarray:
        jax.effects_barrier()
        rank, query, key = np.array(computed).T
        computed.clear()
        return np.stack(
            [
                rank,
                *np.divmod(local_order[query] // TILE, tiles),
                *np.divmod(local_order[key] // TILE, tiles),
            ],
            1,
        )

    out, backward = jax.vjp(jax.jit(forward), q, q, q)
    jax.block_until_ready(out)
    counts = {"forward": collect()}
    jax.block_until_ready(backward(out))
    return counts | {"backward": collect()}


def per_round(
    computed: Int[np.ndarray, "n 5"], rounds: tuple[Round, ...], size: int
) -> Int[np.ndarray, "rounds ranks"]:
    """Returns the number of tiles that each rank computes in each planned round that has work.

    Raises:
      KeyError: a rank computed a tile that its plan does not assign to it.
    """
    working_rounds = [planned for planned in rounds if planned.tasks]
    round_of = {
        (task.rank, query, key): number
        for number, planned in enumerate(working_rounds)
        for task in planned.tasks
        for query in task.queries
        for key in task.keys
    }
    counts = np.zeros((len(working_rounds), size), int)
    for rank, query, _, key, _ in computed.tolist():
        counts[round_of[rank, query, key], rank] += 1
    return counts


def imbalance(counts: Int[np.ndarray, "rounds ranks"]) -> float:
    """Returns the busiest rank's tiles, summed over rounds, over the sum of the means."""
    return float(counts.max(1).sum() / counts.mean(1).sum())


def measure(schedule, layout: str, size: int, tiles: int = 16) -> dict:
    """Returns the imbalance of both passes, and the counts behind it."""
    computed = computed_tiles(schedule, layout, size, tiles)
    planned = get_schedule(schedule, size, layout).plan(
        size, Block(1, tiles * TILE, size, size, 2, 4)
    )
    row = {"layout": layout, "ranks": size, "tiles": tiles}
    for direction, rounds in zip(("forward", "backward"), planned, strict=True):
        counts = per_round(computed[direction], rounds, size)
        row[direction] = {
            "imbalance": imbalance(counts),
            "busiest": counts.max(1).tolist(),
            "mean": counts.mean(1).tolist(),
        }
    return row


if __name__ == "__main__":
    raise SystemExit(
        "no command; python -m scripts.benchmarks.bench_schedules balance prints what this counts"
    )
