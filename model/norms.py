"""RMS normalizations of the hidden axis and of heads, as Flax modules."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from .config import TransformerConfig
from .sharding import TensorParallel


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
    """Root-mean-square normalization of the hidden axis, in some stages of a layer."""

    def __init__(self, config: TransformerConfig, *stages: str):
        self.config = config
        weight = jnp.full((config.hidden_size,), 1 - config.norm_offset, jnp.float32)
        self.weight = nnx.Param(weight, axes=("norm",), stages=stages)

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        return scaled_norm(x, self.weight[...], self.config)


class HeadNorm(nnx.Module):
    """Root-mean-square normalization of each head, with one weight for all."""

    needs_all_heads = False

    def __init__(self, config: TransformerConfig, heads: int, axis: str, stage: str):
        self.config = config
        weight = jnp.full((config.head_dim,), 1 - config.norm_offset, jnp.float32)
        self.weight = nnx.Param(weight, axes=("head_dim",), stages=(stage,))

    def __call__(
        self, x: Float[Array, "B T H D"], parallel: TensorParallel
    ) -> Float[Array, "B T H D"]:
        """Returns this tensor rank's heads, normalized."""
        return scaled_norm(x, self.weight[...], self.config)


class AllHeadsNorm(nnx.Module):
    """Root-mean-square normalization of all heads together, with a weight per element (OLMo 2)."""

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
        """Returns this tensor rank's heads, normalized over all ranks' heads without padding."""
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
