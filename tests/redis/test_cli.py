"""The operator's tool against a real server."""

import asyncio
import io
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from cache_service.cli import Console, run
from cache_service.codec import encode_array, encode_record, label
from cache_service.redis_layout import KeyLayout
from cache_service.tenants import hash_api_key
from tests.redis.rig import Server, new_key, open_tier

pytestmark = pytest.mark.redis

DAY_S = 86400


async def fill(server: Server) -> dict[str, list[bytes]]:
    """Three embeddings of acme (one of them split, one old), two of blue, an item of acme, and other people's keys."""
    keys: dict[str, list[bytes]] = {"acme": [], "blue": [], "items": []}
    rows = {"acme": [4, 4, 400], "blue": [4, 4]}
    async with open_tier(server.url, max_value_bytes=4096) as tier:
        for name, sizes in rows.items():
            for number, size in enumerate(sizes):
                key = new_key()
                keys[name].append(key)
                created_s = time.time() - (8 * DAY_S if number == 0 else 0)
                array = np.full((size, 32), number, np.float32)
                value = encode_array(
                    key,
                    array,
                    dtype="float32",
                    namespace=f"tenant:{name}",
                    model=f"model-{number}",
                    created_s=created_s,
                )
                assert await tier.put_fenced(key, value, None)
    async with open_tier(server.url) as tier:
        tier.layout = KeyLayout(kind="item")
        key = new_key()
        keys["items"].append(key)
        assert await tier.put_fenced(key, encode_record(key, {"grid": [1, 2, 3]}, namespace="tenant:acme"), None)
    with server.admin() as admin:
        admin.set("somebody:else", "x")
        admin.set("sightline:1:lease:embedding:{00}", "1")
    return keys


