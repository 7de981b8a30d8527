"""How evenly work is dealt out, from what the running kernels tell: counts of computed tiles per round and rank."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from model.attention import Mask, TokenCoords, attention, get_schedule
from model.attention.kernels.counted import counted_kernel
from model.attention.layout import inverse, permutation
from model.attention.schedules.plan import Block, Round

TILE = 4  # tokens of a side: more than one, so that a diagonal tile of a striped block is never hidden whole


def computed_tiles(schedule, layout: str, size: int, tiles: int = 16, mask: Mask = Mask()) -> dict[str, np.ndarray]:
    """Runs attention and its gradient on `size` devices, one document, and collects the tiles that kernels computed.

    Args:
      tiles: of TILE tokens, on a side of each rank's block.

    Returns:
      int [n, 5] for "forward" and "backward": rank, query's block and tile within it, key's block and tile within it; a
      tile once for each kernel call that computed it.
    """
    length = size * tiles * TILE
    order = permutation(length, size, layout)
    place = inverse(order)
    told: list[tuple[int, int, int]] = []
    kernel = counted_kernel(lambda *tile: told.append(tuple(map(int, tile))), TILE, TILE)
    mesh = Mesh(np.array(jax.devices()[:size]), ("sequence",))
    q = jnp.ones((1, length, size, 2))  # as many heads as ranks: each schedule can serve them
    coords = TokenCoords(jnp.asarray(order[None], jnp.int32), jnp.ones((1, length), jnp.int32))

    def forward(q, k, v):
        return attention(q, k, v, coords, mesh=mesh, layout=layout, schedule=schedule, kernel=kernel, mask=mask)

    def finished() -> np.ndarray:
        jax.effects_barrier()
        rank, query, key = np.array(told).T
        told.clear()
        return np.stack([rank, *np.divmod(place[query] // TILE, tiles), *np.divmod(place[key] // TILE, tiles)], 1)

    out, pull = jax.vjp(jax.jit(forward), q, q, q)
    jax.block_until_ready(out)
    counts = {"forward": finished()}
    jax.block_until_ready(pull(out))
    return counts | {"backward": finished()}


def per_round(told: np.ndarray, rounds: tuple[Round, ...], size: int) -> np.ndarray:
    """Counts [rounds with work, ranks] of computed tiles, each in the round in which the plan has its rank meet its blocks.

    Raises:
      KeyError: a rank computed a tile that its plan does not give it.
    """
    rounds = [one for one in rounds if one.tasks]
    when = {(task.rank, query, key): number for number, one in enumerate(rounds) for task in one.tasks
            for query in task.queries for key in task.keys}
    counts = np.zeros((len(rounds), size), int)
    for rank, query, _, key, _ in told.tolist():
        counts[when[rank, query, key], rank] += 1
    return counts


def imbalance(counts: np.ndarray) -> float:
    """The busiest rank's tiles summed over rounds, over the sum of the means: 1 where nobody waits."""
    return float(counts.max(1).sum() / counts.mean(1).sum())


def measure(schedule, layout: str, size: int, tiles: int = 16) -> dict:
    """Imbalance of both passes, and the counts it comes from."""
    told = computed_tiles(schedule, layout, size, tiles)
    planned = get_schedule(schedule, size, layout).plan(size, Block(1, tiles * TILE, size, size, 2, 4))
    row = {"layout": layout, "ranks": size, "tiles": tiles}
    for which, rounds in zip(("forward", "backward"), planned, strict=True):
        counts = per_round(told[which], rounds, size)
        row[which] = {"imbalance": imbalance(counts), "busiest": counts.max(1).tolist(), "mean": counts.mean(1).tolist()}
    return row


if __name__ == "__main__":
    raise SystemExit("no command; python -m scripts.benchmarks.bench_schedules balance prints what this counts")
