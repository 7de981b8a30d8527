"""The cost model: tile counts against attention's own rule, bytes against formulas, times against
limits."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import Keys, Queries, get_kernel
from model.attention.blocks import BackwardInputs
from model.attention.coords import SKIP, Mask, TokenCoords, tile_bounds, tile_kind
from model.attention.kernels import GpuKernel, TpuKernel
from model.attention.layout import LAYOUTS, permutation
from model.attention.schedules import Attention2D, Balanced, Ring, Ulysses, get_schedule, plan
from model.config import TransformerConfig
from planning.compiled.transfers import received, transfers
from planning.costs import HARDWARE, Network, Sizes, TrainingStep, estimate, rounds, time_range
from planning.costs.step import FORWARD_PRODUCTS, ONE_BACKWARD_KERNEL, REMAT, TWO_BACKWARD_KERNELS
from planning.costs.tiles import tile_counts
from planning.plan import DEFAULT_RECIPE
from tests.compiled_text import compile_step
from trainer.config.schema import MeshConfig, TrainConfig
from trainer.devices import peak_flops
from trainer.flops import flops_per_step, pairs_per_layer

BLOCK = plan.Block(batch=1, tokens=256, query_heads=8, kv_heads=2, head_dim=16)
SMALL = Sizes.of(TransformerConfig.preset("llama-1b"))
HEADS_OF_128 = Sizes(
    layers=1, weights=1, head_weights=1, query_heads=8, kv_heads=8, head_dim=128, hidden=1024
)
CHIP = HARDWARE["v4"]
SCHEDULES = [
    "ring",
    Ring(bidirectional=True),
    "all_gather",
    "balanced",
    Balanced(split=True),
    "attention2d",
    Attention2D(overlap=True),
    "ulysses",
]


@pytest.mark.parametrize(
    "mask",
    [Mask(), Mask(window=1), Mask(window=30), Mask(window=30, global_tokens=9), Mask(window=100)],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("ranks", "query_tiles", "key_tiles"), [(1, 4, 4), (2, 1, 1), (3, 4, 2), (4, 3, 6), (8, 2, 2)]
)
def test_tile_counts_match_attentions_own_rule(layout, ranks, query_tiles, key_tiles, mask):
    """Without a window, on a longer sequence than the model counts: tiles of 6 and more tokens."""
    tokens = 6 * math.lcm(query_tiles, key_tiles)
    index = jnp.asarray(permutation(ranks * tokens, ranks, layout), jnp.int32)[None]
    coords = TokenCoords(index, jnp.ones_like(index), jnp.zeros_like(index))
    queries = tile_bounds(coords, tokens // query_tiles)
    keys = tile_bounds(coords, tokens // key_tiles)
    kinds = tile_kind(
        jax.tree.map(lambda x: x[0][:, None], queries),
        jax.tree.map(lambda x: x[0][None], keys),
        mask,
    )
    computed = np.asarray(kinds != SKIP).reshape(ranks, query_tiles, ranks, key_tiles).sum((1, 3))
    counts = tile_counts(
        ranks, query_tiles, key_tiles, layout, mask, tokens if mask.window else None
    )
    np.testing.assert_array_equal(counts, computed)


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False)])
def test_tiles_of_an_unknown_layout_are_not_counted(mask):
    with pytest.raises(ValueError, match=r"layout: found 'spiral'; .*zigzag.* would work"):
        tile_counts(4, 2, 2, "spiral", mask)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_computes_every_tile_once(ranks, layout, schedule):
    if schedule == "ulysses" and BLOCK.query_heads % ranks:
        schedule = Ulysses(degree=math.gcd(ranks, BLOCK.query_heads))
    for passes in rounds(schedule, ranks, layout, BLOCK, (4, 4)):
        assert sum(round_.tiles.sum() for round_ in passes) == pytest.approx(
            tile_counts(ranks, 4, 4, layout).sum()
        )


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@pytest.mark.parametrize(
    "schedule", [*SCHEDULES, Ulysses(degree=1, inner=Balanced()), "ring_self_attention"]
)
def test_sent_bytes_match_the_schedules_plan(ranks, layout, schedule):
    declared = get_schedule(schedule, ranks, layout).plan(ranks, BLOCK)
    for passes, planned in zip(
        rounds(schedule, ranks, layout, BLOCK, (1, 1)), declared, strict=True
    ):
        moved = [plan.Round((), (*round_.hidden, *round_.exposed)) for round_ in passes]
        np.testing.assert_allclose(plan.received(moved, ranks), plan.received(planned, ranks))


def test_padded_heads_cost_as_much_as_real_ones():
    """33 heads over 16 ranks: 3 per rank, as for 48 (DistFlashAttn, section 4.3)."""
    forward, _ = rounds(
        "ulysses", 16, "striped", dataclasses.replace(BLOCK, query_heads=33, kv_heads=33), (4, 4)
    )
    assert sum(round_.tiles.sum() for round_ in forward) == pytest.approx(
        48 / 33 * tile_counts(16, 4, 4, "striped").sum()
    )


def test_balanced_fetches_a_round_ahead_and_returns_results_a_round_later():
    """Algorithm 2 on 4 ranks: rounds of distance 1 (one helper) and 2 (none); the last results wait
    for no kernel."""
    forward, backward = rounds("balanced", 4, "contiguous", BLOCK, (1, 1))
    assert [[send.arrays for send in round_.hidden] for round_ in forward] == [
        ["K, V", "Q"],
        ["K, V"],
        ["out, lse"],
        [],
    ]
    queries = "Q, dout, lse, delta"
    assert [[send.arrays for send in round_.hidden] for round_ in backward] == [
        ["K, V", queries],
        ["K, V"],
        ["dK, dV", "dQ"],
        [],
    ]
    assert [send.arrays for send in backward[-1].exposed] == ["dK, dV"]
    assert not any(round_.exposed for round_ in (*forward, *backward[:-1]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ring_self_attention_skips_nothing(layout):
    for direction in rounds("ring_self_attention", 4, layout, BLOCK, (4, 4)):
        assert sum(r.tiles.sum() for r in direction) == pytest.approx(4 * 4 * 16)


@pytest.mark.parametrize(
    ("schedule", "layout", "bound"),
    [
        ("ring", "striped", 1.07),
        ("ring", "zigzag", 1.07),
        (Balanced(split=True), "contiguous", 1.05),
    ],
)
def test_balanced_work_with_16_tiles_per_block_on_8_ranks(schedule, layout, bound):
    forward, _ = rounds(schedule, 8, layout, BLOCK, (16, 16))
    assert sum(r.tiles.max() for r in forward) / sum(r.tiles.mean() for r in forward) <= bound


def test_the_contiguous_ring_takes_almost_twice_as_long():
    """2 - 1/P with the diagonal block counted as half; P = 8, with tiles small enough for that."""
    forward, _ = rounds("ring", 8, "contiguous", BLOCK, (256, 256))
    assert sum(r.tiles.max() for r in forward) / sum(
        r.tiles.mean() for r in forward
    ) == pytest.approx(2 - 1 / 8, rel=1e-3)


def test_a_bidirectional_ring_halves_the_bytes_per_link():
    network = Network(1e9, 0.0, torus=True)
    single, both = (
        rounds(Ring(bidirectional=bidirectional), 8, "striped", BLOCK, (4, 4))[0]
        for bidirectional in (False, True)
    )
    assert network.seconds(both[0].hidden, 8) == pytest.approx(
        network.seconds(single[0].hidden, 8) / 2
    )


def _shift(by, size):
    return plan.Send("", plan.PERMUTE, size, plan.shift(8, by))


def test_a_shift_on_a_torus_uses_every_link_in_between():
    torus = Network(link=1e9, latency=0.0, torus=True)
    single, three, back = (torus.seconds((_shift(by, 1e6),), 8) for by in (1, 3, -3))
    assert single == pytest.approx(1e-3)
    assert three == back == pytest.approx(3 * single)
    assert torus.seconds((_shift(1, 5e5), _shift(-1, 5e5)), 8) == pytest.approx(single / 2)


def test_a_pair_between_nodes_uses_one_nic_and_a_collective_all():
    network = Network(link=100e9, latency=0.0, node=4, flow=10e9, uplink=40e9)
    assert network.seconds((_shift(1, 1e9),), 8) == pytest.approx(
        0.1
    )  # one pair crosses: its own NIC
    assert network.seconds((_shift(1, 1e9), _shift(1, 5e8)), 8) == pytest.approx(0.15)
    assert network.seconds((_shift(4, 1e9),), 8) == pytest.approx(0.1)  # four pairs, four NICs
    everywhere, inside = (
        plan.Send("", plan.GATHER, 1e9, plan.everyone(lines))
        for lines in ([range(8)], [range(4), range(4, 8)])
    )
    assert network.seconds((everywhere,), 8) == pytest.approx(7e9 / 40e9)
    assert network.seconds((inside,), 8) == pytest.approx(3e9 / 100e9)
    exchange = plan.Send("", plan.EXCHANGE, 1e9, plan.everyone([range(8)]))
    assert network.seconds((exchange,), 8) == pytest.approx(
        4 * 4e9 / 40e9
    )  # from each device to each device of the other node


@pytest.mark.parametrize("name", ["a100-nvlink", "rtx4090"])
def test_one_box_connects_all_its_ranks_whatever_their_numbers(name):
    """With tensor 2 those of the sequence are every second GPU."""
    box, sends = HARDWARE[name].network, (_shift(1, 1e6),)
    assert box.seconds(sends, 8, range(0, 16, 2)) == box.seconds(sends, 8)
    step = estimate(TrainingStep(SMALL, HARDWARE[name], 1 << 16, tensor=2, sequence=4))
    assert 0 < step.step.exposed < step.seconds < math.inf


def _chip(**changes):
    """Returns a machine of round numbers: every rate is 1, no latency, one tile per block."""
    return dataclasses.replace(CHIP, matmul=1.0, attention=1.0, attention_backward=1.0, **changes)


@pytest.mark.parametrize(("share", "hidden"), [(1.02, True), (0.98, False)])
def test_a_ring_hides_its_transfers_if_c_exceeds_f_over_b(share, hidden):
    """Ring Attention, section 3: 4 d c^2 / F >= 4 c d / B. Forward, not causal; the coordinates' 8
    bytes per token are 0.1%."""
    bandwidth, ranks = 268e9, 8
    c = round(share * 275e12 / bandwidth)
    hardware = _chip(network=Network(bandwidth, 0.0, torus=True), tile=(c, c))
    sizes = dataclasses.replace(Sizes.of(TransformerConfig.preset("llama-7b")), layers=1)
    forward = estimate(
        TrainingStep(sizes, hardware, c * ranks, sequence=ranks, causal=False)
    ).attention_forward
    assert (forward.exposed < 1e-9 * forward.seconds) == hidden


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [("ring", "striped"), ("balanced", "contiguous"), ("attention2d", "striped")],
)
def test_a_perfect_network_exposes_nothing(schedule, layout):
    hardware = dataclasses.replace(CHIP, network=Network(1e30, 0.0, torus=True))
    estimated = estimate(
        TrainingStep(SMALL, hardware, 1 << 17, sequence=8, schedule=schedule, layout=layout)
    )
    assert estimated.step.exposed < 1e-9 * estimated.seconds


def test_on_a_slow_network_a_ring_takes_as_long_as_its_bytes():
    network = Network(1e6, 0.0, torus=True)
    job = TrainingStep(SMALL, dataclasses.replace(CHIP, network=network), 1 << 16, sequence=8)
    declared = get_schedule("ring", 8).plan(8, job.block)
    sent = sum(plan.received(passes, 8).max() for passes in declared) / 1e6
    estimated = estimate(job)
    both = estimated.attention_forward + estimated.attention_backward
    assert both.seconds == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize("name", HARDWARE)
def test_no_machine_exceeds_its_rates_and_every_figure_has_a_source(name):
    hardware = HARDWARE[name]
    estimated = estimate(TrainingStep(SMALL, hardware, 1 << 17, sequence=8, remat="everything"))
    assert 0 < estimated.mfu < max(hardware.matmul, hardware.attention)
    assert estimated.seconds == pytest.approx(estimated.step.compute + estimated.step.exposed)
    named = " ".join(hardware.sources)
    assert all(word in named for word in ("peak", "matmul", "attention", "latency", "tile"))
    assert all(len(source) > 10 for source in hardware.sources.values())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("v3", "TPU v3"),
        ("v4", "TPU v4"),
        ("v5e", "TPU v5 lite"),
        ("v5p", "TPU v5p"),
        ("v6e", "TPU v6 lite"),
        ("tpu7x", "TPU7x"),
        ("a100-nvlink", "NVIDIA A100-SXM4-80GB"),
        ("h100-infiniband", "NVIDIA H100 80GB HBM3"),
    ],
)
def test_peak_flops_match_the_metrics(name, kind):
    assert HARDWARE[name].peak == pytest.approx(peak_flops(kind))


@pytest.mark.parametrize("preset", ["gemma-3-12b", "gpt-oss-20b", "phi-3-mini-4k", "llama-3.1-8b"])
def test_the_needed_work_of_a_step_is_that_of_the_metrics_in_every_layers_window(preset):
    config, length = TransformerConfig.preset(preset), 1 << 17
    masks = tuple(
        Mask().within(config.common_window).within(kind.window) for kind in config.layer_kinds
    )
    job = TrainingStep(
        Sizes.of(config), CHIP, length, batch=2, sequence=8, masks=masks, schedule="ring"
    )
    mask = Mask(window=config.common_window)
    pairs = 2 * pairs_per_layer(config, np.array([length]), mask)
    needed = flops_per_step(config, 2 * length, pairs)
    assert job.seconds_at_peak * 8 * CHIP.peak == pytest.approx(needed, rel=1e-12)
    assert estimate(job).mfu < 1


def test_layers_with_a_window_take_their_share_of_a_steps_attention():
    """Half of the layers have one: attention takes the mean of the times with and without."""
    wide, narrow, mixed = (
        estimate(TrainingStep(SMALL, CHIP, 1 << 17, sequence=8, masks=masks))
        for masks in (
            (Mask(),),
            (Mask(window=4096),),
            (Mask(window=4096), Mask()),
        )
    )
    for name in ("attention_forward", "attention_backward"):
        assert getattr(narrow, name).compute < getattr(wide, name).compute / 4
        both = getattr(wide, name).seconds, getattr(narrow, name).seconds
        assert getattr(mixed, name).seconds == pytest.approx(sum(both) / 2)
    assert mixed.forward_rounds == wide.forward_rounds


def test_tokens_per_second_and_mfu_count_all_rows_and_devices():
    """By hand: 6 rows on 16 devices; causal attention needs half of all pairs."""
    length = 1 << 15
    estimated = estimate(TrainingStep(SMALL, CHIP, length, sequence=8, fsdp=2, batch=6))
    assert estimated.tokens_per_second * estimated.seconds == pytest.approx(6 * length)
    flops = SMALL.needed_flops(6 * length, 6 * length * (length + 1) / 2)
    assert estimated.mfu * estimated.seconds * 16 * CHIP.peak == pytest.approx(flops)


def test_the_optimizer_reads_four_float32_numbers_for_each_weight_and_writes_three():
    slow = dataclasses.replace(CHIP.device, memory_bandwidth=1.0)
    chip = dataclasses.replace(CHIP, device=slow)
    trained, frozen = (
        estimate(TrainingStep(SMALL, chip, 1 << 14, sequence=4, fsdp=2, batch=2, frozen=frozen))
        for frozen in (False, True)
    )
    seconds = trained.seconds - frozen.seconds
    assert seconds == pytest.approx((4 + 3) * 4 * SMALL.parameters / 8, rel=1e-6)


@pytest.mark.parametrize(
    ("remat", "again", "attention_again"),
    [("everything", 0, 0), ("save_attention", 1, 0), ("nothing", 1, 1), ("every_k", 2, 2)],
)
def test_a_layer_recomputes_what_a_policy_does_not_keep(remat, again, attention_again):
    """By hand, on one device: a product forward, two backward, and those that are recomputed; a
    frozen quantized layer has one backward, and is dequantized in each pass."""
    tokens = 1 << 16
    job = TrainingStep(SMALL, CHIP, tokens, remat=remat)
    result = estimate(job)
    product = 2 * SMALL.weights * tokens / (CHIP.peak * CHIP.matmul)
    between = CHIP.between_products * tokens * SMALL.hidden / CHIP.memory_bandwidth
    attention, attention_backward = (
        phase.compute for phase in (result.attention_forward, result.attention_backward)
    )
    assert result.layer_forward.compute == pytest.approx(product + between + attention)
    backward = (2 + again) * (product + between) + attention_again * attention + attention_backward
    assert result.layer_backward.compute == pytest.approx(backward)
    assert result.layer_forward.exposed == result.layer_backward.exposed == 0

    frozen = dataclasses.replace(job, frozen=True)
    quantized = dataclasses.replace(frozen, weight_bytes=0.5, dequantizations=3)
    plain, packed = estimate(frozen), estimate(quantized)
    assert plain.layer_backward.compute == pytest.approx(backward - product)
    moved = 3 * SMALL.weights * (0.5 + 2) / CHIP.memory_bandwidth
    extra = packed.layer_forward.compute - plain.layer_forward.compute
    assert extra == pytest.approx(moved)
    extra = packed.layer_backward.compute - plain.layer_backward.compute
    assert extra == pytest.approx((1 + again) * moved)


def test_keeping_less_takes_longer():
    times = [
        estimate(TrainingStep(SMALL, CHIP, 1 << 17, sequence=8, remat=remat)).seconds
        for remat in ("everything", "save_attention", "nothing", "every_k")
    ]
    assert times == sorted(times) and len(set(times)) == 4


def test_the_schedule_does_not_matter_on_one_device():
    alone = [
        estimate(TrainingStep(SMALL, CHIP, 1 << 14, schedule=schedule)) for schedule in SCHEDULES
    ]
    assert all(seconds == alone[0] for seconds in alone)
    assert alone[0].step.exposed == 0


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("ring", "contiguous"),
        ("ring", "striped"),
        ("balanced", "contiguous"),
        ("all_gather", "striped"),
        ("ulysses", "striped"),
        ("attention2d", "striped"),
    ],
)
def test_slower_hardware_never_makes_a_step_faster(schedule, layout):
    def seconds(hardware=CHIP, **changes):
        return estimate(
            TrainingStep(
                SMALL, hardware, 1 << 16, sequence=8, schedule=schedule, layout=layout, **changes
            )
        ).seconds

    slower = dataclasses.replace(CHIP.network, link=CHIP.network.link / 100)
    assert seconds(dataclasses.replace(CHIP, network=slower)) >= seconds()
    assert seconds(dataclasses.replace(CHIP, attention=CHIP.attention / 2)) > seconds()
    assert seconds(overlap=False) >= seconds()


def test_tensor_parallelism_divides_compute_and_adds_communication():
    whole, split = (
        estimate(TrainingStep(SMALL, CHIP, 1 << 17, sequence=8, tensor=tensor)) for tensor in (1, 4)
    )
    assert split.step.compute == pytest.approx(whole.step.compute / 4, rel=0.01)
    assert split.step.exposed > whole.step.exposed / 4


SLOW_BOX = Network(1e6, 0.0)  # so slow that a step takes as long as its transfers


def test_a_layer_sums_five_bfloat16_hidden_states_over_tensor():
    """Megatron-LM: each sum is a reduce-scatter and an all-gather, in which a rank receives (t - 1)
    / t of the states. Two in the forward pass, two in the backward pass; ours sums the
    feed-forward's input once more. Then those of the embedding and the head."""
    ranks, tokens = 4, 1 << 16
    job = TrainingStep(SMALL, dataclasses.replace(CHIP, network=SLOW_BOX), tokens, tensor=ranks)
    states = tokens * SMALL.hidden * 2 * (ranks - 1) / ranks
    assert estimate(job).seconds == pytest.approx(
        (5 * SMALL.layers + 2) * 2 * states / 1e6, rel=0.002
    )


