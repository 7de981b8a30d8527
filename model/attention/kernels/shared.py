"""Attention of documents that share the beginning of an earlier one, with any kernel.

A kernel decides by `index` and `segment_ids` what is visible: a query sees only keys of its own
document. For a block whose tokens also say which beginnings are shared (`TokenCoords.shared`) it is
called twice: for the keys that each query sees in its own document, and for those in a shared
beginning. The two sets of keys are disjoint, so the results merge exactly and the gradients add up.
Each call skips the tiles that it does not need, as always.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..blocks import BackwardInputs, Gradients, Keys, Queries, StackedKeys
from ..coords import Mask, TokenCoords, beginnings, own_documents
from ..partial import AttentionPartial, merge
from .kernel import Kernel


@dataclasses.dataclass(frozen=True)
class SharedBeginningsKernel(Kernel):
    """Calls another kernel for documents and for the beginnings that they share.

    Attributes:
      kernel: the kernel to call.
    """

    kernel: Kernel

    @classmethod
    def of(cls, kernel: Kernel) -> SharedBeginningsKernel:
        """Returns the kernel that calls `kernel`."""
        return cls(kernel, softcap=kernel.softcap)

    def over_shards(self, queries: int, keys: int) -> SharedBeginningsKernel:
        return dataclasses.replace(self, kernel=self.kernel.over_shards(queries, keys))

    def forward(
        self, queries: Queries, keys: Keys, *, mask: Mask, scale: float
    ) -> AttentionPartial:
        return merge(
            *(
                self.kernel.forward(*blocks, mask=mask, scale=scale)
                for blocks in _views(queries, keys)
            )
        )

    def backward(
        self, queries: Queries, keys: Keys, saved: BackwardInputs, *, mask: Mask, scale: float
    ) -> Gradients:
        own, shared = (
            self.kernel.backward(*blocks, saved, mask=mask, scale=scale)
            for blocks in _views(queries, keys)
        )
        return Gradients(*(x + y for x, y in zip(own, shared, strict=True)))

    def extend(
        self,
        so_far: AttentionPartial | None,
        queries: Queries,
        keys: Keys | StackedKeys,
        *,
        mask: Mask,
        scale: float,
    ) -> AttentionPartial:
        own, shared = _views(queries, keys)
        so_far = self.kernel.extend(so_far, *own, mask=mask, scale=scale)
        return self.kernel.extend(so_far, *shared, mask=mask, scale=scale)

    def gradients(
        self,
        so_far,
        queries: Queries,
        keys: Keys | StackedKeys,
        saved: BackwardInputs,
        *,
        mask: Mask,
        scale: float,
    ):
        own, shared = _views(queries, keys)
        dq, dkv = self.kernel.gradients(so_far, *own, saved, mask=mask, scale=scale)
        dq, shared_dkv = self.kernel.gradients(dq, *shared, saved, mask=mask, scale=scale)
        return dq, dkv + shared_dkv


_Blocks = tuple[Queries, Any]


def _views(queries: Queries, keys: Keys | StackedKeys) -> tuple[_Blocks, _Blocks]:
    """Returns the blocks with the coordinates for each of the two calls."""
    own = (own_documents(queries.coords), own_documents(keys.coords))
    shared = beginnings(queries.coords, keys.coords)

    def blocks(q_coords: TokenCoords, kv_coords: TokenCoords) -> _Blocks:
        return queries._replace(coords=q_coords), keys._replace(coords=kv_coords)

    return blocks(*own), blocks(*shared)
