"""Linear maps with low-rank adapters (LoRA, DoRA), as Flax modules on whole (or tensor-split)
weights."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, UInt32

from .adapter import PROJECTIONS
from .config import TransformerConfig
from .dropout import zero_dropped
from .frozen import array
from .linear import einsum_subscripts, product
from .sharding import TensorParallel

Shape = tuple[int, ...]
Axes = tuple[str, ...]
# The tokens' numbers within a layer, for dropout's masks; None without dropout.
DropoutKeys = UInt32[Array, "B T"] | None


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


def zero_param(shape: Shape, axes: Axes, **declared: Any) -> nnx.Param:
    """Returns a float32 parameter of zeros, declared as in `param`: a bias, or an adapter's A or B;
    `parameters.draw_adapters` draws A."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes, **declared)


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
        bias: bool,
        *,
        name: str,
        stage: str,
        config: TransformerConfig,
        rngs: nnx.Rngs,
    ):
        self.equation, self.name, self.adapter = equation, name, config.adapter_of(name)
        x_axes, w_axes, _ = einsum_subscripts(equation)
        self.inputs = inputs = len(set(x_axes) & set(w_axes))
        self.input_axes, output_axes, stages = axes[:inputs], axes[inputs:], (stage,)
        self.weight = param(rngs, shape, axes, config.initializer_range, inputs, stages=stages)
        if bias:
            bias_axes = tuple("norm" if axis == "embed" else axis for axis in output_axes)
            self.bias = zero_param(shape[inputs:], bias_axes, stages=stages)
        if self.adapter is None:
            return
        rank = self.adapter.rank
        self.lora_A = zero_param(
            (*shape[:inputs], rank), (*self.input_axes, "rank"), inputs=inputs, stages=stages
        )
        self.lora_B = zero_param(
            (rank, *shape[inputs:]), ("rank", *output_axes), inputs=1, stages=stages
        )
        if self.adapter.use_dora:  # `ModelParameters.init_magnitudes` sets them
            self.lora_magnitude_vector = nnx.Param(
                jnp.ones(shape[inputs:], jnp.float32), axes=output_axes, stages=stages
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
        x_axes, w_axes, y_axes = einsum_subscripts(self.equation)
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
        return zero_dropped(
            x, dropout, self.adapter.dropout_rate, PROJECTIONS.index(self.name), first
        )

    def norms(self, parallel: TensorParallel, dtype: Any) -> Float[Array, ...]:
        """Returns the norm of each output's column of W + s A B over all inputs, without gradient
        (Liu et al., DoRA, arXiv 2402.09353, section 4.3), rounded to the compute dtype like the
        trained magnitudes.

        A B is not formed: with w, a and b for the columns, |w + s A b|^2 = |w|^2 + 2 s b . (A^T w)
        + s^2 b . (A^T A) b.
        """
        assert self.adapter is not None
        w_axes = einsum_subscripts(self.equation)[1]
        weight = self.weight.get_value()
        a = self.lora_A[...]
        b = self.lora_B[...]
        w_in, w_out, scale = w_axes[: self.inputs], w_axes[self.inputs :], self.adapter.scale
        dense = array(weight, dtype)
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