def test_weights_are_gathered_twice_in_bfloat16_and_gradients_scattered_in_float32():
    """ZeRO-3: forward, backward, gradient; each rank receives 7 / 8 of the weights."""
    job = TrainingStep(SMALL, dataclasses.replace(CHIP, network=SLOW_BOX), 1 << 10, batch=8, fsdp=8)
    weights = SMALL.weights * SMALL.layers + SMALL.head_weights
    assert estimate(job).seconds == pytest.approx((2 + 2 + 4) * weights * 7 / 8 / 1e6, rel=0.01)


def test_each_part_of_a_batch_gathers_and_scatters_weights_and_adds_its_gradient():
    """By hand: eight parts take eight times one part's passes; a part's gradient is added in
    float32 (two numbers read, one written), and the optimizer updates once. The published step
    counts as much work as without parts."""
    part = TrainingStep(SMALL, HARDWARE["h100-infiniband"], 512, batch=32, fsdp=32)
    whole = dataclasses.replace(part, batch=256, accumulation=8)
    bandwidth, shard = part.hardware.memory_bandwidth, SMALL.parameters / 32
    one, eight = estimate(part), estimate(whole)
    passes = one.seconds - 28 * shard / bandwidth
    assert one.step.exposed > 0
    assert eight.seconds == pytest.approx(8 * passes + (28 + 8 * 12) * shard / bandwidth)
    assert eight.step.exposed == pytest.approx(8 * one.step.exposed)
    assert eight.tokens_per_second * eight.seconds == 256 * 512
    assert whole.seconds_at_peak == 8 * part.seconds_at_peak
    totals = estimate(dataclasses.replace(whole, extra_forwards=1))
    added = 8 * SMALL.layers * one.layer_forward.seconds
    assert totals.seconds - eight.seconds == pytest.approx(added)


