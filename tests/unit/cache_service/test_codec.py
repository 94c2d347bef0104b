import os

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cache_service.codec import (
    FIXED_HEADER_BYTES,
    CorruptValueError,
    decode_array,
    decode_record,
    encode_array,
    encode_record,
    label,
    read_header,
    verify_value,
)

KEY = bytes(range(32))
OTHER_KEY = bytes(reversed(range(32)))
NUMPY_OF = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "uint8": np.uint8,
    "int32": np.int32,
    "int64": np.int64,
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
RECORDS = st.dictionaries(st.text(max_size=8), JSON, max_size=4)


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    dtype = draw(st.sampled_from(sorted(NUMPY_OF)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    return dtype, draw(hnp.arrays(NUMPY_OF[dtype], shape))


@given(arrays(), st.tuples(*[st.integers(0, 2**32 - 1)] * 3), RECORDS, st.integers(0, 2**40))
def test_array_round_trip(
    given_array: tuple[str, np.ndarray], grid: tuple[int, int, int], meta: dict, created: int
) -> None:
    dtype, array = given_array
    value = encode_array(KEY, array, dtype=dtype, grid=grid, meta=meta, created_s=created)
    decoded = decode_array(value, identity=KEY)
    assert decoded.array.tobytes() == array.tobytes()
    assert (decoded.array.dtype, decoded.array.shape) == (array.dtype, array.shape)
    assert (decoded.dtype, decoded.grid, decoded.meta, decoded.created_s) == (dtype, grid, meta, created)
    assert not decoded.array.flags.writeable


@given(RECORDS)
def test_record_round_trip(record: dict) -> None:
    value = encode_record(KEY, record, created_s=7)
    decoded = decode_record(memoryview(value), identity=KEY)
    assert decoded.record == record
    assert decoded.created_s == 7


def test_reading_does_not_copy_and_payload_is_aligned() -> None:
    value = encode_array(KEY, np.zeros((100, 7), np.float32), dtype="float32")
    array = decode_array(value, identity=KEY).array
    whole = np.frombuffer(value, np.uint8)
    assert np.shares_memory(array, whole)
    assert read_header(value).header_bytes % 64 == 0


def test_strided_arrays_are_stored_in_c_order() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    np.testing.assert_array_equal(decode_array(encode_array(KEY, array, dtype="int32"), identity=KEY).array, array)


def sample_values() -> list[bytes]:
    array = np.arange(24, dtype=np.uint16).reshape(2, 12)
    return [
        encode_array(
            KEY, array, dtype="bfloat16", grid=(1, 4, 6), meta={"a": 1}, namespace="n", model="m", created_s=1
        ),
        encode_record(KEY, {"size": [3, 4], "text": "x" * 50}, created_s=1),
    ]


def decode_any(value: bytes) -> object:
    """Whatever either reader makes of a value: all that a caller could ever see of it."""
    for decode in (decode_array, decode_record):
        try:
            decoded = decode(value, identity=KEY)
        except CorruptValueError:
            continue
        if decode is decode_array:
            return decoded.array.tobytes(), decoded.array.shape, decoded.dtype, decoded.grid, dict(decoded.meta)
        return dict(decoded.record)
    return None


@pytest.mark.parametrize("value", sample_values())
def test_no_single_byte_can_change_unnoticed(value: bytes) -> None:
    for position in range(len(value)):
        mutated = bytearray(value)
        mutated[position] ^= 0x41
        assert decode_any(bytes(mutated)) is None, position


@pytest.mark.parametrize("value", sample_values())
def test_truncated_or_longer_values_are_corrupt(value: bytes) -> None:
    for length in range(len(value)):
        assert decode_any(value[:length]) is None
    assert decode_any(value + b"\0") is None


@given(st.binary(max_size=400))
def test_random_bytes_are_corrupt(value: bytes) -> None:
    assert decode_any(value) is None


def forge(value: bytearray) -> bytes:
    """Fix the checksum after a change, as somebody with access to the server could."""
    value[8:40] = blake3(bytes(value[40:])).digest()
    return bytes(value)


@settings(max_examples=500)
@given(st.sampled_from(sample_values()), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=6))
def test_forged_headers_give_corrupt_or_a_consistent_value(value: bytes, changes: list[tuple[int, int]]) -> None:
    forged = bytearray(value)
    for position, byte in changes:
        forged[position % len(forged)] = byte
    whole = forge(forged)
    for decode in (decode_array, decode_record):
        try:
            decoded = decode(whole, identity=KEY)
        except CorruptValueError:
            continue
        if decode is decode_array:
            assert decoded.array.nbytes == read_header(whole).payload_bytes


@pytest.mark.parametrize(
    ("offset", "raw"),
    [(4, b"\x02\x00"), (41, b"\x63"), (42, b"\x05"), (40, b"\x03"), (112, b"\x03"), (48, b"\x00"), (6, b"\xff\xff")],
    ids=["version", "dtype", "ndim", "kind", "shape", "payload length", "header length"],
)
def test_forged_fields_are_corrupt(offset: int, raw: bytes) -> None:
    forged = bytearray(sample_values()[0])
    forged[offset : offset + len(raw)] = raw
    assert decode_any(forge(forged)) is None


def test_nested_forged_json_is_corrupt() -> None:
    deep = b"[" * 200_000
    value = bytearray(encode_record(KEY, {"a": "b" * (len(deep) - len(b'{"a":""}'))}))
    assert len(value) == read_header(bytes(value)).header_bytes + len(deep)
    value[-len(deep) :] = deep
    with pytest.raises(CorruptValueError):
        decode_record(forge(value), identity=KEY)


def test_a_value_of_another_key_is_corrupt_even_unchecked() -> None:
    for value in sample_values():
        for decode in (decode_array, decode_record):
            with pytest.raises(CorruptValueError):
                decode(value, identity=OTHER_KEY, verify_checksum=False)


def test_unchecked_read_skips_only_the_checksum() -> None:
    value = bytearray(sample_values()[0])
    value[-1] ^= 1
    decode_array(bytes(value), identity=KEY, verify_checksum=False)
    with pytest.raises(CorruptValueError):
        decode_array(bytes(value[:-1]), identity=KEY, verify_checksum=False)


def test_kinds_do_not_mix() -> None:
    array, record = sample_values()
    with pytest.raises(CorruptValueError, match="record"):
        decode_array(record, identity=KEY)
    with pytest.raises(CorruptValueError, match="array"):
        decode_record(array, identity=KEY)
    assert verify_value(array, identity=KEY).kind == "array"
    assert verify_value(record, identity=KEY).kind == "record"


def test_header_alone_tells_what_an_operator_needs() -> None:
    header = read_header(sample_values()[0][:FIXED_HEADER_BYTES])
    assert (header.identity, header.dtype, header.shape, header.grid) == (KEY, "bfloat16", (2, 12), (1, 4, 6))
    assert (header.namespace_label, header.model_label, header.created_s) == (label("n"), label("m"), 1)
    assert label("n") != label("m")


@pytest.mark.parametrize(
    ("array", "options", "message"),
    [
        (np.zeros(3, np.float64), {"dtype": "float64"}, "dtype must be one of"),
        (np.zeros(3, np.float32), {"dtype": "bfloat16"}, "needs an array of uint16"),
        (np.zeros((1,) * 5, np.uint8), {"dtype": "uint8"}, "at most 4 dimensions"),
        (np.zeros(3, np.uint8), {"dtype": "uint8", "meta": {"x": "y" * 20_000}}, "meta is too large"),
        (np.zeros(3, np.uint8), {"dtype": "uint8", "meta": {"x": object()}}, "only JSON"),
        (np.zeros(3, np.uint8), {"dtype": "uint8", "meta": {"x": float("nan")}}, "JSON"),
    ],
)
def test_what_cannot_be_read_back_is_not_written(array: np.ndarray, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_array(KEY, array, **options)


def test_short_identities_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        encode_record(os.urandom(16), {})
