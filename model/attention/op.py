"""Attention as an operation: `attention` of global arrays, and `attend` of a rank's local arrays
inside `shard_map`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, reshard
from jaxtyping import Array, Float, PyTree

from .arguments import (
    check_arrays,
    check_options,
    check_same_tokens,
    check_shards,
    check_sharing,
    checked_coords,
    checked_layout,
    mesh_axes,
    one_document,
)
from .blocks import BackwardInputs, Gradients, Keys, Queries
from .coords import Mask, check_starts
from .kernels import Kernel, get_kernel
from .kernels.shared import SharedBeginningsKernel
from .names import BATCH_AXES
from .partial import AttentionPartial, with_sinks
from .schedules import Context, Payload, Ranks, Schedule, get_schedule


@dataclasses.dataclass(frozen=True)
class AttentionOp:
    """Attention of a rank's queries over the keys of all ranks, for use inside `shard_map`: a
    schedule over a kernel.

    Static (hashable), so that it can be an argument of compiled functions. The methods are the
    separate directions; `attend` combines both under one differentiation rule.

    Attributes:
      schedule: which rank computes what when, and what travels.
      kernel: attention of one block of queries over one block of keys.
      ranks: the shards of the sequence.
      mask: which keys of its document a query sees.
      scale: multiplies the scores.
    """

    schedule: Schedule
    kernel: Kernel
    ranks: Ranks
    mask: Mask
    scale: float

    @classmethod
    def create(
        cls,
        head_dim: int,
        *,
        schedule,
        kernel: Kernel,
        axis: str,
        size: int,
        layout: str = "",
        mask: Mask = Mask(),
        scale: float | None = None,
    ) -> AttentionOp:
        """The operation for a mesh axis.

        Args:
          head_dim: size of a head; the scale is head_dim ** -0.5 unless given.
          schedule: a name, a mapping or a Schedule, see `get_schedule`.
          axis: the mesh axis of the sequence.
          size: its number of devices.
          layout: the layout of the arrays, if known, see `get_schedule`.

        Raises:
          ValueError: a schedule that is unknown or cannot serve `size` ranks.
        """
        scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        # Then all tokens are visible already, and no document starts are needed.
        if mask.window is None:
            mask = dataclasses.replace(mask, global_tokens=0)
        return cls(get_schedule(schedule, size, layout), kernel, Ranks(axis, size), mask, scale)

    def forward(
        self, queries: Queries, keys: Keys, sinks: Float[Array, " Hq"] | None = None
    ) -> AttentionPartial:
        """Returns out in q's dtype and lse in float32; `sinks`, float32, as in `with_sinks`."""
        # Sinks still scale the output, so it is rounded after them.
        context = dataclasses.replace(self._context, rounded=sinks is None)
        partial = self.schedule.forward(self._kernel(queries), queries, keys, context)
        return self._rounded(with_sinks(partial, sinks), queries)

    def backward(
        self,
        queries: Queries,
        keys: Keys,
        result: AttentionPartial,
        dout: Float[Array, "B T Hq D"],
        dlse: Float[Array, "B Hq T"] | float = 0.0,
    ) -> Gradients:
        """The gradients of q, k and v in their dtypes, from the result of `forward` and the
        gradients of out and lse."""
        return _cast(self.gradients(queries, keys, result, dout, dlse), queries, keys)

    def gradients(
        self,
        queries: Queries,
        keys: Keys,
        result: AttentionPartial,
        dout: Float[Array, "B T Hq D"],
        dlse: Float[Array, "B Hq T"] | float = 0.0,
    ) -> Gradients:
        """The gradients of `backward` in float32."""
        saved = BackwardInputs(dout, result.lse, _delta(result, dout, dlse))
        return self.schedule.backward(self._kernel(queries), queries, keys, saved, self._context)

    def forward_and_gather(
        self, queries: Queries, keys: Keys, shard, sinks: Float[Array, " Hq"] | None = None
    ) -> tuple[AttentionPartial, PyTree[Array]]:
        """`forward`, which also all-gathers `shard`, a tree of arrays, to [P, ...] along with K and
        V."""
        partial, gathered = self.schedule.forward_and_gather(
            self._kernel(queries), queries, keys, shard, self._context
        )
        return self._rounded(with_sinks(partial, sinks), queries), gathered

    def backward_and_exchange(
        self,
        queries: Queries,
        keys: Keys,
        result: AttentionPartial,
        dout: Float[Array, "B T Hq D"],
        payload: Payload,
    ) -> tuple[Gradients, PyTree[Array], PyTree[Array]]:
        """`backward`, which also all-gathers `payload.shard` and reduce-scatters `payload.shares`;
        each is a tree or None."""
        saved = BackwardInputs(dout, result.lse, _delta(result, dout))
        gradients, gathered, share = self.schedule.backward_and_exchange(
            self._kernel(queries), queries, keys, saved, payload, self._context
        )
        return _cast(gradients, queries, keys), gathered, share

    def _kernel(self, queries: Queries) -> Kernel:
        """The kernel, made to handle shared prefixes if the tokens have any.

        Raises:
          ValueError: a window, which would count tokens of the row instead of the document.
        """
        if queries.coords.shared is None:
            return self.kernel
        if self.mask.window is not None:
            raise ValueError(
                f"coords.shared: found Mask.window = {self.mask.window}; prefixes can be shared "
                "only without a window"
            )
        return SharedBeginningsKernel.of(self.kernel)

    @property
    def _context(self) -> Context:
        return Context(self.ranks, self.mask, self.scale)

    def _rounded(self, partial: AttentionPartial, queries: Queries) -> AttentionPartial:
        return AttentionPartial(partial.out.astype(queries.q.dtype), partial.lse)


