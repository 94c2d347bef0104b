"""Control sockets: who may join, messages in order, and ends that are noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from deployments.lm_engine.tensor_parallel.channel import Channel, Lobby, connect


@pytest.fixture
def lobby() -> Iterator[Lobby]:
    made = Lobby()
    yield made
    made.close()


def pair(lobby: Lobby) -> tuple[Channel, Channel]:
    theirs = connect(lobby.address(0), 1)
    return lobby.accept([1], 5.0)[1], theirs


def test_messages_of_any_length_arrive_in_order(lobby: Lobby) -> None:
    ours, theirs = pair(lobby)
    messages = [b"", b"x", bytes(range(256)) * 20_000, b"last"]
    sending = threading.Thread(target=lambda: [ours.send(message) for message in messages])
    sending.start()
    assert [theirs.receive() for _ in messages] == messages
    sending.join()
    theirs.send(b"back")
    assert ours.receive() == b"back"
    ours.close()
    theirs.close()


def test_an_end_is_noticed_by_both_directions(lobby: Lobby) -> None:
    ours, theirs = pair(lobby)
    theirs.close()
    assert ours.receive() is None
    with pytest.raises(OSError):
        ours.send(b"x" * (64 << 20))  # more than any buffer takes
    ours.close()


def test_an_end_within_a_message_is_an_end(lobby: Lobby) -> None:
    address = lobby.address(0)
    raw = socket.create_connection((address.host, address.port))
    raw.sendall(address.token + (1).to_bytes(4, "big"))
    ours = lobby.accept([1], 5.0)[1]
    raw.sendall((100).to_bytes(8, "big") + b"only this")
    raw.close()
    assert ours.receive() is None
    ours.close()


def test_closing_wakes_whoever_waits(lobby: Lobby) -> None:
    ours, theirs = pair(lobby)
    threading.Timer(0.1, ours.close).start()
    assert ours.receive() is None
    theirs.close()


def test_strangers_are_sent_away_and_do_not_take_a_place(lobby: Lobby) -> None:
    address = lobby.address(0)
    stranger = connect(replace(address, token=bytes(32)), 1)
    unknown = connect(address, 7)
    silent = socket.create_connection((address.host, address.port))
    silent.close()
    ours, theirs = pair(lobby)
    for other in (stranger, unknown):
        assert other.receive() is None
        other.close()
    ours.send(b"hello")
    assert theirs.receive() == b"hello"
    ours.close()
    theirs.close()


def test_a_rank_that_does_not_come_is_named(lobby: Lobby) -> None:
    theirs = connect(lobby.address(0), 1)
    with pytest.raises(TimeoutError, match=r"ranks \[2\] have not come within 0.3 s"):
        lobby.accept([1, 2], 0.3)
    assert theirs.receive() is None
    theirs.close()


def test_the_secret_is_not_shown(lobby: Lobby) -> None:
    address = lobby.address(0)
    assert address.token.hex() not in repr(address)
    assert repr(address.token) not in repr(address)
