"""The engine behind its port: one thread steps, the event loop talks. Knows no RPC framework.

    event loop    submit, abort, encoder answers ──inbox──▶   engine thread: commands, then a step, again and again
                  channels ◀── one hand-over per step, all requests' deltas at once ──┘

Only the engine's thread touches the engine. The loop is woken once per step, however many requests it served, and what
the step made leaves in one message per channel: work per token on the loop would take the engine's thread its time.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

import torch

from cache_service.identity import EmbeddingIdentity
from deployments.errors import (
    InternalError,
    InvalidRequestError,
    NotReadyError,
    SightlineError,
)
from deployments.lm_engine.embed_pool import EmbedPoolStats
from deployments.lm_engine.embed_upload import EmbedUploader
from deployments.lm_engine.encode_client import EncodeClient
from deployments.lm_engine.engine import EncodeBatch, Encodes, Engine, Output
from deployments.lm_engine.engine_stats import EngineStats
from deployments.lm_engine.grammar import Grammar, GrammarCompiler
from deployments.lm_engine.plan import EncodeStart
from deployments.lm_engine.request_streams import RequestStreams
from deployments.lm_engine.stats import SchedulerStats
from deployments.messages import DeltaBatch, GenerateRequest, GenerationStats
from deployments.ports import ObjectStore, VisionEncoder

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

# How long the engine sleeps when nothing can be computed: deadlines are noticed this late at most.
_WAIT_WITH_WORK_S = 0.02
_WAIT_WITHOUT_WORK_S = 0.5
_MAX_FAULTS_IN_A_ROW = 5
# Longer than a step: without a token for so long nothing is being decoded.
_DECODING_S = 0.1


class AsyncEngine:
    """Implements ports.LMEngine, and `forward` and `read_channel` for callers in other processes.

    Args:
        make_engine: Makes the engine, given where its wishes for embeddings go.
        encoder, store: Where embeddings come from, and what their refs point into.
        uploader: Brings them to the device.
        grammars: Compiles structured-output constraints; None refuses them.
        embed_width: Columns an embedding must have.
        max_encode_tries: Calls for one item before its error stands.
        encode_timeout_s: After which an encoder call counts as lost.
        grammar_timeout_s: Longest wait for a grammar to be compiled.
        stall_s: Without a step for so long while there is work, the engine counts as stuck.
        open_timeout_s: A stream that nobody opens for so long is aborted.
        on_thread_start: Called first in the engine's thread.
    """

    def __init__(
        self,
        make_engine: Callable[[Encodes], Engine],
        encoder: VisionEncoder,
        store: ObjectStore,
        uploader: EmbedUploader,
        *,
        embed_width: int,
        grammars: GrammarCompiler | None = None,
        max_encode_tries: int = 3,
        encode_timeout_s: float = 120.0,
        grammar_timeout_s: float = 5.0,
        stall_s: float = 60.0,
        open_timeout_s: float = 60.0,
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = make_engine(self)
        self._on_thread_start = on_thread_start
        self._grammars = grammars
        self._grammar_timeout_s, self._stall_s = grammar_timeout_s, stall_s
        self._uploader = uploader
        self._encode_client = EncodeClient(
            encoder,
            store,
            uploader,
            self,
            width=embed_width,
            max_tries=max_encode_tries,
            timeout_s=encode_timeout_s,
            trace_context=self.trace_context,
        )
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams = RequestStreams(self._abort_soon, open_timeout_s=open_timeout_s)
        self._calls: set[asyncio.Future[Any]] = set()
        """Callers that wait for the engine's thread."""
        self._compilers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")
        self._thread = threading.Thread(target=self._run, name="lm-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._last_beat_s = time.monotonic()
        self._last_output_s = float("-inf")

    # -- life ----------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the engine's thread; called once, on the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        self._last_beat_s = time.monotonic()
        self._thread.start()

    async def close(self) -> None:
        """End all requests and the thread. Idempotent."""
        self._closing = True
        self._inbox.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        await self._encode_client.close()
        self._uploader.close()
        self._end_waiting(NotReadyError("the server is shutting down"))
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def check_health(self) -> None:
        """Raise InternalError if the engine can make no progress any more."""
        if not self._thread.is_alive():
            raise InternalError("the engine's thread has ended")
        stalled_s = time.monotonic() - self._last_beat_s
        if stalled_s > self._stall_s and self._engine.has_work:
            raise InternalError(f"the engine has work but took no step for {stalled_s:.0f} s")

    # -- ports.LMEngine ------------------------------------------------------------------------------------------------
    async def submit(self, request: GenerateRequest) -> None:
        """Admit a request, or raise. Whoever submits must stream soon, or the request is aborted."""
        if self._loop is None or self._closing or not self._thread.is_alive():
            raise NotReadyError("the engine is not running")
        request_id = request.request_id
        stream = self._streams.add(request)
        try:
            self._engine.validate(request)
            grammars = await self._compile(request)
            await self._call(lambda: self._engine.add(request, grammars))
        except BaseException:
            self._streams.remove(request_id, stream)
            self._abort_soon(request_id)
            raise
        self._streams.await_reader(request_id, stream)

    async def stream(self, request_id: str) -> AsyncGenerator[DeltaBatch, None]:
        """See ports.LMEngine; errors of a sequence are in its last delta."""
        async with aclosing(self._streams.read(request_id)) as batches:
            async for batch in batches:
                yield batch

    async def abort(self, request_id: str) -> None:
        """Stop a request; its reader, if any, sees `abort` as finish reason."""
        if self._streams.end(request_id):
            self._abort_soon(request_id)

    # -- for callers in other processes --------------------------------------------------------------------------------
    async def forward(self, request_id: str, channel_id: str) -> tuple[GenerationStats, ...]:
        """Send an admitted request's deltas over a channel; see RequestStreams."""
        return await self._streams.forward(request_id, channel_id)

    def read_channel(self, channel_id: str) -> AsyncGenerator[list[tuple[str, DeltaBatch]], None]:
        """What the requests of a channel gain, step by step; see RequestStreams."""
        return self._streams.read_channel(channel_id)

    # -- operators -----------------------------------------------------------------------------------------------------
    async def stats(self) -> EngineStats:
        """Totals, and the observations since the last call."""
        return await self._call(self._engine.stats)

    async def scheduler_stats(self) -> SchedulerStats:
        """The scheduler's part of `stats`; reading it takes nothing away."""
        return await self._call(self._engine.scheduler_stats)

    def embed_pool_stats(self) -> EmbedPoolStats:
        """Of the host memory through which embeddings come."""
        return self._uploader.pool.stats()

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns how many blocks were forgotten."""
        return await self._call(self._engine.reset_prefix_cache)

    def trace_context(self, request_id: str) -> Mapping[str, str]:
        """As submitted, while the request is known here; else empty."""
        return self._streams.trace_context(request_id)

    @property
    def is_decoding(self) -> bool:
        """Whether tokens have come out of late. Callable from any thread."""
        return time.monotonic() - self._last_output_s < _DECODING_S

    @property
    def num_streams(self) -> int:
        """Requests submitted and not yet read to their end."""
        return len(self._streams)

    # -- engine.Encodes, called by the engine's thread -----------------------------------------------------------------
    def handle(self, cancelled: tuple[EmbeddingIdentity, ...], batches: tuple[EncodeBatch, ...]) -> None:
        self._on_loop(lambda: self._encode_client.handle(cancelled, batches))

    # -- encode_client.EncodeListener, called on the event loop --------------------------------------------------------
    def on_encoded(self, start: EncodeStart, embeddings: torch.Tensor) -> None:
        def put() -> None:
            try:
                self._engine.put_embedding(start.identity, embeddings, start.sequence_id)
            except Exception as exc:
                _LOG.exception("an embedding could not be stored")
                error = InternalError(f"an embedding could not be stored: {exc!r}")
                self._publish(self._engine.fail_embedding(start, error))

        self._inbox.put(put)

    def on_encode_failed(self, start: EncodeStart, error: SightlineError) -> None:
        self._inbox.put(lambda: self._publish(self._engine.fail_embedding(start, error)))

    def on_encode_retry(self) -> None:
        self._inbox.put(self._engine.count_encode_retry)

    # -- the engine's thread -------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._on_thread_start()
            self._run_steps()
        except Exception as exc:
            _LOG.exception("the engine's thread ends")
            error = exc if isinstance(exc, SightlineError) else InternalError(f"the engine has ended: {exc!r}")
            self._on_loop(lambda: self._end_waiting(error))

    def _run_steps(self) -> None:
        idle, faults_in_a_row = True, 0
        while True:
            had_work = self._engine.has_work
            self._obey(wait_s=(_WAIT_WITH_WORK_S if had_work else _WAIT_WITHOUT_WORK_S) if idle else 0.0)
            self._last_beat_s = time.monotonic()
            if self._closing:
                return
            if not self._engine.has_work:
                if had_work or not idle:
                    self._publish(self._engine.settle())
                idle = True
                continue
            result = self._engine.step()
            idle = result.idle
            self._publish(result.outputs)
            faults_in_a_row = faults_in_a_row + 1 if result.failed else 0
            if faults_in_a_row >= _MAX_FAULTS_IN_A_ROW:
                raise InternalError(f"{faults_in_a_row} steps in a row have failed")

    def _obey(self, wait_s: float) -> None:
        """Carry out all commands that are there; wait for the first one at most so long."""
        try:
            command = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while command is not None:
                self._obey_one(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _obey_one(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:
            _LOG.exception("a command to the engine failed")
            self._publish(self._engine.settle())

    def _publish(self, outputs: list[Output]) -> None:
        if outputs:
            self._last_output_s = time.monotonic()
            self._on_loop(lambda: self._deliver(outputs))

    def _on_loop(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            self._closing = True

    # -- the event loop ------------------------------------------------------------------------------------------------
    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._streams.push(output.request_id, output.delta)

    async def _call(self, function: Callable[[], _T]) -> _T:
        """Result of a function of the engine's thread, run between two steps."""
        if not self._thread.is_alive():
            raise NotReadyError("the engine is not running")
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def run() -> None:
            try:
                result = function()
            except Exception as exc:
                self._on_loop(lambda error=exc: _set_exception(future, error))  # type: ignore[misc]
            else:
                self._on_loop(lambda: _set_result(future, result))

        self._inbox.put(run)
        return await future

    async def _compile(self, request: GenerateRequest) -> tuple[Grammar, ...]:
        """One fresh grammar per choice, compiled off the loop and off the engine's thread."""
        spec = request.sampling.grammar
        if spec is None:
            return ()
        if self._grammars is None:
            raise InvalidRequestError("structured output is not available on this server", param=spec.param)
        loop = asyncio.get_running_loop()
        compiler, count = self._grammars, request.sampling.n
        work = loop.run_in_executor(self._compilers, lambda: tuple(compiler.compile(spec) for _ in range(count)))
        try:
            return await asyncio.wait_for(work, self._grammar_timeout_s)
        except TimeoutError:
            message = f"{spec.param}: compiling took longer than {self._grammar_timeout_s:g} s; simplify it"
            raise InvalidRequestError(message, code="grammar_too_complex", param=spec.param) from None

    def _abort_soon(self, request_id: str) -> None:
        self._inbox.put(lambda: self._engine.abort(request_id))

    def _end_waiting(self, error: SightlineError) -> None:
        """The engine answers no more: nobody shall wait for it."""
        for future in tuple(self._calls):
            _set_exception(future, error)
        self._streams.end_all(error)


def _set_result(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[_T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
