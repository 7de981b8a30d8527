"""Documents that share the beginning of an earlier one: every schedule and kernel is exact, and the
mask equals its definition."""

import functools
import re

import numpy as np
import pytest

from model.attention import Mask, TokenCoords
from model.attention.coords import visible
from model.attention.kernels.shared import SharedBeginningsKernel
from model.attention.layout import permutation

from .cases import SCHEDULES, check, inputs, is_supported, out_and_gradients
from .dense import dense_attention, with_beginnings
from .dense import visible as dense_visible
from .kernels import test_gpu, test_mosaic, test_tpu

LENGTH = 96
# Per row: tokens of a beginning, of the rest of its document, and of a later document that shares it.
PAIRS = (((20, 9, 14), (1, 5, 30), (0, 4, 5)), ((50, 13, 17),))


@functools.cache
def rows(length=LENGTH):
    """Returns index, segment_ids and shared [2, length], with padding at the end."""
    index = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    segments, shared = np.zeros((2, 2, length), np.int32)
    for row, pairs in enumerate(PAIRS):
        start = 0
        for number, (beginning, first, second) in enumerate(pairs, 1):
            middle, end = start + beginning + first, start + beginning + first + second
            segments[row, start:middle], segments[row, middle:end] = 2 * number - 1, 2 * number
            if beginning:
                shared[row, start : start + beginning] = number
                shared[row, middle:end] = -number
            start = end
    return index, segments, shared


@functools.cache
def truth(length=LENGTH):
    q, k, v, dout = inputs("8/2", length)
    index, segments, shared = rows(length)
    return dense_attention(q, k, v, index, segments, dout, shared=shared)


def in_order(order, length=LENGTH):
    index, segments, shared = (x[:, order] for x in rows(length))
    return TokenCoords(index, segments, shared=shared)


def test_the_mask_matches_the_definition():
    index, segments, shared = rows()
    coords = TokenCoords(index, segments, shared=shared)
    expected = with_beginnings(dense_visible(index, segments), shared)
    assert (np.asarray(visible(coords, coords, Mask())) == expected).all()
    first, second = segments == 1, segments == 2
    assert not (expected & second[:, :, None] & (first & (shared == 0))[:, None, :]).any()
    assert (expected & second[:, :, None] & (shared == 1)[:, None, :]).sum() == 20 * 14 + 50 * 17


QUICK = ("ring", "balanced", "ulysses", "attention2d overlap", "ring_self_attention")


@pytest.mark.parametrize(
    "schedule",
    [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in SCHEDULES if x not in QUICK)],
)
def test_every_schedule_is_exact(schedule):
    size = 4
    assert is_supported(schedule, size)
    order = permutation(LENGTH, size, "striped")
    arrays = (x[:, order] for x in inputs("8/2", LENGTH))
    run = out_and_gradients(SCHEDULES[schedule], size, kernel="xla", tiles=(8, 4))
    check(run(*arrays, in_order(order)), truth(), order)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("schedule", ["ring", "balanced", "all_gather"])
def test_every_layout_is_exact(schedule, layout):
    order = permutation(LENGTH, 4, layout)
    arrays = (x[:, order] for x in inputs("8/2", LENGTH))
    run = out_and_gradients(schedule, 4, layout=layout, kernel="reference")
    check(run(*arrays, in_order(order)), truth(), order)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [test_tpu.KERNEL, test_gpu.KERNEL, test_mosaic.KERNEL],
    ids=lambda kernel: type(kernel).__name__,
)
def test_accelerator_kernels_are_exact(kernel):
    arrays = inputs("4/4", LENGTH, head_dim=64)
    index, segments, shared = rows()
    expected = dense_attention(*arrays[:3], index, segments, arrays[3], shared=shared)
    order = permutation(LENGTH, 2, "striped")
    got = test_tpu.attend(
        *(x[:, order] for x in arrays), in_order(order), Mask(), SharedBeginningsKernel.of(kernel)
    )
    check(got, expected, order)


def test_a_window_is_refused():
    order = np.arange(LENGTH)
    run = out_and_gradients("ring", 2, Mask(window=9))
    with pytest.raises(ValueError, match=re.escape("coords.shared: found Mask.window = 9")):
        run(*inputs("8/2", LENGTH), in_order(order))
