"""Which bytes of one buffer are in use: first fit with coalescing, on integers alone.

┌────────┬──────┬───────────────┬─────┬──────────┐
│ in use │ hole │    in use     │hole │  in use  │   freeing what lies between two holes makes one of all three
└────────┴──────┴───────────────┴─────┴──────────┘
"""

from __future__ import annotations

from bisect import bisect_left, insort


class FirstFit:
    """Args:
    num_bytes: Of the buffer.
    alignment: Every piece starts at a multiple of it.
    """

    def __init__(self, num_bytes: int, *, alignment: int = 1) -> None:
        if num_bytes < 1 or alignment < 1:
            raise ValueError(f"num_bytes is {num_bytes} and alignment {alignment}; both must be at least 1")
        self.alignment = alignment
        self.num_bytes = num_bytes // alignment * alignment
        """A rest at the end that is smaller than the alignment is not used."""
        self._holes: list[tuple[int, int]] = [(0, self.num_bytes)] if self.num_bytes else []
        """(offset, size), by offset; no two of them touch."""
        self._used: dict[int, int] = {}
        """Size by offset."""
        self.used_bytes = 0

    def size_of(self, num_bytes: int) -> int:
        """What a piece of so many bytes takes."""
        return max(1, -(-num_bytes // self.alignment)) * self.alignment

    def allocate(self, num_bytes: int) -> int | None:
        """Offset of a new piece in the first hole that is large enough; None if there is none."""
        size = self.size_of(num_bytes)
        for index, (offset, hole) in enumerate(self._holes):
            if hole >= size:
                if hole == size:
                    del self._holes[index]
                else:
                    self._holes[index] = (offset + size, hole - size)
                self._used[offset] = size
                self.used_bytes += size
                return offset
        return None

    def free(self, offset: int) -> None:
        """Give a piece back.

        Raises:
            KeyError: No piece in use starts there.
        """
        size = self._used.pop(offset)
        self.used_bytes -= size
        place = bisect_left(self._holes, (offset, 0))
        if place < len(self._holes) and self._holes[place][0] == offset + size:
            size += self._holes.pop(place)[1]
        if place and sum(self._holes[place - 1]) == offset:
            offset, before = self._holes.pop(place - 1)
            size += before
        insort(self._holes, (offset, size))

    @property
    def num_pieces(self) -> int:
        """In use."""
        return len(self._used)

    @property
    def largest_hole_bytes(self) -> int:
        return max((size for _, size in self._holes), default=0)

    def check_integrity(self) -> None:
        """Raise AssertionError unless pieces and holes tile the buffer and no two holes touch."""
        assert self.used_bytes == sum(self._used.values()), "used bytes do not add up"
        end, was_hole = 0, False
        for offset, size, is_hole in sorted(
            [(offset, size, False) for offset, size in self._used.items()]
            + [(offset, size, True) for offset, size in self._holes]
        ):
            assert offset == end, f"bytes {min(offset, end)} to {max(offset, end)} are in two pieces, or in none"
            assert size > 0, f"nothing at {offset}"
            assert offset % self.alignment == 0, f"the piece at {offset} is not aligned"
            assert not (is_hole and was_hole), f"two holes touch at {offset}"
            end, was_hole = offset + size, is_hole
        assert end == self.num_bytes, f"{end} of {self.num_bytes} bytes are accounted for"
