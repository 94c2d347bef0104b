"""What is fed with mutated input: each takes one input and says how it ended. Anything but the outcomes that a caller
may cause is a fault and escapes as the exception it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from app.body import parse_json
from app.limits import EdgeLimits
from app.openai_schema import ChatCompletionRequest
from app.openai_validation import validate
from cache_service.codec import CorruptValueError, decode_array, decode_record, encode_array, encode_record
from deployments.errors import InvalidRequestError
from deployments.preprocessor.data_uri import decode_data_uri, is_data_uri, parse_data_uri
from deployments.preprocessor.decode import ImageDecoder
from deployments.preprocessor.url_guard import parse_url
from tests.fuzz import seeds
from tests.fuzz.mutate import Mutator

Target = Callable[[], str]
"""Makes an input, feeds it, and names the outcome. Raises whatever nobody planned for."""

MAX_PIXELS = 4_000_000
_KEY = bytes(range(32))


def picture_files(rng: random.Random) -> Target:
    """Sniffing and decoding."""
    mutator, files = Mutator(rng), seeds.files()
    decoder = ImageDecoder(max_pixels=MAX_PIXELS)

    def once() -> str:
        data = mutator.damage(rng.choice(files), files)

        def decode() -> str:
            width, height = decoder.probe(data)
            image = decoder.decode(data)
            assert image.pixels.shape == (image.size[1], image.size[0], 3)
            assert image.pixels.dtype == np.uint8
            assert width * height <= MAX_PIXELS
            assert image.pixels.size <= 3 * MAX_PIXELS
            return "decoded"

        return _verdict(decode)

    return once


def urls(rng: random.Random) -> Target:
    """The URL parser."""
    mutator, texts = Mutator(rng), [url.encode() for url in seeds.URLS]

    def once() -> str:
        text = mutator.damage(rng.choice(texts), texts).decode(
            "utf-8", "surrogateescape" if rng.random() < 0.1 else "replace"
        )

        def parse() -> str:
            url = parse_url(text)
            assert url.host.isascii()
            assert url.host == url.host.lower()
            assert not set(url.host) & set("@/\\?# \r\n%")
            assert url.target.startswith("/")
            assert url.target.isascii()
            assert " " not in url.target
            return "parsed"

        return _verdict(parse)

    return once


def data_uris(rng: random.Random) -> Target:
    """The grammar of `data:` URIs and base64."""
    mutator, texts = Mutator(rng), seeds.data_uris()

    def once() -> str:
        text = mutator.damage(rng.choice(texts), texts).decode("utf-8", "replace")

        def decode() -> str:
            if not is_data_uri(text):
                return "no data URI"
            assert 0 < len(decode_data_uri(parse_data_uri(text), 100_000)) <= 100_000
            return "decoded"

        return _verdict(decode)

    return once


def chat_requests(rng: random.Random) -> Target:
    """JSON limits and the OpenAI schema."""
    mutator, limits = Mutator(rng), EdgeLimits()
    bodies = seeds.requests("m")

    def once() -> str:
        body = mutate_request(mutator, rng, bodies)

        def check() -> str:
            validate(ChatCompletionRequest, parse_json(body, limits))
            return "valid"

        return _verdict(check)

    return once


def cache_values(rng: random.Random) -> Target:
    """Values as a shared cache might hand them back. A checksum that fits is not expected of damage."""
    mutator = Mutator(rng)
    array = np.arange(96, dtype=np.float32).reshape(12, 8)
    value = encode_array(_KEY, array, dtype="float32", grid=(1, 6, 8), meta={"a": [1, None]})
    record = encode_record(_KEY, {"width": 5, "names": ["x"]})

    def once() -> str:
        original, decode = rng.choice(((value, decode_array), (record, decode_record)))
        data = mutator.damage(bytes(original), [bytes(value), bytes(record)])
        checked = rng.random() < 0.5
        try:
            decode(data, identity=_KEY, verify_checksum=checked)
        except CorruptValueError:
            return "corrupt"
        assert not checked or data == bytes(original), "damage was not noticed"
        return "accepted"

    return once


def mutate_request(mutator: Mutator, rng: random.Random, bodies: list[dict[str, Any]]) -> bytes:
    """Mostly well-formed JSON of the wrong shape; every fourth body is damaged as text as well."""
    request = mutator.distort(rng.choice(bodies))
    if isinstance(request.get("max_tokens"), int) and request["max_tokens"] > 8:
        request["max_tokens"] = 8
    body = orjson.dumps(request, option=orjson.OPT_NON_STR_KEYS) if _dumpable(request) else b"{"
    return mutator.damage(body) if rng.random() < 0.25 else body


def _dumpable(request: Any) -> bool:
    try:
        orjson.dumps(request)
    except TypeError:  # integers beyond 64 bits
        return False
    return True


def _verdict(run: Callable[[], str]) -> str:
    try:
        return run()
    except InvalidRequestError as error:
        return error.code


TARGETS: dict[str, Callable[[random.Random], Target]] = {
    "files": picture_files,
    "urls": urls,
    "data-uris": data_uris,
    "schema": chat_requests,
    "codec": cache_values,
}
