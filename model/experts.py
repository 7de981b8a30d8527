"""A mixture of experts: a router sends each token to a few of many feed-forwards, and none is
dropped.

Tokens are sorted by expert and multiplied in groups (`grouped`). The router's sums over a device's
tokens are returned as the layer's auxiliary output; `router_losses` turns them into losses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from .adapter import ROUTER
from .config import TransformerConfig
from .dropout import TokenInfo
from .feedforward import ACTIVATIONS, Auxiliary, FeedForward
from .grouped import grouped_product
from .linear import product
from .projection import param, zero_param
from .sharding import TensorParallel
from .stages import OUTPUT

# Functions from logits to scores, by `TransformerConfig.router_scores`.
SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
}
# What the declarations of an adapter's A and B share.
_ADAPTER: dict[str, Any] = {"inputs": 1, "stages": (OUTPUT,)}


class Routes(NamedTuple):
    """Where tokens go: their experts' numbers, and the factor of each expert's output."""

    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]


def route(
    logits: Float[Array, "T X"],
    config: TransformerConfig,
    correction: Float[Array, " X"] | None = None,
) -> Routes:
    """Returns each token's experts, those with the highest scores; ties go to the first.

    Args:
      logits: float32.
      correction: added to the scores when choosing experts, not to their weights.
    """
    assert config.num_experts_per_tok is not None
    scores = SCORES[config.router_scores](logits)
    if correction is None:
        weights, experts = lax.top_k(scores, config.num_experts_per_tok)
    else:
        corrected = lax.stop_gradient(scores + correction)
        experts = lax.top_k(corrected, config.num_experts_per_tok)[1]
        weights = jnp.take_along_axis(scores, experts, -1)
    if config.norm_topk_prob:
        total = weights.sum(-1, keepdims=True)
        if correction is not None and config.router_scores == "softmax":
            total = jnp.maximum(total, 1e-12)  # corrections may choose experts of no probability
        else:  # sigmoids may all be 0
            total = total + (1e-20 if correction is not None else 0)
        weights /= total
    return Routes(experts, config.routed_scaling_factor * weights)


def router_sums(logits: Float[Array, "T X"], routes: Routes, real: Bool[Array, " T"]) -> Auxiliary:
    """Returns a router's sums over tokens that are not padding, float32.

    They are, per expert, its tokens and its probabilities; and over all experts the squares of the
    logits' log-sum-exp and the entropies of the probabilities. Gradients pass only through the
    probabilities and the squares.
    """
    lse = jax.nn.logsumexp(logits, -1)
    probabilities = jnp.exp(logits - lse[:, None])
    entropies = lax.stop_gradient(lse - jnp.sum(probabilities * logits, -1))
    got = jnp.zeros(logits.shape[-1]).at[routes.experts].add(real[:, None].astype(jnp.float32))
    return {
        "tokens": got,
        "probability": jnp.sum(jnp.where(real[:, None], probabilities, 0), 0),
        "square": jnp.sum(jnp.where(real, jnp.square(lse), 0)),
        "entropy": jnp.sum(jnp.where(real, entropies, 0)),
    }


class Router(nnx.Module):
    """Makes a token's logits, one per expert."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        shape = (config.hidden_size, config.num_experts)
        self.weight = param(
            rngs, shape, ("embed", "router"), config.initializer_range, stages=(OUTPUT,)
        )
        if config.expert_bias:
            self.bias = zero_param(shape[1:], ("router",), stages=(OUTPUT,))
        if config.router_correction:
            self.e_score_correction_bias = zero_param(
                shape[1:], ("router",), stages=(OUTPUT,), constant=True
            )
        self.adapter = config.adapter_of(ROUTER)
        if self.adapter is not None:
            rank = self.adapter.rank
            self.lora_A = zero_param((shape[0], rank), ("embed", "rank"), **_ADAPTER)
            self.lora_B = zero_param((rank, shape[1]), ("rank", "router"), **_ADAPTER)

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T X"]:
        """Returns float32 logits of normalized hidden states."""
        logits = product("te,ex->tx", x, self.weight.get_value(), jnp.float32)
        if self.adapter is not None:
            low = product("te,er->tr", x, self.lora_A[...])
            added = product("tr,rx->tx", low, self.lora_B[...], jnp.float32)
            logits += self.adapter.scale * added
        return logits + self.bias[...] if hasattr(self, "bias") else logits

    @property
    def correction(self) -> Float[Array, " X"] | None:
        """The correction added to experts' scores when choosing them, if any."""
        bias = getattr(self, "e_score_correction_bias", None)
        return None if bias is None else bias[...]


