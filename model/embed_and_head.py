"""Before and after the layers: the embedding, the final norm and the head, with the vocabulary
split over `tensor`.

All functions run inside `shard_map`, on whole weights (of this tensor rank), float32 by type.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .attention.kernels.softcap import capped
from .config import TransformerConfig
from .frozen import Weight, array
from .linear import product
from .lookup import rows
from .loss import token_losses
from .memory.chunked import chunked, chunked_total
from .norms import scaled_norm
from .sharding import TensorParallel

Weights = dict[str, Weight]


@dataclasses.dataclass(frozen=True)
class EmbedAndHead:
    """Maps token ids to hidden states, and hidden states to logits and losses.

    Attributes:
      config: the model's sizes without padding.
      dtype: the compute dtype.
      loss_chunk: tokens whose logits exist at a time; 0 computes all at once.
    """

    config: TransformerConfig
    parallel: TensorParallel
    dtype: Any
    loss_chunk: int

    @property
    def head_names(self) -> tuple[str, ...]:
        """The parameters that `logits` and `losses` read."""
        return (
            "norm.weight",
            "embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight",
        )

    def embed(self, weights: Weights, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """Returns the tokens' rows of the table. Rows are cast after indexing the float32 table, so
        that its gradient is float32.

        The row of `pad_token_id` gets no gradient here, as in transformers (`padding_idx` of
        torch.nn.Embedding), even if that token is part of the text, as SmolLM2's <|im_end|> is. A
        tied head trains it.
        """

        def embed(weights, arrays, constants):
            table, ids = weights["embed_tokens.weight"], constants["tokens"]
            learned = True if self._padding_row is None else ids != self._padding_row
            local_size = self.parallel.vocab_size // self.parallel.tensor
            if self.parallel.tensor > 1:
                ids = ids - self.parallel.rank() * local_size
            is_local = (ids >= 0) & (ids < local_size)
            embedded = rows(table, jnp.where(is_local, ids, 0), is_local & learned)
            embedded = jnp.where(is_local[..., None], embedded, 0.0)
            return self.parallel.reduce_output(
                (embedded * self.config.embedding_scale).astype(self.dtype), "vocab"
            )

        with jax.named_scope("embed"):
            return chunked(embed, weights, {}, {"tokens": tokens}, dtype=self.dtype)

    @property
    def _padding_row(self) -> int | None:
        """The row of `pad_token_id`; a negative one counts from the end, as in torch."""
        token = self.config.pad_token_id
        return None if token is None else token + self.config.vocab_size * (token < 0)

    def logits(self, weights: Weights, x: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Returns float32 logits of the whole vocabulary on every tensor rank. For evaluation: not
        chunked."""

        def head(weights, arrays, constants):
            logits = self._local_logits(weights, arrays["x"])
            if self.parallel.tensor > 1:
                logits = lax.all_gather(logits, "tensor", axis=2, tiled=True)[
                    ..., : self.config.vocab_size
                ]
            return logits

        with jax.named_scope("head"):
            return chunked(head, weights, {"x": x}, {}, dtype=self.dtype)

    def token_losses(
        self, weights: Weights, x: Float[Array, "B T E"], targets: Int[Array, "B T"]
    ) -> Float[Array, "B T"]:
        """Returns -log p(target) of each token, float32, with gradients.

        Logits exist for one chunk at a time and are recomputed in the backward pass.
        """
        with jax.named_scope("head_and_loss"):
            return chunked(
                self._chunk_losses,
                weights,
                {"x": x},
                {"targets": targets},
                dtype=self.dtype,
                chunk=self.loss_chunk,
            )

    def losses(
        self,
        weights: Weights,
        x: Float[Array, "B T E"],
        targets: Int[Array, "B T"],
        loss_weights: Float[Array, "B T"],
    ) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
        """Returns the weighted sum of -log p(target) over this device's tokens, and each token's
        without gradient.

        Logits exist for one chunk at a time, and no chunk's are computed twice (the loss in blocks
        of Blockwise Parallel Transformer and Ring Attention, Algorithm 1).
        """
        with jax.named_scope("head_and_loss"):
            return chunked_total(
                self._chunk_losses,
                weights,
                {"x": x},
                {"targets": targets},
                loss_weights,
                dtype=self.dtype,
                chunk=self.loss_chunk,
            )

    def _chunk_losses(
        self, weights: Weights, arrays: dict[str, jax.Array], constants: dict[str, jax.Array]
    ) -> Float[Array, "B T"]:
        """-log p(target) of a chunk's tokens: the function that `chunked` runs."""
        return token_losses(
            self._local_logits(weights, arrays["x"]), constants["targets"], self.parallel
        )

    def _local_logits(self, weights: Weights, x: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Final norm, and float32 logits of this tensor rank's vocabulary; minus infinity in
        padding."""
        norm = scaled_norm(x, array(weights["norm.weight"]), self.config)
        # In bfloat16, a logit above 8, and hence its token's loss, would be off by up to 0.03.
        if self.config.tie_word_embeddings:
            logits = product("bte,ve->btv", norm, weights["embed_tokens.weight"], jnp.float32)
        else:
            logits = product("bte,ev->btv", norm, weights["lm_head.weight"], jnp.float32)
        if self.config.logits_scaling != 1:
            logits = logits / self.config.logits_scaling
        logits = capped(logits, self.config.final_logit_softcapping)
        if self.parallel.vocab_size == self.config.vocab_size:
            return logits
        ids = self.parallel.rank() * logits.shape[-1] + jnp.arange(logits.shape[-1])
        return jnp.where(ids < self.config.vocab_size, logits, -jnp.inf)
