"""The arguments of `attention`: each is checked, and what is left out is filled in."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .coords import MOST_TOKENS, Mask, TokenCoords
from .kernels import Kernel
from .layout import check_length, permutation


class MeshAxes(NamedTuple):
    """The axes of a mesh by what is split over them; () or None if the mesh has none."""

    batch: tuple[str, ...]
    heads: str | None
    sequence: str | None


def mesh_axes(
    mesh: Mesh,
    batch_axes: str | Sequence[str],
    head_axis: str | None,
    sequence_axis: str | None,
) -> MeshAxes:
    """Returns the mesh's axes by what is split over them. Refuses names that are none, an axis with
    two uses, and axes over which attention splits nothing."""
    batch = (batch_axes,) if isinstance(batch_axes, str) else batch_axes
    if not isinstance(batch, tuple | list) or not all(isinstance(axis, str) for axis in batch):
        raise ValueError(f"batch_axes: found {batch_axes!r}; needs names of axes, () for none")
    for name, axis in (("head_axis", head_axis), ("sequence_axis", sequence_axis)):
        if not isinstance(axis, str | None):
            raise ValueError(f"{name}: found {axis!r}; needs the name of one axis, or None")
    named = [*batch, *(axis for axis in (head_axis, sequence_axis) if axis is not None)]
    if twice := [axis for axis in named if named.count(axis) > 1]:
        raise ValueError(
            f"batch_axes, head_axis and sequence_axis: found {twice[0]!r} twice; an axis splits "
            "either rows, heads or the sequence"
        )
    if unknown := [axis for axis in mesh.shape if axis not in named]:
        raise ValueError(
            f"mesh: found the axis {unknown[0]!r}, over which nothing would be split; name it in "
            f"batch_axes ({', '.join(batch)}), head_axis ({head_axis}) or sequence_axis "
            f"({sequence_axis})"
        )
    heads, sequence = (axis if axis in mesh.shape else None for axis in (head_axis, sequence_axis))
    return MeshAxes(tuple(axis for axis in batch if axis in mesh.shape), heads, sequence)


def check_arrays(q, k, v, sinks):
    """Refuses arrays that are not of their kind or do not fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(jnp.shape(x)) != 4 or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise ValueError(
                f"{name}: found {jnp.result_type(x)} {jnp.shape(x)}; needs floating-point numbers "
                "[B, L, heads, D]"
            )
    if k.shape != v.shape:
        raise ValueError(f"k and v: found shapes {k.shape} and {v.shape}; they must be equal")
    for axis, name in ((0, "B, the rows"), (3, "D, the size of a head")):
        if q.shape[axis] != k.shape[axis]:
            raise ValueError(
                f"q and k: found shapes {q.shape} and {k.shape}; {name}, must be equal"
            )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"heads: {q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads"
        )
    if sinks is not None and (sinks.shape, sinks.dtype) != (q.shape[2:3], jnp.float32):
        raise ValueError(
            f"sinks: found {sinks.dtype} {sinks.shape}; needs float32 ({q.shape[2]},), one for "
            "each head"
        )


def check_options(mask: Mask, scale: float | None, kernel: str | Kernel) -> None:
    """Refuses options of another kind, such as an array as the mask."""
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask: found {_kind(mask)}; needs a Mask, such as Mask(causal=True, window=4096); "
            "documents and padding are given by coords"
        )
    if scale is not None and not (isinstance(scale, numbers.Real) and math.isfinite(scale)):
        raise ValueError(f"scale: found {_kind(scale)}; needs a finite Python number, or None")
    if not isinstance(kernel, str | Kernel):
        raise ValueError(f"kernel: found {_kind(kernel)}; needs a name, or a Kernel")


def _kind(value: object) -> str:
    """A value in a message, in one line: an array as its dtype and shape, a sequence as its
    length."""
    if isinstance(value, np.ndarray | jax.Array):
        return f"an array, {value.dtype} {value.shape}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)


