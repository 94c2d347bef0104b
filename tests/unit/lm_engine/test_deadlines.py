from __future__ import annotations

from deployments.lm_engine.deadlines import Deadlines
from deployments.lm_engine.request import Sequence
from tests.unit.lm_engine.host_side import text


def numbered(name: str, serial: int) -> Sequence:
    seq = text(name, 4)
    seq.rank = (0.0, 0.0, serial)
    return seq


def due(deadlines: Deadlines, now_s: float) -> list[str]:
    return [seq.sequence_id for seq in deadlines.due(now_s)]


def test_sequences_come_up_in_order_of_time_each_time_once() -> None:
    living = {name: numbered(name, serial) for serial, name in enumerate("abc")}
    deadlines = Deadlines(living)
    for name, when_s in (("b", 2.0), ("a", 1.0), ("a", 3.0), ("c", 9.0)):
        deadlines.watch(when_s, living[name])
    assert due(deadlines, 2.0) == ["a", "b"]
    assert due(deadlines, 2.5) == []
    assert due(deadlines, 5.0) == ["a"]


def test_the_dead_do_not_come_up_nor_does_a_successor_with_their_id() -> None:
    living = {"a": numbered("a", 0), "b": numbered("b", 1)}
    deadlines = Deadlines(living)
    for seq in living.values():
        deadlines.watch(1.0, seq)
    del living["a"]
    living["b"] = numbered("b", 2)
    assert due(deadlines, 1.0) == []


def test_the_dead_are_forgotten_before_their_time() -> None:
    living: dict[str, Sequence] = {}
    deadlines = Deadlines(living)
    for serial in range(5000):
        living["a"] = numbered("a", serial)
        deadlines.watch(1e9, living["a"])
    assert len(deadlines) < 1100
