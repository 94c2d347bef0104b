"""Runs a target many times and says what came of it: outcomes, faults, the slowest input, memory before and after."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzz.targets import Target


@dataclass(slots=True)
class Result:
    target: str
    seed: int
    count: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """The first few, as `number of the input: exception`."""
    num_faults: int = 0
    slowest_s: float = 0.0
    seconds: float = 0.0
    warm_rss_mib: float = 0.0
    """After the first fifth, when caches and allocators have their size."""
    end_rss_mib: float = 0.0

    @property
    def growth_mib(self) -> float:
        return self.end_rss_mib - self.warm_rss_mib

    def add_fault(self, text: str) -> None:
        self.num_faults += 1
        if len(self.faults) < 20:
            self.faults.append(text)


def run(name: str, seed: int, count: int, target: Target, progress: Callable[[int], None] = lambda _: None) -> Result:
    """Feed `count` inputs; a fault is noted and does not end the run."""
    result, start = Result(name, seed), time.perf_counter()
    for number in range(count):
        if number == count // 5:
            result.warm_rss_mib = settled_rss_mib()
        began = time.perf_counter()
        try:
            result.outcomes[target()] += 1
        except Exception as error:
            result.add_fault(f"{number}: {error!r}")
        result.slowest_s = max(result.slowest_s, time.perf_counter() - began)
        result.count += 1
        progress(result.count)
    result.seconds = time.perf_counter() - start
    result.end_rss_mib = settled_rss_mib()
    return result


def settled_rss_mib(pid: int | None = None) -> float:
    """Resident memory; of this process after giving back what nobody holds."""
    if pid is None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    with open(f"/proc/{pid or os.getpid()}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