class ExpertProjection(nnx.Module):
    """A linear map per expert, with a low-rank adapter for each, if there are adapters."""

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        axes: tuple[str, str],
        config: TransformerConfig,
        rngs: nnx.Rngs,
    ):
        shape = (config.num_experts, inputs, outputs)
        self.weight = param(
            rngs,
            shape,
            ("experts", *axes),
            config.initializer_range,
            stages=(OUTPUT,),
            hf_name=f"model.layers.{{i}}.mlp.experts.{{j}}.{name}.weight",
        )
        if config.expert_bias:
            self.bias = zero_param(
                (config.num_experts, outputs),
                ("experts", axes[1]),
                stages=(OUTPUT,),
                hf_name=f"model.layers.{{i}}.mlp.experts.{{j}}.{name}.bias",
            )
        self.adapter = config.adapter_of(name)
        if self.adapter is not None:
            experts, rank = config.num_experts, self.adapter.rank
            self.lora_A = zero_param(
                (experts, inputs, rank), ("experts", axes[0], "rank"), **_ADAPTER
            )
            self.lora_B = zero_param(
                (experts, rank, outputs), ("experts", "rank", axes[1]), **_ADAPTER
            )

    def __call__(
        self, x: Float[Array, "M K"], sizes: Int[Array, " X"], experts: Int[Array, " M"], share=1
    ) -> Float[Array, "M N"]:
        """Returns the products of rows sorted by expert, as in `grouped_product`, with this share
        of the biases.

        Args:
          experts: the rows' experts.
        """
        y = grouped_product(x, self.weight.get_value(), sizes)
        if self.adapter is not None:
            low = _named(grouped_product(x, self.lora_A[...], sizes))
            y += self.adapter.scale * grouped_product(low, self.lora_B[...], sizes)
        y = _named(y)
        if not hasattr(self, "bias"):
            return y
        return (y + _biases(self.bias[...], experts) / share).astype(y.dtype)


def _named(grouped: Float[Array, "M N"]) -> Float[Array, "M N"]:
    """Returns a grouped product under the name by which `runners.remat` recognizes it, since it is
    not a dot."""
    return checkpoint_name(grouped, "expert_product")


def _clamped_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gpt-oss's gate: both sides are clamped at 7, and the sigmoid has a slope of 1.702."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


