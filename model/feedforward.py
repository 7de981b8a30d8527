"""The SwiGLU feed-forward, as a Flax module on whole (or tensor-split) weights."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from .config import TransformerConfig
from .dropout import TokenInfo
from .projection import DropoutKeys, Projection
from .sharding import TensorParallel
from .stages import OUTPUT

# A feed-forward's auxiliary results by name: float32 sums over a device's tokens, of any shape and
# with gradient, for auxiliary losses (`Transformer.auxiliary_losses`). Equal on all tensor ranks.
Auxiliary = dict[str, Float[Array, "..."]]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)); the width F, intermediate_size unless given, is split over
    `tensor`."""

    def __init__(self, config: TransformerConfig, width: int | None = None, *, rngs: nnx.Rngs):
        self.activation = ACTIVATIONS[config.activation]
        hidden, width, bias = config.hidden_size, width or config.intermediate_size, config.mlp_bias
        inward = ("bte,ef->btf", (hidden, width), ("embed", "mlp"), bias)
        outward = ("btf,fe->bte", (width, hidden), ("mlp", "embed"), bias)
        projection = functools.partial(Projection, stage=OUTPUT, config=config, rngs=rngs)
        self.gate_proj = projection(*inward, name="gate_proj")
        self.up_proj = projection(*inward, name="up_proj")
        self.down_proj = projection(*outward, name="down_proj")

    def __call__(
        self, x: Float[Array, "B T E"], parallel: TensorParallel, info: TokenInfo
    ) -> tuple[Float[Array, "B T E"], Auxiliary]:
        """Returns the feed-forward of normalized hidden states, summed over the tensor ranks, and
        no auxiliary sums."""
        down = self.partial_sum(parallel.all_gather_tokens(x), parallel, info.dropout)
        return self.down_proj.add_bias(parallel.reduce_output(down, "mlp")), {}

    def partial_sum(
        self, x: Float[Array, "B T E"], parallel: TensorParallel, dropout: DropoutKeys = None
    ) -> Float[Array, "B T E"]:
        """Returns this tensor rank's partial sum, without the last bias."""
        gate = self.gate_proj.add_bias(self.gate_proj(x, parallel, dropout))
        up = self.up_proj.add_bias(self.up_proj(x, parallel, dropout))
        return self.down_proj(self.activation(gate) * up, parallel, dropout)
