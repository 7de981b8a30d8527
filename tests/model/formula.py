"""A decoder-only model written out on one device, for losses that jax differentiates itself."""

import jax
import jax.numpy as jnp

from model.norms import rms_norm
from model.rope import apply_rope, inverse_frequencies


def layers(params, config):
    """Yields each layer's parameters by their names in the layer."""
    for number in range(config.num_hidden_layers):
        yield {
            name.removeprefix("layers."): x[number]
            for name, x in params.items()
            if name.startswith("layers.")
        }


def attention(weights, hidden, batch, config):
    """What a layer's attention adds to the residual stream."""
    segments, length = batch["segment_ids"], hidden.shape[1]
    seen = (segments[:, :, None] == segments[:, None]) & (segments[:, :, None] > 0)
    seen = (seen & (batch["index"][:, :, None] >= batch["index"][:, None]))[:, None]
    frequencies = inverse_frequencies(config.rope, config.head_dim, length)
    q, k, v = (
        jnp.einsum("bte,ehd->bthd", hidden, weights[f"self_attn.{name}_proj.weight"])
        for name in "qkv"
    )
    q, k = (apply_rope(heads, batch["positions"], frequencies, 1.0, length) for heads in (q, k))
    k, v = (
        jnp.repeat(x, config.num_attention_heads // config.num_key_value_heads, 2) for x in (k, v)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * config.head_dim**-0.5
    shares = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, -1e30), -1), 0)
    attended = jnp.einsum("bhqk,bkhd->bqhd", shares, v)
    return jnp.einsum("bthd,hde->bte", attended, weights["self_attn.o_proj.weight"])


def feed_forward(weights, hidden):
    gate, up = (hidden @ weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up"))
    return (jax.nn.silu(gate) * up) @ weights["mlp.down_proj.weight"]


def loss(params, x, batch, config):
    """The weighted sum of the token losses, from the last layer's output."""
    logits = rms_norm(x, params["norm.weight"], config.rms_norm_eps) @ params["lm_head.weight"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)
    return -jnp.sum(chosen[..., 0] * batch["loss_weights"])
