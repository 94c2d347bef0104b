"""What a replica writes to its logs: JSON lines of ours, less noise in Serve's. Knows Serve's logger by name only."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path
from typing import Any

import orjson

from deployments.errors import SightlineError

_SERVE_LOGGER = "ray.serve"
OUR_LOGGERS = ("sightline", "app", "deployments", "cache_service")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, `extra={"fields": {...}}`, and the exception if any.

    Args:
        fields: Stand in every line.
    """

    converter = staticmethod(time.gmtime)  # type: ignore[assignment]
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, fields: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._fields = dict(fields or {})

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line.update(fields)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def install_json_log(level: str, fields: Mapping[str, str]) -> None:
    """Write our loggers' lines as JSON: beside the file that Serve writes for this replica, with `.jsonl` for its
    ending and rotated like it, or to stderr where Serve writes none. A further call replaces the one before.
    """
    handler = _json_handler()
    handler.setFormatter(JsonFormatter(fields))
    for name in OUR_LOGGERS:
        logger = logging.getLogger(name)
        for old in logger.handlers:
            old.close()
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False


def _json_handler() -> logging.Handler:
    serves = _file_of(logging.getLogger(_SERVE_LOGGER))
    if serves is None:
        # Not sys.stderr, which Serve may have turned into its own log.
        return logging.StreamHandler(sys.__stderr__)
    path = Path(serves.baseFilename).with_suffix(".jsonl")
    return RotatingFileHandler(path, maxBytes=serves.maxBytes, backupCount=serves.backupCount, encoding="utf-8")


def _file_of(logger: logging.Logger) -> RotatingFileHandler | None:
    for handler in logger.handlers:
        target = handler.target if isinstance(handler, MemoryHandler) else handler
        if isinstance(target, RotatingFileHandler):
            return target
    return None


class CallersFault(logging.Filter):
    """Serve logs every exception of a replica at ERROR with its traceback. One that is the caller's doing (status below
    500) becomes one INFO line without: else anybody could fill the log by sending broken pictures."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, SightlineError) and error.status < 500:
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.exc_info = record.exc_text = None
            record.msg, record.args = "refused: %s (%d)", (error.code, error.status)
        return True


def quiet_callers_faults() -> None:
    """Once per replica; further calls change nothing."""
    logger = logging.getLogger(_SERVE_LOGGER)
    if not any(isinstance(known, CallersFault) for known in logger.filters):
        logger.addFilter(CallersFault())
