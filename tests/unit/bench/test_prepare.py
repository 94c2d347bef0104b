"""Request bodies: equal for equal workloads, different where they should be."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from PIL import Image

from tests.bench.load.prepare import bodies, plan, token_counter
from tests.bench.load.workload import Popularity, SizeMix, Workload
from tests.bench.model_folder import SHAPES, make_tokenizer

SMALL = Workload(requests=12, images=2, sizes=SizeMix.parse("32x24,48x40"), out_tokens=7, seed=5)


def make(workload: Workload, **options: Any) -> list[dict[str, Any]]:
    return [orjson.loads(body) for body in bodies(workload, "m", progress=False, **options)]


def urls(body: dict[str, Any]) -> list[str]:
    return [part["image_url"]["url"] for part in body["messages"][0]["content"] if part["type"] == "image_url"]


def test_two_servers_get_the_same_bytes_whoever_makes_them() -> None:
    here = bodies(SMALL, "m", progress=False)
    assert here == bodies(SMALL, "m", progress=False)
    assert here == bodies(SMALL, "m", processes=2, progress=False)


@pytest.mark.parametrize("other", [{"seed": 6}, {"name": "other"}, {"name": "other", "pool": 3}])
def test_another_seed_or_name_asks_other_things(other: dict[str, Any]) -> None:
    ours = {url for body in make(SMALL) for url in urls(body)}
    theirs = {url for body in make(replace(SMALL, **other)) for url in urls(body)}
    assert theirs
    assert not ours & theirs


def test_without_a_pool_no_picture_comes_twice() -> None:
    seen = [url for body in make(SMALL) for url in urls(body)]
    assert len(set(seen)) == len(seen) == 24


def test_a_pool_bounds_the_pictures_and_its_first_is_the_favourite() -> None:
    workload = replace(SMALL, requests=300, pool=4, popularity=Popularity("zipf", 2.0))
    drawn = [picture.seed for ask in plan(workload) for picture in ask.pictures]
    counts = [drawn.count(seed) for seed in sorted(set(drawn))]
    assert len(counts) == 4
    assert counts == sorted(counts, reverse=True)


def test_pictures_are_jpegs_of_the_mix() -> None:
    sizes = set()
    for body in make(SMALL):
        for url in urls(body):
            head, _, data = url.partition(",")
            assert head == "data:image/jpeg;base64"
            sizes.add(Image.open(io.BytesIO(base64.b64decode(data))).size)
    assert sizes == {(32, 24), (48, 40)}


def test_what_is_asked_for() -> None:
    body = make(SMALL)[0]
    wanted = {
        "model": "m", "max_tokens": 7, "min_tokens": 7, "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert {name: body[name] for name in wanted} == wanted
    assert body["messages"][0]["content"][-1]["type"] == "text"


def test_text_alone_has_its_length() -> None:
    (body,) = make(Workload(requests=1, images=0, text_characters=33))
    (part,) = body["messages"][0]["content"]
    assert (part["type"], len(part["text"])) == ("text", 33)


def test_text_in_tokens(tmp_path: Path) -> None:
    make_tokenizer(SHAPES["tiny"]).save(str(tmp_path / "tokenizer.json"))
    count = token_counter(tmp_path)
    asks = plan(replace(SMALL, text_tokens=40), count)
    assert {count(ask.text) for ask in asks} == {40}
    assert len({ask.text for ask in asks}) == len(asks)
    with pytest.raises(ValueError, match="tokenizer"):
        plan(replace(SMALL, text_tokens=40))
    with pytest.raises(ValueError, match="nowhere"):
        token_counter(tmp_path / "nowhere")
