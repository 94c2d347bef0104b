"""One line a finished request: its id, outcome and stage times. Never payloads, URLs, keys or addresses."""

from __future__ import annotations

import logging

from app.observer import RequestTrace

logger = logging.getLogger("sightline.access")


def log_finished(trace: RequestTrace, method: str) -> None:
    """`method` and the endpoint are from fixed sets; a path as sent could hold anything."""
    fields = {
        "request_id": trace.request_id,
        "method": method if method in _METHODS else "other",
        "endpoint": trace.endpoint,
        "tenant": trace.tenant,
        "status": trace.status,
        "error_code": trace.error_code,
        "seconds": round(trace.clock() - trace.arrived_s, 6),
        "stream": trace.stream,
        "media": trace.num_media,
        "attempts": trace.attempts,
        "prompt_tokens": trace.usage.prompt_tokens,
        "completion_tokens": trace.usage.completion_tokens,
        "cached_tokens": trace.usage.cached_tokens,
        "stage_seconds": {stage: round(seconds, 6) for stage, seconds in trace.stage_seconds.items()},
    }
    logger.info("%s %s %d", fields["method"], trace.endpoint, trace.status, extra={"fields": fields})


_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
