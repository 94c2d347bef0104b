from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.errors import InternalError
from deployments.lm_engine.sampler import Sample, Sampler, SamplingState, keep_likely, keep_top
from deployments.messages import SamplingParams

VOCAB = 16


def state(prompt: tuple[int, ...] = (1, 2), choice: int = 0, grammar: Any = None, **options: Any) -> SamplingState:
    banned = options.pop("banned_ids", ())
    params = SamplingParams(max_tokens=10, **options)
    return SamplingState(params, prompt, choice=choice, grammar=grammar, banned_ids=banned)


def tokens(results: list[Any]) -> list[int]:
    return [result.token_id for result in results]


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_temperature_zero_takes_the_most_likely() -> None:
    logits = random_logits(5)
    assert tokens(Sampler().sample([state(temperature=0.0)] * 5, logits)) == logits.argmax(-1).tolist()


def test_logits_are_not_changed() -> None:
    logits = random_logits(2)
    before = logits.clone()
    Sampler().sample([state(temperature=0.5, top_k=3), state(logit_bias=((0, 5.0),))], logits)
    assert torch.equal(logits, before)


def test_a_seeded_sequence_does_not_depend_on_the_batch() -> None:
    logits = random_logits(40)

    def draw(others: int) -> list[int]:
        sampler = Sampler(seed=others)
        subject = state(seed=7, temperature=0.9, top_p=0.8)
        company = [state(temperature=1.3, top_k=2 + i, seed=i if i % 2 else None) for i in range(others)]
        drawn = []
        for step in range(40):
            batch = [*company[: others // 2], subject, *company[others // 2 :]]
            rows = torch.cat([random_logits(others // 2, step), logits[step : step + 1], random_logits(others, step)])
            drawn.append(sampler.sample(batch, rows[: len(batch)])[others // 2].token_id)  # type: ignore[union-attr]
        return drawn

    alone = draw(0)
    assert alone == draw(0) == draw(3) == draw(8)
    assert len(set(alone)) > 3


def test_choices_of_one_seed_differ() -> None:
    logits = torch.zeros(1, VOCAB)
    sequences = []
    for choice in range(3):
        subject, sampler = state(seed=1, choice=choice), Sampler()
        sequences.append(tuple(tokens([sampler.sample([subject], logits)[0] for _ in range(20)])))
    assert len(set(sequences)) == 3


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler = Sampler(seed=3)
    logits = probabilities.log().repeat(4000, 1)
    counts = Counter(tokens(sampler.sample([state()] * 4000, logits)))
    for token, probability in enumerate(probabilities.tolist()):
        assert counts[token] / 4000 == pytest.approx(probability, abs=4 * math.sqrt(0.25 / 4000))


def test_temperature_sharpens() -> None:
    logits = torch.tensor([[1.0, 0.0]]).repeat(2000, 1)
    counts = Counter(tokens(Sampler(seed=1).sample([state(temperature=0.25)] * 2000, logits)))
    assert counts[0] / 2000 == pytest.approx(1 / (1 + math.exp(-4)), abs=0.02)


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-1, VOCAB + 2), st.sampled_from([0.01, 0.3, 0.7, 0.95, 1.0])), min_size=1, max_size=4
    ),
    st.integers(0, 10**6),
)
def test_top_k_and_top_p_keep_what_the_definitions_say(options: list[tuple[int, float]], seed: int) -> None:
    logits = random_logits(len(options), seed)
    processed = logits.clone()
    keep_top(processed, [k for k, _ in options], [p for _, p in options])
    for row, (k, p) in enumerate(options):
        order = np.argsort(-logits[row].numpy(), kind="stable")[: k if k > 0 else VOCAB]
        chosen = np.exp(logits[row].double().numpy()[order])
        chosen /= chosen.sum()
        reached = np.concatenate([[0.0], np.cumsum(chosen)[:-1]])
        certain = set(order[reached < p - 1e-6].tolist())
        possible = set(order[reached < p + 1e-6].tolist())
        assert certain <= kept(processed)[row] <= possible
        assert torch.equal(processed[row][list(certain)], logits[row][list(certain)])


def test_min_p_keeps_tokens_near_the_best() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.04, 0.16], [0.5, 0.3, 0.04, 0.16]]).log()
    keep_likely(logits, torch.tensor([0.3, 0.0]))
    assert kept(logits) == [{0, 1, 3}, {0, 1, 2, 3}]


