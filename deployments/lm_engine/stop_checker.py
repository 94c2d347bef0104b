"""When a sequence ends: by token, by length or by a string in its text. Pure; knows no tokenizer.

Text is shown only when no later token can make it part of a stop string:

    stop "END"     text so far  "... the EN"     shown "... the ", held back "EN"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deployments.messages import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a sequence ended."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token id or stop string of the request; None for the model's own end of text."""


class TokenStop:
    """Ends by end-of-text tokens, stop token ids and `max_tokens`."""

    __slots__ = ("_eos", "_max_tokens", "_min_tokens", "_stop_ids")

    def __init__(self, params: SamplingParams, eos_token_ids: Iterable[int]) -> None:
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._min_tokens, self._max_tokens = params.min_tokens, params.max_tokens

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Tokens that must not be sampled before `min_tokens` are out, sorted."""
        return tuple(sorted(self._eos | self._stop_ids))

    def check(self, token_id: int, num_output_tokens: int) -> Stop | None:
        """Args: the newest token, and the output's length with it."""
        if num_output_tokens >= self._min_tokens or num_output_tokens >= self._max_tokens:
            if token_id in self._stop_ids:
                return Stop("stop", token_id)
            if token_id in self._eos:
                return Stop("stop")
        return Stop("length") if num_output_tokens >= self._max_tokens else None


class StopStrings:
    """Looks for stop strings in text that comes in pieces, and holds back what may become one."""

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include_in_output
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text to show, stop string found or None). After a find nothing is held and nothing more may be fed."""
        if not self._stops:
            return text, None
        pending = self._held + text
        found = [(at, order) for order, stop in enumerate(self._stops) if (at := pending.find(stop)) >= 0]
        if found:
            at, order = min(found)
            stop = self._stops[order]
            self._held = ""
            return pending[: at + len(stop) if self._include else at], stop
        keep = self._possible_start(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def skip(self, text: str) -> str:
        """Text that is shown whatever it holds (before `min_tokens`)."""
        shown, self._held = self._held + text, ""
        return shown

    def flush(self) -> str:
        """What was held back; the text ends here."""
        return self.skip("")

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string starts with."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
