"""Decoding in worker processes: a codec that crashes, hangs or eats memory costs one request, and its process.

    event loop ──▶ idle worker ──thread──▶ pipe ──▶ process ──▶ pipe ──▶ result
                                  │ no answer in time, or the pipe breaks: kill, fork another, try once more

New processes are forked from a server that has imported everything and done nothing, so a replacement is there within
milliseconds and shares its memory. A file that breaks two processes in a row is refused as damaged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from deployments.errors import InternalError, MediaError, OverloadedError
from deployments.messages import Modality
from deployments.preprocessor.config import PreprocessorConfig
from deployments.preprocessor.decode_process import (
    Job,
    JobLimits,
    Method,
    Processor,
    Result,
    read_array,
    serve,
    write_parts,
)
from deployments.preprocessor.families.base import Family
from deployments.preprocessor.media import EncodedMedia, Inspection, MediaOptions, ProcessedMedia
from deployments.preprocessor.processor import MediaProcessor
from deployments.preprocessor.workers import DecodeStats, one_torch_thread

_PRELOAD = [
    "torch.nn.functional",
    "PIL.Image",
    "av",
    "simplejpeg",
    "deployments.preprocessor.decode_process",
    "deployments.preprocessor.isolation",
    "deployments.preprocessor.families.registry",
]
"""What a worker needs; modules that are not installed are passed over."""
_MAIN_LOCK = threading.Lock()
_START_TIMEOUT_S = 60.0
_DEATH_TIMEOUT_S = 1.0
_TRIES = 2


class WorkerLostError(InternalError):
    """The process died or hung in this job. `hung` says which."""

    def __init__(self, message: str, *, hung: bool = False, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.hung = hung


class ProcessWorkers:
    """`DecodeWorkers` in processes. Belongs to one event loop.

    Args:
        make_processor: Makes each process's processor; must be picklable.
        num_workers: Processes, and so jobs at once.
        limits: Of each process and job.
        timeout_s: Wall-clock time of one job.
        preload: Modules that the fork server imports.
    """

    def __init__(
        self,
        make_processor: Callable[[], Processor],
        num_workers: int,
        *,
        limits: JobLimits,
        timeout_s: float,
        preload: list[str] | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD if preload is None else preload)
        self._workers = [_Worker(context, make_processor, limits, timeout_s) for _ in range(num_workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="decode-pipe")
        self.stats = DecodeStats()

    @classmethod
    def for_model(cls, config: PreprocessorConfig, family: Family) -> ProcessWorkers:
        return cls(
            functools.partial(_make_processor, config, family),
            config.decode_threads or os.cpu_count() or 1,
            limits=JobLimits(config.decode_worker_memory_bytes, config.decode_timeout_s),
            timeout_s=config.decode_timeout_s,
        )

    async def inspect(self, modality: Modality, data: EncodedMedia, options: MediaOptions) -> Inspection:
        value, _ = await self._run("inspect", modality, data, options)
        assert isinstance(value, Inspection)
        return value

    async def process(
        self, modality: Modality, data: EncodedMedia, inspection: Inspection, options: MediaOptions
    ) -> ProcessedMedia:
        value, patches = await self._run("process", modality, data, inspection, options)
        assert isinstance(value, ProcessedMedia)
        assert patches is not None
        return replace(value, patches=patches)

    async def remake(self, modality: Modality, data: EncodedMedia, processing: Mapping[str, Any]) -> np.ndarray:
        _, patches = await self._run("remake", modality, data, dict(processing))
        assert patches is not None
        return patches

    async def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self, method: Method, modality: Modality, data: EncodedMedia, *arguments: Any
    ) -> tuple[Any, np.ndarray | None]:
        hung = False
        for _ in range(_TRIES):
            worker = await self._idle.get()
            self.stats.jobs += 1
            job = self._threads.submit(worker.run, method, modality, data, arguments)
            # A caller that leaves does not free the worker; the end of its job does.
            job.add_done_callback(functools.partial(self._release, asyncio.get_running_loop(), worker))
            try:
                return await asyncio.wrap_future(job)
            except WorkerLostError as exc:
                hung = exc.hung
                self.stats.hangs += hung
                self.stats.crashes += not hung
                if hung:
                    break  # a second try would only hang as long again
        reason = "took too long to decode" if hung else "broke the decoder"
        raise MediaError(f"the media {reason}; it is damaged or not what it seems", code=f"invalid_{modality}")

    def _release(self, loop: asyncio.AbstractEventLoop, worker: _Worker, job: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._idle.put_nowait, worker)


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Keeps `multiprocessing` from running the main module again in a process that is started in here.

    No worker needs it, and a Serve replica's is Ray's: a second of imports for every replacement.
    """
    main = sys.modules["__main__"]
    with _MAIN_LOCK:
        spec, file = main.__spec__, main.__dict__.pop("__file__", None)
        main.__spec__ = None
        try:
            yield
        finally:
            main.__spec__ = spec
            if file is not None:
                main.__file__ = file


def _make_processor(config: PreprocessorConfig, family: Family) -> MediaProcessor:
    if config.resample == "torch":
        one_torch_thread()
    return MediaProcessor(config, family)


class _Worker:
    """One process and what connects us to it. `run` is called by one thread at a time."""

    def __init__(
        self,
        context: Any,
        make_processor: Callable[[], Processor],
        limits: JobLimits,
        timeout_s: float,
    ) -> None:
        self._context = context
        self._make_processor = make_processor
        self._limits = limits
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._stopped = False
        self._start()

    def run(
        self, method: Method, modality: Modality, data: EncodedMedia, arguments: tuple[Any, ...]
    ) -> tuple[Any, np.ndarray | None]:
        """The method's value and array. Raises WorkerLostError, and then has a fresh process again."""
        if not self._process.is_alive():  # ended while idle: that is nobody's fault here
            self._restart()
        try:
            sizes = write_parts(self._arena.fileno(), data)
        except OSError:
            raise OverloadedError("there is no room for media to decode right now", retry_after_s=1.0) from None
        try:
            self._pipe.send(Job(method, modality, sizes, isinstance(data, bytes), arguments))
            if not self._pipe.poll(self._timeout_s):
                raise TimeoutError
            result: Result = self._pipe.recv()
        except TimeoutError:
            self._restart()
            raise WorkerLostError("a decode process hung", hung=True) from None
        except (EOFError, OSError):
            self._process.join(_DEATH_TIMEOUT_S)  # it has closed its end, so it is going
            out_of_time = self._process.exitcode == -signal.SIGXCPU
            self._restart()
            raise WorkerLostError("a decode process died", hung=out_of_time) from None
        if result.error is not None:
            raise result.error
        if result.failure is not None:
            raise InternalError(f"decoding failed with {result.failure}")
        array = None if result.shape is None else read_array(self._arena.fileno(), result.shape)
        return result.value, array

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._end()

    def _restart(self) -> None:
        with self._lock:
            self._end()
            if not self._stopped:
                self._start()

    def _start(self) -> None:
        self._arena = tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)  # noqa: SIM115
        self._pipe, theirs = self._context.Pipe()
        self._process: BaseProcess = self._context.Process(
            target=serve,
            args=(theirs, self._arena.name, self._limits, self._make_processor),
            daemon=True,
            name="decode",
        )
        with _without_main_module():
            self._process.start()
        theirs.close()
        try:
            if not self._pipe.poll(_START_TIMEOUT_S):
                raise TimeoutError
            self._pipe.recv()
        except (EOFError, OSError):  # the next job tries again
            self._end()
            raise OverloadedError("a decode process could not be started right now", retry_after_s=1.0) from None

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._arena.close()
