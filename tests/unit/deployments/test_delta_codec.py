"""What goes through a channel comes out as it went in, whatever it is."""

from __future__ import annotations

import pickle
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from deployments.delta_codec import MAX_TOKENS, decode, encode
from deployments.errors import InternalError, MediaError
from deployments.messages import DeltaBatch, GenerationStats, Logprob, SequenceDelta, TokenLogprobs

tokens = st.integers(0, 2**31)
logprobs = st.builds(Logprob, tokens, st.text(max_size=4), st.floats(-100, 0), st.binary(max_size=4))
token_logprobs = st.builds(TokenLogprobs, logprobs, st.lists(logprobs, max_size=3).map(tuple))
stats = st.builds(GenerationStats, prompt_tokens=tokens, completion_tokens=tokens)
deltas = st.builds(
    SequenceDelta,
    index=st.integers(0, 7),
    text=st.text(max_size=8),
    token_ids=st.lists(tokens, max_size=3).map(tuple),
    logprobs=st.lists(token_logprobs, max_size=2).map(tuple),
    finish_reason=st.sampled_from((None, None, None, "stop", "length")),
    stop_reason=st.none() | st.integers(0, 9) | st.text(max_size=3),
    stats=st.none() | stats,
)
batches = st.dictionaries(st.text(max_size=5), st.lists(deltas, min_size=1, max_size=3).map(tuple), max_size=5)


def through(steps: dict[str, DeltaBatch]) -> dict[str, DeltaBatch]:
    return dict(pair for message in encode(list(steps.items())) for pair in decode(message))


@given(batches)
def test_a_message_says_what_was_put_in_and_in_the_same_types(steps: dict[str, DeltaBatch]) -> None:
    found = through(steps)
    assert list(found) == list(steps)
    # Equal in repr, too: 1 and True, or a list and a tuple inside, would show.
    assert repr(found) == repr(steps)
    assert found == steps


def test_errors_keep_their_kind_and_their_words() -> None:
    (delta,) = through({"r": (SequenceDelta(finish_reason="error", error=MediaError("no", param="p")),)})["r"]
    assert isinstance(delta.error, MediaError)
    assert (delta.error.message, delta.error.param) == ("no", "p")
    (delta,) = through({"r": (SequenceDelta(error=InternalError("x")),)})["r"]
    assert isinstance(delta.error, InternalError)


def test_a_plain_token_is_four_plain_values() -> None:
    (message,) = encode([("r", (SequenceDelta(index=1, text="a", token_ids=(7,)),))])
    assert pickle.loads(message) == [("r", 1, "a", (7,))]


def test_a_long_backlog_goes_in_several_messages_in_order() -> None:
    step = [(f"r{i}", (SequenceDelta(text="x", token_ids=tuple(range(700))),) * 3) for i in range(4)]
    messages = list(encode(step))
    assert len(messages) > 3
    parts = [pair for message in messages for pair in decode(message)]
    assert all(sum(len(d.token_ids) for _, batch in decode(m) for d in batch) < 2 * MAX_TOKENS for m in messages)
    joined = [
        (request_id, tuple(d for _, batch in group for d in batch))
        for request_id, group in groupby(parts, lambda pair: pair[0])
    ]
    assert joined == step


def test_nothing_is_no_message() -> None:
    assert list(encode([])) == []
