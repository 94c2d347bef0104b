"""How much of Ray's object store is in use, as the raylet counts it."""

from __future__ import annotations

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address


def bytes_in_use() -> int:
    """Bytes of objects that are referenced somewhere in the cluster this process is connected to."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(get_memory_info_reply(state).store_stats.object_store_bytes_used)
