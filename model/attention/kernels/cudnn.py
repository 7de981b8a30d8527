"""cuDNN's attention on NVIDIA GPUs, through JAX's binding, for the blocks that it computes exactly.

cuDNN has no token coordinates. It can compute a block if, in each row, the real tokens come first,
belong to one document and are in its order, and either every query sees every key or each query
sees one key more than the query before: full blocks, causal blocks, and those of striped shards.
`block_form` decides at run time; another kernel computes blocks of packed documents and all others.
(cuDNN's own packed format needs a bound on the documents per row and that many rows of statistics,
and supports grouped heads only from JAX 0.11 on: before, its binding multiplies the offsets of keys
by the number of query heads.)

cuDNN's backward computes delta from out and dout. Here delta comes from all blocks together, and
`output_with` constructs an out that yields this delta.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..blocks import BackwardInputs, Gradients, Keys, Queries
from ..coords import Mask, TokenCoords
from ..partial import AttentionPartial, per_row
from .kernel import Kernel
from .padding import pad
from .xla import XlaKernel

HEAD_UNIT = 8  # cuDNN requires head sizes that are multiples of it
# Forms of a block; PADDED: some rows end with tokens that see nothing.
NOTHING, FULL, CAUSAL, PADDED_FULL, PADDED_CAUSAL, OTHER = range(6)
MASKS = {
    FULL: "NO_MASK",
    CAUSAL: "CAUSAL",
    PADDED_FULL: "PADDING",
    PADDED_CAUSAL: "PADDING_CAUSAL",
}
# Replaces zeros in a row of dout whose delta is not zero; too small to change dv.
TINY = 2.0**-60


class BlockForm(NamedTuple):
    """What cuDNN needs to know about a block.

    Attributes:
      kind: NOTHING, FULL, ..., the same for all rows.
      queries, keys: the number of real tokens in each row.
      shift: 1 if the first query of each row sees no key and the second sees one; else 0.
    """

    kind: Int[Array, ""]
    queries: Int[Array, " B"]
    keys: Int[Array, " B"]
    shift: Int[Array, ""]


def block_form(q: TokenCoords, kv: TokenCoords, mask: Mask) -> BlockForm:
    """Returns a block's form from its tokens' coordinates; `mask` has no window."""
    queries, q_in_order = _leading_document(q)
    keys, kv_in_order = _leading_document(kv)
    same = q.segment_ids[:, 0] == kv.segment_ids[:, 0]
    fits = q_in_order & kv_in_order & same & (queries > 0) & (keys > 0)
    large = jnp.iinfo(jnp.int32).max
    first_query = jnp.where(q.segment_ids > 0, q.index, large).min(1)
    last_key = jnp.where(kv.segment_ids > 0, kv.index, -1).max(1)
    full = fits & ((first_query >= last_key) | (not mask.causal))
    triangular = [
        fits & _sees_one_more_each(q.index, kv.index, queries, keys, shift) for shift in (0, 1)
    ]
    if not mask.causal or q.index.shape != kv.index.shape:
        triangular = [jnp.zeros_like(fits)] * 2
    unpadded = (queries == q.index.shape[1]).all() & (keys == kv.index.shape[1]).all()
    kind = jnp.select(
        [
            _sees_nothing(q, kv, mask),
            full.all() & unpadded,
            triangular[0].all() & unpadded,
            full.all(),
            triangular[0].all() | triangular[1].all(),
        ],
        [NOTHING, FULL, CAUSAL, PADDED_FULL, PADDED_CAUSAL],
        OTHER,
    )
    return BlockForm(kind, queries, keys, jnp.where(triangular[0].all(), 0, 1))


def _leading_document(coords: TokenCoords) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Returns the number of real tokens in each row, and whether they come first, belong to one
    document and are in its order."""
    real = coords.segment_ids > 0
    count = real.sum(1, dtype=jnp.int32)
    offset = jnp.arange(real.shape[1])
    ascends = (coords.index[:, 1:] > coords.index[:, :-1]) | (offset[1:] >= count[:, None])
    one_document = (coords.segment_ids == coords.segment_ids[:, :1]) | ~real
    leading = real == (offset < count[:, None])
    return count, ascends.all(1) & one_document.all(1) & leading.all(1)


def _sees_one_more_each(q_index, kv_index, queries, keys, shift: int) -> Bool[Array, " B"]:
    """Returns whether query r of each row sees exactly the first r + 1 - shift keys, or all if
    there are fewer. Both must be in order; False unless they are equally many."""
    if q_index.shape != kv_index.shape:
        return jnp.zeros(len(q_index), bool)
    offset = jnp.arange(q_index.shape[1])
    last = offset - shift  # the last key that the query should see
    sees_last = jnp.roll(kv_index, shift, 1) <= q_index
    hides_next = jnp.roll(kv_index, shift - 1, 1) > q_index
    sees_last |= (last < 0) | (last >= keys[:, None])
    hides_next |= last + 1 >= keys[:, None]
    return (sees_last & hides_next | (offset >= queries[:, None])).all(1) & (queries > shift)


