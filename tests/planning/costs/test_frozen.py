"""The cost model with adapters: no gradients of frozen weights, gathers of codes, and the cost of
dequantizing them."""

import dataclasses

import pytest

from model.config import TransformerConfig
from planning.costs import HARDWARE
from planning.costs.step import Sizes, TrainingStep, estimate
from planning.plan import Job
from trainer.config.schema import AdapterConfig, MeshConfig

SIZES = Sizes.of(TransformerConfig.preset("llama-3.1-8b"))
ONE_DEVICE = TrainingStep(
    SIZES, HARDWARE["h100-infiniband"], 131072, schedule="local", remat="offload"
)


def test_a_frozen_weight_saves_one_product_and_the_update():
    """By hand, on one device: saves 2 FLOPs per token and matrix weight, and AdamW's 28 bytes per
    weight; the MFU counts 4 FLOPs per weight instead of 6."""
    trained, frozen = estimate(ONE_DEVICE), estimate(dataclasses.replace(ONE_DEVICE, frozen=True))
    matrices = SIZES.layers * SIZES.weights + SIZES.head_weights
    hardware = ONE_DEVICE.hardware
    saved = (
        2 * matrices * ONE_DEVICE.length / (hardware.peak * hardware.matmul)
        + 28 * SIZES.parameters / hardware.memory_bandwidth
    )
    assert trained.seconds - frozen.seconds == pytest.approx(saved)
    pairs = ONE_DEVICE.length * (ONE_DEVICE.length + 1) / 2
    needed = (
        4 * matrices * ONE_DEVICE.length
        + 12 * SIZES.layers * SIZES.query_heads * SIZES.head_dim * pairs
    )
    assert frozen.mfu == pytest.approx(needed / frozen.seconds / hardware.peak)


def test_codes_are_gathered_quantized_and_dequantized_in_every_pass():
    """Eight GPUs without overlap: a layer's gather takes 0.258 of bfloat16's time except for
    latencies, and three passes per layer with remat dequantize it, each reading codes and writing
    bfloat16."""
    plain = dataclasses.replace(ONE_DEVICE, sequence=8, schedule="ring", frozen=True, overlap=False)
    codes = dataclasses.replace(
        plain, weight_bytes=AdapterConfig(rank=1, quantize="nf4").number_bytes
    )

    def gather(job):
        return estimate(job).layer_forward.exposed - estimate(job).attention_forward.exposed

    assert 0.257 < gather(codes) / gather(plain) <= 0.30
    dequantized = dataclasses.replace(
        ONE_DEVICE, frozen=True, weight_bytes=33 / 64, dequantizations=2
    )
    added = (
        estimate(dequantized).seconds
        - estimate(dataclasses.replace(dequantized, dequantizations=0)).seconds
    )
    moved = 3 * 2 * SIZES.layers * SIZES.weights * (33 / 64 + 2)
    assert added == pytest.approx(moved / ONE_DEVICE.hardware.memory_bandwidth)


def test_a_job_passes_its_adapter_to_the_cost_model():
    """LoRA is estimated to be faster than training all weights, and QLoRA to gather less."""
    jobs = {
        quantize: Job.of(
            "llama-3.1-8b",
            "h100:8",
            131072,
            mesh=MeshConfig(sequence=8),
            adapter=AdapterConfig(rank=16, quantize=quantize),
        )
        for quantize in ("none", "nf4")
    }
    whole = Job.of("llama-3.1-8b", "h100:8", 131072, mesh=MeshConfig(sequence=8))
    assert jobs["none"].estimate().seconds < whole.estimate().seconds
    assert (
        jobs["nf4"].training_step().weight_bytes == 33 / 64
        and jobs["nf4"].training_step().dequantizations > 0
    )
    assert (
        jobs["none"].training_step().dequantizations == 0 == whole.training_step().dequantizations
    )
