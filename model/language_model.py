"""`LanguageModel`: embedding, layers, and the cross-entropy of the next token."""

from __future__ import annotations

import dataclasses

from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from .attention.names import BATCH_AXES
from .embed_and_head import EmbedAndHead
from .frozen import Weight
from .loss import LocalLosses, LossSums, global_sums, sums_by_document
from .modules import TokenEmbedAndHead
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

    @property
    def embed_and_head(self) -> EmbedAndHead:
        """The computation before and after the layers."""
        return EmbedAndHead(self.config, self.parallel, self.dtype, self.memory.loss_chunk)

    # On a device

    def local_embed(self, params: Shards, batch: Batch) -> Float[Array, "B T E"]:
        """Returns the first layer's input."""
        weights = self.weights.gather_named(params, ("embed_tokens.weight",))
        return self.embed_and_head.embed(weights, batch["tokens"])

    def _head_weights(self, params: Shards) -> dict[str, Weight]:
        return self.weights.gather_named(params, self.embed_and_head.head_names)

    def local_logits(self, params: Shards, x: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Returns float32 logits of the whole vocabulary, from the last layer's output."""
        return self.embed_and_head.logits(self._head_weights(params), x)

    def local_losses(self, params: Shards, batch: Batch) -> LocalLosses:
        """Returns the losses of this device's tokens."""
        x, sums = self.local_layers(params, batch)
        total, losses = self.embed_and_head.losses(
            self._head_weights(params), x, batch["targets"], batch["loss_weights"]
        )
        return LocalLosses(
            total, losses, self.auxiliary_losses(sums, batch), self.measures(sums, batch)
        )

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

        Float32; gradients pass through the first.

        Args:
          documents: D, the most documents in a row; document d of `segment_ids` is column d - 1.
        """

        def local(params, batch):
            x, head_weights = self.local_hidden(params, batch), self._head_weights(params)
            losses = self.embed_and_head.token_losses(head_weights, x, batch["targets"])

            def by_document(values: Float[Array, "B T"]) -> Float[Array, "B D"]:
                sums = sums_by_document(values, batch["segment_ids"], documents)
                return lax.psum(sums, "sequence")

            weights = batch["loss_weights"]
            return by_document(-losses * weights), by_document(weights)

        rows = PartitionSpec(BATCH_AXES)
        return self.sharded(local, (rows, rows))(params, batch)

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
