"""Entry point of `python -m cache_service`; see cli.py."""

from __future__ import annotations

import os
import sys

from cache_service.cli import Console, run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], os.environ, Console(sys.stdin, sys.stdout, sys.stderr)))
