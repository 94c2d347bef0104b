"""One request's way through the stages: admit, prepare, submit, stream. Knows nothing about HTTP or Ray.

    place ─▶ prepare ─▶ submit ─▶ deltas … ─▶ finished
                 └──── a replica or a payload was lost, nothing streamed yet: once more, within bounds ────┘

Closing the iterator, or cancelling who awaits it, cancels the stage that is at work and aborts the generation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from app.admission import Admission
from app.observer import RequestTrace
from cache_service.tenants import Tenant
from deployments.errors import (
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PayloadLostError,
    ReplicaLostError,
)
from deployments.messages import (
    ChatPrompt,
    DeltaBatch,
    GenerateRequest,
    MediaInput,
    PreparedPrompt,
    PrepareRequest,
    SamplingParams,
    TextPrompt,
)
from deployments.ports import LMEngine, Preprocessor

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A validated request, in the words of the stages."""

    engine_id: str
    """Unique at the engine; never taken from the caller."""
    prompt: ChatPrompt | TextPrompt
    prompt_param: str
    """Request field that a prompt that is too long is blamed on: `messages` or `prompt`."""
    sampling: SamplingParams
    """Its `max_tokens` counts only if `max_tokens_param` is set."""
    max_tokens_param: str | None
    """Field with which the caller bounded the answer; None: whatever the context leaves."""
    tenant: Tenant
    media: tuple[MediaInput, ...] = ()
    mm_processor_kwargs: Mapping[str, object] = field(default_factory=dict)
    cache_salt: str = ""
    priority: int = 0

    def without_payload(self) -> Call:
        """The same call once it cannot be tried again: its texts and media, which may be large, are let go."""
        return replace(self, prompt=TextPrompt(), media=())


