"""Predicts every row of the papers by the cost model.

Each prediction is computed by planning.costs. Rows that a constant bears on which was set after they had been seen say which
(`Row.afterwards`). Misses are printed with their size and the likely reason.
"""
from __future__ import annotations

import dataclasses
import functools
import math

from model.attention import get_schedule
from model.attention.schedules.plan import GATHER, Block, Send, everyone, received
from model.config import LlamaConfig
from planning.costs.hardware import HARDWARE
from planning.costs.rounds import rounds
from planning.costs.step import FORWARD_PRODUCTS, ONE_BACKWARD_KERNEL, Sizes, estimate
from planning.costs.step import Job as CostJob
from planning.costs.tiles import tile_counts
from scripts.benchmarks import paper_rows as paper

THOUSAND = 1024  # the papers' K
# The papers' systems run FlashAttention-2, whose backward kernel has five products.
Job = functools.partial(CostJob, backward_products=ONE_BACKWARD_KERNEL)


@dataclasses.dataclass(frozen=True)
class Row:
    """One number of a paper beside the model's.

    Attributes:
      source, table: the paper, and its table, figure or section.
      label: what the number is.
      paper: the paper's number; None where it is lost or was never given.
      predicted: the model's number.
      digits, goal, between: what counts as reproduced: equal when rounded to so many decimals; a relative error of at most
        `goal`; within the range that the paper gives. A row with none of them claims nothing.
      note: the likely reason of a miss.
      afterwards: the constants of the prediction that were set after the paper's number had been seen.
    """

    source: str
    table: str
    label: str
    paper: float | None
    predicted: float
    digits: int | None = None
    goal: float | None = None
    between: tuple[float, float] | None = None
    note: str = ""
    afterwards: str = ""

    @property
    def error(self) -> float | None:
        """The relative error of the prediction; None without a paper's number."""
        return float(self.predicted / self.paper - 1) if self.paper else None

    @property
    def reproduced(self) -> bool | None:
        """Whether the prediction is within what the row claims; None where it claims nothing."""
        if self.between:
            return bool(self.between[0] <= self.predicted <= self.between[1])
        if self.digits is not None:
            return round(float(self.predicted), self.digits) == self.paper
        return None if self.goal is None or self.error is None else bool(abs(self.error) <= self.goal)


@functools.cache
def every_row() -> tuple[Row, ...]:
    """Returns the rows of all papers."""
    rows = (*ring_attention(), *striped_attention(), *distflashattn(), *attention2d())
    return tuple(dataclasses.replace(row, afterwards=_set_afterwards(row)) for row in rows)


# Rows of DistFlashAttn that no job of `_distflash` predicts: counted, or another system alone.
_WITHOUT_PARTIALS = ("Appendix C", "Equation 2", "Section 3.3")


def _set_afterwards(row: Row) -> str:
    """The constants that were set after a row had been seen, where they bear on it; "" where none does."""
    if row.source == "Attention2D":
        return "flow and uplink of both Ethernets (planning/costs/hardware.py)"
    if row.source != "DistFlashAttn" or row.table in _WITHOUT_PARTIALS or "expected speed-up" in row.label:
        return ""
    partials = "partial results in float16"
    if row.table == "Table 3" and "DistFlashAttn" not in row.label:
        return "SCORE_PASSES" if "Ring Self-Attention" in row.label else f"SCORE_PASSES; {partials}"
    return "" if row.label.startswith(("Megatron-LM", "DeepSpeed-Ulysses")) else partials


# Ring Attention


def ring_attention() -> list[Row]:
    """Returns the rows of Ring Attention: Tables 1 and 2, Appendix C."""
    return [*_ring_table_1(), *_ring_table_2(), *_ring_appendix_c()]


