"""What a replica writes to its log. Knows Serve's logger by name only."""

from __future__ import annotations

import logging

from deployments.errors import SightlineError

_SERVE_LOGGER = "ray.serve"


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
