"""Which of a replica's devices runs which items of a round. Pure floats: no torch.

    costs    [5.0, 1.0, 1.0, 4.0, 1.0]  --2 shards-->  (0, 2)  6.0    (1, 3, 4)  6.0

The round lasts as long as its heaviest shard. Finding the best split is NP-hard; placing the costliest item first,
each where the least lies (LPT, Graham 1969), is never worse than 4/3 - 1/(3 * shards) times the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def plan_shards(costs: Sequence[float], num_shards: int) -> list[tuple[int, ...]]:
    """Positions in `costs` by shard, ascending in each; a shard may be empty.

    Args:
        costs: Predicted seconds of each item, not negative.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards is {num_shards}; it must be at least 1")
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    # Among equal sums the shorter shard comes first, so that items without cost are spread as well.
    heap = [(0.0, 0, shard) for shard in range(num_shards)]
    for position in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, count, shard = heap[0]
        heapq.heapreplace(heap, (total + costs[position], count + 1, shard))
        shards[shard].append(position)
    return [tuple(sorted(shard)) for shard in shards]
