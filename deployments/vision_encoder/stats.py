"""Counters of the encoder stage as plain data. A metrics shim reads them; nothing here knows how they are exported."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class EncoderStats:
    """Monotone counters of one replica, written by the encode thread and the event loop, each its own fields."""

    # encode thread
    invocations: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Forward passes by (modality path, `graph` | `static` | `eager`)."""
    items: Counter[str] = field(default_factory=Counter)
    """Items that went through a path's forward pass, by path."""
    graph_replays: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Replays by (path, slot budget)."""
    padded_slots: Counter[str] = field(default_factory=Counter)
    """Slots computed for nobody, by path."""
    slots: Counter[str] = field(default_factory=Counter)
    """Slots computed for items, by path."""
    eager_fallbacks: Counter[str] = field(default_factory=Counter)
    """Passes that ran eagerly although graphs exist, by reason: the first capacity that was too small
    (`slots`, `patches`, `items`, `segments`, `frames`), `cheaper` or `replay_failed`."""
    batch_items: Counter[int] = field(default_factory=Counter)
    """Forward passes by number of items."""
    batch_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds spent in forward passes (upload to result), by path."""
    batch_failures: Counter[str] = field(default_factory=Counter)
    """Failed passes by kind: `out_of_memory`, `error`."""
    isolated_items: int = 0
    """Items run again on their own after their batch had failed."""

    # event loop
    cache_results: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Look-ups by (tier, result)."""
    single_flight_joins: int = 0
    rejected_items: Counter[str] = field(default_factory=Counter)
    """Items refused by the limit they break."""
    abandoned_items: int = 0
    """Queued items whose callers all went away before they ran."""
    patches_remade: int = 0
    """Items whose patches had to be made again by the preprocessor."""
    queue_seconds: float = 0.0
    """Time items spent queued, summed."""
    paced_seconds: float = 0.0
    """Time rounds were held back while a language model decoded on the same device."""

    # sampled at start and after each pass
    predicted_peak_bytes: int = 0
    """Of the largest pass so far, by the memory model."""
    measured_peak_bytes: int = 0
    """Most that was allocated beyond what stays; includes a language model's passes on the same device."""
    graph_bytes: int = 0
    capture_seconds: float = 0.0


_OF_ONE_DEVICE = ("predicted_peak_bytes", "measured_peak_bytes", "capture_seconds")


def sum_stats(parts: Sequence[EncoderStats]) -> EncoderStats:
    """Counters of several encoders as if one had counted; peaks are those of the device with the highest."""
    total = EncoderStats()
    for part in parts:
        for entry in fields(EncoderStats):
            value, sum_so_far = getattr(part, entry.name), getattr(total, entry.name)
            if isinstance(value, dict):
                for key, count in value.copy().items():  # its thread may add a key meanwhile
                    sum_so_far[key] += count
            elif entry.name in _OF_ONE_DEVICE:
                setattr(total, entry.name, max(sum_so_far, value))
            else:
                setattr(total, entry.name, sum_so_far + value)
    return total
