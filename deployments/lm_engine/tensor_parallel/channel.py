"""The control sockets between rank 0 and the others: messages of bytes, in order. Knows nothing of what they mean.

A socket tells at once when the process at its other end is gone, however long both have been silent: that is why plans
go this way and not through a collective, which would have to wait for its time-out.

    rank r ── hello: token, r ──▶ Lobby ──▶ Channel of rank r
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_LENGTH = struct.Struct("!Q")
_RANK = struct.Struct("!I")
_TOKEN_BYTES = 32
_MAX_HELLO_S = 10.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Address:
    """Where rank 0 can be reached, and the secret that it asks for."""

    host: str
    port: int
    store_port: int
    """Of the key-value store by which the ranks' collectives find each other."""
    token: bytes = field(repr=False)


class Channel:
    """One end of a connection. `send` and `receive` may be called from two threads, each from one only."""

    def __init__(self, connection: socket.socket) -> None:
        # Plans are small and follow each other: none may wait for the receipt of the one before.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.settimeout(None)
        self._socket = connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes | bytearray) -> None:
        """Raises OSError once the other end is gone."""
        self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytearray | None:
        """The next message; None once the other end is gone. Waits as long as it takes."""
        head = self._read(_LENGTH.size)
        return None if head is None else self._read(_LENGTH.unpack(head)[0])

    def _read(self, num_bytes: int) -> bytearray | None:
        data = bytearray(num_bytes)
        view, filled = memoryview(data), 0
        while filled < num_bytes:
            try:
                count = self._socket.recv_into(view[filled:])
            except OSError:
                return None
            if not count:
                return None
            filled += count
        return data

    def close(self) -> None:
        """Both directions; a `receive` that waits returns None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Lobby:
    """Where rank 0 waits for the others.

    Args:
        host: Address of an interface that they can reach.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._server = socket.create_server((host, 0))
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self.host = host

    def address(self, store_port: int) -> Address:
        return Address(self.host, self._server.getsockname()[1], store_port, self._token)

    def accept(
        self, ranks: Iterable[int], timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> dict[int, Channel]:
        """One channel for each of `ranks`; whoever does not know the token is sent away.

        Args:
            check: Called now and then; what it raises ends the wait.

        Raises:
            TimeoutError: Not all came in time.
        """
        missing, channels = set(ranks), dict[int, Channel]()
        deadline_s = time.monotonic() + timeout_s
        self._server.settimeout(_POLL_S)
        try:
            while missing:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"ranks {sorted(missing)} have not come within {timeout_s:g} s")
                connection = self._accept_one()
                if connection is None:
                    check()
                    continue
                rank = self._greet(connection)
                if rank in missing:
                    missing.discard(rank)
                    channels[rank] = Channel(connection)
                else:
                    connection.close()
        except BaseException:
            for channel in channels.values():
                channel.close()
            raise
        return channels

    def _accept_one(self) -> socket.socket | None:
        try:
            return self._server.accept()[0]
        except TimeoutError:
            return None

    def _greet(self, connection: socket.socket) -> int:
        """The caller's rank; -1 if it does not know the token."""
        connection.settimeout(_MAX_HELLO_S)
        hello = b""
        try:
            while len(hello) < _TOKEN_BYTES + _RANK.size:
                part = connection.recv(_TOKEN_BYTES + _RANK.size - len(hello))
                if not part:
                    return -1
                hello += part
        except OSError:
            return -1
        known = hmac.compare_digest(hello[:_TOKEN_BYTES], self._token)
        return int(_RANK.unpack(hello[_TOKEN_BYTES:])[0]) if known else -1

    def close(self) -> None:
        self._server.close()


def connect(address: Address, rank: int, timeout_s: float = 30.0) -> Channel:
    """The channel of `rank` to rank 0."""
    connection = socket.create_connection((address.host, address.port), timeout_s)
    connection.sendall(address.token + _RANK.pack(rank))
    return Channel(connection)
