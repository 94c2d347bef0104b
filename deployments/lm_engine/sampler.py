"""Chooses tokens from logits, for all sampling sequences at once. Knows nothing about scheduling or text.

The order of steps is vLLM's, so that equal options mean equal things:

    log-probabilities of the raw logits -> min_tokens bans, logit_bias -> penalties -> grammar mask
      -> greedy rows: argmax
      -> random rows: temperature -> min_p -> top_k -> top_p -> draw

A draw is the argmax of p / e with e ~ Exp(1) (the Gumbel-max trick), which needs no host synchronisation. A sequence
with a seed draws e from a generator of its own, so its tokens do not depend on who else is in the batch.

Nothing here waits for the device but `PendingSamples.wait`, so that the next step can be prepared meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deployments.errors import InternalError, SightlineError
from deployments.lm_engine.device_copy import HostCopy, to_device
from deployments.lm_engine.grammar import Grammar, apply_masks, new_masks
from deployments.lm_engine.penalties import Edit, PenaltyRow, TokenCounts, apply_edits, apply_penalties
from deployments.messages import SamplingParams

GREEDY_TEMPERATURE = 1e-5
"""At or below this temperature the most likely token is taken, as in vLLM."""
_NEGATIVE_INFINITY = float("-inf")
_MIN_EXPONENTIAL = 1e-20


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Log-probabilities at one position, before any option changed them."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), best first."""


@dataclass(frozen=True, slots=True)
class Sample:
    token_id: int
    logprobs: RawLogprobs | None = None


