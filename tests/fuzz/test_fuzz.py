"""A few hundred mutated inputs per target, with a seed that stays: the long run is `python -m tests.fuzz`."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.mutate import Mutator
from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_only_planned_outcomes(name: str) -> None:
    result = run(name, 7, 400, TARGETS[name](random.Random(7)))
    assert result.faults == []
    assert len(result.outcomes) > 1, "all inputs took the same way: the damage is too small or too great"


def test_stderr_stays_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """Codecs that print would let callers fill the log."""
    run("files", 9, 400, TARGETS["files"](random.Random(9)))
    assert "TIFF" not in capfd.readouterr().err


def test_faults_are_noticed() -> None:
    def target() -> str:
        raise KeyError("broken")

    result = run("x", 1, 3, target)
    assert result.num_faults == 3
    assert "KeyError" in result.faults[0]


def test_same_seed_same_damage() -> None:
    def some(seed: int) -> list[bytes]:
        mutator = Mutator(random.Random(seed))
        return [mutator.damage(b"a sound file of some length") for _ in range(50)]

    assert some(3) == some(3) != some(4)
