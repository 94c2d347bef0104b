"""Key and value pools on the device, addressed by slot. Knows nothing about who owns which block.

block b, block_size 4      slots  4b  4b+1  4b+2  4b+3          slot of token p = table[p // 4] * 4 + p % 4
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of the cache: one key and one value row [num_kv_heads, head_dim] per token and layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


class KVTensors:
    """Pools of all layers in one allocation of `num_blocks * layout.bytes_per_block` bytes."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.layout, self.num_blocks = layout, num_blocks
        num_slots = num_blocks * layout.block_size
        shape = (layout.num_layers, 2, num_slots, layout.num_kv_heads, layout.head_dim)
        self._pools = torch.zeros(shape, dtype=layout.dtype, device=device)

    def keys(self, layer: int) -> torch.Tensor:
        """[num_slots, num_kv_heads, head_dim], a view."""
        return self._pools[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[num_slots, num_kv_heads, head_dim], a view."""
        return self._pools[layer, 1]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows [tokens, num_kv_heads, head_dim] at `slots` (int64 [tokens])."""
        self._pools[layer, 0].index_copy_(0, slots, keys)
        self._pools[layer, 1].index_copy_(0, slots, values)

    def clear_blocks(self, blocks: torch.Tensor) -> None:
        """Zero the given blocks (int64 [n]) in all layers."""
        layout = self.layout
        per_block = self._pools.view(layout.num_layers * 2, self.num_blocks, -1)
        per_block.index_fill_(1, blocks, 0)

    @property
    def num_bytes(self) -> int:
        return self._pools.nbytes
