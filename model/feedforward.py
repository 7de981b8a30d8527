"""The SwiGLU feed-forward and RMS normalisations, as Flax modules on whole (or tensor-split)
weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, UInt32

from .adapter import PROJECTIONS
from .config import TransformerConfig
from .dropout import TokenInfo, kept
from .frozen import FrozenWeight
from .linear import letters, product
from .sharding import TensorParallel

Shape = tuple[int, ...]
Axes = tuple[str, ...]
# The tokens' numbers within a layer, for dropout's masks; None without dropout.
DropoutKeys = UInt32[Array, "B T"] | None
# A feed-forward's auxiliary results by name: float32 sums over a device's tokens, of any shape and
# with gradient, for auxiliary losses (`Transformer.auxiliary_losses`). Equal on all tensor ranks.
Auxiliary = dict[str, Float[Array, "..."]]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


# The stages of a layer that read a parameter: queries; keys and values; and what follows attention.
QUERIES, KEYS_VALUES, ATTENTION, OUTPUT = STAGES = (
    "queries",
    "keys_values",
    "attention",
    "output",
)


def param(
    rngs: nnx.Rngs, shape: Shape, axes: Axes, std: float, inputs: int | None = 1, **declared: Any
) -> nnx.Param:
    """Returns a normally distributed float32 parameter; `axes`, `inputs` and `declared` are as in
    `sharding.Parameter`."""
    return nnx.Param(
        std * jax.random.normal(rngs.params(), shape, jnp.float32),
        axes=axes,
        inputs=inputs,
        **declared,
    )


class Projection(nnx.Module):
    """A linear map, given by an einsum equation whose weight is input-first, and its low-rank
    adapter, if any.

    The bias, if any, is added after the tensor ranks' sum. The adapter's products commute with that
    sum: ranks that split the inputs split A, otherwise B. DoRA's factors, one per output, commute
    with it too.
    """

    def __init__(
        self,
        equation: str,
        shape: Shape,
        axes: Axes,
        std: float,
        bias_shape: Shape | None = None,
        bias_axes: Axes | None = None,
        *,
        name: str,
        stage: str,
        config: TransformerConfig,
        rngs: nnx.Rngs,
    ):
        self.equation, self.name, self.adapter = equation, name, config.adapter_of(name)
        x_axes, w_axes, _ = letters(equation)
        self.inputs = inputs = len(set(x_axes) & set(w_axes))
        stages = (stage,)
        self.weight = param(rngs, shape, axes, std, inputs, stages=stages)
        if bias_shape is not None:
            self.bias = nnx.Param(jnp.zeros(bias_shape, jnp.float32), axes=bias_axes, stages=stages)
        self.input_axes = axes[:inputs]
        adapter = self.adapter
        if adapter is not None:
            # Zeros here; `parameters.draw_adapters` draws A.
            self.lora_A = nnx.Param(
                jnp.zeros((*shape[:inputs], adapter.rank), jnp.float32),
                axes=(*axes[:inputs], "rank"),
                inputs=inputs,
                stages=stages,
            )
            self.lora_B = nnx.Param(
                jnp.zeros((adapter.rank, *shape[inputs:]), jnp.float32),
                axes=("rank", *axes[inputs:]),
                inputs=1,
                stages=stages,
            )
            if adapter.use_dora:  # `ModelParameters.init_magnitudes` sets them
                self.lora_magnitude_vector = nnx.Param(
                    jnp.ones(shape[inputs:], jnp.float32), axes=axes[inputs:], stages=stages
                )

    def __call__(
        self, x: Float[Array, ...], parallel: TensorParallel, dropout: DropoutKeys = None
    ) -> Float[Array, ...]:
        """Returns the product with the weight plus the adapter's products, without the bias.

        Args:
          dropout: the tokens' numbers within the layer, in training with dropout (`model.dropout`).
        """
        y = product(self.equation, x, self.weight.get_value())
        if self.adapter is None:
            return y
        x_axes, w_axes, y_axes = letters(self.equation)
        scale, adapter_x = self.adapter.scale, x
        if dropout is not None:
            adapter_x = self._dropped(x, parallel, dropout)
            scale /= 1 - self.adapter.dropout_rate
        low = product(f"{x_axes},{w_axes[: self.inputs]}r->btr", adapter_x, self.lora_A[...])
        added = scale * product(f"btr,r{w_axes[self.inputs :]}->{y_axes}", low, self.lora_B[...])
        adapted = y + added
        if not self.adapter.use_dora:
            return adapted
        norms = self.norms(parallel, x.dtype)
        # A column of zeros, as in a padded head, stays zero.
        factors = jnp.where(
            norms > 0, self.lora_magnitude_vector[...] / jnp.where(norms > 0, norms, 1), 0
        )
        if dropout is None:
            return (adapted * factors).astype(y.dtype)
        # As in peft: DoRA's addition to W x reads the dropped input, even in its product with W.
        base = product(self.equation, adapter_x, self.weight.get_value())
        return (
            y + (factors - 1) / (1 - self.adapter.dropout_rate) * base + factors * added
        ).astype(y.dtype)

    def _dropped(
        self, x: Float[Array, ...], parallel: TensorParallel, dropout: UInt32[Array, "B T"]
    ) -> Float[Array, ...]:
        """Returns x with zeros where dropout drops it; a rank with part of the features drops the
        same ones as a single device."""
        assert self.adapter is not None
        axis = self.input_axes[0]
        split = parallel.tensor > 1 and axis in ("heads", "mlp") and getattr(parallel, axis)
        first = parallel.rank() * math.prod(x.shape[2:]) if split else 0
        return kept(x, dropout, self.adapter.dropout_rate, PROJECTIONS.index(self.name), first)

    def norms(self, parallel: TensorParallel, dtype: Any) -> Float[Array, ...]:
        """Returns the length of each output's column of W + s A B over all inputs, without gradient
        (Liu et al., DoRA, arXiv 2402.09353, section 4.3), rounded to the compute dtype like the
        trained lengths.

        A B is not formed: with w, a and b for the columns, |w + s A b|^2 = |w|^2 + 2 s b . (A^T w)
        + s^2 b . (A^T A) b.
        """
        assert self.adapter is not None
        w_axes = letters(self.equation)[1]
        weight = self.weight.get_value()
        a = self.lora_A[...]
        b = self.lora_B[...]
        w_in, w_out, scale = w_axes[: self.inputs], w_axes[self.inputs :], self.adapter.scale
        dense = weight.dequantize(dtype) if isinstance(weight, FrozenWeight) else weight
        # A product, not a sum of squares, which would be a float32 copy of the weight if not fused.
        squares = jnp.einsum(
            f"{w_axes},{w_axes}->{w_out}", dense, dense, preferred_element_type=jnp.float32
        )
        across = product(f"{w_in}r,{w_axes}->r{w_out}", a.astype(dtype), weight, jnp.float32)
        flat = a.reshape(-1, self.adapter.rank)
        low = jnp.tensordot(flat.T @ flat, b, 1)
        squares += jnp.sum(b * (2 * scale * across + scale * scale * low), 0)
        for axis in {"heads", "mlp"} & set(self.input_axes):
            squares = parallel.sum(squares, axis)
        norms = jnp.sqrt(jnp.maximum(squares, 0)).astype(dtype).astype(jnp.float32)
        return lax.stop_gradient(norms)

    def add_bias(self, y: Float[Array, ...]) -> Float[Array, ...]:
        """Returns y with the bias added in float32, in y's dtype."""
        return (y + self.bias[...]).astype(y.dtype) if hasattr(self, "bias") else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(
    x: Float[Array, "... E"], weight: Float[Array, " E"], epsilon: float
) -> Float[Array, "... E"]:
    """Returns x / rms(x) * weight over the last axis, computed in float32, in x's dtype."""
    x32 = x.astype(jnp.float32)
    return (x32 * _inverse_rms(x32, epsilon) * weight).astype(x.dtype)


