"""Slot budgets worth capturing. Pure integers.

    range 64 .. 4096, 1 step per octave:   64 128 256 512 1024 2048 4096
    the same, 4 steps:                     64 80 96 112 128 160 192 224 256 320 ...

More steps mean less padding for more graphs; graphs share one memory pool, so each costs its launch records.
"""

from __future__ import annotations

from collections.abc import Sequence


def make_ladder(
    min_slots: int,
    max_slots: int,
    *,
    steps_per_octave: int = 1,
    slot_step: int = 1,
    explicit: Sequence[int] = (),
    usual: Sequence[int] = (),
) -> tuple[int, ...]:
    """Ascending budgets from `min_slots` to `max_slots`, both included, each a multiple of `slot_step`.

    Args:
        explicit: Used instead of the derived budgets, in any order; those above `max_slots` are refused.
        usual: Added to the derived budgets where they are inside the range.

    Raises:
        ValueError: An explicit budget is above `max_slots`, or is no multiple of `slot_step`.
    """
    if explicit:
        for budget in explicit:
            if budget > max_slots or budget % slot_step:
                raise ValueError(
                    f"encoder_cudagraph_token_budgets has {budget}; budgets must be multiples of {slot_step}"
                    f" and at most {max_slots}"
                )
        return tuple(sorted(set(explicit)))
    top = max_slots // slot_step * slot_step
    budgets = {top} if top else set()
    budgets.update(size for size in usual if min_slots <= size <= top and size % slot_step == 0)
    octave = min_slots
    while octave < top:
        for step in range(steps_per_octave):
            budget = octave + octave * step // steps_per_octave
            rounded = -(-budget // slot_step) * slot_step
            if rounded < top:
                budgets.add(rounded)
        octave *= 2
    return tuple(sorted(budgets))
