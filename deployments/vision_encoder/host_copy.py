"""Megabytes of pixels into staging memory, fast."""

from __future__ import annotations

import numpy as np
import torch

_SHARED_BYTES = 1 << 20
"""Below, waking further threads takes longer than the copy."""


def copy_bytes(target: np.ndarray, source: np.ndarray) -> None:
    """target[...] = source for uint8 arrays of equal shape; large ones with torch's CPU threads."""
    if source.nbytes < _SHARED_BYTES or not source.flags.c_contiguous:
        target[...] = source
    else:
        torch.from_numpy(target).copy_(torch.from_numpy(_unlocked(source)))


class _Unlocked:
    """NumPy's array interface of memory that is only read, without its read-only mark: torch warns of that mark."""

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._owner = array


def _unlocked(array: np.ndarray) -> np.ndarray:
    return array if array.flags.writeable else np.asarray(_Unlocked(array))