def test_tensor_parallelism_stays_within_hosts_and_the_sequence_crosses_them():
    """As `make_mesh` places them: each GPU gathers the keys of its head from the other host, over
    its own card of 50 GB/s."""
    hardware = HARDWARE["h100-infiniband"]
    job = TrainingStep(SMALL, hardware, 4096, tensor=8, sequence=2, schedule="all_gather")
    assert job.lines("tensor") == (tuple(range(8)), tuple(range(8, 16)))
    assert job.lines("sequence")[1] == (1, 9)
    first, *_ = estimate(job).forward_rounds
    sent, latency = job.block.keys + job.block.coords, hardware.network.far_latency
    assert first.seconds == pytest.approx(sent / 50e9 + 2 * latency)


@pytest.mark.parametrize("data", [2, 4])
def test_a_sum_of_gradients_over_hosts_takes_as_long_as_a_card_needs(data):
    """Eight GPUs of a host share the parameters; each sums its shard with one GPU of each other
    host, over its own card of 50 GB/s, while nothing is computed. Frozen weights have no sum."""
    hardware = HARDWARE["h100-infiniband"]
    job = TrainingStep(SMALL, hardware, 4096, batch=8 * data, data=data, fsdp=8)
    alone = dataclasses.replace(job, batch=8, data=1)
    seconds = 4 * 2 * (data - 1) / data * SMALL.parameters / 8 / 50e9
    latencies = 2 * (data - 1) * hardware.network.far_latency
    added = estimate(job).step.exposed - estimate(alone).step.exposed
    assert added == pytest.approx(seconds + latencies)
    frozen = (estimate(dataclasses.replace(step, frozen=True)) for step in (job, alone))
    assert len({result.seconds for result in frozen}) == 1