class Experts(nnx.Module):
    """A gated feed-forward per expert; their width F is split over `tensor`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.activation, self.count = config.activation, config.num_experts
        hidden, width = config.hidden_size, config.expert_width
        inward, outward = (hidden, width, ("embed", "mlp")), (width, hidden, ("mlp", "embed"))
        self.gate_proj = ExpertProjection("gate_proj", *inward, config, rngs)
        self.up_proj = ExpertProjection("up_proj", *inward, config, rngs)
        self.down_proj = ExpertProjection("down_proj", *outward, config, rngs)

    def __call__(
        self, x: Float[Array, "T E"], routes: Routes, parallel: TensorParallel
    ) -> Float[Array, "T E"]:
        """Returns this tensor rank's partial sums of the experts' weighted outputs.

        If `expert` splits the experts, each of its ranks gets all ranks' tokens and runs its
        experts on them, and the sums return to the tokens' ranks. An all-to-all with static shapes
        would send as much, since any token may go to any rank (bytes of both are in
        docs/notes/design_decisions.md).
        """
        local = jax.tree.leaves(self.gate_proj.weight.get_value())[0].shape[0]
        if local == self.count:
            return self._sums(x, routes, parallel, self.count)
        x, routes = jax.tree.map(
            lambda part: lax.all_gather(part, "expert", axis=0, tiled=True), (x, routes)
        )
        sums = self._sums(x, routes, parallel, local, lax.axis_index("expert") * local)
        return lax.psum_scatter(sums, "expert", scatter_dimension=0, tiled=True)

    def _sums(
        self,
        x: Float[Array, "T E"],
        routes: Routes,
        parallel: TensorParallel,
        count: int,
        first: Any = 0,
    ) -> Float[Array, "T E"]:
        """Returns the partial sums of the experts from `first` on, `count` of them."""
        experts = routes.experts.reshape(-1) - first
        # Other experts' rows come last.
        experts = jnp.where((experts >= 0) & (experts < count), experts, count)
        order = jnp.argsort(experts, stable=True)
        inverse_order = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
        sizes = jnp.bincount(experts, length=count + 1)[:count]
        rows = _sorted_rows(x, order, inverse_order)
        by_row = experts[order]
        gate, up = self.gate_proj(rows, sizes, by_row), self.up_proj(rows, sizes, by_row)
        if self.activation == "clamped":
            gated = _clamped_gate(gate, up)
        else:
            gated = ACTIVATIONS[self.activation](gate) * up
        # Each tensor rank's partial sum has its share of the biases.
        shares = parallel.tensor if parallel.mlp else 1
        outputs = _reordered(self.down_proj(gated, sizes, by_row, shares), inverse_order, order)
        outputs = outputs.reshape(*routes.experts.shape, -1).astype(jnp.float32)
        return jnp.einsum("tke,tk->te", outputs, routes.weights).astype(x.dtype)


class MixtureOfExperts(nnx.Module):
    """A router and its experts instead of a feed-forward; and a shared expert, if any."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.gate = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)
        if config.shared_expert_intermediate_size:
            # In a mixture, PEFT's gate_proj, up_proj and down_proj are the experts'.
            unadapted = dataclasses.replace(config, adapter=None)
            self.shared_expert = FeedForward(
                unadapted, config.shared_expert_intermediate_size, rngs=rngs
            )
        if config.shared_expert_gate:
            shape, axes = (config.hidden_size, 1), ("embed", "router")
            self.shared_expert_gate = nnx.Dict(
                weight=param(rngs, shape, axes, config.initializer_range, stages=(OUTPUT,))
            )

    def __call__(
        self, x: Float[Array, "B T E"], parallel: TensorParallel, info: TokenInfo
    ) -> tuple[Float[Array, "B T E"], Auxiliary]:
        """Returns the mixture of normalized hidden states, summed over the tensor ranks, and the
        router's sums over this device's tokens, as in `router_sums`."""
        x = parallel.all_gather_tokens(x)
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.gate(tokens)
        routes = route(logits, self.config, self.gate.correction)
        y = self.experts(tokens, routes, parallel).reshape(x.shape)
        if self.config.shared_expert_intermediate_size:
            y += self._shared(x, parallel)
        # Decoding trains nothing and needs no sums.
        real = info.real
        sums = {} if real is None else router_sums(logits, routes, real.reshape(-1))
        return parallel.reduce_output(y, "mlp"), sums

    def _shared(self, x: Float[Array, "B T E"], parallel: TensorParallel) -> Float[Array, "B T E"]:
        """Returns this tensor rank's partial sum of the shared expert's output."""
        y = self.shared_expert.partial_sum(x, parallel)
        if not self.config.shared_expert_gate:
            return y
        gate = product("bte,eo->bto", x, self.shared_expert_gate.weight[...], jnp.float32)
        return (jax.nn.sigmoid(gate) * y).astype(y.dtype)


