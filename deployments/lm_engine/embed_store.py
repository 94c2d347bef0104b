"""Encoder embeddings resident on the device, by identity. What stays and what goes is decided by the scheduler."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cache_service.identity import EmbeddingIdentity


class EmbedStore:
    """Tensors [num_slots, width] as the scheduler's logical cache believes them to be resident."""

    def __init__(self) -> None:
        self._tensors: dict[EmbeddingIdentity, torch.Tensor] = {}
        self.num_bytes = 0

    def put(self, identity: EmbeddingIdentity, embeddings: torch.Tensor) -> None:
        """Keep `embeddings` until dropped; the same identity again replaces it."""
        self.drop((identity,))
        self._tensors[identity] = embeddings
        self.num_bytes += embeddings.nbytes

    def rows(self, identity: EmbeddingIdentity, start: int, num_rows: int) -> torch.Tensor:
        """Rows [start, start + num_rows): a view, valid until the identity is dropped.

        Raises:
            KeyError: Not resident: the plan and the store disagree.
        """
        return self._tensors[identity][start : start + num_rows]

    def drop(self, identities: Iterable[EmbeddingIdentity]) -> None:
        """Free tensors; identities that never arrived are ignored."""
        for identity in identities:
            tensor = self._tensors.pop(identity, None)
            if tensor is not None:
                self.num_bytes -= tensor.nbytes

    def clear(self) -> None:
        self._tensors.clear()
        self.num_bytes = 0

    def __contains__(self, identity: EmbeddingIdentity) -> bool:
        return identity in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)
