from collections.abc import Iterator

import pytest

from tests.redis.rig import Server, running_server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    """An empty server that must be left as it was found."""
    with shared_server.admin() as admin:
        admin.flushall()
    return shared_server


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that a test may break."""
    with running_server() as server:
        yield server
