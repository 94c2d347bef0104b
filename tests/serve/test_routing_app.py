"""Two replicas of encoder and engine: a picture's requests meet where its embedding and prefix are, others spread."""

from __future__ import annotations

import asyncio
import base64
import io
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.serve.app_process import AppProcess, Samples, replicas_with, running_app, total
from tests.serve.streams import long_streams, stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PICTURES = 16


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppProcess]:
    folder = tmp_path_factory.mktemp("routing")
    with running_app(folder, args={}, replicas={"VisionEncoder": 2, "LMEngine": 2}) as app:
        yield app


def picture(seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def ask(app: AppProcess, *pictures: str, text: str = "", timeout_s: float = 120.0, **options: object) -> httpx.Response:
    parts: list[dict[str, object]] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    if text:
        parts.append({"type": "text", "text": text})
    body = {"model": app.model, "messages": [{"role": "user", "content": parts}], "max_tokens": 2, **options}
    return httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=timeout_s)


def used(before: Samples, after: Samples, name: str, **labels: str) -> set[str]:
    """Replicas that counted anything in between."""
    return replicas_with(after - before, name, **labels)


def test_questions_about_one_picture_are_answered_by_one_replica_from_its_own_caches(app: AppProcess) -> None:
    url = picture(1_000)
    before = app.samples()
    answers = [ask(app, url, text=f"Question {i}?") for i in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    after = app.samples()
    assert len(used(before, after, "generated_tokens_total")) == 1
    assert total(after, "encoder_items_total") - total(before, "encoder_items_total") == 1


def test_different_pictures_use_every_replica_and_a_request_of_several_is_put_together_right(app: AppProcess) -> None:
    before = app.samples()
    urls = [picture(i) for i in range(PICTURES)]
    with ThreadPoolExecutor(8) as pool:  # a prompt of nothing but a picture, at once
        answers = list(pool.map(lambda url: ask(app, url), urls))
    assert {answer.status_code for answer in answers} == {200}
    middle = app.samples()
    assert len(used(before, middle, "generated_tokens_total")) == 2
    assert len(used(before, middle, "encoder_items_total")) == 2
    # Whatever engine this goes to, each picture is found where it was encoded.
    assert ask(app, *urls[:4], text="And now?").status_code == 200
    assert total(app.samples(), "encoder_items_total") == total(middle, "encoder_items_total")


def test_every_stream_is_read_where_its_request_was_put(app: AppProcess) -> None:
    """Submit, stream and abort are three calls; one of them astray would be an error or an endless wait."""
    url = picture(2_000)

    def stream(i: int) -> str:
        return ask(app, url, text=f"Tell me {i}", stream=True, n=1 + i % 2).text

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(stream, range(48)))
    assert all(text.rstrip().endswith("data: [DONE]") and '"error"' not in text for text in texts)


async def test_a_signal_lets_streams_end_and_new_requests_are_refused(app: AppProcess) -> None:
    """The last test here: it stops the application. What else operators do is in test_operations.py."""
    hello = {"model": app.model, "messages": [{"role": "user", "content": "Hello"}]}
    async with (
        long_streams(app.url, app.model, number=8, tokens=1200) as tasks,
        httpx.AsyncClient(base_url=app.url, timeout=60.0) as client,
    ):
        app.signal()
        async with asyncio.timeout(20):
            while (await stream(client, hello)).failure != "503 shutting_down":
                pass
        assert (await client.get("/ready")).status_code == 503
        assert not any(task.done() for task in tasks), "the streams were too short for this test"
        refusals: Counter[str] = Counter()
        while not (answer := await stream(client, hello)).loss:  # until nobody listens any more
            refusals[answer.failure] += 1
            await asyncio.sleep(0.05)
        assert set(refusals) <= {"503 shutting_down", "503 unavailable"}, refusals
        ended = await asyncio.gather(*tasks)
    assert Counter(outcome for outcome, _ in ended) == {"right": 8}, ended
    assert await asyncio.to_thread(app.wait, 60) == 0