def call(server: Server, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one invocation."""
    console = Console(io.StringIO(stdin), io.StringIO(), io.StringIO())
    code = run([arguments[0], "--url", server.url, *arguments[1:]], {}, console)
    return code, console.stdout.getvalue(), console.stderr.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
async def filled(server: Server) -> dict[str, list[bytes]]:
    return await fill(server)


async def in_thread(server: Server, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    return await asyncio.to_thread(call, server, *arguments, stdin=stdin)


async def rows_of(server: Server, *arguments: str) -> list[dict[str, Any]]:
    code, out, _ = await in_thread(server, "inspect", *arguments)
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


async def test_count(server: Server, filled: dict[str, list[bytes]]) -> None:
    code, out, err = await in_thread(server, "count", "--json")
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    acme = label("tenant:acme").hex()
    assert sum(row["entries"] for row in rows) == 6
    assert sum(row["entries"] for row in rows if row["namespace"] == acme) == 4
    (split,) = [row for row in rows if row["model"] == label("model-2").hex()]
    assert split["bytes"] > 400 * 32 * 4
    code, out, err = await in_thread(server, "count", "--namespace", "tenant:blue", "--quiet")
    assert out.splitlines()[-1].split()[:2] == ["total", "2"]
    assert err == ""


async def test_inspect(server: Server, filled: dict[str, list[bytes]]) -> None:
    rows = await rows_of(server, "--kind", "embedding", "--model", "model-2")
    (row,) = rows
    assert row["key"] == filled["acme"][2].hex()
    assert (row["holds"], row["dtype"], row["shape"]) == ("array", "float32", [400, 32])
    assert 0 < row["ttl_s"] <= 86400
    assert len(await rows_of(server)) == 6
    assert len(await rows_of(server, "--limit", "2")) == 2
    assert len(await rows_of(server, "--older-than", "7d")) == 2
    assert await rows_of(server, "--namespace", "tenant:acme", "--older-than", "2w") == []
    assert len(await rows_of(server, "--kind", "item")) == 1
    assert await rows_of(server, "--schema", "9") == []


async def test_verify_finds_names_and_deletes_bad_entries(server: Server, filled: dict[str, list[bytes]]) -> None:
    code, out, _ = await in_thread(server, "verify")
    assert (code, out) == (0, "6 entries read, 0 bad\n")
    layout = KeyLayout(kind="embedding")
    broken, headless, half = filled["blue"][0], filled["blue"][1], filled["acme"][2]
    with server.admin() as admin:
        admin.setrange(layout.value(broken), 300, b"\xff\xff")
        admin.set(layout.value(headless), b"not ours")
        admin.lpush(layout.value(bytes(32)), "x")
        parts = admin.keys(layout.value(half) + b":c:*")
        admin.delete(parts[0])  # type: ignore[index]
    code, out, _ = await in_thread(server, "verify")
    assert code == 1
    assert out.splitlines()[-1] == "7 entries read, 4 bad"
    for key, problem in [(broken, "checksum"), (headless, "shorter"), (half, "part is missing"), (bytes(32), "string")]:
        (line,) = [line for line in out.splitlines() if key.hex() in line]
        assert problem in line
    code, out, _ = await in_thread(server, "verify", "--delete")
    assert (code, out.splitlines()[-1]) == (1, "7 entries read, 4 bad, deleted")
    code, out, _ = await in_thread(server, "verify")
    assert (code, out) == (0, "3 entries read, 0 bad\n")
    with server.admin() as admin:
        assert not admin.keys(layout.value(half) + b"*")


async def test_purge_takes_what_is_meant_and_nothing_else(server: Server, filled: dict[str, list[bytes]]) -> None:
    code, out, err = await in_thread(server, "purge")
    assert code == 2
    assert "--all" in err
    selected = ("--namespace", "tenant:acme", "--kind", "embedding")
    code, out, _ = await in_thread(server, "purge", *selected, "--dry-run")
    assert out.startswith("would delete 3 entries")
    code, out, err = await in_thread(server, "purge", *selected, stdin="n\n")
    assert (code, out) == (0, "")
    assert "nothing deleted" in err
    assert len(await rows_of(server)) == 6
    code, out, _ = await in_thread(server, "purge", *selected, stdin="y\n")
    assert out.startswith("deleted 3 entries")
    assert len(await rows_of(server)) == 3
    code, out, _ = await in_thread(server, "purge", "--older-than", "7d", "--yes")
    assert out.startswith("deleted 1 entries")
    code, out, _ = await in_thread(server, "purge", "--all", "--yes")
    assert out.startswith("deleted 2 entries")
    with server.admin() as admin:
        assert sorted(admin.keys("*")) == [b"sightline:1:lease:embedding:{00}", b"somebody:else"]  # type: ignore[type-var]


async def test_many_entries_are_all_seen(server: Server) -> None:
    layout = KeyLayout(kind="item")
    with server.admin() as admin:
        pipeline = admin.pipeline(transaction=False)
        for _ in range(1500):
            key = new_key()
            pipeline.set(layout.value(key), encode_record(key, {}))
        pipeline.execute()
    _, out, _ = await in_thread(server, "purge", "--all", "--yes")
    assert out.startswith("deleted 1,500 entries")
    with server.admin() as admin:
        assert admin.dbsize() == 0


def quiet_console(stdin: str = "") -> Console:
    return Console(io.StringIO(stdin), io.StringIO(), io.StringIO())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["count"], 2),
        (["count", "--url", "http://x"], 2),
        (["count", "--url", "redis://x", "--older-than", "7"], 2),
        (["count", "--url", "redis://x", "--timeout", "0"], 2),
        (["frobnicate"], 2),
        ([], 2),
        (["--help"], 0),
        (["purge", "--help"], 0),
        (["count", "--url", "redis://127.0.0.1:1", "--timeout", "1"], 3),
    ],
)
def test_exit_codes(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments, {}, quiet_console()) == code


def test_password_comes_from_the_environment(own_server: Server) -> None:
    with own_server.admin() as admin:
        admin.config_set("requirepass", "secret")
    environment = {"SIGHTLINE_REDIS_URL": own_server.url}
    assert run(["count", "--quiet"], environment, quiet_console()) == 3
    assert run(["count", "--quiet"], environment | {"SIGHTLINE_REDIS_PASSWORD": "secret"}, quiet_console()) == 0


def test_keys_of_tenants() -> None:
    console = quiet_console("sl-some-key\n")
    assert run(["hash-key"], {}, console) == 0
    assert console.stdout.getvalue() == hash_api_key("sl-some-key") + "\n"  # type: ignore[attr-defined]
    assert run(["hash-key"], {}, quiet_console()) == 2
    console = quiet_console()
    assert run(["new-key"], {}, console) == 0
    key, key_hash = (line.split()[1] for line in console.stdout.getvalue().splitlines())  # type: ignore[attr-defined]
    assert hash_api_key(key) == key_hash


def test_as_a_module(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cache_service", "count", "--url", server.url],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["total", "0", "0"]
