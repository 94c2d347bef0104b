"""The page at `/`: ask about a picture, watch the answer stream, see stage times, cache results and budgets live.

One answer holds the page, its style and its script, so that no release serves a page with another one's script. The
policy sent with it lets the browser run exactly these two texts and talk to this server only. All figures come from the
API itself (/v1/models, /v1/chat/completions, /metrics), in addresses relative to the page.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Response

_STYLE_LINK = '<link rel="stylesheet" href="status.css">'
_SCRIPT_LINK = '<script src="status.js"></script>'


@dataclass(frozen=True, slots=True)
class Page:
    html: bytes
    content_security_policy: str


def load_page() -> Page:
    """The page with style and script in it."""
    folder = files("app") / "static"
    html, style, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("status.html", "status.css", "status.js")
    )
    html = html.replace(_STYLE_LINK, f"<style>{style}</style>").replace(_SCRIPT_LINK, f"<script>{script}</script>")
    policy = (
        "default-src 'none'",
        f"script-src {_source(script)}",
        f"style-src {_source(style)}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return Page(html.encode(), "; ".join(policy))


def status_router() -> APIRouter:
    """`GET /`. Needs no key: the page asks its reader for one if the API wants it."""
    page = load_page()
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": page.content_security_policy,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    router = APIRouter()

    async def show() -> Response:
        return Response(page.html, headers=headers)

    router.add_api_route("/", show, methods=["GET", "HEAD"], include_in_schema=False)
    return router


def _source(text: str) -> str:
    """An inline text as a source of a content security policy (CSP level 3, hash-source)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
