"""`LanguageModel`: embedding, layers, final norm and head, and the cross-entropy of the next token;
the vocabulary is split over `tensor`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from .attention.kernels.softcap import capped
from .attention.names import BATCH_AXES
from .frozen import Weight, array
from .linear import product
from .lookup import rows
from .loss import LocalLosses, LossSums, global_sums, sums_by_document, token_losses
from .memory.chunked import chunked, chunked_total
from .modules import TokenEmbedAndHead
from .norms import scaled_norm
from .parameter_declarations import EmbedAndHeadFactory
from .transformer import TOKENS, Batch, Transformer
from .weight_gathering import Shards

__all__ = ["TOKENS", "Batch", "LanguageModel"]


@dataclasses.dataclass(frozen=True)
class LanguageModel(Transformer):
    """A language model on a mesh. A batch holds `tokens`, `targets` and `loss_weights` [B, L] in
    addition to the coordinates."""

    @property
    def embed_and_head_factory(self) -> EmbedAndHeadFactory:
        """The embedding table, the final norm and the head."""
        return TokenEmbedAndHead

    # On a device; weights are whole (of this tensor rank), and float32 by type

    def local_embed(self, params: Shards, batch: Batch) -> Float[Array, "B T E"]:
        """Returns the first layer's input, the tokens' rows of the table. Rows are cast after
        indexing the float32 table, so that its gradient is float32.

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

        weights = self.weights.gather_named(params, ("embed_tokens.weight",))
        with jax.named_scope("embed"):
            return chunked(embed, weights, {}, {"tokens": batch["tokens"]}, dtype=self.dtype)

    @property
    def _padding_row(self) -> int | None:
        """The row of `pad_token_id`; a negative one counts from the end, as in torch."""
        token = self.config.pad_token_id
        return None if token is None else token + self.config.vocab_size * (token < 0)

    def _head_weights(self, params: Shards) -> dict[str, Weight]:
        head = "embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        return self.weights.gather_named(params, ("norm.weight", head))

    def local_logits(self, params: Shards, x: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Returns float32 logits of the whole vocabulary, from the last layer's output, on every
        tensor rank. For evaluation: not chunked."""

        def head(weights, arrays, constants):
            logits = self._logits_of_rank(weights, arrays["x"])
            if self.parallel.tensor > 1:
                logits = lax.all_gather(logits, "tensor", axis=2, tiled=True)[
                    ..., : self.config.vocab_size
                ]
            return logits

        weights = self._head_weights(params)
        with jax.named_scope("head"):
            return chunked(head, weights, {"x": x}, {}, dtype=self.dtype)

    def local_losses(self, params: Shards, batch: Batch) -> LocalLosses:
        """Returns the losses of this device's tokens.

        Logits exist for one chunk at a time, and no chunk's are computed twice (the loss in blocks
        of Blockwise Parallel Transformer and Ring Attention, Algorithm 1).
        """
        x, sums = self.local_layers(params, batch)
        weights = self._head_weights(params)
        with jax.named_scope("head_and_loss"):
            total, losses = chunked_total(
                self._chunk_losses,
                weights,
                {"x": x},
                {"targets": batch["targets"]},
                batch["loss_weights"],
                dtype=self.dtype,
                chunk=self.memory.loss_chunk,
            )
        return LocalLosses(
            total, losses, self.auxiliary_losses(sums, batch), self.measures(sums, batch)
        )

    def _chunk_losses(
        self, weights: dict[str, Weight], arrays: dict[str, jax.Array], constants: dict
    ) -> Float[Array, "B T"]:
        """-log p(target) of a chunk's tokens: the function that `chunked` runs."""
        return token_losses(
            self._logits_of_rank(weights, arrays["x"]), constants["targets"], self.parallel
        )

    def _logits_of_rank(
        self, weights: dict[str, Weight], x: Float[Array, "B T E"]
    ) -> Float[Array, "B T V"]:
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

    # Of a global batch

    def loss(self, params: Shards, batch: Batch, sources: int = 0) -> LossSums:
        """Returns the sums of weighted losses and of weights; their quotient is the mean
        cross-entropy in nats.

        Take gradients of the total outside: inside `shard_map` a psum over `tensor` in the loss
        would make them wrong.

        Args:
          sources: the number of sources in the batch's `source_ids` [B, L]; each then has separate
            sums.
        """

        def local(params, batch):
            return global_sums(
                self.local_losses(params, batch),
                batch["loss_weights"],
                batch.get("source_ids"),
                sources,
            )

        return self.sharded(local, PartitionSpec())(params, batch)

    def document_sums(
        self, params: Shards, batch: Batch, documents: int
    ) -> tuple[Float[Array, "B D"], Float[Array, "B D"]]:
        """Returns, for each document of each row, the weighted log-likelihood of its targets and
        the sum of their weights.

        Float32; gradients pass through the first. Logits exist for one chunk at a time and are
        recomputed in the backward pass.

        Args:
          documents: D, the most documents in a row; document d of `segment_ids` is column d - 1.
        """

        def local(params, batch):
            x, weights = self.local_hidden(params, batch), self._head_weights(params)
            constants = {"targets": batch["targets"]}
            chunk = self.memory.loss_chunk
            with jax.named_scope("head_and_loss"):
                losses = chunked(
                    self._chunk_losses, weights, {"x": x}, constants, dtype=self.dtype, chunk=chunk
                )

            def by_document(values: Float[Array, "B T"]) -> Float[Array, "B D"]:
                sums = sums_by_document(values, batch["segment_ids"], documents)
                return lax.psum(sums, "sequence")

            return by_document(-losses * batch["loss_weights"]), by_document(batch["loss_weights"])

        by_row = PartitionSpec(BATCH_AXES)
        return self.sharded(local, (by_row, by_row))(params, batch)

    def token_losses(self, params: Shards, batch: Batch) -> Float[Array, "B L"]:
        """Returns -log p(target) of every token, float32."""
        return self.sharded(lambda params, batch: self.local_losses(params, batch).tokens, TOKENS)(
            params, batch
        )

    def logits(self, params: Shards, batch: Batch) -> Float[Array, "B L V"]:
        """Returns the float32 logits of every token. For tests and short inputs."""

        def local(params, batch):
            return self.local_logits(params, self.local_hidden(params, batch))

        return self.sharded(local, PartitionSpec(*TOKENS, None))(params, batch)
