"""Sightline's application: HTTP edge and composition root. `import_path: app:build` names the builder."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`app.build`, imported on first use, so that the edge's modules can be imported without Ray."""
    if name == "build":
        from app.builder import build

        return build
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