class Pipeline:
    """One per ingress replica.

    Args:
        max_model_len: Context length in tokens.
        request_timeout_s: Deadline of a request, counted from `trace.arrived_s`.
        max_attempts: Tries of a request whose replica or payload was lost before anything was streamed.
        unix_time: Wall clock, for deadlines that cross machines.
    """

    def __init__(
        self,
        preprocessor: Preprocessor,
        engine: LMEngine,
        admission: Admission,
        *,
        max_model_len: int,
        request_timeout_s: float,
        max_attempts: int = 3,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        if max_attempts < 1:
            raise ValueError(f"max_attempts is {max_attempts}; allowed: 1 or more")
        self._preprocessor, self._engine, self.admission = preprocessor, engine, admission
        self._max_model_len, self._timeout_s, self._max_attempts = max_model_len, request_timeout_s, max_attempts
        self._unix_time = unix_time
        self._aborts: set[asyncio.Task[None]] = set()

    async def prepare(self, call: Call, trace: RequestTrace) -> PreparedPrompt:
        """Token ids and media spans only, as /tokenize wants them."""
        deadline = self._deadline(trace)
        async with deadline.entered(self.admission.place(call.tenant), trace):
            return await self._prepare(call, trace, deadline, max_prompt_tokens=None)

    async def generate(
        self, call: Call, trace: RequestTrace, on_prepared: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[DeltaBatch, None]:
        """Deltas until each of `sampling.n` choices has finished, in batches as the engine hands them out.

        `on_prepared` is called once, when the request's media are not kept any longer. Raises SightlineErrors; an
        error before the first batch means that nothing of the answer exists yet.
        """
        deadline = self._deadline(trace)
        async with deadline.entered(self.admission.place(call.tenant), trace):
            prepared: PreparedPrompt | None = None
            for attempt in range(self._max_attempts):
                trace.attempts, started = attempt + 1, False
                engine_id = call.engine_id if attempt == 0 else f"{call.engine_id}-{attempt}"
                try:
                    if prepared is None:
                        prepared = await self._prepare(call, trace, deadline, self._max_model_len - 1)
                        sampling = self._fit(call, len(prepared.token_ids))
                    trace.enter_engine()
                    run = self._run(self._request(call, engine_id, prepared, sampling, deadline, trace), deadline)
                    async with aclosing(run) as batches:
                        async for batch in batches:
                            if not started:
                                # It cannot be tried again: the prompt's refs to pixels must not outlive their use.
                                started, call, prepared = True, call.without_payload(), None
                                on_prepared()
                            trace.on_deltas(batch)
                            yield batch
                    return
                except (ReplicaLostError, PayloadLostError) as error:
                    if started:
                        raise
                    trace.close_stages()
                    logger.warning("attempt %d of %s was lost: %s", attempt + 1, call.engine_id, error.code)
                    if isinstance(error, PayloadLostError):
                        prepared = None
            raise OverloadedError(
                "The server lost the replica that worked on this request, and others as well.",
                code="unavailable",
                retry_after_s=1,
            )

    async def drain(self) -> None:
        """Wait for aborts that are on their way."""
        await asyncio.gather(*self._aborts, return_exceptions=True)

    async def _prepare(
        self, call: Call, trace: RequestTrace, deadline: _Deadline, max_prompt_tokens: int | None
    ) -> PreparedPrompt:
        request = PrepareRequest(
            request_id=call.engine_id,
            prompt=call.prompt,
            media=call.media,
            mm_processor_kwargs=call.mm_processor_kwargs,
            namespace=call.tenant.namespace,
            cache_salt=call.cache_salt,
            deadline_s=deadline.unix_s,
            max_prompt_tokens=max_prompt_tokens,
            max_item_bytes=call.tenant.limits.max_image_bytes,
            trace_context=trace.context,
        )
        began_s = trace.clock()
        prepared = await deadline.bound(self._preprocessor.prepare(request))
        trace.add_window(began_s, prepared.stage_seconds, "transfer")
        for lookup, count in prepared.cache_results.items():
            trace.cache_results[lookup] = trace.cache_results.get(lookup, 0) + count
        trace.usage.prompt_tokens = len(prepared.token_ids)
        return prepared

    def _fit(self, call: Call, prompt_tokens: int) -> SamplingParams:
        left = self._max_model_len - prompt_tokens
        if left < 1:
            raise ContextLengthError(
                f"The prompt has {prompt_tokens} tokens; the model's context length is {self._max_model_len} tokens, "
                "and at least one must be left for the answer.",
                param=call.prompt_param,
            )
        if call.max_tokens_param is None:
            most = call.tenant.limits.max_completion_tokens or left
            sampling = replace(call.sampling, max_tokens=min(left, most))
        elif call.sampling.max_tokens > left:
            raise ContextLengthError(
                f"{call.max_tokens_param} is {call.sampling.max_tokens}, but the prompt's {prompt_tokens} tokens leave "
                f"{left} of the model's context length of {self._max_model_len} tokens.",
                param=call.max_tokens_param,
            )
        else:
            sampling = call.sampling
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {sampling.min_tokens}, more than the {sampling.max_tokens} tokens that the answer may "
                "have.",
                param="min_tokens",
            )
        return sampling

    def _request(
        self,
        call: Call,
        engine_id: str,
        prepared: PreparedPrompt,
        sampling: SamplingParams,
        deadline: _Deadline,
        trace: RequestTrace,
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=engine_id,
            prompt_token_ids=prepared.token_ids,
            sampling=sampling,
            items=prepared.items,
            namespace=call.tenant.namespace,
            cache_salt=call.cache_salt,
            priority=call.priority,
            deadline_s=deadline.unix_s,
            trace_context=trace.context,
        )

    async def _run(self, request: GenerateRequest, deadline: _Deadline) -> AsyncGenerator[DeltaBatch, None]:
        """Submit and stream one attempt; whatever ends it early aborts the rest at the engine."""
        request_id, unfinished = request.request_id, set(range(request.sampling.n))
        deltas: AsyncIterator[DeltaBatch] | None = None
        try:
            try:
                await deadline.bound(self._engine.submit(request))
            except (InvalidRequestError, OverloadedError):
                unfinished.clear()  # Not admitted: there is nothing to abort.
                raise
            del request  # with its refs to pixels; it is the engine's now
            deltas = self._engine.stream(request_id)
            while unfinished:
                try:
                    batch = await deadline.bound(anext(deltas))
                except StopAsyncIteration:
                    raise ReplicaLostError("the stream ended before every choice had finished") from None
                _raise_failure(batch)
                unfinished.difference_update(delta.index for delta in batch if delta.finish_reason is not None)
                yield batch
        finally:
            if unfinished:
                await self._abort(request_id, deltas)

    async def _abort(self, request_id: str, deltas: AsyncIterator[DeltaBatch] | None) -> None:
        # A task of its own: a caller that is cancelled twice must not keep the engine from hearing of it.
        task = asyncio.create_task(self._tell_abort(request_id, deltas))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        await asyncio.shield(task)

    async def _tell_abort(self, request_id: str, deltas: AsyncIterator[DeltaBatch] | None) -> None:
        try:
            if deltas is not None and hasattr(deltas, "aclose"):
                await deltas.aclose()
            await self._engine.abort(request_id)
        except Exception as error:
            # The engine gives up on its own when its caller is gone or the deadline has passed.
            logger.warning("abort of %s failed: %s", request_id, type(error).__name__)

    def _deadline(self, trace: RequestTrace) -> _Deadline:
        left_s = self._timeout_s - (trace.clock() - trace.arrived_s)
        return _Deadline(
            loop_s=asyncio.get_running_loop().time() + left_s,
            unix_s=self._unix_time() + left_s,
            limit_s=self._timeout_s,
        )


def _raise_failure(batch: DeltaBatch) -> None:
    for delta in batch:
        if delta.error is not None:
            raise delta.error
        if delta.finish_reason in ("error", "abort"):
            raise InternalError(f"choice {delta.index} ended with {delta.finish_reason}")


@dataclass(frozen=True, slots=True)
class _Deadline:
    loop_s: float
    """On the event loop's clock."""
    unix_s: float
    limit_s: float

    async def bound(self, work: Awaitable[T]) -> T:
        """The result of `work`, or DeadlineError once the time is up; `work` is cancelled then."""
        scope = asyncio.timeout_at(self.loop_s)
        try:
            async with scope:
                return await work
        except TimeoutError:
            if scope.expired():
                raise self.error() from None
            raise

    def error(self) -> DeadlineError:
        return DeadlineError(f"The request was not finished within its limit of {self.limit_s:g} seconds.")

    @asynccontextmanager
    async def entered(self, place: AbstractAsyncContextManager[None], trace: RequestTrace) -> AsyncIterator[None]:
        began_s = trace.clock()
        trace.add_stages({"receive": began_s - trace.arrived_s})
        async with AsyncExitStack() as stack:
            await self.bound(stack.enter_async_context(place))
            trace.add_stages({"admission": trace.clock() - began_s})
            yield
