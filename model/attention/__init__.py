"""Exact attention over a sharded sequence: any layout with any schedule, on one mask made from token coordinates.

`attention` takes and gives global arrays; `attend` is the same for a shard's own arrays, inside `shard_map`.
"""
from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from .coords import Mask, TokenCoords, check_starts, document_starts
from .kernels import Kernel, get_kernel
from .layout import check_length
from .partial import AttentionPartial, merge
from .schedules import Ranks, get_schedule

__all__ = ["Attending", "AttentionPartial", "Mask", "TokenCoords", "attend", "attending", "attention", "document_starts",
           "keep", "merge"]


@dataclasses.dataclass(frozen=True)
class Attending:
    """How a shard's queries meet all keys: a schedule over a kernel, static. `attend` is the two directions under one rule."""

    schedule: object
    kernel: Kernel
    ranks: Ranks
    mask: Mask
    scale: float

    @property
    def _options(self):
        return {"ranks": self.ranks, "mask": self.mask, "scale": self.scale}

    def forward(self, q, k, v, q_coords, kv_coords):
        """out like q, in its dtype, and lse float32 [B, Hq, T]."""
        partial = self.schedule.forward(self.kernel, q, k, v, q_coords, kv_coords, **self._options)
        return partial.out.astype(q.dtype), partial.lse

    def backward(self, q, k, v, *rest):
        """Gradients of q, k and v as of `gradients`, in their dtypes."""
        return tuple(g.astype(x.dtype) for g, x in zip(self.gradients(q, k, v, *rest), (q, k, v), strict=True))

    def gradients(self, q, k, v, q_coords, kv_coords, out, lse, dout, dlse):
        """Gradients of q, k and v, float32, from what `forward` gave and its cotangents."""
        return self.schedule.backward(
            self.kernel, q, k, v, dout, lse, _delta(out, lse, dout, dlse), q_coords, kv_coords, **self._options)

    @property
    def carries(self) -> bool:
        """Whether other arrays can ride with what the schedule sends."""
        return hasattr(self.schedule, "carry_forward")

    def carry_forward(self, q, k, v, q_coords, kv_coords, shard):
        """`forward` (out and lse in one pair), and `shard`, a tree of arrays, of all ranks [P, ...]: it rides along."""
        partial, gathered = self.schedule.carry_forward(self.kernel, q, k, v, q_coords, kv_coords, shard, **self._options)
        return (partial.out.astype(q.dtype), partial.lse), gathered

    def carry_backward(self, q, k, v, q_coords, kv_coords, out, lse, dout, shard, shares):
        """`backward` without a cotangent for lse; `shard` of all ranks; the sum over all ranks of what their `shares` [P, ...]
        have for this one. Each is a tree, or None."""
        gradients, gathered, share = self.schedule.carry_backward(
            self.kernel, q, k, v, dout, lse, _delta(out, lse, dout), q_coords, kv_coords, shard, shares, **self._options)
        return tuple(g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True)), gathered, share


def _delta(out, lse, dout, dlse=0.0):
    """d score = weight * (dweight - delta); d lse / d score = weight, so that lse's own cotangent joins delta."""
    delta = jnp.einsum("bthd,bthd->bht", dout.astype(jnp.float32), out.astype(jnp.float32), precision="highest")
    return delta - jnp.where(jnp.isneginf(lse), 0.0, dlse)


def keep(out, lse):
    """Named, so that a remat policy can keep them: the backward then never runs attention forward again (DistFlashAttn,
    section 3.3)."""
    return checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: Attending, *arrays):
    return _attend_forward(how, *arrays)[0]


def _attend_forward(how, *arrays):
    kept = keep(*how.forward(*arrays))
    return kept, (*arrays, *kept)


def _attend_backward(how, residuals, cotangents):
    return *how.backward(*residuals, *cotangents), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def attending(head_dim: int, *, schedule, kernel: Kernel, axis: str, size: int, layout="", mask=Mask(),
              scale=None) -> Attending:
    """From names and sizes; see `attend`."""
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    return Attending(get_schedule(schedule, size, layout), kernel, Ranks(axis, size), mask, scale)


