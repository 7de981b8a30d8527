"""The Mosaic kernel in JAX's interpreter against dense float64 attention: out, lse and all
gradients, within 1e-5.

This runs the kernel itself: its intervals and tiles, copies, barriers and stores, three warpgroups
at a time. Two things differ in the interpreter: products are plain float32 ones (`Arithmetic`), and
a copy completes as soon as it is issued.
"""

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import Keys, Mask, Queries, TokenCoords, attention, get_kernel
from model.attention.blocks import BackwardInputs
from model.attention.choice import LIMITS
from model.attention.kernels import GpuKernel, MosaicKernel, XlaKernel, chosen, mosaic_one_pass
from model.attention.kernels.intervals import in_row_order
from model.attention.layout import permutation
from model.attention.names import LAYOUTS
from model.attention.options import AttentionConfig
from tests.model.attention.cases import QUICK, SCHEDULES, mesh_of
from tests.model.attention.dense import dense_attention
from tests.model.attention.mosaic_interpreter import KERNEL, compile_once
from tests.model.attention.test_exactness import check

from .test_tpu import (
    MASKS,
    SHAPES,
    check_case,
    check_no_visible_keys,
    check_rounded,
    documents,
    inputs,
)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    with compile_once(monkeypatch):
        yield


KINDS = "one", "padded behind"
# Several tiles, padding and a window; and whole tiles of whole heads, one per shard, since the
# interpreter takes a second per tile.
COVERING = [(80, MASKS[2], "zigzag", KINDS[1], 512), (128, MASKS[0], "striped", "one", 256)]
ALL = [
    *itertools.product(SHAPES, MASKS, ("contiguous", "striped"), KINDS),
    *itertools.product((80, 128), MASKS, ("zigzag",), KINDS),
]


@pytest.mark.parametrize(("head_dim", "mask", "layout", "kind", "length"), COVERING, ids=str)
def test_kernel_is_exact(head_dim, mask, layout, kind, length):
    check_case(head_dim, mask, layout, kind, KERNEL, length)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "mask", "layout", "kind"),
    [case for case in ALL if (*case, 512) not in COVERING],
    ids=str,
)
def test_kernel_is_exact_in_every_case(head_dim, mask, layout, kind):
    check_case(head_dim, mask, layout, kind, KERNEL)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["32 bits", "16 bits"])
def test_a_result_with_nothing_to_merge_has_the_queries_dtype(dtype):
    check_rounded(KERNEL, dtype)


def test_queries_that_see_no_key_are_zero():
    check_no_visible_keys(KERNEL)


ANY_ORDER = dataclasses.replace(KERNEL, any_order=True)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "limit"),
    [
        (128, jnp.float32, 1e-5),
        pytest.param(128, jnp.bfloat16, 1e-2, marks=pytest.mark.slow),
        pytest.param(64, jnp.float32, 1e-5, marks=pytest.mark.slow),
    ],
    ids=["128", "128 in 16 bits", "64"],
)
def test_one_backward_kernel_is_exact_and_accumulates_dq(head_dim, dtype, limit):
    """Two documents and padding, two key tiles of one head that two query heads share: each tile of
    dq is added to several times, and dk and dv are sums over heads."""
    rng, length = np.random.default_rng(0), 256
    q, k, v, dout = (
        np.asarray(jnp.asarray(rng.standard_normal((1, length, heads, head_dim)), dtype))
        for heads in (2, 1, 1, 2)
    )
    index = np.arange(length, dtype=np.int32)[None]
    segments = np.repeat([1, 2, 0], [90, 150, 16]).astype(np.int32)[None]
    out, lse, *expected = dense_attention(
        *(x.astype(np.float64) for x in (q, k, v)), index, segments, dout.astype(np.float64)
    )
    delta = np.einsum("bthd,bthd->bht", out, dout.astype(np.float64)).astype(np.float32)
    before = rng.standard_normal(q.shape, dtype=np.float32)
    coords, kernel = TokenCoords(index, segments), ANY_ORDER.with_rows_in_order(True)
    dq, (dk, dv) = jax.jit(
        lambda *blocks: kernel.gradients(*blocks, mask=Mask(), scale=head_dim**-0.5)
    )(
        before,
        Queries(q, coords),
        Keys(k, v, coords),
        BackwardInputs(dout, lse.astype(np.float32), delta),
    )
    for got, truth in zip((np.asarray(dq) - before, dk, dv), expected, strict=True):
        assert np.linalg.norm(got - truth) <= limit * np.linalg.norm(truth)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "mask", "layout", "kind"),
    [
        *itertools.product((64, 80, 128), MASKS, ("striped",), KINDS),
        *itertools.product((128,), MASKS, ("contiguous", "zigzag"), KINDS),
    ],
    ids=str,
)
def test_one_backward_kernel_is_exact_in_every_case(head_dim, mask, layout, kind):
    check_case(head_dim, mask, layout, kind, ANY_ORDER)


