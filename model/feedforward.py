"""The SwiGLU feed-forward and RMS normalisation, as Flax modules on whole (or tensor-split) weights."""
from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from .config import LlamaConfig
from .memory.chunked import product
from .sharding import Parallel


def param(rngs: nnx.Rngs, shape, axes, std: float) -> nnx.Param:
    """A normally distributed float32 parameter with its logical axes."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


class Projection(nnx.Module):
    """A linear map; `equation` says which axes meet. The bias, if any, is added after the tensor ranks' sum."""

    def __init__(self, equation, shape, axes, std, bias_shape=None, bias_axes=None, *, rngs):
        self.equation = equation
        self.weight = param(rngs, shape, axes, std)
        if bias_shape is not None:
            self.bias = nnx.Param(jnp.zeros(bias_shape, jnp.float32), axes=bias_axes)

    def add_bias(self, y):
        return (y + self.bias[...]).astype(y.dtype) if hasattr(self, "bias") else y

    def __call__(self, x):
        return product(self.equation, x, self.weight[...])


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """x / rms(x) * weight over the last axis, in float32, given back in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + epsilon)
    return (wide * weight).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation of the hidden axis."""

    def __init__(self, config: LlamaConfig, *, rngs=None):
        self.epsilon = config.rms_norm_eps
        self.weight = nnx.Param(jnp.ones((config.hidden_size,), jnp.float32), axes=("norm",))

    def __call__(self, x):
        return rms_norm(x, self.weight[...], self.epsilon)


class FeedForward(nnx.Module):
    """down(silu(gate(x)) * up(x)); the width F is split over `tensor`."""

    def __init__(self, config: LlamaConfig, *, rngs):
        hidden, width, std = config.hidden_size, config.intermediate_size, config.initializer_range
        wide = ((width,), ("mlp",)) if config.mlp_bias else ()
        narrow = ((hidden,), ("norm",)) if config.mlp_bias else ()
        self.gate_proj = Projection("bte,ef->btf", (hidden, width), ("embed", "mlp"), std, *wide, rngs=rngs)
        self.up_proj = Projection("bte,ef->btf", (hidden, width), ("embed", "mlp"), std, *wide, rngs=rngs)
        self.down_proj = Projection("btf,fe->bte", (width, hidden), ("mlp", "embed"), std, *narrow, rngs=rngs)

    def __call__(self, x, parallel: Parallel):
        """x [B, T, E] -> [B, T, E], summed over the tensor ranks."""
        x = parallel.whole(x)
        gate = self.gate_proj.add_bias(self.gate_proj(x))
        up = self.up_proj.add_bias(self.up_proj(x))
        return self.down_proj.add_bias(parallel.combine(self.down_proj(jax.nn.silu(gate) * up), "mlp"))
