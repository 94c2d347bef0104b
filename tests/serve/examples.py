"""The shipped model's own examples as chat requests with known answers."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent.parent / "serve_configs" / "demo_model"


@dataclass(frozen=True)
class Example:
    name: str
    messages: list[dict[str, Any]]
    answer: str

    def is_answered_by(self, text: str | None) -> bool:
        return normal(text or "") == normal(self.answer)


def normal(text: str) -> str:
    return text.strip().lower().removesuffix(".")


def data_uri(path: Path) -> str:
    kind = "jpeg" if path.suffix in (".jpg", ".jpeg") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def picture_part(path: Path) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(path)}}