def test_min_tokens_bans_the_end_until_it_is_reached() -> None:
    logits = torch.tensor([[9.0, 5.0, 1.0, 0.0]])
    subject = state(temperature=0.0, min_tokens=2, banned_ids=(0, 1))
    drawn = []
    for _ in range(3):
        result = Sampler().sample([subject], logits)[0]
        assert isinstance(result, Sample)
        subject.accept(result.token_id)
        drawn.append(result.token_id)
    assert drawn == [2, 2, 0]


def test_logit_bias_and_penalties_apply_to_their_row_only() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0]]).repeat(4, 1)
    states = [
        state(temperature=0.0),
        state(temperature=0.0, logit_bias=((2, 5.0),)),
        state(temperature=0.0, repetition_penalty=2.0, prompt=(0,)),
        state(temperature=0.0, frequency_penalty=0.2),
    ]
    states[3].accept(0)
    assert tokens(Sampler().sample(states, logits)) == [0, 2, 1, 1]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(3, 1)
    states = [
        state(temperature=0.0, logprobs=2, logit_bias=((3, 50.0),)),
        state(temperature=0.0),
        state(temperature=0.0, logprobs=0),
    ]
    first, second, third = Sampler().sample(states, logits)
    expected = logits[0].log_softmax(-1).tolist()
    assert isinstance(first, Sample)
    assert first.token_id == 3
    assert first.logprobs is not None
    assert first.logprobs.chosen == pytest.approx(expected[3])
    assert [token_id for token_id, _ in first.logprobs.top] == [0, 1]
    assert [value for _, value in first.logprobs.top] == pytest.approx(expected[:2])
    assert isinstance(second, Sample)
    assert second.logprobs is None
    assert isinstance(third, Sample)
    assert third.logprobs is not None
    assert third.logprobs.top == ()


class OneToken:
    """A grammar that allows one token, or fails."""

    def __init__(self, token_id: int | None) -> None:
        self.token_id = token_id
        self.is_finished = False

    def fill_mask(self, mask: np.ndarray, row: int) -> None:
        if self.token_id is None:
            raise RuntimeError("broken")
        mask[row, self.token_id // 32] |= np.int32(1 << self.token_id % 32)

    def accept(self, token_id: int) -> None:
        assert token_id == self.token_id


def test_grammars_mask_their_row_only() -> None:
    states = [state(temperature=0.0), state(grammar=OneToken(11)), state(temperature=0.0)]
    logits = random_logits(3)
    drawn = tokens(Sampler().sample(states, logits))
    assert drawn == [int(logits[0].argmax()), 11, int(logits[2].argmax())]


def test_a_broken_grammar_and_a_row_without_numbers_end_alone() -> None:
    logits = random_logits(4)
    logits[2] = float("nan")
    states = [state(temperature=0.7, seed=1), state(grammar=OneToken(None)), state(), state(temperature=0.0)]
    good, broken, empty, greedy = Sampler().sample(states, logits)
    assert isinstance(good, Sample)
    assert isinstance(broken, InternalError)
    assert isinstance(empty, InternalError)
    assert isinstance(greedy, Sample)
    assert greedy.token_id == int(logits[3].argmax())


def test_options_that_break_the_batch_end_their_sequence_alone() -> None:
    logits = random_logits(3)
    states = [state(temperature=0.0), state(logit_bias=((VOCAB + 5, 1.0),)), state(temperature=0.0)]
    first, bad, last = Sampler().sample(states, logits)
    assert isinstance(bad, InternalError)
    assert tokens([first, last]) == [int(logits[0].argmax()), int(logits[2].argmax())]
