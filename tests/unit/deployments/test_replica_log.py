"""Callers cannot fill the log with tracebacks; faults of ours keep theirs."""

from __future__ import annotations

import logging
import sys

from deployments.errors import InternalError, MediaError
from deployments.replica_log import CallersFault


def logged(error: Exception) -> logging.LogRecord:
    try:
        raise error
    except Exception:
        record = logging.LogRecord("ray.serve", logging.ERROR, "", 0, "Request failed.", (), sys.exc_info())
    assert CallersFault().filter(record)
    return record


def test_a_callers_fault_is_one_line() -> None:
    record = logged(MediaError("the picture is broken", code="invalid_image"))
    assert record.levelno == logging.INFO
    assert record.exc_info is None
    assert record.getMessage() == "refused: invalid_image (400)"


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    for error in (InternalError("broken"), ValueError("broken")):
        record = logged(error)
        assert record.levelno == logging.ERROR
        assert record.exc_info is not None