def test_a_compiled_step_sums_gradients_over_data_once_a_part_and_outside_the_layers():
    """As the cost model has it, in a step of two parts compiled for four devices of the CPU."""
    parts = 2
    config = TransformerConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    compiled = compile_step(
        config,
        jax.devices()[:4],
        32,
        batch=8,
        mesh=MeshConfig(data=2, fsdp=2),
        recipe=dataclasses.replace(DEFAULT_RECIPE, train=TrainConfig(accumulation=parts)),
        kernel=get_kernel("reference"),
        flags={"xla_backend_optimization_level": 0},
        remat="everything",
    )
    moved = [each for each in transfers(compiled.as_text(), 4) if each.kind == plan.REDUCE]
    shard = Sizes.of(config).parameters / 2
    nbytes = received(moved, plan.REDUCE)
    np.testing.assert_allclose(nbytes, parts * 2 * 1 / 2 * 4 * shard, rtol=0.01)
    assert max(each.times for each in moved) == parts


@pytest.mark.parametrize(
    ("axes", "shares"),
    [
        # The other slice's weights for each pass in bfloat16, and its gradients.
        ({"fsdp": 8, "dcn": {"fsdp": 2}}, (2 + 2 + 4) / 8),
        ({"fsdp": 8}, 0),
        ({"data": 2, "fsdp": 4}, 0),
    ],
    ids=str,
)
def test_each_chip_exchanges_its_shards_with_the_same_chip_of_other_slices(axes, shares):
    """Google's figure per chip, on links so fast that nothing else takes time."""
    slice_link = 1e6
    network = dataclasses.replace(CHIP.network, link=1e30, latency=0, slice_link=slice_link)
    hardware = dataclasses.replace(CHIP, network=network)
    job = TrainingStep(SMALL, hardware, 64, batch=8, overlap=False, **axes)
    weights = SMALL.weights * SMALL.layers + SMALL.head_weights
    assert estimate(job).step.exposed == pytest.approx(shares * weights / slice_link)


