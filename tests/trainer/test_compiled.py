"""Reading compiled texts: bytes and hops against the schedules' plans, transfers behind kernels, and texts made by hand."""
import functools
import itertools
import re

import numpy as np
import pytest

from model.attention.schedules.plan import Block
from scripts.bench_schedules import CASES, count_bytes, small_step
from trainer.compiled.overlap import crossings
from trainer.compiled.text import arrays_with, parse
from trainer.compiled.transfers import groups, received, transfers

BLOCK = Block(batch=1, tokens=1024, query_heads=32, kv_heads=8, head_dim=128)
SMALL = Block(batch=1, tokens=256, query_heads=8, kv_heads=4, head_dim=128)  # so small that gradients would be all-reduced
HOPS = [name for name in CASES if name.startswith(("ring", "balanced")) or name.endswith("overlap")]
COVERING = [*itertools.product(["ring", "ring bidirectional", "balanced split", "attention2d overlap"], (4, 8)),
            *itertools.product(["ring window", "ring_self_attention", "all_gather", "ulysses", "attention2d square"], (4,))]


@functools.cache
def counted(name, size):
    return count_bytes(name, size, SMALL if name in HOPS else BLOCK)


def agrees(name, size):
    """Maximum and mean within 2% of the plan's own formula, and no collective but the planned ones."""
    row = counted(name, size)
    for which in ("forward", "backward"):
        one = row[which]
        assert one["kinds"] == one["planned_kinds"], which
        for kind in ("max", "mean"):
            assert one[f"{kind}_bytes"] == pytest.approx(one[f"planned_{kind}_bytes"], rel=0.02), (which, kind)
        if name in HOPS:
            assert one["kinds"] == ["collective-permute"]
    if name == "ring":  # K and V as one array, coordinates as one, in each of P - 1 hops; and P hops of dK and dV
        assert (row["forward"]["permutes"], row["backward"]["permutes"]) == (2 * (size - 1), 2 * (size - 1) + size)
    if name == "ring bidirectional":  # as many hops of halves, either way
        assert (row["forward"]["permutes"], row["backward"]["permutes"]) == (4 * (size - 1), 4 * (size - 1) + 2 * size)


@pytest.mark.parametrize(("name", "size"), COVERING)
def test_compiled_bytes_are_the_planned_ones(name, size):
    agrees(name, size)


def test_the_ring_both_ways_receives_no_more_than_one_way():
    for which in ("forward", "backward"):
        assert counted("ring bidirectional", 8)[which]["max_bytes"] == counted("ring", 8)[which]["max_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [one for one in itertools.product(CASES, (4, 8, 16)) if one not in COVERING])
def test_every_schedules_compiled_bytes_are_the_planned_ones(name, size):
    agrees(name, size)


@pytest.fixture(scope="module")
def step():
    """A small model's training step, compiled for 8 chips on the sequence axis."""
    return small_step("v5e:2x4", 512)


def test_every_ring_transfer_hides_behind_a_kernel(step):
    """But the hop home, and the coordinates' first hop: the same in all layers, it is made once a step, outside of them."""
    ring = [one for one in crossings(step) if one.kind == "collective-permute"]
    exposed = [one for one in ring if not one.kernels]
    per_layer = [one for one in exposed if one.times > 1]
    assert {one.times for one in ring if one.kernels} == {4, 4 * (8 - 2)}  # 4 layers; the rounds of the ring's scan
    assert [one.backward for one in per_layer] == [True]
    assert all("s32[1,512]" in line for one in exposed if one.times == 1 for line in step.splitlines()
               if re.match(rf"\s+%{re.escape(one.name)} =", line))
    assert any(one.backward and one.kernels for one in ring) and any(not one.backward and one.kernels for one in ring)


def test_the_step_holds_nothing_of_tokens_times_tokens(step):
    assert not [array for array in arrays_with(step, 512) if "4096" in array]  # 512 tokens a device, 4,096 in all


HAND = """HloModule hand, is_scheduled=true, num_partitions=4

%body (p: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
  %p = (s32[], f32[2,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[2,8]{1,0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %send = (f32[2,8]{1,0}, f32[2,8]{1,0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,2},{2,3}}, metadata={op_name="jit(f)/ppermute"}
  BEFORE
  %got = f32[2,8]{1,0} collective-permute-done(%send)
  AFTER
  ROOT %out = (s32[], f32[2,8]) tuple(%next, %got)
}

%condition (p.1: (s32[], f32[2,8])) -> pred[] {
  %p.1 = (s32[], f32[2,8]) parameter(0)
  %limit = s32[] constant(7)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (a: f32[2,8]) -> f32[2,8] {
  %a = f32[2,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[2,8]) tuple(%zero, %a)
  %loop = (s32[], f32[2,8]) while(%start), condition=%condition, body=%body
  ROOT %b = f32[2,8]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501
KERNEL = '%kernel = f32[2,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"'


@pytest.mark.parametrize(("before", "after", "hidden"), [
    (KERNEL, "", True), ("", KERNEL, False), ("", "", False),
    ('%other = f32[2,8]{1,0} custom-call(%x), custom_call_target="AllocateBuffer"', "", False),
])
def test_a_transfer_that_hides_behind_nothing_is_found(before, after, hidden):
    (one,) = crossings(HAND.replace("BEFORE", before).replace("AFTER", after))
    assert bool(one.kernels) == hidden and one.times == 7 and not one.backward


def test_an_end_in_another_computation_hides_nothing():
    """Started in the loop's body, ended after the loop: whatever stands behind it there is no overlap."""
    text = HAND.replace("  %got = f32[2,8]{1,0} collective-permute-done(%send)\n", "").replace("%next, %got", "%next, %x")
    (one,) = crossings(text.replace("BEFORE", KERNEL).replace("AFTER", ""))
    assert not one.kernels


def test_a_text_that_is_not_scheduled_is_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        crossings(HAND.replace("is_scheduled=true, ", ""))


def test_bytes_of_a_text_made_by_hand():
    """Seven rounds, 64 bytes to each of the ranks 1, 2, 3."""
    text = HAND.replace("BEFORE", "").replace("AFTER", "")
    assert received(transfers(text, 4)).tolist() == [0, 448, 448, 448]
    gather = ("%g = bf16[4,8]{1,0} all-gather(%x), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}\n"
              "  %s = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1},{2,3}}, dimensions={0}")
    found = transfers(HAND.replace("BEFORE", gather).replace("AFTER", ""), 4)
    assert received(found, "all-gather").tolist() == [7 * 32] * 4  # half of 64 bytes
    assert received(found, "reduce-scatter").tolist() == [7 * 8] * 4  # one other rank's part


def test_a_collective_in_a_loop_of_unknown_length_is_refused():
    text = HAND.replace("BEFORE", "").replace("AFTER", "").replace("%zero = s32[] constant(0)", "%zero = s32[] partition-id()")
    with pytest.raises(ValueError, match="number of rounds"):
        transfers(text, 4)


def test_groups_as_they_are_written():
    assert groups("{{0,2},{1,3}}", 4) == [[0, 2], [1, 3]]
    assert groups("[2,4]<=[8]", 8) == np.arange(8).reshape(2, 4).tolist()
    assert groups("[4,2]<=[2,4]T(1,0)", 8) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups(None, 3) == [[0, 1, 2]]
    assert parse(HAND.replace("BEFORE", "").replace("AFTER", "")).runs["body"] == 7
