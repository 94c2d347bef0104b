"""Callers cannot fill the log with tracebacks; faults of ours keep theirs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path

import pytest

from deployments.errors import InternalError, MediaError
from deployments.replica_log import OUR_LOGGERS, CallersFault, install_json_log


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


@pytest.fixture
def loggers() -> Iterator[None]:
    """Our loggers and Serve's as they were."""
    names = (*OUR_LOGGERS, "ray.serve")
    kept = {name: (logging.getLogger(name).handlers[:], logging.getLogger(name).propagate) for name in names}
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    for name, (handlers, propagate) in kept.items():
        logger = logging.getLogger(name)
        for handler in logger.handlers:
            if handler not in handlers:
                handler.close()
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(levels[name])


@pytest.mark.usefixtures("loggers")
def test_json_lines_stand_beside_serves_own_file(tmp_path: Path) -> None:
    serves = RotatingFileHandler(tmp_path / "replica_app_Ingress_x1.log", maxBytes=1000, backupCount=2)
    logging.getLogger("ray.serve").handlers[:] = [MemoryHandler(1, target=serves)]
    for _ in range(2):  # a second call replaces the first: no line comes twice
        install_json_log("INFO", {"deployment": "Ingress", "replica": "x1"})
    logging.getLogger("sightline.access").info("done", extra={"fields": {"request_id": "r1", "status": 200}})
    logging.getLogger("app.middleware").debug("too little")
    (line,) = (tmp_path / "replica_app_Ingress_x1.jsonl").read_text().splitlines()
    read = json.loads(line)
    assert read.pop("time").endswith("Z")
    assert read == {
        "level": "INFO", "logger": "sightline.access", "message": "done", "deployment": "Ingress", "replica": "x1",
        "request_id": "r1", "status": 200,
    }  # fmt: skip
    (handler,) = logging.getLogger("app").handlers
    assert isinstance(handler, RotatingFileHandler)
    assert (handler.maxBytes, handler.backupCount) == (1000, 2)
    serves.close()


@pytest.mark.usefixtures("loggers")
def test_without_a_file_of_serves_lines_go_to_stderr() -> None:
    logging.getLogger("ray.serve").handlers[:] = []
    install_json_log("WARNING", {})
    (handler,) = logging.getLogger("sightline").handlers
    assert isinstance(handler, logging.StreamHandler)
    assert handler.stream is sys.__stderr__
    assert logging.getLogger("sightline.access").getEffectiveLevel() == logging.WARNING