def test_slices_sum_their_gradients_over_their_network():
    """Half of each chip's shard in float32, twice: to sum it, and to share the sum."""
    network = dataclasses.replace(CHIP.network, link=1e30, latency=0, slice_link=1e6)
    hardware = dataclasses.replace(CHIP, network=network)
    job = TrainingStep(SMALL, hardware, 64, batch=8, data=2, fsdp=4, dcn={"data": 2})
    sums = 4 * 2 / 2 * SMALL.parameters / 4 / 1e6
    assert estimate(job).step.exposed == pytest.approx(sums)


@pytest.mark.parametrize(("schedule", "slices"), [("ring", 2), ("ring", 4), ("all_gather", 2)])
def test_attention_across_slices_waits_for_their_network(schedule, slices):
    """In the ring a slice's last chip sends what a round sends; all chips of a gather receive as
    many blocks as there are other slices."""
    network = dataclasses.replace(CHIP.network, link=1e30, latency=0, slice_link=1e6)
    hardware = dataclasses.replace(CHIP, network=network)
    job = TrainingStep(
        SMALL,
        hardware,
        1 << 12,
        batch=2,
        fsdp=2,
        sequence=8,
        schedule=schedule,
        dcn={"sequence": slices},
    )
    block = job.block
    blocks = 7 if schedule == "ring" else slices - 1
    received = blocks * (block.keys + block.coords) / 1e6
    assert estimate(job).attention_forward.seconds == pytest.approx(received, rel=0.01)


