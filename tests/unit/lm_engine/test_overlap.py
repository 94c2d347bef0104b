"""Steps prepared before the tokens of the one before are known: the same answers, and faults that stay apart."""

from __future__ import annotations

import pytest
import torch

from deployments.errors import InternalError, SightlineError
from deployments.lm_engine.plan import StepPlan
from deployments.lm_engine.sampler import PendingSamples, Sample, SamplingState
from deployments.messages import GrammarSpec
from tests.parity.conftest import MakeVlm, make_vlm  # noqa: F401 - a fixture
from tests.parity.rig import Picture, Prompt, Rig, TinyVlm

OPTIONS = {
    "greedy": {},
    "one-token": {"num_tokens": 1},
    "two-tokens": {"num_tokens": 2},
    "seeded": {"temperature": 1.0, "seed": 5},
    "three-choices": {"temperature": 1.0, "seed": 6, "n": 3},
    "biased": {"temperature": 0.7, "seed": 7, "logit_bias": ((5, 4.0),), "min_tokens": 4, "ignore_eos": False},
    "penalised": {"repetition_penalty": 1.7, "frequency_penalty": 0.5},
    "logprobs": {"logprobs": 3},
    "grammar": {"grammar": GrammarSpec(kind="regex", value="[a-d]{3,9}", param="guided_regex"), "ignore_eos": False},
}


@pytest.fixture
def vlm(make_vlm: MakeVlm) -> TinyVlm:  # noqa: F811
    torch.set_num_threads(1)
    return make_vlm("qwen2_5_vl")


@pytest.fixture
def prompt(vlm: TinyVlm) -> Prompt:
    return vlm.prompt("See ", Picture(1), " What is in the picture?")


def add_all(rig: Rig, prompt: Prompt) -> None:
    for name, options in OPTIONS.items():
        rig.add(name, prompt, **{"num_tokens": 8, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("max_num_seqs", [2, 16])
def test_every_option_answers_as_step_by_step(vlm: TinyVlm, prompt: Prompt, max_num_seqs: int) -> None:
    rigs = [Rig(vlm, max_num_seqs=max_num_seqs, async_scheduling=overlap) for overlap in (False, True)]
    for rig in rigs:
        add_all(rig, prompt)
        rig.run()
    for name, options in OPTIONS.items():
        for index in range(int(options.get("n", 1))):  # type: ignore[call-overload]
            expected, result = (rig.result(name, index) for rig in rigs)
            assert expected.error is None
            assert result.token_ids == expected.token_ids, name
            assert (result.text, result.finish_reason) == (expected.text, expected.finish_reason), name
            assert [entry.chosen.token_id for entry in result.logprobs] == [
                entry.chosen.token_id for entry in expected.logprobs
            ]


def test_what_was_computed_after_the_end_is_not_shown(vlm: TinyVlm, prompt: Prompt) -> None:
    tokens, _ = vlm.expected(prompt, 8)
    rig = Rig(vlm, async_scheduling=True)
    rig.add("stops", prompt, stop_token_ids=(tokens[2],))
    rig.add("goes-on", prompt)
    rig.run()
    end = tokens.index(tokens[2]) + 1
    assert (list(rig.result("stops").token_ids), rig.result("stops").finish_reason) == (tokens[:end], "stop")
    assert rig.result("stops").stats.completion_tokens == end  # type: ignore[union-attr]
    rig.assert_equals_generate("goes-on", prompt)


def test_a_step_is_queued_before_the_one_before_is_read(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm, async_scheduling=True)
    events: list[str] = []
    run, draw = rig.runner.run, rig.sampler.draw

    def recorded_run(plan: StepPlan, previous: torch.Tensor | None = None) -> torch.Tensor:
        events.append("run")
        return run(plan, previous)

    def recorded_draw(states: list[SamplingState], logits: torch.Tensor) -> PendingSamples:
        pending = draw(states, logits)

        def read() -> list[Sample | SightlineError]:
            events.append("read")
            return pending.wait()

        return PendingSamples(pending.tokens, read)

    rig.runner.run = recorded_run  # type: ignore[method-assign]
    rig.sampler.draw = recorded_draw  # type: ignore[method-assign, assignment]
    rig.add("r", prompt, 4)
    rig.run()
    # The encode's answer comes between the first two steps; the last step has nothing left to compute.
    assert events[events.index("read") - 2 :] == ["run", "run", "read", "run", "read", "run", "read", "run", "read"]


def test_a_failed_step_does_not_take_the_tokens_of_the_one_before(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm, async_scheduling=True, max_num_batched_tokens=64)
    other = vlm.prompt("hello there")
    rig.add("ends", other, 2)
    rig.add("in-it", prompt, 8)
    run, calls = rig.runner.run, 0

    def fail_later(plan: StepPlan, previous: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal calls
        calls += "ends" not in [chunk.sequence_id for chunk in plan.chunks]
        if calls == 2:
            raise RuntimeError("device on fire")
        return run(plan, previous)

    rig.runner.run = fail_later  # type: ignore[method-assign]
    rig.run()
    tokens, _ = vlm.expected(other, 2)
    assert (list(rig.result("ends").token_ids), rig.result("ends").finish_reason) == (tokens, "length")
    assert isinstance(rig.result("in-it").error, InternalError)
    assert not rig.engine.has_work
    rig.add("after", prompt)
    rig.run()
    rig.assert_equals_generate("after", prompt)


def test_a_step_that_cannot_be_read_ends_what_was_in_it_and_the_next(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm, async_scheduling=True, max_num_seqs=1)
    draw, draws = rig.sampler.draw, 0

    def unreadable(states: list[SamplingState], logits: torch.Tensor) -> PendingSamples:
        nonlocal draws
        draws += 1
        pending = draw(states, logits)

        def read() -> list[Sample | SightlineError]:
            raise RuntimeError("device lost")

        return PendingSamples(pending.tokens, read) if draws == 3 else pending

    rig.sampler.draw = unreadable  # type: ignore[method-assign, assignment]
    rig.add("in-it", prompt)
    rig.add("waiting", prompt)
    rig.run()
    assert isinstance(rig.result("in-it").error, InternalError)
    assert len(rig.result("in-it").token_ids) == 2
    rig.assert_equals_generate("waiting", prompt)


def test_a_request_of_the_same_id_gets_none_of_the_one_that_left(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm, async_scheduling=True)
    rig.add("r", prompt, temperature=1.0, seed=1)
    rig.add("other", prompt)
    while len(rig.deltas["r", 0]) < 2:
        rig.step()
    rig.engine.abort("r")
    rig.deltas.pop(("r", 0))
    rig.add("r", prompt)
    rig.run()
    rig.assert_equals_generate("r", prompt)
    rig.assert_equals_generate("other", prompt)


def test_a_step_in_flight_when_all_have_left_is_forgotten(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm, async_scheduling=True)
    rig.add("leaves", prompt)
    while not rig.deltas["leaves", 0]:
        rig.step()
    rig.engine.abort("leaves")
    assert not rig.engine.has_work
    assert rig.engine.settle() == []
    rig.add("next", prompt)
    rig.run()
    rig.assert_equals_generate("next", prompt)
