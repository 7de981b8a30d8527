"""Parsing compiled HLO: bytes and hops against the schedules' plans, overlap with kernels, and
hand-written texts."""

import functools
import itertools

import numpy as np
import pytest

from model.attention import Mask, get_schedule
from model.attention.schedules.plan import Block
from planning.compiled.overlap import crossings
from planning.compiled.text import parse
from planning.compiled.transfers import groups, received, transfers
from planning.topology import topology_devices
from scripts.benchmarks.bench_schedules.compiled import (
    CASES,
    case,
    compile_pass,
    count_bytes,
    small_step,
)
from tests.compiled_text import arrays_with

BLOCK = Block(batch=1, tokens=1024, query_heads=32, kv_heads=8, head_dim=128)
SMALL = Block(
    batch=1, tokens=256, query_heads=8, kv_heads=4, head_dim=128
)  # so small that XLA would all-reduce the gradients
HOPS = [name for name in CASES if name.startswith(("ring", "balanced")) or name.endswith("overlap")]
COVERING = [
    *(
        pytest.param(name, size, marks=pytest.mark.slow) if size == 8 else (name, size)
        for name, size in itertools.product(
            ["ring", "ring bidirectional", "balanced split", "attention2d overlap"], (4, 8)
        )
    ),
    *itertools.product(["ring_self_attention", "all_gather", "ulysses"], (4,)),
]


@functools.cache
def byte_counts(name, size):
    return count_bytes(name, size, SMALL if name in HOPS else BLOCK)


def assert_bytes_as_planned(name, size):
    """Checks that maximum and mean bytes are within 2% of the plan's, and that no unplanned
    collective appears."""
    row = byte_counts(name, size)
    for which in ("forward", "backward"):
        figures = row[which]
        assert figures["kinds"] == figures["planned_kinds"], which
        for kind in ("max", "mean"):
            assert figures[f"{kind}_bytes"] == pytest.approx(
                figures[f"planned_{kind}_bytes"], rel=0.02
            ), (which, kind)
        if name in HOPS:
            assert figures["kinds"] == ["collective-permute"]
    if (
        name == "ring"
    ):  # P - 1 hops of K and V (one array) and of coordinates (another); P hops of dK and dV
        assert (row["forward"]["permutes"], row["backward"]["permutes"]) == (
            2 * (size - 1),
            2 * (size - 1) + size,
        )
    if name == "ring bidirectional":  # the same hops with half the data, in both directions
        assert (row["forward"]["permutes"], row["backward"]["permutes"]) == (
            4 * (size - 1),
            4 * (size - 1) + 2 * size,
        )


@pytest.mark.parametrize(("name", "size"), COVERING)
def test_compiled_bytes_match_the_plan(name, size):
    assert_bytes_as_planned(name, size)


def test_a_bidirectional_ring_receives_as_much_as_a_unidirectional_one():
    for which in ("forward", "backward"):
        assert (
            byte_counts("ring bidirectional", 8)[which]["max_bytes"]
            == byte_counts("ring", 8)[which]["max_bytes"]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [case for case in itertools.product(CASES, (4, 8, 16)) if case not in COVERING],
)
def test_compiled_bytes_match_the_plan_for_every_schedule(name, size):
    assert_bytes_as_planned(name, size)


@functools.cache
def step(name):
    """Returns the permutes and the text of a small model's training step: 4 layers, 4 query and 2
    KV heads of 128, sequence 8, 512 tokens per chip."""
    text = small_step("v5e:2x4", 512, case(name, 8, 512)[0])
    return [crossing for crossing in crossings(text) if crossing.kind == "collective-permute"], text


