"""Shared by the exactness tests: schedules, heads, masks, documents, and the comparison with the
dense reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from model.attention import (
    AttentionPartial,
    Mask,
    TokenCoords,
    attention,
    document_starts,
    get_kernel,
)
from tests.errors import within

from .dense import dense_attention

TOLERANCE = 1e-5
SIZES = (1, 2, 3, 4, 5, 6, 8)
HEADS = {"4/4": (4, 4), "8/2": (8, 2), "4/1": (4, 1), "9/3": (9, 3)}
MASKS = {
    "causal": Mask(),
    "window": Mask(window=50),
    "global": Mask(window=17, global_tokens=5),
    "not causal": Mask(causal=False),
    "not causal window": Mask(causal=False, window=31),
}
QUICK = {"xla_backend_optimization_level": 0}  # the same operations, compiled in half the time
USP = {"name": "ulysses", "degree": 2}
SCHEDULES = {
    "ring": "ring",
    "ring bidirectional": {"name": "ring", "bidirectional": True},
    "all_gather": "all_gather",
    "balanced": "balanced",
    "balanced split": {"name": "balanced", "split": True},
    "ulysses": "ulysses",
    "usp ring": USP,
    "usp ring bidirectional": USP | {"inner": {"name": "ring", "bidirectional": True}},
    "usp all_gather": USP | {"inner": "all_gather"},
    "usp balanced": USP | {"inner": "balanced"},
    "usp attention2d": USP | {"inner": "attention2d"},
    "usp attention2d overlap": USP | {"inner": {"name": "attention2d", "overlap": True}},
    "attention2d": "attention2d",
    "attention2d 2": {"name": "attention2d", "columns": 2},
    "attention2d overlap": {"name": "attention2d", "overlap": True},
    "attention2d overlap 2": {"name": "attention2d", "columns": 2, "overlap": True},
    "ring_self_attention": "ring_self_attention",
}


def is_supported(schedule, size):
    """Returns whether the schedule supports this number of shards: its degree or grid must divide
    them."""
    return size % 2 == 0 or size == 1 or not (schedule.startswith("usp") or schedule.endswith(" 2"))


def documents(kind, length):
    """Returns index and segment_ids [2, length] in the order of the row: `one` document, or
    `packed` ones with padding at the end."""
    index = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    segments = np.ones((2, length), np.int32)
    if kind == "packed":
        for row, ends_of_840 in enumerate(((97, 100, 420, 700, 801), (311, 613))):
            ends = [end * length // 840 for end in ends_of_840]
            segments[row] = np.searchsorted(ends, np.arange(length), side="right") + 1
            segments[row, ends[-1] :] = 0
    return index, segments


def inputs(heads, length, head_dim=8, seed=0):
    """Returns q, k, v and dout."""
    rng = np.random.default_rng(seed)
    query_heads, kv_heads = HEADS[heads]
    shapes = [(2, length, n, head_dim) for n in (query_heads, kv_heads, kv_heads, query_heads)]
    return [rng.standard_normal(shape, dtype=np.float32) * 2 for shape in shapes]


def mesh_of(size):
    return Mesh(np.array(jax.devices()[:size]), ("sequence",))


def tiled(kernel, query_tile, key_tile):
    """Returns the kernel of this name with these tiles, unless it has none."""
    tiles = {} if kernel == "reference" else {"query_tile": query_tile, "key_tile": key_tile}
    return get_kernel(kernel, **tiles)


def out_and_gradients(
    schedule, size, mask=Mask(), layout="striped", kernel="reference", tiles=(64, 32)
):
    """Returns a jitted function of q, k, v, dout and coordinates that computes out, lse, dq, dk,
    dv."""
    kernel = tiled(kernel, *tiles) if isinstance(kernel, str) else kernel

    def run(q, k, v, dout, coords):
        if mask.global_tokens:
            coords = TokenCoords(*coords[:2], document_starts(*coords[:2]))

        def out_and_lse(q, k, v):
            return attention(
                q,
                k,
                v,
                coords,
                mesh=mesh_of(size),
                layout=layout,
                schedule=schedule,
                kernel=kernel,
                mask=mask,
                return_lse=True,
            )

        (out, lse), pullback = jax.vjp(out_and_lse, q, k, v)
        return out, lse, *pullback((dout, jnp.zeros_like(lse)))

    return jax.jit(run, compiler_options=QUICK)


@functools.cache
def truth(heads, kind, mask, length):
    q, k, v, dout = inputs(heads, length)
    return dense_attention(
        q,
        k,
        v,
        *documents(kind, length),
        dout,
        causal=mask.causal,
        window=mask.window,
        global_tokens=mask.global_tokens,
    )


def check(got, expected, order):
    """Compares out, lse, dq, dk, dv, permuted by `order`, with the reference in the order of the
    row."""
    for name, array, in_row_order in zip(
        ("out", "lse", "dq", "dk", "dv"), got, expected, strict=True
    ):
        x = np.asarray(array, np.float64)
        y = in_row_order[:, :, order] if name == "lse" else in_row_order[:, order]
        if name == "lse":
            is_empty = np.isneginf(y)
            assert (np.isneginf(x) == is_empty).all()
            error = np.abs(x[~is_empty] - y[~is_empty]).max()
        else:
            # Documents of one token have zero gradients; errors are then relative to the inputs'
            # magnitude, 1.
            error = np.abs(x - y).max() / max(np.abs(y).max(), 1.0)
        within(error, TOLERANCE, "attention", name)


def empty(batch: int, length: int, heads: int, head_dim: int) -> AttentionPartial:
    """Returns attention over no keys: merging it changes nothing."""
    return AttentionPartial(
        jnp.zeros((batch, length, heads, head_dim), jnp.float32),
        jnp.full((batch, heads, length), -jnp.inf, jnp.float32),
    )
