"""The shipped model's evaluation set as chat requests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

MODEL = Path(__file__).parents[3] / "serve_configs" / "demo_model"
MAX_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    seed: int
    body: Mapping[str, Any]
    """Of a chat request, without the model's name."""
    reference: str
    """The right answer."""

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.seed}"


def questions(each: int, kinds: Sequence[str] = ()) -> list[Question]:
    """`each` conversations of every kind, or of some, always the same ones.

    Raises:
        ValueError: A kind is unknown.
    """
    evaluation = _evaluation()
    known = list(evaluation.KINDS)
    if unknown := sorted(set(kinds) - set(known)):
        raise ValueError(f"no such kind: {', '.join(unknown)}; there are {', '.join(known)}")
    return [_question(evaluation, kind, seed) for kind in kinds or known for seed in range(each)]


def is_right(question: Question, text: str) -> bool:
    """Equal to the right answer as the model's own evaluation judges."""
    normal = _evaluation().normal
    return normal(text) == normal(question.reference)


def _question(evaluation: ModuleType, kind: str, seed: int) -> Question:
    talk = evaluation.make(kind, seed)
    body = {"messages": evaluation.openai_messages(talk), "temperature": 0, "max_tokens": MAX_TOKENS}
    return Question(kind, seed, body, talk.turns[-1].answer)


def _evaluation() -> ModuleType:
    """evaluate.py beside the model, whose files import each other by bare names."""
    if "evaluate" not in sys.modules:
        sys.path.insert(0, str(MODEL))
        try:
            return importlib.import_module("evaluate")
        finally:
            sys.path.remove(str(MODEL))
    return sys.modules["evaluate"]
