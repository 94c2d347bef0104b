"""The shipped model's own examples as chat requests with known answers."""

from __future__ import annotations

import base64
import json
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
        return _normal(text or "") == _normal(self.answer)


def load_examples() -> list[Example]:
    listed = json.loads((FOLDER / "examples.json").read_text())
    return [Example(entry["name"], [_message(m) for m in entry["messages"]], entry["answer"]) for entry in listed]


def data_uri(path: Path) -> str:
    kind = "jpeg" if path.suffix in (".jpg", ".jpeg") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return {**message, "content": content if isinstance(content, str) else [_part(part) for part in content]}


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    return {"type": "image_url", "image_url": {"url": data_uri(FOLDER / part["path"])}}


def _normal(text: str) -> str:
    return text.strip().lower().removesuffix(".")