class SamplingState:
    """What sampling remembers of one sequence; survives preemption.

    Args:
        banned_ids: Tokens that end the sequence, banned until `min_tokens` are out.
        choice: Index among the request's n choices; choices of one seed differ.
    """

    __slots__ = (
        "banned_ids",
        "counts",
        "generator",
        "grammar",
        "num_drawn_tokens",
        "num_output_tokens",
        "params",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        banned_ids: Sequence[int] = (),
        grammar: Grammar | None = None,
        choice: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.params, self.grammar = params, grammar
        self.banned_ids = tuple(banned_ids)
        self.num_output_tokens = 0
        self.num_drawn_tokens = 0
        """Output tokens, and the one that is drawn but has not come back from the device yet."""
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        self.counts = TokenCounts(prompt_token_ids) if penalised else None
        self.generator: torch.Generator | None = None
        if params.seed is not None:
            self.generator = torch.Generator(device).manual_seed(_choice_seed(params.seed, choice))

    @property
    def needs_last_token(self) -> bool:
        """Whether the next token can be drawn only once the host knows the last one."""
        return self.grammar is not None or self.counts is not None

    def edits(self, row: int) -> list[Edit]:
        """Bans and biases of the next token."""
        edits = []
        # A grammar knows when its text may end; banning the end there could leave no token at all.
        if self.num_drawn_tokens < self.params.min_tokens and self.grammar is None:
            edits.append(Edit(row, self.banned_ids, (_NEGATIVE_INFINITY,) * len(self.banned_ids)))
        if self.params.logit_bias:
            ids, values = zip(*self.params.logit_bias, strict=True)
            edits.append(Edit(row, ids, values))
        return edits

    def penalty(self, row: int) -> PenaltyRow | None:
        if self.counts is None:
            return None
        p = self.params
        return PenaltyRow(row, self.counts, p.presence_penalty, p.frequency_penalty, p.repetition_penalty)

    def accept(self, token_id: int) -> None:
        """Take note of a sampled token."""
        self.num_output_tokens += 1
        self.num_drawn_tokens = max(self.num_drawn_tokens, self.num_output_tokens)
        if self.counts is not None:
            self.counts.add(token_id)


class PendingSamples:
    """The tokens of one step, drawn on the device and on their way to the host.

    Args:
        tokens: int64 [rows] on the device.
        read: Waits, and answers for each row.
    """

    def __init__(self, tokens: torch.Tensor, read: Callable[[], list[Sample | SightlineError]]) -> None:
        self.tokens, self._read = tokens, read

    def wait(self) -> list[Sample | SightlineError]:
        """The next token of each row, or what went wrong with that row alone. Called once."""
        return self._read()


class Sampler:
    """Args:
    seed: Of the generator that sequences without a seed share.
    """

    def __init__(self, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self._shared = torch.Generator(device).manual_seed(seed)

    def sample(self, states: Sequence[SamplingState], logits: torch.Tensor) -> list[Sample | SightlineError]:
        """`draw`, and wait for it."""
        return self.draw(states, logits).wait()

    @torch.inference_mode()
    def draw(self, states: Sequence[SamplingState], logits: torch.Tensor) -> PendingSamples:
        """Draw the next token of each sequence; what breaks one sequence's draw is that sequence's error alone.

        Args:
            logits: float32 [len(states), vocab_size]; not changed.

        States are advanced by the caller (`SamplingState.accept`), grammars too.
        """
        try:
            pending = self._draw_all(states, logits)
        except Exception as exc:
            if len(states) == 1:
                error = InternalError(f"sampling failed: {exc!r}")
                return PendingSamples(torch.zeros(1, dtype=torch.int64, device=logits.device), lambda: [error])
            # Some sequence's options broke the batch: alone, each can only break itself.
            parts = [self.draw([state], logits[row : row + 1]) for row, state in enumerate(states)]
            return PendingSamples(
                torch.cat([part.tokens for part in parts]), lambda: [part.wait()[0] for part in parts]
            )
        for state in states:
            state.num_drawn_tokens += 1
        return pending

    def _draw_all(self, states: Sequence[SamplingState], logits: torch.Tensor) -> PendingSamples:
        processed = logits.clone()
        apply_edits(processed, [edit for row, state in enumerate(states) for edit in state.edits(row)])
        apply_penalties(processed, [p for row, state in enumerate(states) if (p := state.penalty(row)) is not None])
        errors = _mask_by_grammar(processed, states)
        best, tokens = processed.max(dim=-1)
        random_rows = [
            row
            for row, state in enumerate(states)
            if row not in errors and state.params.temperature > GREEDY_TEMPERATURE
        ]
        if random_rows:
            index = _copied(random_rows, np.int64, logits)
            tokens[index] = self._draw(processed[index], [states[row] for row in random_rows])
        logprobs = _PendingLogprobs(logits, tokens, [state.params.logprobs for state in states])
        copy = HostCopy(torch.stack((tokens, best.isfinite().long())))

        def read() -> list[Sample | SightlineError]:
            found, usable = copy.wait().tolist()
            raw = logprobs.wait()
            # A row without a usable logit was drawn from as well, for nothing.
            for row, is_usable in enumerate(usable):
                if not is_usable and row not in errors:
                    errors[row] = InternalError("no token has a finite logit")
            return [errors[row] if row in errors else Sample(token, raw.get(row)) for row, token in enumerate(found)]

        return PendingSamples(tokens, read)

    def _draw(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
        """One token a row, int64 [rows]; `logits` is overwritten."""
        params = [state.params for state in states]
        logits.div_(_copied([p.temperature for p in params], np.float32, logits)[:, None])
        if any(p.min_p > 0 for p in params):
            keep_likely(logits, _copied([p.min_p for p in params], np.float32, logits))
        keep_top(logits, [p.top_k for p in params], [p.top_p for p in params])
        noise = torch.empty_like(logits)
        if any(state.generator is None for state in states):
            noise.exponential_(generator=self._shared)
        for row, state in enumerate(states):
            if state.generator is not None:
                noise[row].exponential_(generator=state.generator)
        return logits.softmax(dim=-1).div_(noise.clamp_min_(_MIN_EXPONENTIAL)).argmax(dim=-1)


def keep_likely(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Drop tokens less likely than min_p times the most likely one, in place (arXiv:2407.01082)."""
    floor = logits.max(dim=-1, keepdim=True).values + min_p.log()[:, None]
    logits.masked_fill_(logits < floor, _NEGATIVE_INFINITY)


def keep_top(logits: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> None:
    """Keep each row's k most likely tokens, and of these the fewest whose probabilities reach p, in place.

    k of 0 or less and p of 1 keep all. Rows are independent of each other, so batching changes nothing.
    """
    vocab_size = logits.shape[1]
    limits = [min(k, vocab_size) if k > 0 else vocab_size for k in top_k]
    widest = max(limits)
    if min(limits) == vocab_size and all(p >= 1 for p in top_p):
        return
    values, ids = logits.topk(widest) if widest < vocab_size else logits.sort(dim=-1, descending=True)
    ranks = torch.arange(widest, device=logits.device)
    values.masked_fill_(ranks >= _copied(limits, np.int64, logits)[:, None], _NEGATIVE_INFINITY)
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # At p = 1 rounding in the sum must not cut the tail off; the first token is always kept.
    reach = _copied([p if p < 1 else 2.0 for p in top_p], np.float32, logits)
    values.masked_fill_((before >= reach[:, None]) & (ranks > 0), _NEGATIVE_INFINITY)
    logits.fill_(_NEGATIVE_INFINITY).scatter_(1, ids, values)


def _copied(values: Sequence[float], dtype: type[np.generic], like: torch.Tensor) -> torch.Tensor:
    """Values on the device of `like`, without waiting for what runs there."""
    return to_device(np.asarray(values, dtype), like.device)


def _mask_by_grammar(logits: torch.Tensor, states: Sequence[SamplingState]) -> dict[int, SightlineError]:
    """Apply the grammars' masks, in place; errors by row of grammars that failed."""
    errors: dict[int, SightlineError] = {}
    constrained = [row for row, state in enumerate(states) if state.grammar is not None]
    if not constrained:
        return errors
    masks = new_masks(len(constrained), logits.shape[1])
    for position, row in enumerate(constrained):
        grammar = states[row].grammar
        assert grammar is not None
        try:
            grammar.fill_mask(masks, position)
        except SightlineError as error:
            errors[row] = error
        except Exception as exc:  # whatever one grammar does, the other sequences go on
            errors[row] = InternalError(f"a grammar failed: {exc!r}")
    apply_masks(logits, constrained, masks)
    return errors


class _PendingLogprobs:
    """Log-probabilities of the rows that want any, on their way to the host.

    Args:
        wanted: For each row how many of the most likely tokens, beside the chosen one; None for nothing.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, wanted: Sequence[int | None]) -> None:
        self._counts = {row: count for row, count in enumerate(wanted) if count is not None}
        if not self._counts:
            return
        rows = _copied(list(self._counts), np.int64, logits)
        logprobs = logits[rows].log_softmax(dim=-1)
        most = min(max(self._counts.values()), logits.shape[1])
        values, ids = logprobs.topk(most)
        self._chosen = HostCopy(logprobs.gather(1, tokens[rows][:, None])[:, 0])
        self._values, self._ids = HostCopy(values), HostCopy(ids)

    def wait(self) -> dict[int, RawLogprobs]:
        """By row."""
        if not self._counts:
            return {}
        chosen, values, ids = (copy.wait().tolist() for copy in (self._chosen, self._values, self._ids))
        return {
            row: RawLogprobs(chosen[place], tuple(zip(ids[place][:count], values[place][:count], strict=True)))
            for place, (row, count) in enumerate(self._counts.items())
        }


def _choice_seed(seed: int, choice: int) -> int:
    """Seed of one of n choices: 63 bits that differ for every (seed, choice)."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest(), "little") >> 1