@pytest.mark.slow
def test_one_backward_kernel_is_zero_for_queries_that_see_no_key():
    check_no_visible_keys(ANY_ORDER)


@pytest.mark.parametrize(
    ("head_dim", "warning"),
    [(128, ""), (256, r"has one order for heads of 256 \(any for 128 at most\)")],
)
def test_any_order_is_used_only_on_request_and_warns_where_it_changes_nothing(
    head_dim, warning, monkeypatch, recwarn
):
    monkeypatch.setattr(chosen, "device_kind", lambda: "NVIDIA H200")
    q = blocks(head_dim=head_dim)[0].q
    assert get_kernel("mosaic").on("cuda", q, Mask()) == MosaicKernel()
    assert get_kernel("auto", backward="repeatable").on("cuda", q, Mask()) == MosaicKernel()
    for name in ("auto", "mosaic"):
        kernel = get_kernel(name, backward="any_order").on("cuda", q, Mask())
        assert kernel == MosaicKernel(any_order=not warning)
    messages = [str(caught.message) for caught in recwarn if "backward" in str(caught.message)]
    assert bool(messages) == bool(warning)
    assert all(re.search(warning, message) for message in messages)
    assert LIMITS["mosaic"].any_order == max(mosaic_one_pass.HEAD_DIMS)


def test_any_order_on_other_devices_warns(monkeypatch):
    monkeypatch.setattr(chosen, "device_kind", lambda: "NVIDIA A100-SXM4-80GB")
    with pytest.warns(
        UserWarning, match=r"'any_order' changes nothing here; the kernel 'gpu' has one order"
    ):
        kernel = get_kernel("auto", backward="any_order").on("cuda", blocks()[0].q, Mask())
    assert kernel == GpuKernel()
    with pytest.raises(
        ValueError, match=r"backward is 'any_order', but the kernel 'gpu' has one order; leave"
    ):
        get_kernel("gpu", backward="any_order")
    with pytest.raises(ValueError, match=r"backward: found 'fast'; known: repeatable, any_order"):
        get_kernel("auto", backward="fast")
    with pytest.raises(
        ValueError, match=r"attention\.backward .* the kernel 'cudnn' has one order"
    ):
        AttentionConfig(kernel="cudnn", backward="any_order")
    assert AttentionConfig(backward="any_order") and AttentionConfig().backward == "repeatable"


@pytest.mark.slow
def test_a_block_with_padding_inside_a_document_is_sorted():
    """Detected at run time, block by block; the results are still exact."""
    check_case(64, MASKS[0], "striped", "packed", KERNEL)


@dataclasses.dataclass(frozen=True)
class Watched(XlaKernel):
    """Reports whether the tokens of each block that was not gathered are in the order of the row,
    in both directions."""

    report: Any = None
    shards: tuple[int, int] = (1, 1)

    def over_shards(self, queries, keys):
        return dataclasses.replace(self, shards=(self.shards[0] * queries, self.shards[1] * keys))

    def _watch(self, queries, keys):
        for block, shards in zip((queries, keys), self.shards, strict=True):
            jax.debug.callback(self.report, True if shards > 1 else in_row_order(block.coords))

    def forward(self, queries, keys, **options):
        self._watch(queries, keys)
        return super().forward(queries, keys, **options)

    def backward(self, queries, keys, saved, **options):
        self._watch(queries, keys)
        return super().backward(queries, keys, saved, **options)


def orders(schedule, layout, mask, segments):
    """Returns whether each block of a forward and a backward pass over four devices is in order."""
    reports = []
    order = permutation(segments.shape[1], 4, layout)
    coords = TokenCoords(
        np.arange(segments.shape[1], dtype=np.int32)[None][:, order], segments[:, order]
    )
    x = jnp.ones((1, segments.shape[1], 4, 8))

    def loss(x):
        return attention(
            x,
            x,
            x,
            coords,
            mesh=mesh_of(4),
            layout=layout,
            schedule=SCHEDULES[schedule],
            mask=mask,
            kernel=Watched(report=lambda is_ordered: reports.append(bool(is_ordered))),
        ).sum()

    jax.block_until_ready(jax.jit(jax.grad(loss), compiler_options=QUICK)(x))
    jax.effects_barrier()
    return reports


