"""CPU time of this process and its decode workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_UTIME, _STIME = 11, 12
"""Fields of /proc/PID/stat after the command's closing parenthesis."""


class CpuMeter:
    """Load since the last reading, as a share of `num_cores`.

    Args:
        num_cores: Cores that the work may use.
        cpu_seconds: Total CPU time so far.
        clock: Seconds that never run backwards.
    """

    def __init__(
        self,
        num_cores: int,
        cpu_seconds: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_cores < 1:
            raise ValueError(f"num_cores is {num_cores}; it must be at least 1")
        self._num_cores, self._clock = num_cores, clock
        self._cpu_seconds = cpu_seconds or process_cpu_seconds
        self._last = (self._cpu_seconds(), clock())

    def read(self) -> float:
        cpu_s, now = self._cpu_seconds(), self._clock()
        before_cpu_s, before = self._last
        self._last = cpu_s, now
        if now <= before:
            return 0.0
        # A worker process that ended takes its past seconds with it.
        return max(0.0, cpu_s - before_cpu_s) / (now - before) / self._num_cores


def process_cpu_seconds() -> float:
    """Of this process and, on Linux, of its live children."""
    return time.process_time() + sum(_seconds_of(pid) for pid in _children())


def _children() -> set[str]:
    children: set[str] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            children.update(path.read_text().split())
        except OSError:  # the thread has ended
            continue
    return children


def _seconds_of(pid: str) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # the child has ended
        return 0.0
    return (int(fields[_UTIME]) + int(fields[_STIME])) / os.sysconf("SC_CLK_TCK")