def _ring_table_1() -> list[Row]:
    b, h, n, s, c = 1, 4096, 32, 65536, 1024  # the paper's letters; LLaMA-7B on 64 devices
    shape = "bytes a layer at b 1, h 4096, n 32, s 65536, c 1024"
    output = Block(b, s, n, n, h // n).queries  # s x h in bfloat16
    # Six blocks of c x h: queries, keys and values, arriving keys and values, output.
    block = Block(b, c, n, n, h // n)
    ring = block.queries + 2 * block.keys + block.queries
    values = {"2bhs^2": (2 * b * h * s * s, 2 * b * n * s * s, "the scores are n s^2, not h s^2"),
              "8bsh": (8 * b * s * h, 4 * output, "a feed-forward four times as wide"),
              "2bsh": (2 * b * s * h, output, ""),
              "6bch": (6 * b * c * h, ring, "six blocks are 6bch numbers, 12bch bytes; activation_memory.py")}
    rows = []
    for name, formula in paper.RING_TABLE_1.items():
        printed, predicted, reason = values[formula]
        rows.append(Row("Ring Attention", "Table 1", f"{name}: {formula}", float(printed), float(predicted),
                        note="; ".join(filter(None, (shape, reason)))))
    return rows


def _ring_table_2() -> list[Row]:
    rows = []
    for name, (tflops, bandwidth, tokens, length) in paper.RING_TABLE_2.items():
        # A round of c queries and c keys computes 4 d c^2 FLOPs and sends K and V, 4 c d bytes: equally long at c = F / B.
        least = tflops * 1e12 / (bandwidth * 1e9) / 1e3
        rows.append(Row("Ring Attention", "Table 2", f"{name}: minimal block, thousands", tokens, least,
                        digits=1 if tokens < 10 else None, goal=0.01,
                        note="" if tokens < 10 else "24.96; printed 24.8, of which 6 x is not its own 149.6"))
        rows.append(Row("Ring Attention", "Table 2", f"{name}: minimal sequence, thousands", length, 6 * least, goal=0.01))
    return rows


def _ring_appendix_c() -> list[Row]:
    name, longer, ratio = paper.RING_FIGURE_5_RATIO
    rows = [Row("Ring Attention", "Appendix C, text", f"{name}: {longer} x 4K", ratio, flops_ratio(name, longer), digits=1,
                note="the text says 10M, which is 2441 x 4096; 162.6 belongs to 3072 x 4096")]
    name, longer, times = paper.RING_FIGURE_5_MILLION
    rows.append(Row("Ring Attention", "Appendix C, text", f"{name}: 1M, 'approximately {times[0]}-{times[1]} times'", None,
                    flops_ratio(name, longer), between=times))
    rows += [Row("Ring Attention", "Figure 5", f"{name}: {longer} x 4K", None, flops_ratio(name, longer),
                 note="the figure's bars carry no numbers in the text at hand")
             for name in paper.RING_FIGURE_5_HIDDEN for longer in (8, 32, 64, 256, 2560, 25600)]
    return rows


def flops_ratio(name: str, longer: int, short: int = 4096) -> float:
    """Returns the factor by which a data set's training FLOPs grow in sequences `longer` times as long (Appendix C), with every
    pair of tokens computed and without the head."""
    hidden = paper.RING_FIGURE_5_HIDDEN[name]
    sizes = Sizes(1, 12 * hidden * hidden, 0, 1, 1, hidden, hidden)
    per_token = [sizes.needed_flops(1, length) for length in (longer * short, short)]
    return per_token[0] / per_token[1]


# Striped Attention


def striped_attention() -> list[Row]:
    """Returns all theoretical maximum speed-ups (TMS), and the measured ones beside what whole tiles allow."""
    bounds, measured = [], []
    for (table, device, model, tensor, shards), rows in paper.STRIPED_ATTENTION.items():
        cost, tile = STRIPED_ATTENTION_COST[device], paper.STRIPED_TILES[device]
        for number, bound, speedup in rows:
            length = number * shards if table == "Table 5" else number
            label = f"{device} {model} {tensor} x {shards}, {length} tokens"
            bounds.append(Row("Striped Attention", table, f"TMS {label}", bound,
                              striped_speedup(model, length, shards, cost), digits=2))
            measured.append(Row("Striped Attention", table, f"speed-up {label}", speedup,
                                striped_speedup(model, length, shards, cost, tile), note=STRIPED_MISS))
    for model, speedups in paper.STRIPED_TABLE_2.items():
        for (device, shards), speedup in zip((("A100", 4), ("TPU v4", 8)), speedups, strict=True):
            predicted = striped_speedup(model, 262144, shards, STRIPED_ATTENTION_COST[device], paper.STRIPED_TILES[device])
            label = f"speed-up {device} {model} 2 x {shards}, 262144 tokens"
            measured.append(Row("Striped Attention", "Table 2", label, speedup, predicted, note=STRIPED_MISS))
    return bounds + measured


# The price of an attention FLOP in others: on A100 attention in TF32 runs at half the rate of bfloat16.
STRIPED_ATTENTION_COST = {"A100": 2.0, "TPU v4": 1.0}
STRIPED_MISS = "a bound: whole tiles, transfers hidden; the paper names exposed transfers and work that is no matrix product"


def striped_speedup(model: str, length: int, shards: int, attention_cost: float, tile: tuple[int, int] | None = None) -> float:
    """Returns the end-to-end speed-up of the striped over the contiguous ring, by matrix FLOPs of the busiest rank.

    Args:
      attention_cost: the price of an attention FLOP in others.
      tile: queries and keys of a tile that is computed whole; None for tiles of one token.
    """
    config = LlamaConfig.preset(model)
    hidden = config.hidden_size
    # The paper counts two of the three feed-forward matrices.
    weights = (config.num_hidden_layers * hidden * (4 * hidden + 2 * config.intermediate_size)
               + hidden * paper.STRIPED_VOCABULARY)
    linear = 2.0 * weights
    attention = 4.0 * length * hidden * config.num_hidden_layers * attention_cost
    if tile is None:
        contiguous, striped = (shards - 0.5) / shards, 0.5
    else:
        contiguous, striped = (busiest_share(shards, length // shards, layout, tile) for layout in ("contiguous", "striped"))
    return (linear + attention * contiguous) / (linear + attention * striped)


def busiest_share(shards: int, tokens: int, layout: str, tile: tuple[int, int]) -> float:
    """Returns the share of all query-key pairs of a rank's queries that the rounds' busiest ranks compute."""
    count = tuple(math.ceil(tokens / side) for side in tile)
    forward, _ = rounds("ring", shards, layout, Block(1, tokens, 1, 1, 1), count)
    return sum(planned.tiles.max() for planned in forward) / (shards * count[0] * count[1])


def _received(schedule, layout: str, ranks: int, block: Block) -> list[float]:
    """Returns the bytes that a rank receives on average, forward and backward."""
    return [received(passes, ranks).mean() for passes in get_schedule(schedule, ranks, layout).plan(ranks, block)]


# DistFlashAttn


def distflashattn() -> list[Row]:
    """Returns the rows of DistFlashAttn: Figures 4 and 5, Appendix C, Tables 1, 3, 4, 5."""
    return [*_distflash_figure_5(), *_distflash_idle(), *_distflash_overhead(), *_distflash_volume(), *_distflash_table_1(),
            *_distflash_table_3(), *_distflash_table_4(), *_distflash_remat()]


def _dgx(nodes: int):
    """Returns the hardware of so many DGX nodes of 8 A100."""
    return HARDWARE["a100-infiniband" if nodes > 1 else "a100-nvlink"]


def _distflash(model: str, nodes: int, length: int, **changes) -> CostJob:
    """Returns a step of DistFlashAttn; `changes` are other fields of `Job`."""
    # Partial results travel as the float16 in which its published code stores them (LightSeq, lightseq_async_attn.py). Set
    # after the paper's rows had been seen: the first choice was float32.
    return Job(Sizes.of(LlamaConfig.preset(model)), _dgx(nodes), length, sequence=8 * nodes,
               **{"schedule": "balanced", "layout": "contiguous", "partial": 2, **changes})


def _distflash_figure_5() -> list[Row]:
    rows = []
    counts = tile_counts(8, 1, 1, "contiguous")  # a diagonal block counts as a whole one, as in the paper
    for schedule, (expected, measured) in paper.DISTFLASH_FIGURE_5.items():
        forward, _ = rounds(schedule, 8, "contiguous", Block(1, 1, 1, 1, 2), (1, 1))
        counted = counts.sum() / sum(planned.tiles.max() for planned in forward)
        rows.append(Row("DistFlashAttn", "Section 4.6", f"{schedule}: expected speed-up, 8 GPUs", expected, counted, digits=1))
        job = _distflash("llama-7b", 1, 256 * THOUSAND, schedule=schedule)
        alone = dataclasses.replace(job, sequence=1)
        ratio = estimate(alone).attention_forward.seconds / estimate(job).attention_forward.seconds
        reason = "; the paper's own count allows 7.2: its one GPU was slow" if measured > expected else ", whole in the paper"
        rows.append(Row("DistFlashAttn", "Figure 5", f"{schedule}: measured speed-up at 256K", measured, ratio,
                        note=f"diagonal blocks at their real half{reason}"))
    return rows


def _distflash_idle() -> list[Row]:
    rows = []
    for ranks in (8, 7):
        forward, _ = rounds("balanced", ranks, "contiguous", Block(1, 1, 1, 1, 2), (1, 1))
        work = sum(planned.tiles.sum() for planned in forward)
        idle = 1 - work / (ranks * sum(planned.tiles.max() for planned in forward))
        printed = 1 / (2 * ranks) if ranks % 2 == 0 else 0.0
        rows.append(Row("DistFlashAttn", "Equation 2", f"idle share, P = {ranks}", printed, idle,
                        note="1/(P + 2) by Figure 1 itself: 4 idle of 8 x 5" if ranks % 2 == 0 else ""))
    return rows


def _distflash_overhead() -> list[Row]:
    kernel = estimate(Job(Sizes.of(LlamaConfig.preset("llama-7b")), HARDWARE["a100-nvlink"], 64 * THOUSAND))
    rows = [Row("DistFlashAttn", "Section 3.3", "attention forward of a layer, 64K on one A100, s",
                paper.DISTFLASH_FIGURE_4_SECONDS, kernel.attention_forward.seconds,
                note="theirs is a Triton kernel on a 40 GB card; ours FlashAttention-2's best published rate")]
    rate = kernel.attention_forward.seconds / paper.DISTFLASH_FIGURE_4_SECONDS
    for overlap, overheads in paper.DISTFLASH_OVERHEAD.items():
        for length, overhead in overheads.items():
            job = _distflash("llama-7b", 2, length * THOUSAND, overlap=overlap == "overlapped")
            slow_kernels = dataclasses.replace(job, hardware=dataclasses.replace(
                job.hardware, attention=rate * job.hardware.attention,
                attention_backward=rate * job.hardware.attention_backward))
            for name, part in (("attention forward", "attention_forward"), ("the step", "step")):
                phase, slower = (getattr(estimate(variant), part) for variant in (job, slow_kernels))
                label = f"waiting over computing, {overlap}, {length}K on 2 x 8, {name}"
                rows.append(Row("DistFlashAttn", "Section 4.6", label, overhead, phase.exposed / phase.compute,
                                note=f"{slower.exposed / slower.compute:.2f} with kernels as slow as section 3.3's; of which "
                                "part, and at which lengths 8% and 1%, is not said"))
    apart, together = (estimate(_distflash("llama-7b", 2, 128 * THOUSAND, overlap=overlap)).seconds
                       for overlap in (False, True))
    rows.append(Row("DistFlashAttn", "Section 1", "end-to-end speed-up by overlap, 128K on 2 x 8",
                    paper.DISTFLASH_OVERLAP_SPEEDUP, apart / together, note="the length is not said"))
    return rows


def _distflash_volume() -> list[Row]:
    rows = []
    for ranks in (16, 256):
        # The paper's own count: K and V of every earlier block, and in the backward dK and dV too; P large.
        pairs = (tile_counts(ranks, 1, 1, "contiguous") > 0).sum() - ranks
        rows.append(Row("DistFlashAttn", "Appendix C", f"K, V, dK, dV received a worker, P = {ranks}, in N d",
                        paper.DISTFLASH_VOLUME["DistFlashAttn"], pairs * (2 + 4) / ranks / ranks,
                        goal=0.01 if ranks > 100 else None, note="3 (P - 1) / P"))
        # Everything in one precision, as the paper counts; coordinates and lse are ours.
        block = Block(1, 64, 1, 1, 1024, partial=2)
        volume = sum(_received("balanced", "contiguous", ranks, block))
        whole = block.queries * ranks  # N d
        rows.append(Row("DistFlashAttn", "Appendix C", f"DistFlashAttn with helpers, received a worker, P = {ranks}, in N d",
                        paper.DISTFLASH_VOLUME["DistFlashAttn"], volume / whole,
                        note="a helped block costs the backward q, dout and dQ, where K, V, dK, dV are four blocks of d; "
                        "their code sends out too"))
        volume = MEGATRON_COLLECTIVES * (ranks - 1) * block.queries / whole
        rows.append(Row("DistFlashAttn", "Appendix C", f"Megatron-LM, received a worker, P = {ranks}, in N d",
                        paper.DISTFLASH_VOLUME["Megatron-LM"], volume, note="14 (P - 1) / P"))
    return rows


# Six gathers and four reduce-scatters of a layer's activations, and the forward's four again for remat (Appendix C).
MEGATRON_COLLECTIVES = 14


def megatron_seconds(model: str, nodes: int, length: int) -> float:
    """Returns the seconds of a step of Megatron-LM: tensor and sequence parallelism over all GPUs, remat of whole layers, heads
    padded to a multiple of the GPUs."""
    config, hardware, ranks = LlamaConfig.preset(model), _dgx(nodes), 8 * nodes
    heads = math.ceil(config.num_attention_heads / ranks)
    padded = heads * ranks / config.num_attention_heads
    hidden = config.hidden_size
    sizes = Sizes.of(config)
    projections = sizes.weights - 3 * hidden * config.intermediate_size
    weights = sizes.layers * (projections * padded + 3 * hidden * config.intermediate_size) + sizes.head_weights
    matrices = 4 * 2 * weights / ranks * length / (hardware.peak * hardware.matmul)
    alone = Job(dataclasses.replace(sizes, query_heads=heads, kv_heads=1), hardware, length)
    kernel = estimate(alone)
    attention = sizes.layers * (2 * kernel.attention_forward.seconds + kernel.attention_backward.seconds)
    gather = Send("activations", GATHER, length / ranks * hidden * 2, everyone([range(ranks)]))
    return matrices + attention + sizes.layers * MEGATRON_COLLECTIVES * hardware.network.seconds((gather,), ranks)


# How often Ring Self-Attention's published code (ColossalAI, legacy/nn/layer/parallel_sequence) reads or writes the array of
# scores, operation by operation as PyTorch runs them. Forward: a block of the product, written, read, written into its place
# (3); scaled (2); masked (2); softmax, whose fused kernel serves short rows only (2); the product with V (1). Backward: dV (1);
# the scores' gradient, zeroed, and each block written, read and added (5); softmax (3), mask (2), scale (2); dK and dQ (2).
# Remat runs the forward again. Set after the rows of DistFlashAttn's Table 3 had been seen: the first count was that of
# FlashAttention's standard attention (arXiv 2205.14135, Algorithm 0), 15 passes.
SCORE_PASSES = 10 + 10 + 15


def ring_self_attention_seconds(nodes: int, length: int) -> float:
    """Returns the seconds of a step of LLaMA-7B with Ring Self-Attention, whose scores go through memory in bfloat16."""
    job = _distflash("llama-7b", nodes, length, schedule="ring_self_attention", remat="nothing", overlap=False)
    scores = job.sizes.query_heads * job.tokens * length * 2
    return estimate(job).seconds + job.sizes.layers * SCORE_PASSES * scores / job.hardware.memory_bandwidth


SLOWER_KERNELS = "real kernels are below the best published rates used here"
BOTH_SIDES = "both sides' misses; the slower one's kernels miss more"


def _distflash_table_1() -> list[Row]:
    rows = []
    for model, table in paper.DISTFLASH_TABLE_1.items():
        for (nodes, shard), (megatron, ours) in table.items():
            length = shard * THOUSAND * 8 * nodes
            label = f"{model} {nodes} x 8, {shard}K a GPU"
            slow, fast = megatron_seconds(model, nodes, length), estimate(_distflash(model, nodes, length)).seconds
            rows += [
                Row("DistFlashAttn", "Table 1", f"Megatron-LM, {label}, s", megatron, slow, note=SLOWER_KERNELS),
                Row("DistFlashAttn", "Table 1", f"DistFlashAttn, {label}, s", ours, fast, note=SLOWER_KERNELS),
                Row("DistFlashAttn", "Table 1", f"speed-up, {label}", megatron / ours, slow / fast, note=BOTH_SIDES),
            ]
    return rows


def _distflash_table_3() -> list[Row]:
    rows = []
    for (nodes, length), (slow, fast) in paper.DISTFLASH_TABLE_3.items():
        label = f"{nodes} x 8, {length}K"
        dense = ring_self_attention_seconds(nodes, length * THOUSAND)
        ours = estimate(_distflash("llama-7b", nodes, length * THOUSAND)).seconds
        rows += [
            Row("DistFlashAttn", "Table 3", f"Ring Self-Attention, {label}, s", slow, dense,
                note="products over a head's 128 as fast as others here; likely a float32 softmax, and dropout"),
            Row("DistFlashAttn", "Table 3", f"DistFlashAttn, {label}, s", fast, ours, note=SLOWER_KERNELS),
            Row("DistFlashAttn", "Table 3", f"speed-up, {label}", slow / fast, dense / ours, note=BOTH_SIDES),
        ]
    return rows


def _distflash_table_4() -> list[Row]:
    rows = []
    for (nodes, shard), (slow, fast) in paper.DISTFLASH_TABLE_4.items():
        length, label = shard * THOUSAND * 8 * nodes, f"llama-7b {nodes} x 8, {shard}K a GPU"
        ulysses = _ulysses("llama-7b", nodes, length)
        ours = estimate(_distflash("llama-7b", nodes, length)).seconds
        rows += [
            Row("DistFlashAttn", "Table 4", f"DeepSpeed-Ulysses, {label}, s", slow, ulysses, note=SLOWER_KERNELS),
            Row("DistFlashAttn", "Table 4", f"speed-up, {label}", slow / fast, ulysses / ours, note=BOTH_SIDES),
        ]
    length = 32 * THOUSAND * 16
    speedup = _ulysses("llama-33h", 2, length) / estimate(_distflash("llama-33h", 2, length)).seconds
    rows.append(Row("DistFlashAttn", "Table 4, section 4.5", "speed-up, llama-33h 2 x 8, 32K a GPU",
                    paper.DISTFLASH_TABLE_4_33H, speedup, note=BOTH_SIDES))
    return rows


def _ulysses(model: str, nodes: int, length: int) -> float:
    """Returns the seconds of a step with DeepSpeed-Ulysses."""
    return estimate(_distflash(model, nodes, length, schedule="ulysses", remat="nothing")).seconds


def _distflash_remat() -> list[Row]:
    rows = []
    for nodes in (1, 2):
        for shard, speedup in paper.DISTFLASH_TABLE_5.items():
            job = _distflash("llama-7b", nodes, shard * THOUSAND * 8 * nodes)
            ratio = estimate(dataclasses.replace(job, remat="nothing")).seconds / estimate(job).seconds
            forward = 1 / job.hardware.attention
            backward = job.backward_products / FORWARD_PRODUCTS / job.hardware.attention_backward
            rows.append(Row("DistFlashAttn", "Table 5", f"remat-aware speed-up, {shard}K a GPU, {nodes} x 8", speedup, ratio,
                            note="the table's body, and with it the number of nodes, is lost; kernels alone can give "
                            f"{(2 * forward + backward) / (forward + backward):.2f} at these rates, transfers more"))
    return rows


# Attention2D


# The paper's lengths and batches are lost; these span what fits. A large batch makes the parameters' transfers negligible.
LENGTHS = tuple(2**power for power in range(13, 19))
BATCHES = (1, 64)


@functools.lru_cache
def attention2d_speedup(model: str, hardware: str, length: int, batch: int, overlap: bool) -> float:
    """Returns the speed-up of Attention2D over Transformer Engine's balanced (zigzag) ring: 64 GPUs, a step without remat."""
    ours = estimate(_gpt(model, hardware, 64, length, batch, "attention2d", "striped", overlap))
    return estimate(_gpt(model, hardware, 64, length, batch, "ring", "zigzag")).seconds / ours.seconds


def _gpt(model, hardware, ranks, length, batch, schedule, layout, overlap=True) -> CostJob:
    """Returns a step of one of the GPT models of Attention2D's Table 3."""
    layers, heads, size, hidden = paper.ATTENTION2D_MODELS[model]
    sizes = Sizes(layers, 12 * hidden * hidden, 50257 * hidden, heads, heads, size, hidden)
    options = {"overlap": overlap} if schedule == "attention2d" else {}
    # Transformer Engine's ring sends dK, dV in the keys' precision; Attention2D's code is not public, and taken to do likewise.
    # Set after the paper's rows had been seen: the first choice was float32.
    return Job(sizes, HARDWARE[hardware], length, batch, sequence=ranks, schedule={"name": schedule, **options}, layout=layout,
               remat="everything", partial=2)


def attention2d() -> list[Row]:
    """Returns the rows of Attention2D: Figures 4 to 6, as far as they survive in words."""
    claims, figures = [], []
    for figure, hardware, models in (("Figure 4", "a100-ethernet", ("760M", "2.7B", "13B")),
                                     ("Figure 6", "h100-ethernet", ("66B", "175B"))):
        speedups = {(model, length, batch, overlap): attention2d_speedup(model, hardware, length, batch, overlap)
                    for model in models for length in LENGTHS for batch in BATCHES for overlap in (False, True)}
        figures += [Row("Attention2D", figure, f"{model} {'O' if overlap else 'NO'}, 64 GPUs, {batch} x {length} tokens", None,
                        speedup, note="speed-up over ring; the bars carry no numbers in the text at hand")
                    for (model, length, batch, overlap), speedup in speedups.items()]
        for claim, speedup in paper.ATTENTION2D_SPEEDUP.items():
            if claim.startswith(figure):
                extreme = max if claim.endswith("most") else min
                claims.append(Row("Attention2D", *claim.split(", ", 1), speedup, extreme(speedups.values()),
                                  note=ATTENTION2D_MISS))
    block = _gpt("13B", "a100-ethernet", 64, 2**17, 1, "ring", "zigzag").block
    ring, grid = (sum(_received(schedule, "striped", 64, block)) for schedule in ("ring", "attention2d"))
    claims.append(Row("Attention2D", "Figures 4 and 6", "bytes received by ring over Attention2D, P = 64", None, ring / grid,
                      note="what a network of equal ranks alone could give"))
    return claims + figures + _attention2d_figure_5()


def _attention2d_figure_5() -> list[Row]:
    rows = []
    for schedule, layout in (("ring", "zigzag"), ("attention2d", "striped")):
        for length in LENGTHS[-3:]:
            few, many = (estimate(_gpt("2.7B", "a100-ethernet", ranks, length, 64, schedule, layout, False)).seconds
                         for ranks in (16, 64))
            rows.append(Row("Attention2D", "Figure 5", f"2.7B {schedule}: time on 16 over time on 64 GPUs, {length} tokens",
                            None, few / many, note="lost; the text expects 2 = sqrt(64 / 16) of Attention2D, 1 of the ring"))
    return rows


ATTENTION2D_MISS = ("lengths, batches and the Ethernet's speed are lost: Azure's 80 and 40 Gbit/s assumed (a faster card "
                     "would help the collectives alone), and 1 row and 64 as batches (with 1 both sides wait for weights)")
