"""From a validated OpenAI request to a Call: turns, media, sampling and grammar in the words of the stages.

Here is judged what depends on the served model and on the operator's limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.chat_prompt import ChatPromptBuilder, check_mm_kwargs
from app.checks import at_most, value_at_most
from app.openai_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    Generation,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from app.output_grammar import OutputGrammars
from app.pipeline import Call
from app.settings import ApiSettings
from app.tool_calls import CALL_CLOSE
from cache_service.tenants import Tenant
from deployments.errors import InvalidRequestError, NotFoundError
from deployments.messages import ChatPrompt, GrammarSpec, MediaInput, SamplingParams, TextPrompt

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by them only overflows."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions, where no answer has a natural end."""


class RequestConverter:
    """One per ingress replica.

    Args:
        new_id: Makes the unique part of engine ids.
    """

    def __init__(self, settings: ApiSettings, new_id: Callable[[], str]) -> None:
        self._settings, self._limits, self._new_id = settings, settings.limits, new_id
        self._chat_prompts, self._grammars = ChatPromptBuilder(settings.limits), OutputGrammars(settings)

    def chat(self, request: ChatCompletionRequest, tenant: Tenant) -> Call:
        self.check_model(request.model)
        max_tokens = request.max_completion_tokens or request.max_tokens
        tools_active = self._grammars.tools_active(request)
        prompt, media = self._chat_prompts.build(request, tenant, with_tools=tools_active)
        max_tokens_param = (
            "max_completion_tokens"
            if request.max_completion_tokens is not None
            else "max_tokens"
            if request.max_tokens is not None
            else None
        )
        _check_tenant_tokens(max_tokens_param or "max_tokens", max_tokens, tenant)
        stop: tuple[str, ...] = ()
        if tools_active and not request.parallel_tool_calls and request.tool_choice in (None, "auto"):
            stop = (CALL_CLOSE,)  # Nothing constrains the text, so the first call ends it.
        return Call(
            engine_id=self._new_id(),
            prompt=prompt,
            prompt_param="messages",
            media=media,
            sampling=self._sampling(
                request,
                max_tokens=max_tokens,
                logprobs=(request.top_logprobs or 0) if request.logprobs else None,
                logprobs_param="top_logprobs",
                extra_stop=stop,
                grammar=self._grammars.for_tools(request) or self._grammars.for_format(request),
            ),
            max_tokens_param=max_tokens_param,
            tenant=tenant,
            mm_processor_kwargs=check_mm_kwargs(request.mm_processor_kwargs),
            cache_salt=request.cache_salt,
            priority=request.priority,
        )

    def completions(self, request: CompletionRequest, tenant: Tenant) -> tuple[Call, ...]:
        """One call for each prompt."""
        self.check_model(request.model)
        at_most("prompt", len(request.prompt), self._limits.max_prompts, "prompts")
        max_tokens = request.max_tokens or COMPLETION_MAX_TOKENS
        _check_tenant_tokens("max_tokens", max_tokens, tenant)
        sampling = self._sampling(
            request,
            max_tokens=max_tokens,
            logprobs=request.logprobs,
            logprobs_param="logprobs",
            extra_stop=(),
            grammar=self._grammars.for_format(request),
        )
        return tuple(
            Call(
                engine_id=self._new_id(),
                prompt=self._text_prompt(prompt, request.add_special_tokens),
                prompt_param="prompt",
                sampling=sampling,
                max_tokens_param="max_tokens",
                tenant=tenant,
                cache_salt=request.cache_salt,
                priority=request.priority,
            )
            for prompt in request.prompt
        )

    def tokenize(self, request: TokenizeChatRequest | TokenizeTextRequest, tenant: Tenant) -> Call:
        if request.model is not None:
            self.check_model(request.model)
        media: tuple[MediaInput, ...] = ()
        kwargs: Mapping[str, object] = {}
        prompt: ChatPrompt | TextPrompt
        if isinstance(request, TokenizeChatRequest):
            prompt, media = self._chat_prompts.build(request, tenant, with_tools=bool(request.tools))
            kwargs = check_mm_kwargs(request.mm_processor_kwargs)
        else:
            prompt = TextPrompt(text=request.prompt, add_special_tokens=request.add_special_tokens)
        return Call(
            engine_id=self._new_id(),
            prompt=prompt,
            prompt_param="prompt",
            media=media,
            mm_processor_kwargs=kwargs,
            sampling=SamplingParams(max_tokens=1),
            max_tokens_param=None,
            tenant=tenant,
        )

    def check_model(self, name: str) -> None:
        if name not in self._settings.served_model_name:
            raise NotFoundError(
                "The model does not exist on this server; GET /v1/models lists what is served.",
                code="model_not_found",
                param="model",
            )

    # ---- prompt
    def _text_prompt(self, prompt: str | list[int], add_special_tokens: bool) -> TextPrompt:
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError("prompt must not be empty.", param="prompt")
            return TextPrompt(text=prompt, add_special_tokens=add_special_tokens)
        self._check_token_ids("prompt", prompt)
        return TextPrompt(token_ids=tuple(prompt), add_special_tokens=False)

    # ---- sampling
    def _sampling(
        self,
        request: Generation,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        logprobs_param: str,
        extra_stop: tuple[str, ...],
        grammar: GrammarSpec | None,
    ) -> SamplingParams:
        self._check_sampling(request, logprobs, logprobs_param)
        defaults = self._settings.sampling_defaults
        temperature = _first(request.temperature, defaults.temperature)
        return SamplingParams(
            max_tokens=max_tokens or self._settings.max_model_len,
            min_tokens=request.min_tokens,
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_p=_first(request.top_p, defaults.top_p),
            top_k=max(0, _first(request.top_k, defaults.top_k)),
            min_p=_first(request.min_p, defaults.min_p),
            seed=None if request.seed is None else request.seed % 2**63,
            n=request.n,
            stop=tuple(dict.fromkeys((*request.stop, *extra_stop))),
            stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids)),
            ignore_eos=request.ignore_eos,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
            logit_bias=tuple(request.logit_bias.items()),
            logprobs=logprobs,
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            grammar=grammar,
        )

    def _check_sampling(self, request: Generation, logprobs: int | None, logprobs_param: str) -> None:
        limits = self._limits
        value_at_most("n", request.n, limits.max_n)
        value_at_most(logprobs_param, logprobs or 0, limits.max_logprobs)
        at_most("stop", len(request.stop), limits.max_stop_strings, "entries")
        for i, stop in enumerate(request.stop):
            at_most(f"stop[{i}]", len(stop), limits.max_stop_chars, "characters")
        at_most("stop_token_ids", len(request.stop_token_ids), limits.max_stop_token_ids, "entries")
        at_most("logit_bias", len(request.logit_bias), limits.max_logit_bias, "entries")
        self._check_token_ids("stop_token_ids", request.stop_token_ids)
        self._check_token_ids("logit_bias", tuple(request.logit_bias))

    def _check_token_ids(self, param: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._settings.vocab_size
        if token_ids and max(token_ids) >= vocab_size:
            largest = max(token_ids)
            seen = str(largest) if largest < 2**63 else "over 2**63"
            raise InvalidRequestError(
                f"{param} holds the token id {seen}; the largest of this model is {vocab_size - 1}.",
                code="invalid_token_id",
                param=param,
            )


def _check_tenant_tokens(param: str, max_tokens: int | None, tenant: Tenant) -> None:
    limit = tenant.limits.max_completion_tokens
    if limit is not None and max_tokens is not None and max_tokens > limit:
        raise InvalidRequestError(
            f"{param} is {max_tokens}, the limit of this key is {limit}.", code="limit_exceeded", param=param
        )


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value