def checked_layout(layout: str | None, is_needed: bool) -> str:
    """Returns the layout, by default `striped`."""
    if layout is None and is_needed:
        raise ValueError(
            "layout: not given, and without coords the order of the tokens follows from it; "
            "'contiguous' if they are in natural order, 'striped' or 'zigzag' if "
            "permutation(length, shards, layout) permuted them"
        )
    return "striped" if layout is None else layout


def check_same_tokens(q, k, kv_coords: Sequence[Any] | None) -> None:
    """Refuses queries and keys of different tokens, which only coordinates relate."""
    if kv_coords is not None or q.shape[:2] != k.shape[:2]:
        found = "kv_coords" if kv_coords is not None else f"q {q.shape} and k {k.shape}"
        raise ValueError(
            f"coords: not given, found {found}; needed unless queries and keys are the same tokens"
        )


def one_document(shape: tuple[int, ...], size: int, layout: str, mask: Mask) -> TokenCoords:
    """Returns the coordinates of rows of one document each, [B, L], in the layout's order."""
    index = jnp.asarray(permutation(shape[1], size, layout), jnp.int32)
    index = jnp.broadcast_to(index, shape)
    start = jnp.zeros_like(index) if mask.global_tokens else None
    return TokenCoords(index, jnp.ones_like(index), start)


def checked_coords(name: str, coords: Sequence[Any], shape: tuple[int, ...]) -> TokenCoords:
    """Returns coordinates as int32, in which differences of any two are right; refuses others than
    integers of the tokens' shape [B, L]."""
    if not isinstance(coords, tuple | list) or not 2 <= len(coords) <= len(TokenCoords._fields):
        raise ValueError(
            f"{name}: found {_kind(coords)}; needs TokenCoords(index, segment_ids), or a pair"
        )
    coords = TokenCoords(*coords)
    for field, values in coords._asdict().items():
        if values is None and field in ("start", "shared"):
            continue
        if np.shape(values) != tuple(shape):
            raise ValueError(
                f"{name}.{field}: found shape {np.shape(values)}; needs [B, L] = {tuple(shape)}, "
                "one per token of each row"
            )
        if not jnp.issubdtype(jnp.result_type(values), jnp.integer):
            raise ValueError(
                f"{name}.{field}: found dtype {jnp.result_type(values)}; needs integers, such as "
                "int32"
            )
        # Arrays of JAX may be traced, or on another host.
        if isinstance(values, np.ndarray) and values.size and np.abs(values).max() > MOST_TOKENS:
            raise ValueError(
                f"{name}.{field}: found {values.flat[np.abs(values).argmax()]}; needs numbers that "
                "int32 holds"
            )
    return TokenCoords._make(None if x is None else jnp.asarray(x, jnp.int32) for x in coords)


def check_sharing(coords: TokenCoords, kv_coords: TokenCoords) -> None:
    """Refuses shared prefixes that only the queries or only the keys name."""
    given, missing = (
        ("coords", "kv_coords") if kv_coords.shared is None else ("kv_coords", "coords")
    )
    if (coords.shared is None) != (kv_coords.shared is None):
        raise ValueError(
            f"{missing}.shared: not given, found {given}.shared; queries and keys need both, 0 for "
            "tokens that share nothing"
        )


def check_shards(q, k, mesh: Mesh, axes: MeshAxes, size: int, layout: str) -> None:
    """Refuses sizes that the mesh cannot shard, naming sizes it can."""
    for name, length in (("q", q.shape[1]), ("k", k.shape[1])):
        check_length(length, size, layout, f"length of {name}")
    rows = math.prod(mesh.shape[axis] for axis in axes.batch)
    if q.shape[0] % rows:
        raise ValueError(
            f"batch: {q.shape[0]} rows are not divisible by {' x '.join(axes.batch)} = {rows}; use "
            f"a multiple of {rows}"
        )
    if axes.heads and k.shape[2] % mesh.shape[axes.heads]:
        raise ValueError(
            f"heads: {k.shape[2]} key/value heads are not divisible by {axes.heads} = "
            f"{mesh.shape[axes.heads]}; its devices would compute the same"
        )