def _sees_nothing(q: TokenCoords, kv: TokenCoords, mask: Mask) -> Bool[Array, ""]:
    """Returns whether no query can see a key, judging by the bounds of whole rows."""
    limits = jnp.iinfo(jnp.int32)

    def bounds(x, coords):
        real = coords.segment_ids > 0
        return (
            jnp.where(real, x, limits.max).min(1),
            jnp.where(real, x, limits.min).max(1),
        )

    q_first, q_last = bounds(q.segment_ids, q)
    kv_first, kv_last = bounds(kv.segment_ids, kv)
    disjoint = (q_last < kv_first) | (kv_last < q_first)
    if mask.causal:
        disjoint |= bounds(q.index, q)[1] < bounds(kv.index, kv)[0]
    return disjoint.all()


def output_with(
    delta: Float[Array, "B T H"], dout: Float[Array, "B T H D"]
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H D"]]:
    """Returns an output and a dout whose products sum to delta, in dout's dtype.

    The output is a multiple of dout. All products have the same sign, so rounding it to 16 bits
    changes their sum by less than rounding the actual output does; and by Cauchy-Schwarz it is no
    larger than the actual one, unless delta contains a gradient of lse. Where dout is zero, delta
    can only be such a gradient: there three tiny numbers replace dout, and their products with the
    output sum to delta.
    """
    dout32 = dout.astype(jnp.float32)
    # Scaled, so that squares of small gradients do not underflow.
    largest = jnp.abs(dout32).max(-1, keepdims=True)
    is_zero = largest < TINY**2
    scaled = dout32 / jnp.where(is_zero, 1.0, largest)
    squares = jnp.sum(scaled * scaled, -1, keepdims=True)
    out = scaled * (delta[..., None] / jnp.where(is_zero, 1.0, squares * largest))
    parts = []
    rest = delta
    for _ in range(3):
        parts.append(rest.astype(dout.dtype).astype(jnp.float32))
        rest = rest - parts[-1]
    widths = [(0, 0)] * delta.ndim + [(0, dout.shape[-1] - len(parts))]
    out_for_zero = jnp.pad(jnp.stack(parts, -1) / TINY, widths)
    dout_for_zero = jnp.pad(jnp.full((*delta.shape, len(parts)), TINY), widths)
    return (
        jnp.where(is_zero, out_for_zero, out).astype(dout.dtype),
        jnp.where(is_zero, dout_for_zero, dout32).astype(dout.dtype),
    )


def cudnn_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: tuple[jax.Array, ...],
    mask: str,
    scale: float,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B H T"]]:
    """Returns cuDNN's out, in q's dtype, and lse.

    Args:
      lengths: the numbers of real queries and keys in each row, int32; () for masks without
        padding.
      mask: one of the values of MASKS.
    """
    binding, absent, options = _binding(q, lengths, mask, scale)
    return binding._dot_product_attention_fwd_p.bind(
        q, k, v, absent, *(lengths or (absent, absent)), *[absent] * 4, is_training=True, **options
    )


def cudnn_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lse: Float[Array, "B H T"],
    out: jax.Array,
    dout: jax.Array,
    lengths: tuple[jax.Array, ...],
    mask: str,
    scale: float,
) -> list[jax.Array]:
    """Returns cuDNN's dq, dk and dv, in q's dtype; arguments as in `cudnn_forward`."""
    binding, absent, options = _binding(q, lengths, mask, scale)
    return binding._dot_product_attention_bwd_p.bind(
        q,
        k,
        v,
        absent,
        *(lengths or (absent, absent)),
        *[absent] * 4,
        lse,
        out,
        dout,
        **options,
    )