@jax.custom_vjp
def _sorted_rows(
    x: Float[Array, "T E"], order: Int[Array, " M"], inverse_order: Int[Array, " M"]
) -> Float[Array, "M E"]:
    """Returns the token of each assignment, sorted.

    Its gradient is a sum over a token's assignments in float32, without a scatter.

    Args:
      order: the sorted assignments, numbered token by token.
      inverse_order: its inverse.
    """
    return x[order // (len(order) // len(x))]


def _sorted_rows_backward(residuals, dy):
    inverse_order, like = residuals
    by_token = dy[inverse_order].reshape(len(like), -1, dy.shape[-1])
    return by_token.sum(1, dtype=jnp.float32).astype(like.dtype), None, None


_sorted_rows.defvjp(
    lambda x, order, inverse_order: (
        _sorted_rows(x, order, inverse_order),
        (inverse_order, jnp.zeros((len(x), 0), x.dtype)),
    ),
    _sorted_rows_backward,
)


@jax.custom_vjp
def _reordered(
    x: Float[Array, "M E"], order: Int[Array, " M"], inverse_order: Int[Array, " M"]
) -> Float[Array, "M E"]:
    """Returns x[order]; the gradient uses the inverse order, not a scatter."""
    return x[order]


_reordered.defvjp(
    lambda x, order, inverse_order: (x[order], inverse_order),
    lambda inverse_order, dy: (dy[inverse_order], None, None),
)


@jax.custom_vjp
def _biases(bias: Float[Array, "X N"], experts: Int[Array, " M"]) -> Float[Array, "M N"]:
    """Returns the experts' biases, 0 for other numbers; the gradient is a product, not a scatter,
    whose order of additions differs from run to run on GPUs."""
    return bias.at[experts].get(mode="fill", fill_value=0)


def _biases_backward(residuals, dy):
    experts, bias = residuals
    is_expert = jnp.arange(len(bias))[:, None] == experts
    return jnp.dot(is_expert.astype(dy.dtype), dy, precision="highest"), None


_biases.defvjp(
    lambda bias, experts: (_biases(bias, experts), (experts, jnp.zeros((len(bias), 0)))),
    _biases_backward,
)


class RouterTotals(NamedTuple):
    """Totals of a whole batch for its router losses.

    Attributes:
      tokens: the tokens that each expert of each layer with experts got, without gradient.
      real: the number of non-padding tokens.
      weight: the sum of the tokens' loss weights.
    """

    tokens: Float[Array, "N X"]
    real: Float[Array, ""]
    weight: Float[Array, ""]


def router_losses(
    sums: Auxiliary, totals: RouterTotals, config: TransformerConfig
) -> dict[str, Float[Array, ""]]:
    """Returns a device's partial sums of the router losses, on the scale of the sum of the tokens'
    losses.

    The balance loss is transformers' (Switch Transformer, arXiv 2101.03961, equations 4 to 6, over
    the tokens of all layers together), the z-loss ST-MoE's (arXiv 2202.08906, equation 5), averaged
    over tokens and layers.

    Args:
      sums: of all layers with experts, stacked [N, ...], as in `router_sums`.
    """
    routed = jnp.maximum(totals.real * config.expert_layers, 1)
    scale, losses = totals.weight / routed, {}
    if config.router_aux_loss:
        shares = lax.stop_gradient(totals.tokens.sum(0)) / routed
        balance = config.num_experts * jnp.dot(shares, sums["probability"].sum(0))
        losses["router_balance"] = config.router_aux_loss * scale * balance
    if config.router_z_loss_coef:
        losses["router_z"] = config.router_z_loss_coef * scale * sums["square"].sum()
    return losses


def router_measures(
    part: RouterTotals, whole: RouterTotals, entropy: Float[Array, ""], config: TransformerConfig
) -> dict[str, Float[Array, ""]]:
    """Returns the routers' metrics of a part of a batch, such that their sums over all parts,
    divided by the whole batch's loss weights, are those of the batch.

    They are each expert's load, 1 for an equal share, averaged over the layers; the highest and
    lowest load in any layer; the share of dropped assignments, which is 0 unless something is
    wrong; and the mean entropy of a token's probabilities, in nats.

    Args:
      part, whole: of the part, and of the batch: the highest load is not a mean of the parts'.
      entropy: the sum over the part's tokens and all layers.
    """
    assert config.num_experts_per_tok is not None
    share = whole.real * config.num_experts_per_tok / config.num_experts
    loads = whole.tokens / jnp.maximum(share, 1)
    digits = len(str(config.num_experts - 1))
    measures = {
        f"router/load/{expert:0{digits}}": load for expert, load in enumerate(loads.mean(0))
    }
    measures |= {"router/load_max": loads.max(), "router/load_min": loads.min()}
    measures = {name: part.weight * load for name, load in measures.items()}
    of_token = whole.weight / jnp.maximum(whole.real * config.expert_layers, 1)
    measures["router/entropy"] = of_token * entropy
    # Counts are exact in float32, and their sums over experts in int32.
    got = part.tokens.astype(jnp.int32).sum(-1)
    missing = part.real.astype(jnp.int32) * config.num_experts_per_tok - got
    measures["router/dropped"] = of_token * missing.sum() / config.num_experts_per_tok
    return measures
