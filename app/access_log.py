"""One line a finished request, as JSON if the formatter is installed. Never payloads, URLs, keys or addresses."""

from __future__ import annotations

import logging
import time
from typing import Any

import orjson

from app.observer import RequestTrace

logger = logging.getLogger("sightline.access")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, `extra={"fields": {...}}`, and the exception if any."""

    converter = staticmethod(time.gmtime)  # type: ignore[assignment]
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line.update(fields)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


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
