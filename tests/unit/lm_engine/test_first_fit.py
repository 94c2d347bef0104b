from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deployments.lm_engine.first_fit import FirstFit


def test_the_first_hole_that_is_large_enough_is_taken() -> None:
    space = FirstFit(100)
    offsets = [space.allocate(20) for _ in range(5)]
    assert offsets == [0, 20, 40, 60, 80]
    space.free(20)
    space.free(60)
    assert space.allocate(21) is None
    assert space.allocate(10) == 20
    assert space.allocate(20) == 60
    assert space.allocate(10) == 30


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_neighbouring_holes_become_one_in_whatever_order_they_are_made(order: tuple[int, ...]) -> None:
    space = FirstFit(30)
    offsets = [space.allocate(10) for _ in range(3)]
    for index in order:
        space.free(offsets[index] or 0)
        space.check_integrity()
    assert space.largest_hole_bytes == 30
    assert space.allocate(30) == 0


def test_pieces_are_aligned_and_take_what_that_costs() -> None:
    space = FirstFit(1000, alignment=256)
    assert space.num_bytes == 768
    assert (space.allocate(1), space.allocate(257)) == (0, 256)
    assert space.used_bytes == 768
    assert space.allocate(1) is None


def test_what_is_not_in_use_cannot_be_freed() -> None:
    space = FirstFit(10)
    space.allocate(5)
    space.free(0)
    with pytest.raises(KeyError):
        space.free(0)


@pytest.mark.parametrize("options", [{"num_bytes": 0}, {"num_bytes": 8, "alignment": 0}])
def test_sizes_are_positive(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        FirstFit(**options)


@given(st.integers(1, 4096), st.sampled_from((1, 16, 256)))
def test_an_empty_buffer_gives_itself_whole(num_bytes: int, alignment: int) -> None:
    space = FirstFit(num_bytes, alignment=alignment)
    if space.num_bytes:
        assert space.allocate(space.num_bytes) == 0
        assert space.largest_hole_bytes == 0


class Machine(RuleBasedStateMachine):
    """Against a byte map, the simplest allocator there is."""

    @initialize(num_units=st.integers(1, 60), alignment=st.sampled_from((1, 8, 256)))
    def start(self, num_units: int, alignment: int) -> None:
        self.space = FirstFit(num_units * alignment, alignment=alignment)
        self.owner: list[int | None] = [None] * num_units
        self.pieces: dict[int, int] = {}

    @rule(size=st.integers(1, 2000))
    def allocate(self, size: int) -> None:
        units = -(-size // self.space.alignment)
        starts = range(len(self.owner) - units + 1)
        expected = next((s for s in starts if all(o is None for o in self.owner[s : s + units])), None)
        offset = self.space.allocate(size)
        assert offset == (None if expected is None else expected * self.space.alignment)
        if expected is not None and offset is not None:
            self.owner[expected : expected + units] = [offset] * units
            self.pieces[offset] = units

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.pieces:
            offset = data.draw(st.sampled_from(sorted(self.pieces)))
            self.space.free(offset)
            first, units = offset // self.space.alignment, self.pieces.pop(offset)
            self.owner[first : first + units] = [None] * units

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "space"):
            self.space.check_integrity()
            used = sum(owner is not None for owner in self.owner)
            assert self.space.used_bytes == used * self.space.alignment
            assert self.space.num_pieces == len(self.pieces)

    def teardown(self) -> None:
        if hasattr(self, "space"):
            for offset in tuple(self.pieces):
                self.space.free(offset)
            assert (self.space.used_bytes, self.space.largest_hole_bytes) == (0, self.space.num_bytes)


TestFirstFit = Machine.TestCase
