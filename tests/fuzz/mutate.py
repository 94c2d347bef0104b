"""Damage to bytes and to JSON, drawn from one random generator: the same seed gives the same damage."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

_EDGES = (b"\0", b"\xff", b"\x7f", b"\x80", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\1")
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 1e308, -0.0, 0.5, "", "\0", "a" * 5000, "\u202e\ufeff",
    "😀" * 50, "data:,", "data:image/png;base64,", "http://", "file:///etc/hostname", "http://[::1]:1/", "{{7*7}}",
    "<|image_pad|>", "<|im_end|>", [], {}, [[]], [None] * 20, {"": ""}, {"type": "image_url"}, {"url": 5}, [[[[[]]]]],
    "user", "system", "tool", "auto", "json_object", "image_url", "text",
)  # fmt: skip


class Mutator:
    """One to a few changes at a time: sound files with a small fault reach deepest."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def damage(self, data: bytes, others: Sequence[bytes] = ()) -> bytes:
        """A changed copy; `others` lend pieces."""
        out = bytearray(data)
        for _ in range(self._rng.choice((1, 1, 1, 2, 3, 8))):
            self._damage_once(out, others)
        return bytes(out)

    def _damage_once(self, out: bytearray, others: Sequence[bytes]) -> None:
        rng = self._rng
        at = rng.randrange(len(out) + 1)
        length = min(rng.choice((1, 1, 2, 4, 16, 256)), max(len(out) - at, 0))
        match rng.randrange(8):
            case 0 if length:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at : at + length] = rng.randbytes(length)
            case 2:
                edge = rng.choice(_EDGES)
                out[at : at + len(edge)] = edge
            case 3:
                del out[at : at + length]
            case 4:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 4, 64)))
            case 5:
                out[at:at] = out[at : at + length] * rng.choice((1, 2, 50))
            case 6:
                del out[at:]
            case _ if others:
                other = rng.choice(others)
                start = rng.randrange(len(other) + 1)
                out[at : at + length] = other[start : start + rng.choice((4, 64, 1024))]

    def distort(self, value: Any) -> Any:
        """A changed copy of a JSON value."""
        changed = copy.deepcopy(value)
        for _ in range(self._rng.choice((1, 1, 2, 3))):
            self._distort_once(changed)
        return changed

    def _distort_once(self, root: Any) -> None:
        rng = self._rng
        places = [(holder, key) for holder in _holders(root) for key in _keys(holder)]
        if not places:
            return
        holder, key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1:
                holder[key] = [holder[key]]
            case 2 if isinstance(holder, list):
                holder.extend(copy.deepcopy(holder[key]) for _ in range(rng.choice((1, 3, 70))))
            case 2 | 3 if isinstance(holder[key], str):
                text = self.damage(holder[key].encode("utf-8", "surrogatepass"))
                holder[key] = text.decode("utf-8", "replace")
            case 4:
                other, source = rng.choice(places)
                if source in _keys(other) and not isinstance(other[source], list | dict):
                    holder[key] = other[source]
            case _:
                holder[key] = copy.deepcopy(rng.choice(_VALUES))


def _holders(value: Any) -> list[Any]:
    found, stack = [], [value]
    while stack:
        value = stack.pop()
        if isinstance(value, list | dict):
            found.append(value)
            stack.extend(value.values() if isinstance(value, dict) else value)
    return found


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))
