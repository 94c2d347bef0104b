"""Sound inputs to start from, made on the spot."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from tests.unit.preprocessor.pictures import data_uri, encoded, noise, quarters

URLS = (
    "http://example.com/", "https://user.example.com:8443/a/b%20c?x=1&y=[2]#f", "http://93.184.216.34/x.png",
    "http://[2606:4700::1111]:80/p", "https://bücher.example/ä?ö", "http://xn--bcher-kva.example", "HTTP://EXAMPLE.COM./",
    "http://127.0.0.1/", "http://[::ffff:10.0.0.1]/", "http://0x7f.1/", "file:///srv/pictures/a.png", "data:,x",
)  # fmt: skip


def files() -> list[bytes]:
    """Pictures of every format and of the modes that decoders treat in their own way; a moving one of each kind."""
    small, mixed = noise(48, 40), quarters()
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray((np.arange(48 * 40, dtype=np.uint16) * 31).reshape(40, 48))
    return [
        encoded(small, "JPEG", exif=exif, icc_profile=b"not a profile"),
        encoded(small, "JPEG", progressive=True, quality=40),
        encoded(small.convert("CMYK"), "JPEG"),
        encoded(small.convert("L"), "JPEG"),
        encoded(small, "PNG"),
        encoded(mixed.convert("P"), "PNG", transparency=3),
        encoded(small.convert("RGBA"), "PNG"),
        encoded(small.convert("LA"), "PNG"),
        encoded(deep, "PNG"),
        encoded(mixed.convert("1"), "PNG"),
        encoded(small, "WEBP", lossless=True),
        encoded(small, "WEBP", quality=50),
        encoded(small, "WEBP", save_all=True, append_images=[mixed.resize((48, 40))]),
        encoded(mixed, "GIF"),
        encoded(mixed, "GIF", save_all=True, append_images=[small]),
        encoded(small, "BMP"),
        encoded(mixed.convert("P"), "BMP"),
        *(encoded(small, "TIFF", compression=kind) for kind in ("raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg")),
        encoded(mixed.convert("1"), "TIFF", compression="group4"),
        encoded(deep, "TIFF"),
        encoded(small, "AVIF", speed=10),
        _mpo(small, mixed),
    ]


def _mpo(first: Image.Image, second: Image.Image) -> bytes:
    buffer = io.BytesIO()
    first.save(buffer, "MPO", save_all=True, append_images=[second])
    return buffer.getvalue()


def data_uris() -> list[bytes]:
    picture = data_uri(encoded(noise(16, 16)))
    return [
        picture.encode(),
        picture.replace("base64", "name=a.png;BASE64").encode(),
        picture.replace("+", "-").replace("/", "_").replace("=", "").encode(),
        b"data:,%89PNG%0D%0A",
        b"data:;base64,AAAA\r\n AAAA",
        b"DATA:text/plain;charset=utf-8,a%20b",
    ]


def requests(model: str) -> list[dict[str, Any]]:
    """Chat requests that use every part of the schema; short answers only."""
    picture = {
        "type": "image_url",
        "image_url": {"url": data_uri(encoded(noise(56, 56)), "image/png"), "detail": "low"},
    }
    ask = {"role": "user", "content": [picture, {"type": "text", "text": "What is in the picture?"}]}
    weather = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a town",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
        },
    }
    base: dict[str, Any] = {"model": model, "max_tokens": 2, "temperature": 0}
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
    return [
        {**base, "messages": [ask]},
        {**base, "messages": told, "stream": True, "stream_options": {"include_usage": True}},
        {**base, "messages": [ask, {"role": "assistant", "content": "A dog."}, {"role": "user", "content": "Sure?"}]},
        {
            **base,
            "messages": told,
            "n": 2,
            "seed": 5,
            "temperature": 0.9,
            "top_p": 0.8,
            "top_k": 5,
            "stop": ["x", "\n"],
        },
        {**base, "messages": told, "logprobs": True, "top_logprobs": 3, "logit_bias": {"5": -3}},
        {**base, "messages": told, "presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
        {**base, "messages": told, "tools": [weather], "tool_choice": "auto"},
        {
            **base,
            "messages": [
                *told,
                {"role": "assistant", "content": None, "tool_calls": [called]},
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            ],
            "tools": [weather],
        },
        {
            **base,
            "messages": told,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}},
            },
        },
        {**base, "messages": [ask], "mm_processor_kwargs": {"max_pixels": 50176}, "user": "u", "metadata": {"a": "b"}},
    ]
