"""The synchronous engine over a tiny model: options end to end, and faults that stay where they happen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from cache_service.identity import ItemIdentity
from deployments.errors import (
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    MediaError,
    SightlineError,
)
from deployments.lm_engine.plan import StepPlan
from deployments.messages import GrammarSpec
from tests.parity.conftest import MakeVlm, make_vlm  # noqa: F401 - a fixture
from tests.parity.rig import Picture, Prompt, Rig, TinyVlm


@pytest.fixture
def vlm(make_vlm: MakeVlm) -> TinyVlm:  # noqa: F811
    torch.set_num_threads(1)
    return make_vlm("qwen2_5_vl")


@pytest.fixture
def prompt(vlm: TinyVlm) -> Prompt:
    return vlm.prompt("See ", Picture(1), " What is in the picture?")


def text_of(vlm: TinyVlm, prompt: Prompt, num_tokens: int) -> tuple[list[int], str]:
    tokens, _ = vlm.expected(prompt, num_tokens)
    return tokens, vlm.tokenizer.decode(tokens)


def test_text_usage_and_stages(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm, delay_steps=1)
    rig.add("r", prompt)
    rig.run()
    result = rig.result("r")
    tokens, text = text_of(vlm, prompt, 8)
    assert (list(result.token_ids), result.text, result.finish_reason) == (tokens, text, "length")
    assert result.stats is not None
    assert result.stats.prompt_tokens == len(prompt.token_ids)
    assert (result.stats.completion_tokens, result.stats.image_tokens) == (8, 6)
    assert result.stats.stage_seconds.keys() == {"queue", "encode", "prefill", "generation"}
    assert all(seconds >= 0 for seconds in result.stats.stage_seconds.values())


def test_end_of_text_ends_it_and_is_not_shown(vlm: TinyVlm, prompt: Prompt) -> None:
    tokens, _ = vlm.expected(prompt, 8)
    rig = Rig(vlm)
    rig.engine._eos_token_ids = (tokens[3],)
    rig.add("stops", prompt, ignore_eos=False)
    rig.add("goes-on", prompt)
    rig.add("later", prompt, ignore_eos=False, min_tokens=6)
    rig.run()
    stops, later = rig.result("stops"), rig.result("later")
    end = tokens.index(tokens[3]) + 1
    assert (list(stops.token_ids), stops.finish_reason, stops.stop_reason) == (tokens[:end], "stop", None)
    assert stops.text == vlm.tokenizer.decode(tokens[: end - 1])
    assert rig.result("goes-on").finish_reason == "length"
    assert len(later.token_ids) > 6
    assert tokens[3] not in later.token_ids[:6]


def test_stop_token_ids_are_named(vlm: TinyVlm, prompt: Prompt) -> None:
    tokens, _ = vlm.expected(prompt, 8)
    rig = Rig(vlm)
    rig.add("r", prompt, stop_token_ids=(tokens[2],))
    rig.run()
    assert (rig.result("r").finish_reason, rig.result("r").stop_reason) == ("stop", tokens[2])


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_cut_the_text(vlm: TinyVlm, prompt: Prompt, include: bool) -> None:
    _, text = text_of(vlm, prompt, 12)
    stop = text[4:7]
    at = text.index(stop)
    rig = Rig(vlm)
    rig.add("r", prompt, 12, stop=("never seen", stop), include_stop_str_in_output=include)
    rig.run()
    result = rig.result("r")
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert result.text == text[: at + len(stop) if include else at]


def test_stop_strings_before_min_tokens_are_text(vlm: TinyVlm, prompt: Prompt) -> None:
    _, text = text_of(vlm, prompt, 12)
    rig = Rig(vlm)
    rig.add("r", prompt, 12, stop=(text[1],), min_tokens=12)
    rig.run()
    assert (rig.result("r").text, rig.result("r").finish_reason) == (text, "length")


def test_text_held_back_for_a_stop_string_is_shown_at_the_end(vlm: TinyVlm, prompt: Prompt) -> None:
    _, text = text_of(vlm, prompt, 12)
    rig = Rig(vlm)
    rig.add("r", prompt, 12, stop=(text[-2:] + "never",))
    rig.run()
    assert rig.result("r").text == text


def test_choices_share_a_prompt_and_differ(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm)
    rig.add("r", prompt, 12, n=3, temperature=1.0, seed=5)
    rig.run()
    outputs = {rig.result("r", index).token_ids for index in range(3)}
    assert len(outputs) == 3
    stats = rig.result("r", 1).stats
    assert stats is not None
    assert stats.cached_tokens > 0
    assert len(rig.encodes.started) == 1


def test_a_seed_reproduces_in_another_batch(vlm: TinyVlm, prompt: Prompt) -> None:
    options = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 11, "frequency_penalty": 0.3}
    alone = Rig(vlm, enable_prefix_caching=False)
    alone.add("r", prompt, 16, **options)
    alone.run()
    mixed = Rig(vlm, enable_prefix_caching=False, max_num_batched_tokens=13, num_gpu_blocks_override=30)
    for number in range(4):
        mixed.add(f"other-{number}", vlm.prompt("The fox ", Picture(number + 5)), 16, temperature=1.0)
        mixed.step()
    mixed.add("r", prompt, 16, **options)
    mixed.run()
    assert mixed.result("r").token_ids == alone.result("r").token_ids


def test_logprobs_are_those_of_the_model(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm)
    rig.add("r", prompt, logprobs=3)
    rig.run()
    result = rig.result("r")
    _, logits = vlm.expected(prompt, 8)
    expected = logits.log_softmax(-1)
    assert len(result.logprobs) == 8
    for row, position in enumerate(result.logprobs):
        assert position.chosen.logprob == pytest.approx(expected[row].max().item(), abs=1e-4)
        assert [top.token_id for top in position.top] == expected[row].topk(3).indices.tolist()
        assert position.chosen == position.top[0]
    assert b"".join(position.chosen.utf8 for position in result.logprobs).decode(errors="replace") == result.text


def test_a_grammar_shapes_the_text_and_ends_it(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm)
    choice = GrammarSpec(kind="choice", value='["red circle", "blue square"]')
    rig.add("choice", prompt, 50, grammar=choice)
    rig.add("free", prompt)
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    rig.add("json", prompt, 120, grammar=GrammarSpec(kind="json_schema", value=json.dumps(schema)), ignore_eos=False)
    rig.run()
    assert rig.result("choice").text in ("red circle", "blue square")
    assert rig.result("choice").finish_reason == "stop"
    rig.assert_equals_generate("free", prompt)
    if rig.result("json").finish_reason == "stop":
        assert json.loads(rig.result("json").text).keys() == {"n"}


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_refusals_name_the_field(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm)
    with pytest.raises(InvalidRequestError) as caught:
        rig.add("r", prompt, logit_bias=((100_000, 1.0),))
    assert caught.value.param == "logit_bias"
    with pytest.raises(InvalidRequestError) as caught:
        rig.add("r", Prompt(("x",), [5, 100_000]))
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthError):
        rig.add("r", prompt, 100_000)
    rig.add("r", prompt)
    with pytest.raises(InvalidRequestError) as caught:
        rig.add("r", prompt)
    assert caught.value.param == "request_id"
    rig.run()
    rig.assert_equals_generate("r", prompt)


def test_a_deadline_that_passes_ends_it_with_its_error(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm)
    now = [1000.0]
    rig.engine._clock = lambda: now[0]
    rig.engine._scheduler._clock = lambda: now[0]
    request = rig.request("r", prompt, 100)
    rig.engine.add(replace(request, deadline_s=1001.0))
    for _ in range(5):
        rig.step()
    now[0] = 1002.0
    rig.run()
    assert isinstance(rig.result("r").error, DeadlineError)
    assert rig.result("r").stats is not None


# -- faults ------------------------------------------------------------------------------------------------------------
def test_a_bad_picture_ends_only_those_that_need_it(vlm: TinyVlm, prompt: Prompt) -> None:
    bad = vlm.prompt("See ", Picture(2), " and ", Picture(3))
    rig = Rig(vlm, delay_steps=2)
    rig.encodes.errors[ItemIdentity(bad.items[1].identity)] = MediaError("cannot be decoded")
    rig.add("bad", bad)
    rig.add("good", prompt)
    rig.run()
    assert isinstance(rig.result("bad").error, MediaError)
    rig.assert_equals_generate("good", prompt)


def test_a_failed_step_ends_what_was_in_it_and_nothing_else(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm, max_num_seqs=1)
    run = rig.runner.run
    faults = iter([False, False, True])

    def fail_once(plan: StepPlan, previous: torch.Tensor | None = None) -> torch.Tensor:
        if next(faults, False):
            raise RuntimeError("device on fire")
        return run(plan, previous)

    rig.runner.run = fail_once  # type: ignore[method-assign]
    rig.add("in-it", prompt)
    rig.add("waiting", prompt)
    rig.run()
    assert isinstance(rig.result("in-it").error, InternalError)
    assert rig.result("in-it").finish_reason == "error"
    rig.assert_equals_generate("waiting", prompt)
    assert rig.engine.stats().step_faults == 1


def test_deltas_made_before_a_fault_in_the_same_step_are_not_lost(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm)
    rig.add("ends", prompt, 2)
    rig.add("goes-on", prompt)
    while len(rig.deltas["ends", 0]) < 1:
        rig.step()

    def broken(*args: object) -> None:
        raise RuntimeError("bookkeeping")

    rig.engine._scheduler.resolve = broken  # type: ignore[method-assign, assignment]
    rig.step()
    tokens, _ = vlm.expected(prompt, 8)
    assert (list(rig.result("ends").token_ids), rig.result("ends").finish_reason) == (tokens[:2], "length")
    assert isinstance(rig.result("goes-on").error, InternalError)
    assert not rig.engine.has_work


def test_an_unsound_scheduler_is_replaced(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm)
    rig.add("first", prompt)
    rig.step()

    def broken() -> StepPlan:
        raise AssertionError("the books do not balance")

    rig.engine._scheduler.schedule = broken  # type: ignore[method-assign]
    rig.step()
    assert isinstance(rig.result("first").error, InternalError)
    assert not rig.engine.has_work
    assert rig.runner.embed_bytes == 0
    rig.add("second", prompt)
    rig.run()
    rig.assert_equals_generate("second", prompt)


class BrokenGrammar:
    is_finished = False

    def __init__(self, error: Exception) -> None:
        self.error = error

    def fill_mask(self, mask: object, row: int) -> None:
        mask[row] = -1  # type: ignore[index]

    def accept(self, token_id: int) -> None:
        raise self.error


@pytest.mark.parametrize("error", [InternalError("outside"), ValueError("odd")])
def test_one_sequences_grammar_is_no_one_elses_trouble(vlm: TinyVlm, prompt: Prompt, error: Exception) -> None:
    rig = Rig(vlm)
    rig.engine.add(rig.request("broken", prompt), (BrokenGrammar(error),))
    rig.add("good", prompt)
    rig.run()
    assert isinstance(rig.result("broken").error, SightlineError)
    rig.assert_equals_generate("good", prompt)


# -- stats -------------------------------------------------------------------------------------------------------------
def test_stats_count_tokens_by_source_and_drain_observations(vlm: TinyVlm, prompt: Prompt) -> None:
    rig = Rig(vlm)
    for name in ("cold", "warm"):
        rig.add(name, prompt)
        rig.run()
    stats = rig.engine.stats()
    warm = rig.result("warm").stats
    assert warm is not None
    assert stats.prompt_tokens_cached == warm.cached_tokens
    assert stats.prompt_tokens_cached + stats.prompt_tokens_computed == 2 * len(prompt.token_ids)
    assert stats.generated_tokens == 16
    assert (len(stats.time_to_first_token_s), len(stats.inter_token_s)) == (2, 14)
    assert len(stats.stage_seconds["prefill"]) == 2
    assert stats.finished == {"length": 2}
    again = rig.engine.stats()
    assert (again.time_to_first_token_s, again.generated_tokens) == ((), 16)