def _delta(result: AttentionPartial, dout, dlse=0.0):
    """dS = P * (dP - delta); as d lse / dS = P, the gradient of lse is subtracted from delta."""
    delta = jnp.einsum(
        "bthd,bthd->bht",
        dout.astype(jnp.float32),
        result.out.astype(jnp.float32),
        precision="highest",
    )
    return delta - jnp.where(jnp.isneginf(result.lse), 0.0, dlse)


def sink_gradient(
    sinks: Float[Array, " Hq"] | None,
    result: AttentionPartial,
    dout: Float[Array, "B T Hq D"],
    dlse: Float[Array, "B Hq T"] | float = 0.0,
) -> Float[Array, " Hq"] | None:
    """Returns the sinks' gradient, summed over a device's tokens: that of a key whose value is 0.
    None without sinks."""
    if sinks is None:
        return None
    seen = ~jnp.isneginf(result.lse)
    share = jnp.where(seen, jnp.exp(sinks[:, None] - jnp.where(seen, result.lse, 0.0)), 0.0)
    return -jnp.sum(share * _delta(result, dout, dlse), (0, 2))


def _cast(gradients: Gradients, queries: Queries, keys: Keys) -> Gradients:
    dtypes = (queries.q.dtype, keys.k.dtype, keys.v.dtype)
    return Gradients(*(g.astype(dtype) for g, dtype in zip(gradients, dtypes, strict=True)))


def name_for_remat(
    out: Float[Array, "B T Hq D"], lse: Float[Array, "B Hq T"]
) -> tuple[Float[Array, "B T Hq D"], Float[Array, "B Hq T"]]:
    """Returns both unchanged, named "attention_out" and "attention_lse", so that a remat policy can
    keep them: then backward never reruns attention's forward (DistFlashAttn, section 3.3)."""
    return checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")


def attend(
    op: AttentionOp, queries: Queries, keys: Keys, sinks: Float[Array, " Hq"] | None = None
) -> AttentionPartial:
    """Attention of a rank's queries over the keys of all ranks, differentiable; to be called inside
    `shard_map`.

    Args:
      op: the operation, see `AttentionOp.create`.
      queries, keys: this rank's.
      sinks: float32, as in `with_sinks`.

    Returns:
      out [B, T, Hq, D] in q's dtype, and lse [B, Hq, T] in float32.

    Raises:
      ValueError: global tokens without the starts of the keys' documents.
    """
    if op.mask.global_tokens:
        check_starts(keys.coords.start, op.mask)
    coords = queries.coords, keys.coords
    return AttentionPartial(*_attend(op, queries.q, keys.k, keys.v, *coords, sinks))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(op: AttentionOp, *arrays):
    return _attend_forward(op, *arrays)[0]


def _attend_forward(op, q, k, v, q_coords, kv_coords, sinks):
    kept = name_for_remat(*op.forward(Queries(q, q_coords), Keys(k, v, kv_coords), sinks))
    return kept, (q, k, v, q_coords, kv_coords, sinks, *kept)


def _attend_backward(op, residuals, cotangents):
    q, k, v, q_coords, kv_coords, sinks, out, lse = residuals
    result = AttentionPartial(out, lse)
    return (
        *op.backward(Queries(q, q_coords), Keys(k, v, kv_coords), result, *cotangents),
        None,
        None,
        sink_gradient(sinks, result, *cotangents),
    )


_attend.defvjp(_attend_forward, _attend_backward)


