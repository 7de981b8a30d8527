"""The step that bench_step compares with: transformers and torch, on a CPU or GPU."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time

import numpy as np

from model.config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class TorchOptions:
    """Options of torch's step.

    Attributes:
      attention: transformers' attn_implementation: sdpa, flex_attention, ...
      recompute: whether layers are recomputed (gradient checkpointing).
      liger: whether Liger's kernels replace norms, rotary embedding, feed-forward and loss (the
        package liger-kernel).
      compile: whether the model is compiled with torch.compile.
      weights: `float32`, with products in bfloat16 on a GPU (autocast), or `bfloat16`: weights,
        moments and products.
    """

    attention: str = "sdpa"
    recompute: bool = False
    liger: bool = False
    compile: bool = False
    weights: str = "float32"


def torch_step(
    config: TransformerConfig, lengths: list[int], steps: int, options: TorchOptions
) -> dict:
    """Times steps (forward, backward, clipping, AdamW) on one row, with random weights and tokens.

    Args:
      config: the model's shape.
      lengths: tokens of each document in the row.
      steps: steps after the first, which differs from the others.

    Returns:
      `seconds` of each step, the last `loss`, the GPU's peak memory `device_gib` after the first
      step (None on a CPU), `device`, and the packages' `versions`.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch_model(config, options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    forward = torch.compile(model) if options.compile else model
    tokens = torch.from_numpy(
        np.random.default_rng(0).integers(0, config.vocab_size, (1, sum(lengths)))
    ).to(device)
    inputs = {}
    if len(lengths) > 1:  # transformers recognizes a packed row's documents by their positions
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None].to(
            device
        )
    mixed = device == "cuda" and options.weights == "float32"
    seconds = []
    for step in range(steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            loss = forward(tokens, labels=tokens, use_cache=False, **inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        last_loss = float(loss)  # waits for the device
        seconds.append(time.perf_counter() - start)
        if device == "cuda" and step == 0:
            torch.cuda.reset_peak_memory_stats()
    return {"seconds": seconds, "loss": last_loss, **torch_facts()}


def torch_facts(*packages: str) -> dict:
    """Returns the device's name, its peak memory since the last reset (None on a CPU), and the
    versions of torch, transformers and `packages`."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "device_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", *packages)
        },
    }


def torch_model(config: TransformerConfig, options: TorchOptions, device: str):
    """Returns transformers' model with random weights on the device, in training mode."""
    import torch
    import transformers

    written = {**config.to_hf(), "attn_implementation": options.attention}
    if options.liger:
        import liger_kernel.transformers

        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{written['model_type']}")()
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, options.weights))
    try:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(**written)
            ).train()
    finally:
        torch.set_default_dtype(default)
    if options.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