def _inverse_rms(x: Float[Array, "... E"], epsilon: float) -> Float[Array, "... 1"]:
    return lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + epsilon)


def _rms_norm_forward(x, weight, epsilon):
    return rms_norm(x, weight, epsilon), (x, weight)


def _rms_norm_backward(epsilon, residuals, dy):
    """Returns dx and dw. Written out because XLA's CPU compiler is slow at sums with fused
    products: on two cores the automatic derivatives of SmolLM2's norms took a tenth of its step
    (docs/notes/cpu_speed.md)."""
    x, weight = residuals
    x32, dy32 = x.astype(jnp.float32), dy.astype(jnp.float32)
    inverse = _inverse_rms(x32, epsilon)
    dnorm = dy32 * weight
    # A product of vectors, for which the CPU compiler has fast code; other compilers make it a sum.
    across = (
        jnp.einsum("...e,...e->...", dnorm, x32, precision=lax.Precision.HIGHEST)[..., None]
        / x.shape[-1]
    )
    dx = inverse * (dnorm - x32 * (jnp.square(inverse) * across))
    dw = jnp.sum(dy32 * (x32 * inverse), range(x.ndim - 1))
    return dx.astype(x.dtype), dw.astype(weight.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def scaled_norm(
    x: Float[Array, "... E"], weight: Float[Array, " E"], config: TransformerConfig
) -> Float[Array, "... E"]:
    """Returns `rms_norm` with the model's epsilon and a weight that may be stored minus an offset
    (Gemma's is 1)."""
    return rms_norm(
        x, weight + config.norm_offset if config.norm_offset else weight, config.rms_norm_eps
    )


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation of the hidden axis, in some stages of a layer."""

    def __init__(self, config: TransformerConfig, *stages: str):
        self.config = config
        weight = jnp.full((config.hidden_size,), 1 - config.norm_offset, jnp.float32)
        self.weight = nnx.Param(weight, axes=("norm",), stages=stages)

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        return scaled_norm(x, self.weight[...], self.config)


class HeadNorm(nnx.Module):
    """Root-mean-square normalisation of each head, with one weight for all."""

    needs_all_heads = False

    def __init__(self, config: TransformerConfig, heads: int, axis: str, stage: str):
        self.config = config
        weight = jnp.full((config.head_dim,), 1 - config.norm_offset, jnp.float32)
        self.weight = nnx.Param(weight, axes=("head_dim",), stages=(stage,))

    def __call__(
        self, x: Float[Array, "B T H D"], parallel: TensorParallel
    ) -> Float[Array, "B T H D"]:
        """Returns this tensor rank's heads, normalised."""
        return scaled_norm(x, self.weight[...], self.config)


class AllHeadsNorm(nnx.Module):
    """Root-mean-square normalisation of all heads together, with a weight per element (OLMo 2)."""

    needs_all_heads = True

    def __init__(self, config: TransformerConfig, heads: int, axis: str, stage: str):
        self.epsilon, self.axis, self.heads = config.rms_norm_eps, axis, heads
        self.weight = nnx.Param(
            jnp.ones((heads, config.head_dim), jnp.float32),
            axes=(axis, "head_dim"),
            stages=(stage,),
        )

    def __call__(
        self, x: Float[Array, "B T H D"], parallel: TensorParallel
    ) -> Float[Array, "B T H D"]:
        """Returns this tensor rank's heads, normalised over all ranks' heads without padding."""
        x32 = x.astype(jnp.float32)
        squares = parallel.sum_of_heads(jnp.sum(jnp.square(x32), (2, 3), keepdims=True), self.axis)
        return (
            x32 * lax.rsqrt(squares / (self.heads * x.shape[-1]) + self.epsilon) * self.weight[...]
        ).astype(x.dtype)


# The norm of queries and keys before RoPE, by `TransformerConfig.qk_norm`.
QK_NORMS: dict[str, type[HeadNorm] | type[AllHeadsNorm] | None] = {
    "none": None,
    "head": HeadNorm,
    "all": AllHeadsNorm,
}


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)); the width F, intermediate_size unless given, is split over
    `tensor`."""

    def __init__(self, config: TransformerConfig, width: int | None = None, *, rngs: nnx.Rngs):
        self.activation = ACTIVATIONS[config.activation]
        hidden, std = config.hidden_size, config.initializer_range
        width = width or config.intermediate_size
        width_bias = ((width,), ("mlp",)) if config.mlp_bias else ()
        hidden_bias = ((hidden,), ("norm",)) if config.mlp_bias else ()
        inward = ("bte,ef->btf", (hidden, width), ("embed", "mlp"), std, *width_bias)
        outward = ("btf,fe->bte", (width, hidden), ("mlp", "embed"), std, *hidden_bias)
        projection = functools.partial(Projection, stage=OUTPUT, config=config, rngs=rngs)
        self.gate_proj = projection(*inward, name="gate_proj")
        self.up_proj = projection(*inward, name="up_proj")
        self.down_proj = projection(*outward, name="down_proj")

    def __call__(
        self, x: Float[Array, "B T E"], parallel: TensorParallel, labels: TokenInfo
    ) -> tuple[Float[Array, "B T E"], Auxiliary]:
        """Returns the feed-forward of normalised hidden states, summed over the tensor ranks, and
        no auxiliary sums."""
        down = self.summand(parallel.whole(x), parallel, labels.dropout)
        return self.down_proj.add_bias(parallel.combine(down, "mlp")), {}

    def summand(
        self, x: Float[Array, "B T E"], parallel: TensorParallel, dropout: DropoutKeys = None
    ) -> Float[Array, "B T E"]:
        """Returns this tensor rank's summand, without the last bias."""
        gate = self.gate_proj.add_bias(self.gate_proj(x, parallel, dropout))
        up = self.up_proj.add_bias(self.up_proj(x, parallel, dropout))
        return self.down_proj(self.activation(gate) * up, parallel, dropout)