def attention(
    q: Float[Array, "B L Hq D"],
    k: Float[Array, "B Lk Hkv D"],
    v: Float[Array, "B Lk Hkv D"],
    coords: Sequence[Any] | None = None,
    *,
    mesh: Mesh,
    batch_axes: str | Sequence[str] = BATCH_AXES,
    head_axis: str | None = "tensor",
    sequence_axis: str | None = "sequence",
    kv_coords: Sequence[Any] | None = None,
    layout: str | None = None,
    schedule: str | Mapping[str, Any] | Schedule = "ring",
    kernel: str | Kernel = "auto",
    mask: Mask = Mask(),
    scale: float | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    return_lse: bool = False,
) -> Float[Array, "B L Hq D"] | tuple[Float[Array, "B L Hq D"], Float[Array, "B Hq L"]]:
    """Exact attention of global arrays on a mesh, already permuted for `layout`.

    Args:
      q: [B, L, Hq, D]; Hq is a multiple of Hkv.
      k, v: [B, Lk, Hkv, D].
      coords: TokenCoords (or a pair; a third, `start`, for global tokens) of int32 [B, L], permuted
        like the tokens. None: each row is one document without padding.
      mesh: every one of its axes is named in one of the next three arguments, since devices along
        another axis would all compute the same.
      batch_axes, head_axis, sequence_axis: the axes over which B, the heads and the length are
        split. One that the mesh lacks counts as 1.
      kv_coords: the coordinates of k and v, if they differ from those of q.
      layout: the arrays' actual layout, `striped` if not given; without `coords` and with several
        devices along the sequence it must be given. Another one gives wrong results: without
        `coords` it determines the order of the tokens; with `contiguous`, `ring` and `balanced`
        skip ranks with nothing visible (with global tokens, `ring` assumes that each document is a
        run of tokens).
      schedule: a name, a mapping with options, or a Schedule.
      kernel: a name, or a Kernel.
      mask: see `Mask`.
      scale: multiplies the scores, D ** -0.5 unless given.
      sinks: a score per head that joins the softmax denominators; lse counts it.

    Returns:
      out like q, in q's dtype; with return_lse also lse, float32 [B, Hq, L].

    Raises:
      ValueError: sizes do not fit each other or the mesh (the message names sizes that do), or an
        argument is not of its kind.
    """
    axes = mesh_axes(mesh, batch_axes, head_axis, sequence_axis)
    size = mesh.shape[axes.sequence] if axes.sequence else 1
    check_arrays(q, k, v, sinks)
    check_options(mask, scale, kernel)
    layout = checked_layout(layout, coords is None and size > 1)
    check_shards(q, k, mesh, axes, size, layout)
    if coords is None:
        check_same_tokens(q, k, kv_coords)
        coords = one_document(q.shape[:2], size, layout, mask)
    known_layout = layout if kv_coords is None else ""
    coords = checked_coords("coords", coords, q.shape[:2])
    kv_coords = checked_coords("kv_coords", coords if kv_coords is None else kv_coords, k.shape[:2])
    check_sharing(coords, kv_coords)
    tokens = PartitionSpec(axes.batch, axes.sequence)
    vectors = PartitionSpec(axes.batch, axes.sequence, axes.heads)
    op = AttentionOp.create(
        q.shape[-1],
        schedule=schedule,
        kernel=get_kernel(kernel) if isinstance(kernel, str) else kernel,
        axis=axes.sequence or "",
        size=size,
        mask=mask,
        scale=scale,
        layout=known_layout,
    )

    def local(q, k, v, q_coords, kv_coords, sinks):
        return tuple(attend(op, Queries(q, q_coords), Keys(k, v, kv_coords), sinks))

    specs = (vectors, vectors, vectors, tokens, tokens, PartitionSpec(axes.heads))
    arrays = (q, k, v, coords, kv_coords, sinks)
    if AxisType.Explicit in mesh.axis_types:  # then `shard_map` shards nothing by itself
        arrays = tuple(_resharded(*pair, mesh) for pair in zip(arrays, specs, strict=True))
    out, lse = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=specs,
        out_specs=(vectors, PartitionSpec(axes.batch, axes.heads, axes.sequence)),
        check_vma=False,
    )(*arrays)
    return (out, lse) if return_lse else out


def _resharded(tree: PyTree[Array], spec: PartitionSpec, mesh: Mesh) -> PyTree[Array]:
    """Returns a tree of arrays sharded along those axes of `spec` whose type is Explicit."""
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    axes = (
        tuple(
            axis for axis in ((part,) if isinstance(part, str) else part or ()) if axis in explicit
        )
        for part in spec
    )
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.tree.map(lambda x: reshard(x, sharding), tree)