@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_head_runs_forward_once_under_every_remat_policy(remat, frozen):
    """Logits, dx, and dW unless frozen: the products that tests/model/test_head.py counts in a
    training step."""
    # The optimizer's update is free.
    device = dataclasses.replace(CHIP.device, memory_bandwidth=math.inf)
    chip = dataclasses.replace(CHIP, device=device)
    heads = [dataclasses.replace(SMALL, head_weights=weights) for weights in (1 << 20, 1 << 21)]
    small, large = (
        estimate(TrainingStep(sizes, chip, 1 << 16, remat=remat, frozen=frozen)) for sizes in heads
    )
    product = 2 * (1 << 20) * (1 << 16) / (CHIP.peak * CHIP.matmul)
    assert large.step.compute - small.step.compute == pytest.approx(
        (2 if frozen else 3) * product, rel=1e-6
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"remat": "all"}, "remat: found 'all'"),
        ({"fsdp": 2}, "batch: 1 rows"),
        ({"accumulation": 2}, "batch: 1 rows are not divisible by .* x accumulation = 2"),
        ({"sequence": 3}, "length: 65536"),
        ({"schedule": "snake"}, "schedule: found 'snake'"),
        ({"schedule": {"name": "ulysses", "degree": 3}}, "degree: 3"),
    ],
)
def test_an_invalid_step_is_a_one_line_error(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        estimate(TrainingStep(SMALL, CHIP, 1 << 16, **{"sequence": 8, **changes}))
    assert "\n" not in str(error.value)


def _products(jaxpr):
    """Returns the number of matrix products in a program and its inner programs; a kernel has those
    of one tile per tile kind."""
    inner = [
        getattr(value, "jaxpr", value)
        for equation in jaxpr.eqns
        for value in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda value: hasattr(value, "eqns") or hasattr(value, "jaxpr"),
        )
    ]
    return sum(equation.primitive.name == "dot_general" for equation in jaxpr.eqns) + sum(
        _products(program) for program in inner if hasattr(program, "eqns")
    )