SEGMENTS = np.repeat([1, 2, 3, 0], [10, 50, 26, 10]).astype(np.int32)[None]
NEAR = Mask(
    causal=False, window=10
)  # with contiguous shards the ring then sends whole blocks in both directions
ALL_ORDERS = [
    *itertools.product(
        [name for name in SCHEDULES if name != "ring_self_attention"], LAYOUTS, [Mask()]
    ),
    *itertools.product(["ring", "ring bidirectional", "balanced"], LAYOUTS, [NEAR]),
]
QUICK_ORDERS = [
    ("balanced", "striped", Mask()),
    ("ring", "contiguous", NEAR),
]


@pytest.mark.parametrize(
    ("schedule", "layout", "mask"),
    [
        *QUICK_ORDERS,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ALL_ORDERS
            if case not in QUICK_ORDERS
        ),
    ],
    ids=str,
)
def test_every_block_of_a_schedule_is_in_order_or_gathered(schedule, layout, mask):
    """For a row as the loader writes it: documents one after the other, followed by padding."""
    reports = orders(schedule, layout, mask, SEGMENTS)
    assert len(reports) >= 16 and all(reports)


def test_a_block_out_of_order_is_detected():
    segments = SEGMENTS.copy()
    segments[0, 30:40] = 0
    assert not all(orders("ring", "striped", Mask(), segments))


@pytest.mark.parametrize("layout", ["striped", pytest.param("zigzag", marks=pytest.mark.slow)])
def test_gathered_shards_are_sorted(layout):
    """As after Ulysses' exchange: the tokens of all shards in one block, forward and backward."""
    length = 384  # three tiles
    q, k, v, dout = (x[:, :length, :1] for x in inputs(80))
    index, segments = documents("padded behind", 1, length)
    order = permutation(length, 4, layout)
    coords = TokenCoords(index[:, order], segments[:, order])
    kernel, options = KERNEL.over_shards(4, 4), {"mask": Mask(), "scale": 80**-0.5}
    blocks = Queries(q[:, order], coords), Keys(k[:, order], v[:, order], coords)
    out, lse = jax.jit(lambda *blocks: kernel.forward(*blocks, **options))(*blocks)
    delta = np.einsum("bthd,bthd->bht", out, dout[:, order])
    saved = BackwardInputs(dout[:, order], lse, delta)
    gradients = jax.jit(lambda *blocks: kernel.backward(*blocks, **options))(*blocks, saved)
    check((out, lse, *gradients), dense_attention(q, k, v, index, segments, dout), order)


def blocks(dtype=jnp.bfloat16, head_dim=64):
    coords = TokenCoords(
        np.arange(128, dtype=np.int32)[None],
        np.ones((1, 128), np.int32),
        np.zeros((1, 128), np.int32),
    )
    x = jnp.ones((1, 128, 1, head_dim), dtype)
    return Queries(x, coords), Keys(x, x, coords)


@pytest.mark.parametrize(
    ("kind", "arrays", "mask", "reason"),
    [
        (
            "NVIDIA H100 80GB HBM3",
            blocks(),
            Mask(window=8, global_tokens=2),
            "global_tokens = 2; 'gpu' does not .*'xla' does",
        ),
        ("NVIDIA H200", blocks(jnp.float32), Mask(), "float32 operands; 'gpu' does"),
        (
            "NVIDIA H200",
            blocks(head_dim=320),
            Mask(),
            r"heads of 320 \(256 at most\); .* 'xla' does",
        ),
        (
            "NVIDIA A100-SXM4-80GB",
            blocks(),
            Mask(),
            r"devices other than Hopper GPUs \(NVIDIA A100-SXM4-80GB\); 'gpu' does",
        ),
        (
            "NVIDIA B200",
            blocks(),
            Mask(),
            r"devices other than Hopper GPUs \(NVIDIA B200\); 'gpu' does",
        ),
    ],
    ids=["global tokens", "float32", "heads", "older", "newer"],
)
def test_what_mosaic_does_not_serve_warns_and_runs_on_another_kernel(
    kind, arrays, mask, reason, monkeypatch
):
    monkeypatch.setattr(chosen, "device_kind", lambda: kind)
    options = {"mask": mask, "scale": 1.0}
    with pytest.warns(UserWarning, match=f"'mosaic' does not serve {reason}"):
        got = get_kernel("mosaic").forward(*arrays, **options)
    np.testing.assert_array_equal(got.out, get_kernel("xla").forward(*arrays, **options).out)


