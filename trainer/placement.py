"""Places a mesh on a TPU slice so that the sequence ring is a closed walk over neighbours.

On generations with limited routing (v5e, v6e) the compiler makes a permute asynchronous only if all
its hops are short and straight. In row-major order the hops between rows are not, which would
expose every transfer of the ring.

Each dimension of the slice is therefore divided into three levels. Mesh axes outside the ring are
boxes of cells; within a box the ring walks from cell to cell; mesh axes inside the ring (tensor,
whose sums nothing hides) are the devices of a cell.
"""

from __future__ import annotations

import itertools
import math

import numpy as np


def ring_placed(sizes: list[int], ring: int, devices) -> np.ndarray | None:
    """Returns a slice's TPUs as an array whose axis `ring` is a closed walk over neighbours.

    Args:
      sizes: of the mesh axes, from distant devices to near ones.
      ring: the index of the ring's axis.

    Returns:
      The array, or None if the slice is not a full box or has no closed walk (fewer than two
      dimensions, or an odd number of cells).
    """
    grid = _grid(devices)
    if grid is None:
        return None
    level_sizes = math.prod(sizes[:ring]), sizes[ring], math.prod(sizes[ring + 1 :])
    cut = _cut(grid.shape, level_sizes)
    if cut is None:
        return None
    parts = grid.reshape([n for dimension in cut for n in dimension])
    dimensions = len(cut)
    # Outer boxes, cells, devices of a cell.
    order = [3 * i + level for level in range(3) for i in range(dimensions)]
    placed = parts.transpose(order).reshape(level_sizes)
    _, cells, inside = zip(*cut, strict=True)
    placed = placed[:, closed_walk(cells)]
    return placed[:, :, closed_walk(inside) or slice(None)].reshape(sizes)


def _grid(devices) -> np.ndarray | None:
    """Returns the devices by coordinates, then core; None if they are not a full box."""
    coordinates = [(*device.coords, device.core_on_chip) for device in devices]
    low = np.min(coordinates, axis=0)
    shape = np.max(coordinates, axis=0) - low + 1
    if math.prod(shape) != len(devices):
        return None
    grid = np.empty(shape, object)
    for device, coordinate in zip(devices, coordinates, strict=True):
        grid[tuple(coordinate - low)] = device
    return grid


def _cut(shape, level_sizes: tuple[int, int, int]) -> list[tuple[int, int, int]] | None:
    """Returns each dimension as (boxes, cells, devices of a cell) with these products, or None.

    Prefers the most compact cells, then boxes.
    """
    candidates = []
    for cut in itertools.product(*(_triples(size) for size in shape)):
        boxes, cells, inside = zip(*cut, strict=True)
        if (math.prod(boxes), math.prod(cells), math.prod(inside)) == level_sizes and closed_walk(
            cells
        ) is not None:
            candidates.append((max(inside), sum(inside), max(cells), sum(cells), list(cut)))
    return min(candidates)[-1] if candidates else None


def _triples(size: int) -> list[tuple[int, int, int]]:
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    return [
        (size // cells // inside, cells, inside)
        for cells in divisors
        for inside in divisors
        if size % (cells * inside) == 0
    ]


def closed_walk(cells) -> list[int] | None:
    """Returns a closed walk over the cells of a box (row-major numbers), or None.

    Each cell is a neighbour of the previous one, and the last of the first. The walk goes down the
    first column of an even dimension and returns row by row; it goes back and forth over the other
    dimensions as if they were one.
    """
    if math.prod(cells) == 1:
        return [0]
    even = next((i for i, size in enumerate(cells) if size % 2 == 0), None)
    if even is None:
        return None
    rows = cells[even]
    columns = _to_and_fro([size for i, size in enumerate(cells) if i != even])
    if len(columns) == 1 and rows > 2:
        return None
    walk = [(row, columns[0]) for row in range(rows)]
    for number, row in enumerate(reversed(range(rows))):
        walk += [(row, column) for column in (columns[1:] if number % 2 == 0 else columns[:0:-1])]
    return [
        int(np.ravel_multi_index((*column[:even], row, *column[even:]), cells))
        for row, column in walk
    ]


def _to_and_fro(sizes: list[int]) -> list[tuple[int, ...]]:
    """Returns the coordinates of a box's cells, each a neighbour of the previous one."""
    if not sizes:
        return [()]
    rest = _to_and_fro(sizes[1:])
    return [
        (first, *others)
        for first in range(sizes[0])
        for others in (rest if first % 2 == 0 else rest[::-1])
    ]
