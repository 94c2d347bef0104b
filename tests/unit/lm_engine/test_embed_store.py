from __future__ import annotations

import pytest
import torch

from cache_service.identity import EmbeddingIdentity
from deployments.lm_engine.embed_store import EmbedStore

A, B = EmbeddingIdentity(b"a"), EmbeddingIdentity(b"b")


def test_rows_are_views_of_what_was_put() -> None:
    store = EmbedStore()
    rows = torch.arange(12.0).view(4, 3)
    store.put(A, rows)
    assert A in store
    torch.testing.assert_close(store.rows(A, 1, 2), rows[1:3])


def test_bytes_follow_puts_and_drops() -> None:
    store = EmbedStore()
    store.put(A, torch.zeros(4, 3))
    store.put(B, torch.zeros(2, 3))
    store.put(A, torch.zeros(1, 3))
    assert store.num_bytes == 3 * 3 * 4
    store.drop((A, EmbeddingIdentity(b"never came")))
    assert (store.num_bytes, len(store)) == (24, 1)
    store.clear()
    assert (store.num_bytes, len(store)) == (0, 0)


def test_a_dropped_identity_is_not_resident() -> None:
    store = EmbedStore()
    store.put(A, torch.zeros(4, 3))
    store.drop((A,))
    with pytest.raises(KeyError):
        store.rows(A, 0, 1)