def _binding(q, lengths, mask: str, scale: float) -> tuple[Any, jax.Array, dict[str, Any]]:
    """Returns JAX's module, the placeholder for an absent operand, and the options of both passes.

    The module's primitives are called directly: the public function looks for cuDNN on the machine
    that lowers the program, which may not be the one that runs it, and it accepts no lse of several
    blocks.
    """
    from jax._src.cudnn import fused_attention_stablehlo as binding

    assert bool(lengths) == mask.startswith("PADDING"), mask
    options = {
        "scale": scale,
        "seed": 42,  # of dropout, which is off
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # neither a bias nor its gradient
        "mask_type": binding.MaskType[mask],
        "layout": binding.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
    if jax.__version_info__ >= (0, 12):
        options |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return binding, jnp.zeros(0, q.dtype), options


@dataclasses.dataclass(frozen=True)
class CudnnKernel(Kernel):
    """cuDNN for the blocks that it supports, and another kernel for the rest.

    Each call determines its block's form on the device, for which the GPU waits.

    Attributes:
      others: the kernel for blocks of other forms.
    """

    others: Kernel = dataclasses.field(default_factory=XlaKernel)

    def over_shards(self, queries: int, keys: int) -> CudnnKernel:
        return dataclasses.replace(self, others=self.others.over_shards(queries, keys))

    def with_rows_in_order(self, promised: bool) -> CudnnKernel:
        return dataclasses.replace(self, others=self.others.with_rows_in_order(promised))

    def forward(
        self, queries: Queries, keys: Keys, *, mask: Mask, scale: float
    ) -> AttentionPartial:
        others = functools.partial(self.others.forward, mask=mask, scale=scale)
        return self._forward(queries, keys, mask, scale, others, jnp.float32)

    def rounded_forward(
        self, queries: Queries, keys: Keys, *, mask: Mask, scale: float
    ) -> AttentionPartial:
        others = functools.partial(self.others.rounded_forward, mask=mask, scale=scale)
        return self._forward(queries, keys, mask, scale, others, queries.q.dtype)

    def _forward(
        self,
        queries: Queries,
        keys: Keys,
        mask: Mask,
        scale: float,
        others: Callable[..., AttentionPartial],
        dtype: Any,
    ) -> AttentionPartial:
        """Returns attention with out in `dtype`; `others` serves the other forms."""
        form = block_form(queries.coords, keys.coords, mask)
        batch, length, heads, _ = queries.q.shape

        def nothing(queries, keys):
            out = jnp.zeros(queries.q.shape, dtype)
            return AttentionPartial(out, jnp.full((batch, heads, length), -jnp.inf))

        def by_cudnn(kind):
            def run(queries, keys):
                q, k, v = (pad(x, HEAD_UNIT, 3) for x in (queries.q, keys.k, keys.v))
                if kind in (FULL, CAUSAL):
                    out, lse = cudnn_forward(q, k, v, (), MASKS[kind], scale)
                    seeing = jnp.ones((batch, length), bool)
                else:
                    q, lengths, seeing = _shifted(form, kind, q)
                    out, lse = cudnn_forward(q, k, v, lengths, MASKS[kind], scale)
                    out, lse = (_back(form, kind, x, axis) for x, axis in ((out, 1), (lse, 2)))
                out = out[..., : queries.q.shape[3]].astype(dtype)
                return AttentionPartial(
                    jnp.where(seeing[:, :, None, None], out, 0),
                    jnp.where(seeing[:, None], lse, -jnp.inf),
                )

            return run

        return lax.switch(form.kind, [nothing, *map(by_cudnn, MASKS), others], queries, keys)

    def backward(
        self, queries: Queries, keys: Keys, saved: BackwardInputs, *, mask: Mask, scale: float
    ) -> Gradients:
        form = block_form(queries.coords, keys.coords, mask)

        def nothing(queries, keys, saved):
            return Gradients(
                *(jnp.zeros(x.shape, jnp.float32) for x in (queries.q, keys.k, keys.v))
            )

        def by_cudnn(kind):
            def run(queries, keys, saved):
                head_dim = queries.q.shape[3]
                q, k, v, dout = (
                    pad(x, HEAD_UNIT, 3)
                    for x in (queries.q, keys.k, keys.v, saved.dout.astype(queries.q.dtype))
                )
                lse = jnp.where(jnp.isneginf(saved.lse), 0.0, saved.lse)
                out, dout = output_with(per_row(saved.delta)[..., 0], dout)
                if kind in (FULL, CAUSAL):
                    dqkv = cudnn_backward(q, k, v, lse, out, dout, (), MASKS[kind], scale)
                    return Gradients(*(x[..., :head_dim].astype(jnp.float32) for x in dqkv))
                _, lengths, seeing = _shifted(form, kind, q)
                q, out, dout = (_shifted(form, kind, x)[0] for x in (q, out, dout))
                lse = jnp.roll(lse, -_shift(form, kind), 2)
                dq, dk, dv = cudnn_backward(q, k, v, lse, out, dout, lengths, MASKS[kind], scale)
                is_key = jnp.arange(k.shape[1]) < form.keys[:, None]
                pairs = ((_back(form, kind, dq, 1), seeing), (dk, is_key), (dv, is_key))
                return Gradients(
                    *(
                        jnp.where(real[..., None, None], x[..., :head_dim], 0).astype(jnp.float32)
                        for x, real in pairs
                    )
                )

            return run

        def other(queries, keys, saved):
            return self.others.backward(queries, keys, saved, mask=mask, scale=scale)

        return lax.switch(form.kind, [nothing, *map(by_cudnn, MASKS), other], queries, keys, saved)


def _shift(form: BlockForm, kind: int) -> jax.Array | int:
    """Returns by how many tokens the queries of a block lead cuDNN's causal mask."""
    return form.shift if kind == PADDED_CAUSAL else 0


def _shifted(
    form: BlockForm, kind: int, x: Float[Array, "B T H D"]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], Bool[Array, "B T"]]:
    """Returns a per-query array aligned with the keys, the numbers of real queries and keys, and
    which queries see a key."""
    shift = _shift(form, kind)
    offset = jnp.arange(x.shape[1])
    seeing = (offset >= shift) & (offset < form.queries[:, None])
    lengths = (form.queries - shift).astype(jnp.int32), form.keys.astype(jnp.int32)
    return jnp.roll(x, -shift, 1), lengths, seeing


def _back(form: BlockForm, kind: int, x: jax.Array, axis: int) -> jax.Array:
    """Inverts `_shifted` along an axis."""
    return jnp.roll(x, _shift(form, kind), axis)
