"""Request bodies of a workload, made before any clock runs: JPEGs in a pool of processes, then JSON."""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import orjson
from tqdm import tqdm

from tests.bench.load.workload import Size, Workload
from tests.bench.pictures import photo_like_jpeg

WORDS = ("red", "green", "circle", "chart", "left", "above", "count", "name", "read", "the", "of", "what", "which")
LETTERS = "abcdefghijklmnopqrstuvwxyz      "


@dataclass(frozen=True, slots=True)
class Picture:
    """Equal pictures are equal files."""

    seed: int
    size: Size

    def data_uri(self) -> bytes:
        jpeg = photo_like_jpeg(self.size.width, self.size.height, seed=self.seed, grain_levels=4.0)
        return b"data:image/jpeg;base64," + base64.b64encode(jpeg)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, its pictures by name."""

    pictures: tuple[Picture, ...]
    text: str


def plan(workload: Workload, count_tokens: Callable[[str], int] | None = None) -> list[Ask]:
    """Every request in order; the same for the same workload.

    Args:
        count_tokens: Tokens of a text; needed if the workload counts its text in tokens.
    """
    rng = random.Random(f"requests of {workload.name} {workload.seed}")
    draw = _pictures(workload, rng)
    asks = []
    for _ in range(workload.requests):
        pictures = tuple(next(draw) for _ in range(workload.images))
        if workload.text_tokens:
            if count_tokens is None:
                raise ValueError("text_tokens needs a tokenizer to count them with")
            text = text_of_tokens(rng, workload.text_tokens, count_tokens)
        else:
            text = "".join(rng.choices(LETTERS, k=workload.text_characters))
        asks.append(Ask(pictures, text))
    return asks


def text_of_tokens(rng: random.Random, num_tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Words that the tokenizer cuts into exactly so many tokens, or the closest number below."""
    text = rng.choice(WORDS)
    while count_tokens(text) < num_tokens:
        text += " " + rng.choice(WORDS)
    while count_tokens(text) > num_tokens and len(text) > 1:
        text = text[:-1]
    return text


def _pictures(workload: Workload, rng: random.Random) -> Iterator[Picture]:
    # Workloads that share a seed share no picture: the second would find those of the first in the server's caches.
    name = f"{workload.name} {workload.seed}".encode()
    base = int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "big")
    if not workload.pool:
        fresh = base
        while True:
            yield Picture(fresh, workload.sizes.draw(rng))
            fresh += 1
    pool = [Picture(base + index, workload.sizes.draw(rng)) for index in range(workload.pool)]
    shares = workload.popularity.shares(workload.pool)
    while True:
        yield rng.choices(pool, shares)[0]


def bodies(
    workload: Workload,
    model: str,
    *,
    processes: int = 1,
    count_tokens: Callable[[str], int] | None = None,
    progress: bool = True,
) -> list[bytes]:
    """JSON bodies of `/v1/chat/completions`, in order.

    Args:
        processes: That encode pictures; 1 encodes here.
    """
    asks = plan(workload, count_tokens)
    wanted = list(dict.fromkeys(picture for ask in asks for picture in ask.pictures))
    bar = tqdm(
        total=len(wanted), desc=f"pictures of {workload.name}", unit="picture", disable=not progress or not wanted
    )
    with bar:
        uris = dict(zip(wanted, _watched(_encoded(wanted, processes), bar), strict=True))
    return [_body(ask, uris, model, workload.out_tokens) for ask in asks]


def _encoded(pictures: list[Picture], processes: int) -> Iterable[bytes]:
    if processes <= 1 or len(pictures) < 8:
        yield from map(Picture.data_uri, pictures)
        return
    pool: Executor
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(Picture.data_uri, pictures, chunksize=4)


def _watched(uris: Iterable[bytes], bar: tqdm[Any]) -> Iterator[bytes]:
    for uri in uris:
        bar.update()
        yield uri


def _body(ask: Ask, uris: dict[Picture, bytes], model: str, out_tokens: int) -> bytes:
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": uris[picture].decode()}} for picture in ask.pictures
    ]
    content.append({"type": "text", "text": ask.text})
    return orjson.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": out_tokens,
            "min_tokens": out_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def token_counter(tokenizer: Path) -> Callable[[str], int]:
    """Counts with a folder's `tokenizer.json`, or with the file itself."""
    from tokenizers import Tokenizer

    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not path.is_file():
        raise ValueError(f"{tokenizer} is neither a tokenizer.json nor a folder with one")
    loaded = Tokenizer.from_file(str(path))
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)
