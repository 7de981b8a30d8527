"""The SwiGLU feed-forward and RMS normalisations, as Flax modules on whole (or tensor-split) weights."""
from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from .adapter import AdapterConfig
from .config import LlamaConfig
from .memory.chunked import letters, product
from .sharding import Parallel

Shape = tuple[int, ...]
Axes = tuple[str, ...]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


def param(rngs: nnx.Rngs, shape: Shape, axes: Axes, std: float) -> nnx.Param:
    """Returns a normally distributed float32 parameter with its logical axes."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


class Projection(nnx.Module):
    """A linear map, given by an einsum equation whose weight has its inputs first, and the low-rank adapter beside it, if any.

    The bias, if any, is added after the tensor ranks' sum. The adapter's products commute with that sum: where the ranks split
    the inputs they split A, otherwise B.
    """

    def __init__(self, equation: str, shape: Shape, axes: Axes, std: float, bias_shape: Shape | None = None,
                 bias_axes: Axes | None = None, *, adapter: AdapterConfig | None = None, rngs: nnx.Rngs):
        self.equation, self.adapter = equation, adapter
        self.weight = param(rngs, shape, axes, std)
        if bias_shape is not None:
            self.bias = nnx.Param(jnp.zeros(bias_shape, jnp.float32), axes=bias_axes)
        if adapter is not None:
            x_axes, w_axes, _ = letters(equation)
            inputs = len(set(x_axes) & set(w_axes))
            # Zeros here; `modules.init_adapters` draws A.
            self.lora_A = nnx.Param(jnp.zeros((*shape[:inputs], adapter.rank), jnp.float32), axes=(*axes[:inputs], "rank"))
            self.lora_B = nnx.Param(jnp.zeros((adapter.rank, *shape[inputs:]), jnp.float32), axes=("rank", *axes[inputs:]))

    def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
        """Returns the product with the weight, and the adapter's products beside it, without the bias."""
        y = product(self.equation, x, self.weight.get_value())
        if self.adapter is None:
            return y
        x_axes, w_axes, y_axes = letters(self.equation)
        inputs = len(set(x_axes) & set(w_axes))
        low = product(f"{x_axes},{w_axes[:inputs]}r->btr", x, self.lora_A[...])
        return y + self.adapter.scale * product(f"btr,r{w_axes[inputs:]}->{y_axes}", low, self.lora_B[...])

    def add_bias(self, y: Float[Array, ...]) -> Float[Array, ...]:
        """Returns y with the bias added in float32, in y's dtype."""
        return (y + self.bias[...]).astype(y.dtype) if hasattr(self, "bias") else y


def rms_norm(x: Float[Array, "... E"], weight: Float[Array, " E"], epsilon: float) -> Float[Array, "... E"]:
    """Returns x / rms(x) * weight over the last axis, computed in float32, in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + epsilon)
    return (x32 * weight).astype(x.dtype)


def scaled_norm(x: Float[Array, "... E"], weight: Float[Array, " E"], config: LlamaConfig) -> Float[Array, "... E"]:
    """Returns `rms_norm` with the model's epsilon, by a weight that may be stored without its offset (Gemma's is 1)."""
    return rms_norm(x, weight + config.norm_offset if config.norm_offset else weight, config.rms_norm_eps)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation of the hidden axis."""

    def __init__(self, config: LlamaConfig):
        self.config = config
        self.weight = nnx.Param(jnp.full((config.hidden_size,), 1 - config.norm_offset, jnp.float32), axes=("norm",))

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        return scaled_norm(x, self.weight[...], self.config)


class HeadNorm(nnx.Module):
    """Root-mean-square normalisation of each head, with one weight for all."""

    def __init__(self, config: LlamaConfig):
        self.config = config
        self.weight = nnx.Param(jnp.full((config.head_dim,), 1 - config.norm_offset, jnp.float32), axes=("head_dim",))

    def __call__(self, x: Float[Array, "B T H D"]) -> Float[Array, "B T H D"]:
        return scaled_norm(x, self.weight[...], self.config)


class AllHeadsNorm(nnx.Module):
    """Root-mean-square normalisation of all heads together, with a weight for each number (OLMo 2)."""

    def __init__(self, config: LlamaConfig, heads: int, axis: str):
        self.epsilon, self.axis = config.rms_norm_eps, axis
        self.weight = nnx.Param(jnp.ones((heads, config.head_dim), jnp.float32), axes=(axis, "head_dim"))

    def __call__(self, x: Float[Array, "B T H D"], parallel: Parallel, heads: int) -> Float[Array, "B T H D"]:
        """Returns this tensor rank's heads, normalised by those of all ranks; `heads` counts these without padding."""
        x32 = x.astype(jnp.float32)
        squares = parallel.sum_of_heads(jnp.sum(jnp.square(x32), (2, 3), keepdims=True), self.axis)
        return (x32 * lax.rsqrt(squares / (heads * x.shape[-1]) + self.epsilon) * self.weight[...]).astype(x.dtype)


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)); the width F is split over `tensor`."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.activation = ACTIVATIONS[config.activation]
        hidden, width, std = config.hidden_size, config.intermediate_size, config.initializer_range
        width_bias = ((width,), ("mlp",)) if config.mlp_bias else ()
        hidden_bias = ((hidden,), ("norm",)) if config.mlp_bias else ()
        self.gate_proj = Projection("bte,ef->btf", (hidden, width), ("embed", "mlp"), std, *width_bias,
                                    adapter=config.adapter_of("gate_proj"), rngs=rngs)
        self.up_proj = Projection("bte,ef->btf", (hidden, width), ("embed", "mlp"), std, *width_bias,
                                  adapter=config.adapter_of("up_proj"), rngs=rngs)
        self.down_proj = Projection("btf,fe->bte", (width, hidden), ("mlp", "embed"), std, *hidden_bias,
                                    adapter=config.adapter_of("down_proj"), rngs=rngs)

    def __call__(self, x: Float[Array, "B T E"], parallel: Parallel) -> Float[Array, "B T E"]:
        """Returns the feed-forward of normalised hidden states, summed over the tensor ranks."""
        x = parallel.whole(x)
        gate = self.gate_proj.add_bias(self.gate_proj(x))
        up = self.up_proj.add_bias(self.up_proj(x))
        return self.down_proj.add_bias(parallel.combine(self.down_proj(self.activation(gate) * up), "mlp"))
