"""Where a mesh's axes lie on a slice of TPUs: the ring along the sequence as a closed walk from neighbour to neighbour.

On generations with limited routing (v5e, v6e) the compiler makes a permute asynchronous only if all its hops are short and
straight: in row-major order the ring's hops from row to row are not, and every transfer of it would be exposed. Here each
dimension of the slice is cut in three: the axes outside of the ring are boxes, in each of which the ring goes from cell to
cell, and the axes inside of it (tensor, whose sums nothing hides) are the devices of a cell.
"""
from __future__ import annotations

import itertools
import math

import numpy as np


def ring_placed(sizes: list[int], ring: int, devices) -> np.ndarray | None:
    """TPUs of one slice as an array of these sizes, outer axes first, whose axis `ring` is a closed walk over neighbours.

    None where the slice is no full box, or has no such walk: fewer than two dimensions or an odd number of cells.
    """
    grid = _grid(devices)
    if grid is None:
        return None
    wanted = math.prod(sizes[:ring]), sizes[ring], math.prod(sizes[ring + 1:])
    cut = _cut(grid.shape, wanted)
    if cut is None:
        return None
    parts = grid.reshape([n for dimension in cut for n in dimension])
    dimensions = len(cut)
    order = [3 * i + level for level in range(3) for i in range(dimensions)]  # outer boxes, cells, devices of a cell
    placed = parts.transpose(order).reshape(wanted)
    _, cells, inside = zip(*cut, strict=True)
    placed = placed[:, closed_walk(cells)]
    return placed[:, :, closed_walk(inside) or slice(None)].reshape(sizes)


def _grid(devices) -> np.ndarray | None:
    """Devices by their coordinates, cores of a chip last; None where they are no full box."""
    places = [(*device.coords, device.core_on_chip) for device in devices]
    low = np.min(places, axis=0)
    shape = np.max(places, axis=0) - low + 1
    if math.prod(shape) != len(devices):
        return None
    grid = np.empty(shape, object)
    for device, place in zip(devices, places, strict=True):
        grid[tuple(place - low)] = device
    return grid


def _cut(shape, wanted: tuple[int, int, int]) -> list[tuple[int, int, int]] | None:
    """Each dimension as (boxes, cells, devices of a cell), whose products are `wanted`: of compact cells, then boxes."""
    found = []
    for cut in itertools.product(*(_triples(size) for size in shape)):
        boxes, cells, inside = zip(*cut, strict=True)
        if (math.prod(boxes), math.prod(cells), math.prod(inside)) == wanted and closed_walk(cells) is not None:
            found.append((max(inside), sum(inside), max(cells), sum(cells), list(cut)))
    return min(found)[-1] if found else None


def _triples(size: int) -> list[tuple[int, int, int]]:
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    return [(size // cells // inside, cells, inside) for cells in divisors for inside in divisors
            if size % (cells * inside) == 0]


def closed_walk(cells) -> list[int] | None:
    """Row-major numbers of all cells of a box, each a neighbour of the one before, the last of the first; None where none is.

    Down the first column of an even dimension, and back through the rows of the others, which a walk to and fro makes one.
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
    return [int(np.ravel_multi_index((*column[:even], row, *column[even:]), cells)) for row, column in walk]


def _to_and_fro(sizes: list[int]) -> list[tuple[int, ...]]:
    """All places of a box, each a neighbour of the one before."""
    if not sizes:
        return [()]
    rest = _to_and_fro(sizes[1:])
    return [(first, *place) for first in range(sizes[0]) for place in (rest if first % 2 == 0 else rest[::-1])]
