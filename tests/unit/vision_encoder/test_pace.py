"""A decoding neighbour keeps its share of the device, and no item waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.vision_encoder.pace import Pace

seconds = st.floats(0.0005, 0.2)
shares = st.floats(0.05, 1.0)


def run(pace: Pace, items: Sequence[float], slower: float = 1.0) -> list[tuple[float, float]]:
    """(begin, end) of the passes that a queue of items becomes while tokens are decoded all the time.

    Args:
        items: Predicted seconds.
        slower: Factor from predicted to real seconds.
    """
    queue, now, passes = list(items), 0.0, []
    while queue:
        now += pace.wait_s(now, True)
        assert pace.wait_s(now, True) <= 1e-9, "a second wait behind the first"
        count = pace.take(queue, True)
        end = now + sum(queue[:count]) * slower
        pace.spend(now, end, True)
        passes.append((now, end))
        del queue[:count]
        now = end
    return passes


@given(st.lists(seconds, min_size=1, max_size=30), shares, st.floats(0.005, 0.1), st.floats(0.5, 3.0))
def test_the_encoder_keeps_to_its_share_of_any_time(
    items: list[float], share: float, pass_s: float, slower: float
) -> None:
    passes = run(Pace(share, pass_s), items, slower)
    for first in range(len(passes)):
        for last in range(first, len(passes)):
            span = passes[last][0] - passes[first][0]
            computed = sum(end - begin for begin, end in passes[first:last])
            assert computed <= share * span + 1e-9


@given(st.lists(seconds, min_size=1, max_size=30), shares, st.floats(0.005, 0.1))
def test_every_item_runs_within_a_bound(items: list[float], share: float, pass_s: float) -> None:
    """All that stands before it, each pass with its gap, is all that it waits for."""
    passes = run(Pace(share, pass_s), items)
    assert passes[-1][1] <= sum(items) / share + 1e-9
    assert sum(end - begin for begin, end in passes) == pytest.approx(sum(items))


@given(st.lists(seconds, min_size=1, max_size=30), st.floats(0.005, 0.1))
def test_a_pass_is_short_or_one_item(items: list[float], pass_s: float) -> None:
    count = Pace(0.5, pass_s).take(items, True)
    assert 1 <= count <= len(items)
    assert count == 1 or sum(items[:count]) <= pass_s
    assert count == len(items) or sum(items[: count + 1]) > pass_s


@given(st.lists(seconds, max_size=30))
def test_nothing_is_held_back_while_nothing_decodes(items: list[float]) -> None:
    pace = Pace(0.1, 0.01)
    assert pace.take(items, False) == len(items)
    pace.spend(0.0, 5.0, True)
    assert pace.wait_s(5.0, True) == pytest.approx(45.0)
    assert pace.wait_s(5.0, False) == 0.0


def test_a_pass_beside_nobody_is_followed_by_no_gap() -> None:
    pace = Pace(0.1, 0.01)
    pace.spend(0.0, 5.0, False)
    assert pace.wait_s(5.0, True) == 0.0


def test_an_empty_queue_is_an_empty_pass() -> None:
    assert Pace(0.5, 0.01).take([], True) == 0


@pytest.mark.parametrize(("share", "pass_s"), [(0.0, 1.0), (1.1, 1.0), (0.5, 0.0)])
def test_wrong_options_name_themselves(share: float, pass_s: float) -> None:
    with pytest.raises(ValueError, match=r"share is|pass_s is"):
        Pace(share, pass_s)