def test_the_products_of_a_tile_match_the_kernels():
    queries, keys = jnp.zeros((1, 256, 2, 128)), jnp.zeros((1, 256, 1, 128))
    coords = TokenCoords(jnp.arange(256)[None], jnp.ones((1, 256), jnp.int32))
    statistic = jnp.zeros((1, 2, 256))
    blocks = Queries(queries, coords), Keys(keys, keys, coords)
    options = {"mask": Mask(), "scale": 1.0}
    tpu = TpuKernel(128, 128, interpret=True)
    for kernel, products in (
        (tpu, TWO_BACKWARD_KERNELS),
        (dataclasses.replace(tpu, fused=True), ONE_BACKWARD_KERNEL),
        (GpuKernel(interpret=True), TWO_BACKWARD_KERNELS),
    ):
        forward = jax.make_jaxpr(lambda *blocks, kernel=kernel: kernel.forward(*blocks, **options))(
            *blocks
        )
        backward = jax.make_jaxpr(
            lambda *blocks, kernel=kernel: kernel.backward(*blocks, **options)
        )(*blocks, BackwardInputs(queries, statistic, statistic))
        branches = _products(forward.jaxpr) // FORWARD_PRODUCTS  # kinds of tiles
        assert branches in (2, 3) and _products(backward.jaxpr) == branches * products


@pytest.mark.parametrize(
    ("machine", "kv_heads", "products"),
    [
        ("v3", 8, 7),
        ("v4", 8, 5),
        ("v5p", 8, 5),
        ("v5p", 1, 7),
        ("v5e", 1, 5),
        ("v6e", 8, 5),
        ("tpu7x", 1, 5),
        ("h100-infiniband", 8, 7),
    ],
)
def test_one_backward_kernel_is_counted_where_the_tpu_kernel_uses_it(machine, kv_heads, products):
    sizes = dataclasses.replace(HEADS_OF_128, kv_heads=kv_heads)
    assert TrainingStep(sizes, HARDWARE[machine], 65536).tile_backward_products == products


def test_small_heads_fill_part_of_the_matrix_unit():
    """v6e's matrix unit has 256 rows and columns, earlier ones 128."""
    seconds = {}
    for name, size in itertools.product(("v5p", "v6e"), (64, 128, 256)):
        hardware = HARDWARE[name]
        sizes = dataclasses.replace(HEADS_OF_128, head_dim=size)
        result = estimate(TrainingStep(sizes, hardware, 65536))
        seconds[name, size] = (
            result.attention_forward.seconds / size * hardware.peak * hardware.attention
        )
    assert (
        seconds["v6e", 128]
        == pytest.approx(2 * seconds["v6e", 256])
        == pytest.approx(2 * seconds["v5p", 128])
    )
    assert seconds["v5p", 64] == pytest.approx(2 * seconds["v5p", 128])
    assert seconds["v5p", 128] == pytest.approx(seconds["v5p", 256])