def test_a_softcap_warns_and_runs_on_another_kernel(monkeypatch):
    monkeypatch.setattr(chosen, "device_kind", lambda: "NVIDIA H200")
    with pytest.warns(
        UserWarning, match=r"'mosaic' does not serve a soft-cap of scores \(50\.0\); .*; 'xla' does"
    ):
        kernel = get_kernel("mosaic").with_softcap(50.0).on("cuda", blocks()[0].q, Mask())
    assert kernel == XlaKernel(softcap=50.0)
    assert get_kernel("mosaic").with_softcap(None) == get_kernel("mosaic")


def test_tile_sizes_are_refused():
    with pytest.raises(
        ValueError, match=r"its tiles follow from the head size, found \{'query_tile': 64\}"
    ):
        get_kernel("mosaic", query_tile=64)
    with pytest.raises(ValueError, match=r"leave attention\.query_tile and attention\.key_tile 0"):
        AttentionConfig(kernel="mosaic", key_tile=64)
    with pytest.raises(ValueError, match="global_tokens"):
        AttentionConfig(kernel="mosaic", window=8, global_tokens=1)


@pytest.mark.parametrize(
    ("kind", "dtype", "selected"),
    [
        ("NVIDIA H200", jnp.bfloat16, True),
        ("NVIDIA H200", jnp.float32, False),
        ("NVIDIA A100-SXM4-80GB", jnp.bfloat16, False),
    ],
    ids=["hopper", "float32", "older"],
)
def test_auto_selects_mosaic_on_hopper_gpus_for_16_bits_without_warnings(
    kind, dtype, selected, monkeypatch, recwarn
):
    monkeypatch.setattr(chosen, "device_kind", lambda: kind)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    kernel = get_kernel("auto").on("cuda", blocks(dtype)[0].q, Mask())
    traced = str(
        jax.make_jaxpr(lambda *blocks: kernel.forward(*blocks, mask=Mask(), scale=1.0))(
            *blocks(dtype)
        )
    )
    assert ("core_map" in traced or "mpmd_map" in traced, "pallas_call" in traced) == (
        selected,
        not selected,
    )
    assert not [warning for warning in recwarn if "attention kernel" in str(warning.message)]
    tiled = get_kernel("auto", key_tile=64).on("cuda", blocks(dtype)[0].q, Mask())
    assert tiled == GpuKernel(key_tile=64), "requested tiles select the Triton kernel"


def test_auto_avoids_mosaic_under_a_jax_that_compiles_it_badly(monkeypatch):
    """It is still used if requested by name."""
    monkeypatch.setattr(chosen, "device_kind", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    q = blocks(jnp.bfloat16)[0].q
    with pytest.warns(
        UserWarning, match=r"JAX 0\.12\.0 .* jax\[cuda13\]<0\.12 would be faster\); 'gpu' does"
    ):
        assert get_kernel("auto").on("cuda", q, Mask()) == GpuKernel()
    assert get_kernel("mosaic").on("cuda", q, Mask()) == MosaicKernel()


@pytest.mark.slow
def test_rows_promised_in_order_are_not_checked():
    """The results are the same without a branch at run time, for which a GPU's host would wait."""
    check_case(64, MASKS[0], "striped", "padded behind", KERNEL.with_rows_in_order(True))
    for promised in (True, False):
        kernel = KERNEL.with_rows_in_order(promised)
        traced = jax.make_jaxpr(
            lambda *blocks, kernel=kernel: kernel.forward(*blocks, mask=Mask(), scale=1.0)
        )(*blocks(jnp.float32))
        assert ("cond" in {call.primitive.name for call in traced.jaxpr.eqns}) is not promised


def test_rows_that_break_the_promise_of_order_are_nan():
    queries, keys = blocks(jnp.float32)
    segments = np.ones((1, 128), np.int32)
    segments[0, 30:40] = 0
    coords = TokenCoords(queries.coords.index, segments)
    kernel = KERNEL.with_rows_in_order(True)
    out = jax.jit(lambda *blocks: kernel.forward(*blocks, mask=Mask(), scale=1.0).out)(
        queries._replace(coords=coords), keys._replace(coords=coords)
    )
    assert np.isnan(out).any()
