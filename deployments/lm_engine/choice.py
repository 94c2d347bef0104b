"""One of a request's n outputs while it is generated: from sampled tokens to what the caller is shown of them."""

from __future__ import annotations

from deployments.errors import SightlineError
from deployments.lm_engine.detokenizer import Detokenizer
from deployments.lm_engine.request import Sequence
from deployments.lm_engine.sampler import RawLogprobs, Sample, SamplingState
from deployments.lm_engine.stop_checker import Stop, StopStrings, TokenStop
from deployments.lm_engine.tokenizer import TokenDecoder
from deployments.messages import FinishReason, GenerationStats, Logprob, SequenceDelta, TokenLogprobs


class Choice:
    """Args:
    sequence: The scheduler's view of it, read only here.
    sampling: Advanced with every token.
    """

    def __init__(
        self,
        sequence: Sequence,
        sampling: SamplingState,
        token_stop: TokenStop,
        detokenizer: Detokenizer,
        decoder: TokenDecoder,
    ) -> None:
        params = sampling.params
        self.sequence, self.sampling = sequence, sampling
        self.timeline = Timeline(sequence.arrival_s)
        self._token_stop, self._detokenizer, self._decoder = token_stop, detokenizer, decoder
        self._stop_strings = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)

    def advance(self, sample: Sample, now_s: float) -> SequenceDelta:
        """Take one sampled token; the delta carries a finish reason if it was the last.

        Raises:
            SightlineError: The grammar does not take the token.
        """
        self.timeline.note_token(now_s)
        self.sampling.accept(sample.token_id)
        text, stop = self._text_and_stop(sample.token_id)
        logprobs = () if sample.logprobs is None else (self._logprobs(sample.token_id, sample.logprobs),)
        if stop is None:
            return SequenceDelta(index=self.sequence.index, text=text, token_ids=(sample.token_id,), logprobs=logprobs)
        return SequenceDelta(
            index=self.sequence.index,
            text=text,
            token_ids=(sample.token_id,),
            logprobs=logprobs,
            finish_reason=stop.finish_reason,
            stop_reason=stop.stop_reason,
            stats=self.stats(now_s),
        )

    def end(self, finish_reason: FinishReason, now_s: float, error: SightlineError | None = None) -> SequenceDelta:
        """The last delta of a sequence that ends without a last token; text still held back is shown."""
        text = self._stop_strings.skip(self._detokenizer.flush())
        stats = self.stats(now_s)
        return SequenceDelta(
            index=self.sequence.index, text=text, finish_reason=finish_reason, error=error, stats=stats
        )

    def stats(self, now_s: float) -> GenerationStats:
        sequence = self.sequence
        return GenerationStats(
            prompt_tokens=sequence.num_prompt_tokens,
            completion_tokens=self.sampling.num_output_tokens,
            cached_tokens=sequence.num_cached_tokens,
            image_tokens=sum(item.num_slots for item in sequence.items),
            stage_seconds=self.timeline.stage_seconds(sequence.first_scheduled_s, now_s),
        )

    def _text_and_stop(self, token_id: int) -> tuple[str, Stop | None]:
        """Text that may be shown now, and why the sequence ends, if it does."""
        params, num_output_tokens = self.sampling.params, self.sampling.num_output_tokens
        stop = self._token_stop.check(token_id, num_output_tokens)
        ends_itself = stop is not None and stop.finish_reason == "stop"
        if not ends_itself and self.sampling.grammar is not None:
            self.sampling.grammar.accept(token_id)
            if stop is None and self.sampling.grammar.is_finished:
                stop = Stop("stop")
        text = "" if ends_itself and not params.include_stop_str_in_output else self._detokenizer.push(token_id)
        if stop is not None:
            text += self._detokenizer.flush()
        if num_output_tokens <= params.min_tokens:
            return self._stop_strings.skip(text), stop
        shown, found = self._stop_strings.feed(text)
        if found is not None:
            return shown, Stop("stop", found)
        return (shown + self._stop_strings.flush() if stop is not None else shown), stop

    def _logprobs(self, token_id: int, raw: RawLogprobs) -> TokenLogprobs:
        return TokenLogprobs(
            self._logprob(token_id, raw.chosen), tuple(self._logprob(other, value) for other, value in raw.top)
        )

    def _logprob(self, token_id: int, value: float) -> Logprob:
        utf8 = self._decoder.bytes_of(token_id)
        return Logprob(token_id, utf8.decode(errors="replace"), value, utf8)


class Timeline:
    """When things happened to one sequence, on the engine's clock."""

    __slots__ = ("_arrival_s", "_encode_started_s", "_encoded_s", "_first_token_s", "_last_token_s", "inter_token_s")

    def __init__(self, arrival_s: float) -> None:
        self._arrival_s = arrival_s
        self._encode_started_s: float | None = None
        self._encoded_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self.inter_token_s: float | None = None
        """Between the last two tokens; None before there are two."""

    def note_encode_start(self, now_s: float) -> None:
        if self._encode_started_s is None:
            self._encode_started_s = now_s

    def note_encoded(self, now_s: float) -> None:
        self._encoded_s = now_s

    def note_token(self, now_s: float) -> None:
        if self._first_token_s is None:
            self._first_token_s = now_s
        if self._last_token_s is not None:
            self.inter_token_s = now_s - self._last_token_s
        self._last_token_s = now_s

    @property
    def time_to_first_token_s(self) -> float:
        """From arrival; only once there is a token."""
        assert self._first_token_s is not None
        return self._first_token_s - self._arrival_s

    def stage_seconds(self, first_scheduled_s: float | None, now_s: float) -> dict[str, float]:
        """Seconds spent so far in queue, encode, prefill and generation, which add up to the time since arrival.

        While an encode is under way before the first token, the time counts as `encode` and as nothing else.
        """
        scheduled_s = now_s if first_scheduled_s is None else first_scheduled_s
        first_token_s = now_s if self._first_token_s is None else self._first_token_s
        stages = {
            "queue": scheduled_s - self._arrival_s,
            "prefill": first_token_s - scheduled_s,
            "generation": now_s - first_token_s,
        }
        if self._encode_started_s is not None:
            encoded_s = min(now_s if self._encoded_s is None else self._encoded_s, first_token_s)
            queued = max(0.0, min(encoded_s, scheduled_s) - self._encode_started_s)
            running = max(0.0, encoded_s - max(self._encode_started_s, scheduled_s))
            stages["encode"] = queued + running
            stages["queue"] -= queued
            stages["prefill"] -= running
        return stages