def attend(q, k, v, q_coords, kv_coords, *, mask=Mask(), **how):
    """Attention of a shard's queries over the keys of all shards; to be called inside `shard_map`.

    Args:
      q: [B, T, Hq, D]; k, v: [B, T, Hkv, D], this shard's tokens, Hq a multiple of Hkv.
      q_coords, kv_coords: TokenCoords of [B, T].
      schedule: a name, or a schedule; kernel: from `get_kernel`; axis, size: the mesh axis of the sequence;
        layout: the layout of the arrays, where it is known (see `get_schedule`).
      scale: multiplies the scores; D ** -0.5 unless given.

    Returns:
      out like q (in its dtype), and lse float32 [B, Hq, T].
    """
    check_starts(TokenCoords(*kv_coords).start, mask)
    return _attend(attending(q.shape[-1], mask=mask, **how), q, k, v, TokenCoords(*q_coords), TokenCoords(*kv_coords))


def attention(q, k, v, coords, *, kv_coords=None, mesh: Mesh, layout="striped", schedule="ring", kernel="auto",
              mask=Mask(), scale=None, return_lse=False):
    """Exact attention of global arrays on a mesh, already permuted for `layout`.

    Args:
      q: [B, L, Hq, D]; k, v: [B, L, Hkv, D], Hq a multiple of Hkv.
      coords: TokenCoords (or a pair; a third, `start`, for global tokens) of int32 [B, L], permuted as the tokens are;
        `kv_coords` the same for k and v, if they are not the queries' own.
      mesh: axes out of data, fsdp (batch), tensor (heads), sequence (length); a missing one has size 1.
      layout: name of the layout that the arrays are in; it does not change the result, only the balance (and in a
        contiguous one `ring` and `balanced` leave out the ranks of which nothing can be visible).
      schedule: a name, or a schedule with options. kernel: a name, or a Kernel.
      mask, scale: see Mask and `attend`.

    Returns:
      out like q, in q's dtype; with return_lse also lse, float32 [B, Hq, L].

    Raises:
      ValueError: sizes that do not fit each other or the mesh, in one line that names those that do.
    """
    coords = TokenCoords(*coords)
    own_coords = kv_coords is None
    kv_coords = coords if own_coords else TokenCoords(*kv_coords)
    size = mesh.shape.get("sequence", 1)
    batch = tuple(axis for axis in ("data", "fsdp") if axis in mesh.shape)
    _check(q, k, v, mesh, size, batch, layout)
    tensor = mesh.shape.get("tensor", 1)
    heads = "tensor" if tensor > 1 and k.shape[2] % tensor == 0 else None
    sequence = "sequence" if "sequence" in mesh.shape else None
    tokens = PartitionSpec(batch, sequence)
    vectors = PartitionSpec(batch, sequence, heads)
    kernel = get_kernel(kernel) if isinstance(kernel, str) else kernel
    local = functools.partial(attend, schedule=schedule, kernel=kernel, axis="sequence", size=size, mask=mask, scale=scale,
                              layout=layout if own_coords else "")
    out, lse = jax.shard_map(
        local, mesh=mesh, in_specs=(vectors, vectors, vectors, tokens, tokens),
        out_specs=(vectors, PartitionSpec(batch, heads, sequence)), check_vma=False)(q, k, v, coords, kv_coords)
    return (out, lse) if return_lse else out


def _check(q, k, v, mesh, size, batch, layout):
    """Refuses shapes that cannot be sharded, with the ones that could."""
    if k.shape != v.shape:
        raise ValueError(f"k and v: found shapes {k.shape} and {v.shape}; they must be equal")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"heads: {q.shape[2]} query heads are no multiple of {k.shape[2]} key/value heads")
    for name, length in (("q", q.shape[1]), ("k", k.shape[1])):
        check_length(length, size, layout, f"length of {name}")
    rows = math.prod(mesh.shape[axis] for axis in batch)
    if q.shape[0] % rows:
        raise ValueError(f"batch: {q.shape[0]} rows are not divisible by data x fsdp = {rows}; use a multiple of {rows}")


