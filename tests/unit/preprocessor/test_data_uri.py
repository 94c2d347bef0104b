from __future__ import annotations

import base64
import contextlib
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.errors import MediaError
from deployments.preprocessor.data_uri import decode_data_uri, is_data_uri, parse_data_uri

LIMIT = 1 << 20


def decode(uri: str, limit: int = LIMIT) -> bytes:
    return decode_data_uri(parse_data_uri(uri), limit)


def fold(text: str, width: int) -> str:
    return "\r\n".join(text[i : i + width] for i in range(0, len(text), width))


DRESSES = {
    "plain": lambda text: text,
    "folded": lambda text: fold(text, 76),
    "blanks": lambda text: fold(text, 5).replace("\r\n", " "),
    "unpadded": lambda text: text.rstrip("="),
    "url safe": lambda text: text.replace("+", "-").replace("/", "_"),
    "url safe, unpadded": lambda text: text.replace("+", "-").replace("/", "_").rstrip("="),
    "percent-encoded": lambda text: quote(text, safe=""),
    "trailing blank": lambda text: text + " \n",
}


@pytest.mark.parametrize("dress", DRESSES)
@given(data=st.binary(min_size=1, max_size=300))
def test_every_dress_of_base64_gives_the_bytes(dress: str, data: bytes) -> None:
    assert decode("data:image/png;base64," + DRESSES[dress](base64.b64encode(data).decode())) == data


@given(data=st.binary(min_size=1, max_size=300))
def test_percent_encoded_payload(data: bytes) -> None:
    assert decode("data:image/png," + quote(data, safe="")) == data


@pytest.mark.parametrize(
    "header",
    [
        "data:;base64",
        "data:image/png;base64",
        "DATA:image/PNG;BASE64",
        "data:image/png;charset=utf-8;base64",
        "data:image/png;name=a.png;charset=utf-8;Base64",
        "data:image/png; base64",
    ],
)
def test_headers(header: str) -> None:
    assert is_data_uri(header)
    assert decode(header + ",aGk=") == b"hi"


def test_declared_type_is_lower_cased_and_bare() -> None:
    assert parse_data_uri("data:image/PNG;name=x;base64,aGk=").media_type == "image/png"
    assert parse_data_uri("data:,hi").media_type == ""


def test_only_the_last_token_makes_it_base64() -> None:
    assert decode("data:image/png;base64;name=x,aGk=") == b"aGk="


@pytest.mark.parametrize(
    ("uri", "code", "words"),
    [
        ("data:image/png;base64aGk=", "invalid_data_uri", "comma"),
        ("data:image/png;base64,data:image/png;base64,aGk=", "invalid_data_uri", "second data:"),
        ("data:image/png;base64,", "empty_media", "no data"),
        ("data:image/png,", "empty_media", "no data"),
        ("data:image/png;base64,aGkaG", "invalid_base64", "5 characters"),
        ("data:image/png;base64,aGk!", "invalid_base64", "4 characters"),
        ("data:image/png;base64,aG=k", "invalid_base64", "4 characters"),
        ("data:image/png;base64,aGké", "invalid_base64", "4 characters"),
        ("data:image/png,é", "invalid_data_uri", "ASCII"),
    ],
)
def test_faults_have_their_own_message(uri: str, code: str, words: str) -> None:
    with pytest.raises(MediaError) as caught:
        decode(uri)
    assert caught.value.code == code
    assert words in caught.value.message


def test_no_message_echoes_the_payload() -> None:
    for tail in ("!", "", "="):
        with pytest.raises(MediaError) as caught:
            decode("data:image/png;base64," + "SECRETSECRETS" + tail)
        assert "SECRET" not in caught.value.message


def test_size_is_judged_before_decoding() -> None:
    uri = parse_data_uri("data:;base64," + "A" * 4000)
    assert uri.max_decoded_bytes == 3000
    with pytest.raises(MediaError, match="3000 bytes long; at most 1000") as caught:
        decode_data_uri(uri, 1000)
    assert caught.value.code == "media_too_large"


def test_an_oversized_payload_is_not_looked_at() -> None:
    with pytest.raises(MediaError) as caught:
        decode("data:;base64," + "!" * 4000, limit=1000)
    assert caught.value.code == "media_too_large"


def test_folding_does_not_count_towards_the_size() -> None:
    text = fold(base64.b64encode(b"x" * 900).decode(), 4)
    assert decode("data:;base64," + text, limit=900) == b"x" * 900


def test_escapes_do_not_count_towards_the_size() -> None:
    assert decode("data:," + quote(b"\xff" * 900), limit=900) == b"\xff" * 900
    with pytest.raises(MediaError) as caught:
        decode("data:," + quote(b"\xff" * 901), limit=900)
    assert caught.value.code == "media_too_large"


@given(st.text(max_size=60))
def test_any_text_gives_bytes_or_a_media_error(text: str) -> None:
    with contextlib.suppress(MediaError):
        assert decode("data:" + text)
