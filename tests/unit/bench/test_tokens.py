"""Agreement of greedy tokens: the counting, the questions, and the whole comparison on this CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.__main__ import main
from tests.bench.tokens.agreement import Pair, agreement, by_kind
from tests.bench.tokens.questions import is_right, questions

IDS = st.lists(st.integers(0, 3), max_size=8)
COMMAND = ["tokens", "--threads", "1", "--kinds", "solid_colour,chat"]


@given(IDS, IDS)
def test_common_tokens_end_at_the_first_difference(one: list[int], two: list[int]) -> None:
    pair = Pair("k", one, two)
    common = pair.common_tokens
    assert one[:common] == two[:common]
    assert one[common : common + 1] != two[common : common + 1] or common == len(one) == len(two)
    assert pair.is_equal == (one == two)


def test_shares() -> None:
    pairs = [
        Pair("a", [1, 2, 3, 4], [1, 2, 3, 4], True, True),
        Pair("a", [1, 2, 3, 4], [1, 9, 3, 4], True, False),
        Pair("b", [5, 6], [5, 6, 7], False, True),
    ]
    assert agreement(pairs) == {
        "questions": 3,
        "equal_answers": 0.33333,
        "equal_tokens": 0.7,
        "reference_right": 0.66667,
        "right": 0.66667,
    }
    assert {kind: found["questions"] for kind, found in by_kind(pairs).items()} == {"a": 2, "b": 1}
    assert agreement([])["equal_answers"] is None


def test_questions_are_the_same_every_time_and_carry_their_pictures() -> None:
    asked = questions(2, ["solid_colour", "chat"])
    assert [question.name for question in asked] == ["solid_colour/0", "solid_colour/1", "chat/0", "chat/1"]
    assert asked == questions(2, ["solid_colour", "chat"])
    assert "data:image/" in json.dumps(asked[0].body)
    assert is_right(asked[0], f" {asked[0].reference.upper()}. ".rstrip())
    assert not is_right(asked[0], "something else")
    assert len({question.kind for question in questions(1)}) > 25
    with pytest.raises(ValueError, match="no such kind: astronomy"):
        questions(1, ["astronomy"])


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.slow
def test_bfloat16_on_this_cpu_against_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, reference = tmp_path / "tokens.json", tmp_path / "reference.json"
    assert main([*COMMAND, "--each", "2", "--reference", str(reference), "--out", str(out)]) == 0
    result = read(out)
    assert result["overall"]["questions"] == 4
    assert result["overall"]["equal_answers"] >= 0.5
    assert set(result["kinds"]) == {"solid_colour", "chat"}
    assert result["options"]["dtype"] == "bfloat16"
    assert "equal answers" in capsys.readouterr().out
    # The reference is read now. With one of its answers changed that one counts as different.
    stored = read(reference)
    stored["answers"]["chat/0"]["tokens"][0] += 1
    reference.write_text(json.dumps(stored))
    again = [*COMMAND, "--dtype", "float32", "--each", "2", "--reference", str(reference), "--out", str(out)]
    assert main([*again, "--least-equal", "0.75"]) == 0
    assert read(out)["overall"]["equal_answers"] == 0.75
    assert [entry["question"] for entry in read(out)["differences"]] == ["chat/0"]
    assert main([*again, "--least-equal", "0.76"]) == 1
    # It has no answers to further questions, and none of other weights.
    assert main([*COMMAND, "--each", "3", "--reference", str(reference)]) == 2
    reference.write_text(json.dumps(stored | {"weights": "other"}))
    assert main([*COMMAND, "--each", "2", "--reference", str(reference)]) == 2


@pytest.mark.parametrize("wrong", [["--each", "0"], ["--kinds", "astronomy"], ["--concurrency", "0"]])
def test_wrong_options_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *wrong]) == 2
    assert "error: " in capsys.readouterr().err
