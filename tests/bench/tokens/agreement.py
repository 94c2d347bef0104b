"""How far two lists of greedy tokens agree. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Pair:
    """One question's answers."""

    kind: str
    reference: Sequence[int]
    """Token ids in float32 on the CPU."""
    other: Sequence[int]
    reference_right: bool = False
    """Whether the text is the right answer to the question."""
    other_right: bool = False

    @property
    def is_equal(self) -> bool:
        return list(self.reference) == list(self.other)

    @property
    def common_tokens(self) -> int:
        """Before the first difference; what comes after it follows from another text and says nothing."""
        count = 0
        for mine, theirs in zip(self.reference, self.other, strict=False):
            if mine != theirs:
                break
            count += 1
        return count


def agreement(pairs: Iterable[Pair]) -> dict[str, Any]:
    """Shares over some questions, 0 to 1; None where there is nothing to share."""
    pairs = list(pairs)
    tokens = sum(len(pair.reference) for pair in pairs)
    return {
        "questions": len(pairs),
        "equal_answers": _share(sum(pair.is_equal for pair in pairs), len(pairs)),
        "equal_tokens": _share(sum(pair.common_tokens for pair in pairs), tokens),
        "reference_right": _share(sum(pair.reference_right for pair in pairs), len(pairs)),
        "right": _share(sum(pair.other_right for pair in pairs), len(pairs)),
    }


def by_kind(pairs: Iterable[Pair]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.kind, []).append(pair)
    return {kind: agreement(group) for kind, group in groups.items()}


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 5) if whole else None