DKV = OUT = 2 * 512 * 2 * 128
EXPOSED = {  # elements of the transfers in a layer that no kernel hides, forward and backward
    "ring": ([], [DKV]),
    "ring bidirectional": ([], [DKV // 2, DKV // 2]),
    "attention2d overlap": ([OUT, 4 * 512], [OUT]),
    # The last backward kernel has no successor: three results of the last round are sent during
    # the layer's matrix products.
    "balanced": ([], [OUT] * 3),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "ring" else pytest.param(name, marks=pytest.mark.slow) for name in EXPOSED],
)
def test_every_transfer_but_the_hop_home_overlaps_a_kernel(name):
    """Coordinates, 8 bytes per token, are excluded: their first hop ends before the next kernel
    starts."""
    permutes, _ = step(name)
    for backward, expected in zip((False, True), EXPOSED[name], strict=True):
        in_layers = [
            crossing
            for crossing in permutes
            if crossing.loops
            and crossing.backward == backward
            and crossing.results[0].dtype != "s32"
        ]
        exposed = [
            array.elements
            for crossing in in_layers
            if not crossing.kernels
            for array in crossing.results
        ]
        assert sorted(exposed, reverse=True) == expected
        assert name != "balanced" or all(
            crossing.kernels or crossing.products for crossing in in_layers
        )
        assert all(
            kernel.startswith("attention_") for crossing in in_layers for kernel in crossing.kernels
        )  # Pallas kernels
        assert {crossing.times for crossing in in_layers} <= {
            4,
            4 * (8 - 2),
        }  # layers; rounds of a scan
        assert len(in_layers) > len(expected)


@pytest.mark.parametrize("topology", ["v4:2x2x2", "v5p:2x2x2"])
def test_every_transfer_overlaps_a_kernel_when_rounds_are_short(topology):
    """With 512 tokens per rank, adding the received dK/dV to the round's own takes as long as
    transferring K and V."""
    block = Block(batch=1, tokens=512, query_heads=4, kv_heads=2, head_dim=128)
    text = compile_pass(
        get_schedule("ring", 8),
        Mask(),
        8,
        topology_devices(topology),
        block,
        backward=True,
        kernel="tpu",
    )
    rounds = [crossing for crossing in crossings(text) if crossing.loops]
    assert sorted(crossing.nbytes for crossing in rounds) == [
        block.coords,
        block.keys,
        block.key_gradients,
    ]
    assert {crossing.times for crossing in rounds} == {8 - 2}
    assert all(crossing.kernels for crossing in rounds), [
        crossing for crossing in rounds if not crossing.kernels
    ]


def test_the_step_has_no_array_of_tokens_times_tokens():
    assert not [
        array for array in arrays_with(step("ring")[1], 512) if "4096" in array
    ]  # 512 tokens per device, 4,096 in total


HAND_WRITTEN = """HloModule hand, is_scheduled=true, num_partitions=4

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
"""
KERNEL = '%kernel = f32[2,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"'


@pytest.mark.parametrize(
    ("before", "after", "hidden"),
    [
        (KERNEL, "", True),
        ("", KERNEL, False),
        ("", "", False),
        ('%other = f32[2,8]{1,0} custom-call(%x), custom_call_target="AllocateBuffer"', "", False),
    ],
)
def test_a_transfer_that_overlaps_no_kernel_is_reported(before, after, hidden):
    (crossing,) = crossings(HAND_WRITTEN.replace("BEFORE", before).replace("AFTER", after))
    assert bool(crossing.kernels) == hidden and crossing.times == 7 and not crossing.backward
    assert (crossing.kind, crossing.loops, crossing.results) == (
        "collective-permute",
        1,
        (("f32", 16),),
    )


def test_a_gather_split_over_fusions_counts_once_at_its_start():
    """How TPUs overlap a gather with a product: one fusion starts it, another continues it, a third
    ends it."""
    gather = """%{name} (y: f32[2,8]) -> f32[8,8] {{
  %y = f32[2,8] parameter(0)
  ROOT %g = f32[8,8] all-gather(%y), dimensions={{0}}, metadata={{op_name="jit(f)/transpose(jvp())/all_gather"}}
}}

"""
    fusions = """%async-collective-start = (f32[2,8], f32[8,8], s32[2]) fusion(%x), kind=kCustom, calls=%fused_computation
  %part = f32[8,8] get-tuple-element(%async-collective-start), index=1
  %carry = (f32[8,8], f32[2,8]) fusion(%part), kind=kCustom, calls=%async_collective_fusion.1
  %async-collective-done = f32[8,8] fusion(%carry), kind=kCustom, calls=%fused_computation.2"""
    text = HAND_WRITTEN.replace("BEFORE", fusions).replace("AFTER", "")
    names = ("fused_computation", "async_collective_fusion.1", "fused_computation.2")
    inside = "".join(gather.format(name=name) for name in names)
    text = text.replace("%body (p", inside + "%body (p", 1)
    gathers = [crossing for crossing in crossings(text) if crossing.kind == "all-gather"]
    assert [(crossing.name, crossing.results, crossing.backward) for crossing in gathers] == [
        ("async-collective-start", (("f32", 64),), True)
    ]
    assert (
        received(transfers(text, 4), "all-gather").tolist() == [7 * 3 * 64] * 4
    )  # once per round, from three other ranks


def test_a_sparse_core_gather_counts_once_at_its_start():
    """Its start has the types of the core's queues and calls the gather indirectly; a product
    precedes its end."""
    inside = """%program (y: f32[2,8]) -> f32[8,8] {
  %y = f32[2,8] parameter(0)
  ROOT %g = f32[8,8] all-gather(%y), dimensions={0}
}

%queued (z: f32[2,8]) -> f32[8,8] {
  %z = f32[2,8] parameter(0)
  ROOT %c = f32[8,8] custom-call(%z), custom_call_target="sparsecore", called_computations={%program}
}

"""
    gather = """%begin-start = ((), (), (s32[8192], s32[39], s32[0])) async-start(), calls=%queued
  %begin-update = ((f32[2,8]), f32[8,8], (s32[8192])) async-update(%begin-start, %x)
  %product = f32[2,2] dot(%x, %x)
  %end-done = f32[8,8] async-done(%begin-update)"""
    text = (
        HAND_WRITTEN.replace("BEFORE", gather)
        .replace("AFTER", "")
        .replace("%body (p", inside + "%body (p", 1)
    )
    (gather_crossing,) = [crossing for crossing in crossings(text) if crossing.kind == "all-gather"]
    assert (gather_crossing.results, gather_crossing.products, gather_crossing.times) == (
        (("f32", 64),),
        ("product",),
        7,
    )


def test_a_transfer_that_ends_in_another_computation_overlaps_nothing():
    """It starts in the loop's body and ends after the loop: kernels in between are not counted as
    overlap."""
    text = HAND_WRITTEN.replace(
        "  %got = f32[2,8]{1,0} collective-permute-done(%send)\n", ""
    ).replace("%next, %got", "%next, %x")
    (crossing,) = crossings(text.replace("BEFORE", KERNEL).replace("AFTER", ""))
    assert not crossing.kernels


def test_unscheduled_text_is_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        crossings(HAND_WRITTEN.replace("is_scheduled=true, ", ""))


def test_received_bytes_of_hand_written_text():
    """Seven rounds send 64 bytes each to ranks 1, 2 and 3."""
    text = HAND_WRITTEN.replace("BEFORE", "").replace("AFTER", "")
    assert received(transfers(text, 4)).tolist() == [0, 448, 448, 448]
    gather = (
        "%g = bf16[4,8]{1,0} all-gather(%x), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}\n"
        "  %s = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1},{2,3}}, dimensions={0}"
    )
    moved = transfers(HAND_WRITTEN.replace("BEFORE", gather).replace("AFTER", ""), 4)
    assert received(moved, "all-gather").tolist() == [7 * 32] * 4  # half of 64 bytes
    assert received(moved, "reduce-scatter").tolist() == [7 * 8] * 4  # one other rank's shard


def test_a_collective_in_a_loop_of_unknown_trip_count_is_refused():
    text = (
        HAND_WRITTEN.replace("BEFORE", "")
        .replace("AFTER", "")
        .replace("%zero = s32[] constant(0)", "%zero = s32[] partition-id()")
    )
    with pytest.raises(ValueError, match="number of rounds"):
        transfers(text, 4)


def test_every_notation_of_replica_groups_is_parsed():
    assert groups("{{0,2},{1,3}}", 4) == [[0, 2], [1, 3]]
    assert groups("[2,4]<=[8]", 8) == np.arange(8).reshape(2, 4).tolist()
    assert groups("[4,2]<=[2,4]T(1,0)", 8) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups(None, 3) == [[0, 1, 2]]
    assert groups("mesh['a'=2,'b'=3] {'b'}", 6) == [[0, 1, 2], [3, 4, 5]]
    assert groups("mesh['a'=2,'b'=3] {'a'}", 6) == [[0, 3], [1, 4], [2, 5]]
    assert groups("mesh['a'=2,'b'=4] {'b':(2)2}", 8) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups("mesh['a'=2,'b'=4] {'b':(1)2}", 8) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert parse(HAND_WRITTEN.replace("BEFORE", "").replace("AFTER", "")).runs["body"] == 7
