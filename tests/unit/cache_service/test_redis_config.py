import pytest
from pydantic import TypeAdapter

from cache_service.redis_config import MiB, RedisTierConfig

URL = "redis://cache"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "cache"}, "starts with one of"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"read_timeout_s": 0}, "read_timeout_s must be above 0: 0"),
        ({"connections": 0}, "connections"),
        ({"max_value_bytes": 10}, "at least 1024: 10"),
        ({"max_bytes": MiB}, "max_bytes must be at least max_value_bytes"),
        ({"oversize": "drop"}, "'chunk' or 'skip'"),
        ({"tls_cert_file": "x"}, "go together"),
        ({"key_prefix": "a:b"}, "key_prefix"),
        ({"read_timeout_s": float("nan")}, "read_timeout_s"),
    ],
)
def test_mistakes_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RedisTierConfig(**({"url": URL} | options))


def test_secrets_are_not_shown() -> None:
    config = RedisTierConfig(url="redis://:hunter2@h", password="hunter2", sentinel_password="hunter2")
    assert "hunter2" not in repr(config)


def test_bounds_grow_with_the_bytes() -> None:
    config = RedisTierConfig(url=URL, read_timeout_s=0.05, min_bytes_per_s=1e6)
    assert config.read_bound_s(0) == pytest.approx(0.05)
    assert config.read_bound_s(1_000_000) == pytest.approx(1.05)


def test_an_app_can_read_it_and_refuses_unknown_options() -> None:
    adapter = TypeAdapter(RedisTierConfig)
    assert adapter.validate_python({"url": URL, "ttl_s": 5}).ttl_s == 5
    with pytest.raises(ValueError, match="tll"):
        adapter.validate_python({"url": URL, "tll": 5})
