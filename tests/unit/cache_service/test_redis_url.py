import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_service.redis_url import RedisTarget, Topology, parse_redis_url


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("redis://cache", RedisTarget(topology=Topology.SINGLE, hosts=(("cache", 6379),))),
        ("redis://cache:1/2", RedisTarget(topology=Topology.SINGLE, hosts=(("cache", 1),), db=2)),
        ("redis://cache?db=3", RedisTarget(topology=Topology.SINGLE, hosts=(("cache", 6379),), db=3)),
        (
            "rediss://me:p%40ss@[::1]:7",
            RedisTarget(topology=Topology.SINGLE, tls=True, hosts=(("::1", 7),), username="me", password="p@ss"),
        ),
        ("redis://:pw@h", RedisTarget(topology=Topology.SINGLE, hosts=(("h", 6379),), password="pw")),
        ("redis://me@h", RedisTarget(topology=Topology.SINGLE, hosts=(("h", 6379),), username="me")),
        ("unix:///run/r.sock?db=1", RedisTarget(topology=Topology.UNIX, socket_path="/run/r.sock", db=1)),
        (
            "unix://me:pw@/run/r.sock",
            RedisTarget(topology=Topology.UNIX, socket_path="/run/r.sock", username="me", password="pw"),
        ),
        (
            "redis+sentinel://me:pw@a:1,b/main/4",
            RedisTarget(
                topology=Topology.SENTINEL,
                hosts=(("a", 1), ("b", 26379)),
                service="main",
                db=4,
                username="me",
                password="pw",
            ),
        ),
        (
            "rediss+cluster://a,b:2",
            RedisTarget(topology=Topology.CLUSTER, tls=True, hosts=(("a", 6379), ("b", 2))),
        ),
    ],
)
def test_forms(url: str, target: RedisTarget) -> None:
    assert parse_redis_url(url) == target


@pytest.mark.parametrize(
    "url",
    [
        "",
        "cache:6379",
        "http://cache",
        "redis://",
        "redis://:secret@",
        "redis://a,b",
        "redis://a:0",
        "redis://a:70000",
        "redis://a:secret",
        "redis://a/secret",
        "redis://a/1?db=2",
        "redis://a?password=secret",
        "redis://[::1",
        "unix://secret@",
        "redis+sentinel://a:1",
        "redis+sentinel://a:1/",
        "redis+cluster://a/1",
        "redis+cluster://a,,b",
    ],
)
def test_mistakes_are_refused_without_showing_the_url(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_redis_url(url)
    assert "secret" not in str(caught.value).replace("['password']", "")


@given(st.text(max_size=40), st.sampled_from(["redis://", "rediss+cluster://", "redis+sentinel://", "unix://", ""]))
def test_anything_is_parsed_or_refused(text: str, scheme: str) -> None:
    with contextlib.suppress(ValueError):
        parse_redis_url(scheme + text)


def test_passwords_are_not_shown() -> None:
    assert "hunter2" not in repr(parse_redis_url("redis://:hunter2@h"))
