"""An item's embeddings as a cache value, and back. The bytes' form is cache_service.codec's business."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cache_service.codec import decode_array, encode_array
from deployments.vision_encoder.encoder import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    rows: Rows
    """[num_slots, width]; as NumPy, bfloat16 is viewed as uint16."""
    dtype: str
    grid: tuple[int, int, int]
    namespace: str = ""
    """Tenant's, of one that was computed here: a label for operators, who may select by it. Never a key."""


def encode_embedding(key: bytes, embedding: Embedding, *, model: str = "") -> bytes:
    """The value to store under `key`. Copies, and reads a device tensor back: call it off the event loop.

    Args:
        model: Model id, a label for operators as the namespace is.
    """
    rows = embedding.rows
    if isinstance(rows, torch.Tensor):
        host = rows.to("cpu")
        rows = (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()
    return encode_array(
        key,
        np.ascontiguousarray(rows),
        dtype=embedding.dtype,
        grid=embedding.grid,
        namespace=embedding.namespace,
        model=model,
    )


def decode_embedding(key: bytes, value: memoryview, *, trusted: bool) -> Embedding:
    """The embedding in a value. Raises CorruptValueError; see cache_service.tiered.Decode."""
    decoded = decode_array(value, identity=key, verify_checksum=not trusted)
    return Embedding(decoded.array, decoded.dtype, decoded.grid)