@pytest.mark.parametrize(
    ("schedule", "neighbours_only"),
    [
        ("ring", True),
        ({"name": "ring", "bidirectional": True}, True),
        ("balanced", False),
        ({"name": "attention2d", "overlap": True}, False),
    ],
)
def test_hops_beyond_neighbours_are_exposed_on_v5e_and_v6e(schedule, neighbours_only):
    """As the compilers schedule them; a schedule whose hops all go to neighbours waits no longer
    than elsewhere."""
    assert {name for name, hardware in HARDWARE.items() if hardware.network.far_exposed} == {
        "v5e",
        "v6e",
    }
    job = TrainingStep(
        Sizes.of(TransformerConfig.preset("llama-3.1-8b")),
        HARDWARE["v5e"],
        1 << 20,
        sequence=64,
        schedule=schedule,
    )
    network = dataclasses.replace(job.hardware.network, far_exposed=False)
    elsewhere = dataclasses.replace(
        job, hardware=dataclasses.replace(job.hardware, network=network)
    )
    exposed, hidden = (estimate(job).seconds for job in (job, elsewhere))
    assert exposed == hidden if neighbours_only else exposed > 1.05 * hidden


def test_parameters_count_the_layers_the_embedding_and_the_head():
    sizes = dataclasses.replace(HEADS_OF_128, layers=3, weights=100, head_weights=7)
    assert sizes.parameters == 3 * 100 + 7 + 7
    assert dataclasses.replace(sizes, stored=200).parameters == 3 * 200 + 7 + 7


def test_expert_ranks_exchange_tokens_and_keep_their_matrices():
    """On a network without latency seconds are bytes over bandwidth: tokens and sums once forward,
    tokens twice and sums once backward; expert matrices are gathered only within a rank of
    `expert`."""
    config = TransformerConfig.preset("mixtral-8x7b")
    sizes = Sizes.of(config)
    link = 1e9
    box = dataclasses.replace(HARDWARE["a100-nvlink"], network=Network(link=link, latency=0.0))
    job = TrainingStep(sizes, box, 4096, batch=8, fsdp=2, expert=4, schedule="local", overlap=False)
    tokens = 4096 * config.hidden_size * 2 * 3 / link  # from three other ranks, bfloat16
    expert_weights = 3 * config.hidden_size * config.intermediate_size * 8
    assert sizes.experts == expert_weights and sizes.routed == expert_weights // 4
    shared = (sizes.stored - expert_weights) * 7 / 8  # gathered from the seven other ranks
    own = expert_weights / 4 / 2
    result = estimate(job)
    assert result.layer_forward.exposed == pytest.approx(2 * tokens + 2 * (shared + own) / link)
    scattered = 4 * (shared + own) / link
    backward = 3 * tokens + 2 * (shared + own) / link + scattered
    assert result.layer_backward.exposed == pytest.approx(backward)


def test_layers_without_experts_exchange_no_tokens():
    """The step of a mixture with dense layers takes as long as that of its parts."""
    box = dataclasses.replace(HARDWARE["a100-nvlink"], network=Network(link=1e9, latency=0.0))
    config = dataclasses.replace(TransformerConfig.preset("glm-4.5-air"), num_hidden_layers=4)

    def layers(config):
        axes = {"batch": 8, "fsdp": 2, "expert": 4, "schedule": "local", "overlap": False}
        result = estimate(TrainingStep(Sizes.of(config), box, 4096, **axes))
        seconds = result.layer_forward.seconds + result.layer_backward.seconds
        return config.num_hidden_layers * seconds

    dense, mixture = (stack.config for stack in config.stacks)
    assert layers(mixture) == pytest.approx(
        layers(dataclasses.replace(mixture, num_hidden_layers=1)) * 3
    )
    exchanged = 4096 * config.hidden_size * 2 * 3 / 1e9 * 5  # see above
    assert layers(config) == pytest.approx(layers(dense) - exchanged + layers(mixture))


@pytest.mark.parametrize(
    ("model", "expert", "load"),
    [("qwen3-30b-a3b", 8, 8), ("mixtral-8x7b", 4, 4), ("mixtral-8x7b", 8, 4), ("llama-7b", 1, 1)],
)
def test_the_time_range_covers_even_and_uneven_expert_loads(model, expert, load):
    """From equal loads to a rank that every token chooses with as many experts as that rank
    holds."""
    job = TrainingStep(
        Sizes.of(TransformerConfig.preset(model)),
        HARDWARE["h100-infiniband"],
        4096,
        batch=8,
        fsdp=8 // expert,
        expert=expert,
        schedule="local",
    )
    assert job.largest_imbalance == load
    uneven = dataclasses.replace(job, imbalance=load)
    busiest, even = (estimate(step).layer_forward.compute for step in (uneven, job))
    rate = job.hardware.peak * job.hardware.matmul
    assert busiest - even == pytest.approx(2 * (load - 1) * job.sizes.routed * job.tokens / rate)
    bounds, fsdp = time_range(job), time_range(dataclasses.replace(job, fsdp=8, expert=1))
    assert bounds.low == pytest.approx(fsdp.low) and bounds.high >= fsdp.high
