"""The inside of a decode worker process: one job at a time, under limits, until the pipe closes.

Jobs and results are small and go through the pipe; encoded bytes and patches go through a file in memory that both
sides hold open. Memory is limited for the process as a whole, CPU time for each job. This contains faults of codecs; it
is no boundary against an attacker who gains control of the process.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

import numpy as np

from deployments.errors import MediaError, SightlineError
from deployments.preprocessor.media import EncodedMedia, ProcessedMedia

Method = Literal["inspect", "process", "remake"]


@dataclass(frozen=True, slots=True)
class Job:
    method: Method
    modality: str
    sizes: tuple[int, ...]
    """Bytes of each encoded part, one after the other in the arena."""
    is_one_file: bool
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Result:
    value: Any = None
    """What the method returned, without its array."""
    shape: tuple[int, ...] | None = None
    """Shape of the uint8 array in the arena, if there is one."""
    error: SightlineError | None = None
    failure: str | None = None
    """Name of an exception that nobody expected."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    memory_bytes: int
    cpu_s: float


class Processor(Protocol):
    """MediaProcessor, or a stand-in with its methods."""


def serve(pipe: Connection, arena_path: str, limits: JobLimits, make_processor: Callable[[], Processor]) -> None:
    """Run jobs until the pipe closes. The first message out says that the process is ready."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this ends
    with contextlib.suppress(EOFError, BrokenPipeError), open(arena_path, "r+b", buffering=0) as arena:
        processor = make_processor()
        _silence_codecs()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
        pipe.send(Result())
        while True:
            job: Job = pipe.recv()
            _limit_cpu(limits.cpu_s)
            pipe.send(_run(processor, job, arena.fileno()))


def _silence_codecs() -> None:
    """Some codecs print on damage, and callers could fill the log with it. Errors travel through the pipe."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _limit_cpu(cpu_s: float) -> None:
    """The kernel ends the process once this much more CPU time is used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime + cpu_s), hard))


def _run(processor: Processor, job: Job, arena: int) -> Result:
    try:
        data = read_parts(arena, job.sizes, job.is_one_file)
        value = getattr(processor, job.method)(job.modality, data, *job.arguments)
        if isinstance(value, ProcessedMedia):
            write_array(arena, value.patches)
            return Result(replace(value, patches=value.patches[:0].copy()), value.patches.shape)
        if isinstance(value, np.ndarray):
            write_array(arena, value)
            return Result(None, value.shape)
        return Result(value)
    except SightlineError as exc:
        return Result(error=exc)
    except MemoryError:
        text = "the media needs more memory than one request may use"
        return Result(error=MediaError(text, code="image_too_large"))
    except Exception as exc:  # told to the parent, which decides
        return Result(failure=type(exc).__name__)


def write_parts(arena: int, data: EncodedMedia) -> tuple[int, ...]:
    """Put encoded bytes into the arena; the size of each part."""
    parts = (data,) if isinstance(data, bytes) else data
    offset = 0
    for part in parts:
        _write(arena, memoryview(part), offset)
        offset += len(part)
    return tuple(len(part) for part in parts)


def read_parts(arena: int, sizes: tuple[int, ...], is_one_file: bool) -> EncodedMedia:
    parts, offset = [], 0
    for size in sizes:
        parts.append(os.pread(arena, size, offset))
        offset += size
    return parts[0] if is_one_file else tuple(parts)


def write_array(arena: int, array: np.ndarray) -> None:
    _write(arena, np.ascontiguousarray(array).data.cast("B"), 0)


def read_array(arena: int, shape: tuple[int, ...]) -> np.ndarray:
    """A private copy of the array in the arena."""
    array = np.empty(shape, np.uint8)
    view, offset = array.data.cast("B"), 0
    while offset < len(view):
        count = os.preadv(arena, [view[offset:]], offset)
        if count == 0:
            raise EOFError("the arena is shorter than its array")
        offset += count
    return array


def _write(arena: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(arena, view, offset)
        view, offset = view[count:], offset + count
