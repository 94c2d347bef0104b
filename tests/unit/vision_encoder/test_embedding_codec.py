from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cache_service.codec import CorruptValueError, label, read_header
from cache_service.identity import EncoderFingerprint, ItemIdentity, embedding_identity
from cache_service.memory_tier import MemoryTier
from cache_service.tiered import TieredCache
from deployments.vision_encoder.embedding_codec import Embedding, decode_embedding, encode_embedding

KEY = bytes(range(32))
ROWS = np.arange(24, dtype=np.float32).reshape(4, 6)
EMBEDDING = Embedding(ROWS, "float32", (1, 4, 4), "tenant:a")
FINGERPRINT = EncoderFingerprint(model_id="m", weights_revision="1", dtype="float32", encoder_revision="1")


def test_round_trip() -> None:
    decoded = decode_embedding(KEY, memoryview(encode_embedding(KEY, EMBEDDING)), trusted=False)
    assert isinstance(decoded.rows, np.ndarray)
    assert (decoded.rows == ROWS).all()
    assert (decoded.dtype, decoded.grid) == ("float32", (1, 4, 4))


def test_bfloat16_tensor_keeps_its_bits() -> None:
    rows = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    value = encode_embedding(KEY, Embedding(rows, "bfloat16", (1, 4, 4)))
    decoded = decode_embedding(KEY, memoryview(value), trusted=False)
    assert isinstance(decoded.rows, np.ndarray)
    assert (decoded.rows == rows.view(torch.uint16).numpy()).all()


def test_operators_can_select_by_namespace_and_model() -> None:
    header = read_header(encode_embedding(KEY, EMBEDDING, model="m"))
    assert (header.namespace_label, header.model_label) == (label("tenant:a"), label("m"))


def test_value_of_another_key_is_refused() -> None:
    with pytest.raises(CorruptValueError):
        decode_embedding(bytes(32), memoryview(encode_embedding(KEY, EMBEDDING)), trusted=True)


@pytest.mark.parametrize("field", ["model_id", "weights_revision", "dtype", "encoder_revision", "adapter_digest"])
async def test_another_revision_finds_nothing_of_the_old_one(field: str) -> None:
    """A roll-out needs no flush: old and new replicas use one store side by side."""
    item = ItemIdentity(KEY)
    old, new = (embedding_identity(item, print_) for print_ in (FINGERPRINT, replace(FINGERPRINT, **{field: "new"})))
    cache = TieredCache([MemoryTier(1 << 20)], decode_embedding)
    await cache.put(old, encode_embedding(old, EMBEDDING))
    assert await cache.get(new) is None
    assert await cache.get(old) is not None
