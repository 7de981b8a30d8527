"""Builds a run's model on its mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from model.agentic import AgenticTransformer, TrajectorySizes
from model.attention import Mask
from model.attention.kernels import get_kernel
from model.attention.schedules import get_schedule
from model.attention.schedules.plan import Block
from model.attention.schedules.window import window_lines
from model.config import TransformerConfig
from model.language_model import LanguageModel
from model.sharding import STORAGE_AXES, TensorParallel

from .config.schema import RunConfig
from .huggingface.peft import check_train


def build_language_model(
    config: RunConfig,
    model_config: TransformerConfig,
    mesh: Mesh,
    storage_axes: tuple[str, ...] = STORAGE_AXES,
    allow_any_train: bool = False,
) -> LanguageModel:
    """Returns a model of this shape with the run's adapters.

    The sections `attention`, `memory`, `model` and `mesh` determine how it is computed.

    Args:
      storage_axes: mesh axes that parameters are split over; () keeps a copy on each device.
      allow_any_train: whether `adapter.train` may name modules that PEFT's format does not hold, as
        in checkpoints of earlier versions.

    Raises:
      ValueError: options contradict each other, the model or the mesh.
    """
    model_config = model_config.with_adapter(config.adapter)
    if model_config.adapter is not None and not allow_any_train:
        check_train(model_config)
    return LanguageModel(
        model_config, mesh, storage_axes=storage_axes, **_options(config, model_config, mesh)
    )


def build_agentic(
    config: RunConfig,
    model_config: TransformerConfig,
    mesh: Mesh,
    sizes: TrajectorySizes,
    storage_axes: tuple[str, ...] = STORAGE_AXES,
) -> AgenticTransformer:
    """Returns a trajectory model for states and actions of these sizes; see above."""
    return AgenticTransformer(
        model_config,
        mesh,
        storage_axes=storage_axes,
        sizes=sizes,
        **_options(config, model_config, mesh),
    )


def _options(config: RunConfig, model_config: TransformerConfig, mesh: Mesh) -> dict[str, Any]:
    """Returns a Transformer's options by field name; the window is the model's by default."""
    attention = config.attention
    return {
        "schedule": get_schedule(
            attention.schedule, mesh.shape.get("sequence", 1), attention.layout
        ),
        "kernel": get_kernel(
            attention.kernel,
            query_tile=attention.query_tile,
            key_tile=attention.key_tile,
            backward=attention.backward,
        ),
        "dtype": jnp.dtype(config.model.compute_dtype),
        "memory": config.memory,
        "sequence_parallel": config.mesh.sequence_parallel,
        "mask": _mask(config, model_config),
    }


def _mask(config: RunConfig, model_config: TransformerConfig) -> Mask:
    """Returns the mask of all layers. Raises ValueError for global tokens without a window."""
    attention = config.attention
    mask = Mask(
        window=attention.window or model_config.common_window, global_tokens=attention.global_tokens
    )
    if mask.global_tokens and all(
        mask.within(kind.window).window is None for kind in model_config.layer_kinds
    ):
        raise ValueError(
            f"attention.global_tokens is {mask.global_tokens}; the model has no window, so every "
            "token is visible already; set attention.window, or use 0"
        )
    return mask


def layer_masks(config: RunConfig, model_config: TransformerConfig) -> tuple[Mask, ...]:
    """Returns the mask of each kind of layer, in their repeating order; raises as `_mask`."""
    mask = _mask(config, model_config)
    return tuple(mask.within(kind.window) for kind in model_config.layer_kinds)


def run_notes(config: RunConfig, model_config: TransformerConfig) -> list[str]:
    """Returns lines on what the run's mesh, schedule and layout cost this model beyond its sizes:
    padded heads, replicated computation, and unused savings of a sliding window.
    """
    adapted = model_config.with_adapter(config.adapter)
    return [
        *_tensor_notes(TensorParallel.of(adapted, config.mesh.tensor), model_config),
        *_window_notes(config, model_config),
    ]


def _tensor_notes(parallel: TensorParallel, model_config: TransformerConfig) -> Iterator[str]:
    """Yields lines on what `tensor` does not divide."""
    tensor, query = parallel.tensor, model_config.num_attention_heads
    if parallel.query_heads > query:
        key = model_config.num_key_value_heads
        yield (
            f"mesh.tensor: {tensor} does not divide {key} key/value heads: padded {key} -> "
            f"{parallel.key_heads}, and the query heads {query} -> {parallel.query_heads}, "
            f"exported as {key} and {query}; attention takes {parallel.query_heads / query:.3g} "
            "times the work"
        )
    elif not parallel.heads:
        yield f"mesh.tensor: {tensor} does not divide {query} heads: every device computes them all"
    if not parallel.mlp:
        widths = ", ".join(f"{width:,}" for width in model_config.feed_forward_widths)
        yield (
            f"mesh.tensor: {tensor} does not divide the feed-forward width {widths}: every device "
            "computes all of it"
        )


def shares_prompts(config: RunConfig, model_config: TransformerConfig) -> bool:
    """Returns whether the completions of a pair share one computed prompt: only if no layer has a
    window, since windows count tokens of a row."""
    masks = layer_masks(config, model_config)
    wanted = config.preference.loss is not None and config.preference.share_prompts
    return wanted and all(mask.window is None for mask in masks)


def _window_notes(config: RunConfig, model_config: TransformerConfig) -> list[str]:
    """Returns lines on what a sliding window does not save under the run's schedule; see
    `window_lines`."""
    masks = layer_masks(config, model_config)
    attention, size, tensor = config.attention, config.mesh.sequence, config.mesh.tensor
    block = Block(
        batch=1,
        tokens=config.data.context_length // size,
        query_heads=-(-model_config.num_attention_heads // tensor),
        kv_heads=-(-model_config.num_key_value_heads // tensor),
        head_dim=model_config.head_dim,
        itemsize=jnp.dtype(config.model.compute_dtype).itemsize,
        coordinates=3 if attention.global_tokens else 2,
    )
    return window_lines(attention.schedule, attention.layout, size, block, masks)
