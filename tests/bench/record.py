"""What every result of a benchmark says of its own making."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from typing import Any


def header(bench: str, module: str | None = None) -> dict[str, Any]:
    """Name, date, machine and command of `tests/bench/bench_<bench>.py`, run as a module, or of another `module`."""
    return {
        "bench": bench,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "command": " ".join([f"python -m {module or f'tests.bench.bench_{bench}'}", *sys.argv[1:]]),
    }
