"""Which replica a request goes to: the one that probably has its picture or prefix, unless that one is loaded already.

    key ──hash──▶ ring of replicas ──clockwise──▶ first replica whose load is within the bound

Consistent hashing keeps most keys where they were when a replica comes or goes, so what replicas have in memory stays
useful. The bound (Mirrokni, Thorup, Zadimoghaddam: "Consistent Hashing with Bounded Loads", 2018) sends what would
overload a replica to the next one on the ring, and always to the same next one. Pure; request_router.py is its Serve
side.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from deployments.messages import GenerateRequest, MediaItem

PREFIX_TOKENS = 256
"""Tokens of a prompt without pictures that make its key: enough to tell system prompts and first questions apart, and
the same in every later turn of a conversation that has begun with as many."""

_SEPARATOR = "/"


def item_key(item: MediaItem) -> str:
    """Where an item's embedding is looked for."""
    return _digest(item.identity)


def prompt_key(request: GenerateRequest) -> str:
    """Where a prompt's KV blocks and embeddings are looked for: equal for prompts that are equal up to and including
    their first item, or in their first PREFIX_TOKENS tokens if they have none before that. Tenants never share one."""
    end, item = PREFIX_TOKENS, b""
    if request.items and request.items[0].offset < PREFIX_TOKENS:
        end, item = request.items[0].offset, bytes(request.items[0].identity)
    tokens = array("q", request.prompt_token_ids[:end]).tobytes()
    return _digest(request.namespace.encode(), request.cache_salt.encode(), tokens, item)


def session_id(key: str, request_id: str = "") -> str:
    """What a handle tells the router. Calls that name the same request reach the same replica; later ones need no key.

    Args:
        key: Made by one of the functions above, or empty.
    """
    return f"{key}{_SEPARATOR}{request_id}"


def other_session(key: str, request_id: str) -> str:
    """What a handle tells the router of a call that repeats one of `session_id(key, request_id)` elsewhere: any replica
    will do but the one that has, or was first offered, that call; that one if it is alone."""
    return f"{session_id(key, request_id)}{_SEPARATOR}"


def replica_session(name: str) -> str:
    """What a handle tells the router of a call that is for one replica and no other."""
    return f"{_SEPARATOR}{_SEPARATOR}{name}"


class HashRing:
    """Args:
    names: Replicas; the order does not matter.
    points: Places of each replica on the ring; more of them share the keys more evenly.
    """

    def __init__(self, names: Iterable[str] = (), *, points: int = 128) -> None:
        placed = sorted((_hash(f"{name}:{i}"), name) for name in set(names) for i in range(points))
        self._hashes = [place for place, _ in placed]
        self._names = [name for _, name in placed]
        self.num_names = len(set(self._names))

    def walk(self, key: str) -> Iterator[str]:
        """All replicas, the key's owner first, then clockwise."""
        start = bisect_right(self._hashes, _hash(key))
        seen: set[str] = set()
        for i in range(len(self._names)):
            name = self._names[(start + i) % len(self._names)]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == self.num_names:
                    return


class Placer:
    """Decides for one caller. Not thread-safe.

    Args:
        bound: Most that a replica may carry, as a multiple of the mean; above 1. Near 1 spreads load, large values keep
            keys together.
        min_bound: Load up to which a replica is never passed over: below it there is nothing to gain by spreading.
        points: See HashRing.
        max_sessions: Requests remembered; beyond, the one that was used longest ago is forgotten.
    """

    def __init__(
        self, *, bound: float = 1.25, min_bound: int = 4, points: int = 128, max_sessions: int = 16_384
    ) -> None:
        if not bound > 1:
            raise ValueError(f"bound is {bound}; it must be above 1")
        for name, value in (("min_bound", min_bound), ("points", points), ("max_sessions", max_sessions)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self._bound, self._min_bound, self._points, self._max_sessions = bound, min_bound, points, max_sessions
        self._replicas: frozenset[str] = frozenset()
        self._ring = HashRing()
        self._sessions: OrderedDict[str, str] = OrderedDict()
        """Replica of each request, the one used last at the end."""
        self._offered: OrderedDict[str, str] = OrderedDict()
        """Best replica of requests that none has taken yet."""

    def set_replicas(self, names: Iterable[str]) -> None:
        replicas = frozenset(names)
        if replicas != self._replicas:
            self._replicas, self._ring = replicas, HashRing(replicas, points=self._points)

    def rank(self, session: str, load: Callable[[str], float]) -> list[str]:
        """Replicas for a session id, best first; the next one is for when those before it cannot take the call.

        A request that has been taken (see `keep`) has only the replica that took it; its `other_session` has all but
        that one, where there are others. Other calls have first those within the bound, clockwise from the key's owner,
        then those above it. A call for a replica that is not there any more goes to another one, which must refuse it:
        a router has no way to.

        Args:
            load: What a replica carries now.
        """
        target = _Target.of(session)
        known = target.replica or self._sessions.get(target.request_id)
        if target.elsewhere:
            avoided = known or self._offered.get(target.request_id)
            ranked = self._clockwise(target.key or target.request_id, load)
            # Never none at all: Serve would look for a replica for ever, even once the call has been given up.
            return [name for name in ranked if name != avoided] or ranked
        if known in self._replicas:
            if target.replica is None:
                self._sessions.move_to_end(target.request_id)
            return [known]
        ranked = self._clockwise(target.key or target.request_id, load)
        if target.request_id and ranked:
            self._remember(self._offered, target.request_id, ranked[0])
        return ranked

    def keep(self, session: str, name: str) -> None:
        """The replica `name` took a call of this session: later calls of its request go there, too."""
        target = _Target.of(session)
        if target.request_id and not target.elsewhere:
            self._offered.pop(target.request_id, None)
            self._remember(self._sessions, target.request_id, name)

    def _clockwise(self, key: str, load: Callable[[str], float]) -> list[str]:
        """First the replicas within the bound, from the key's owner on, then those above it."""
        loads = {name: load(name) for name in self._replicas}
        if not loads:
            return []
        # The mean is below the bound, so one replica at least is within it.
        most = max(self._min_bound, math.ceil(self._bound * (sum(loads.values()) + 1) / len(loads)))
        return sorted(self._ring.walk(key), key=lambda name: loads[name] >= most)

    def _remember(self, where: OrderedDict[str, str], request_id: str, name: str) -> None:
        where[request_id] = name
        where.move_to_end(request_id)
        if len(where) > self._max_sessions:
            where.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Target:
    """What a session id says."""

    key: str = ""
    request_id: str = ""
    elsewhere: bool = False
    """Not where the request is."""
    replica: str | None = None
    """The one that the call is for, and no other."""

    @classmethod
    def of(cls, session: str) -> _Target:
        marker = _SEPARATOR * 2
        if session.startswith(marker):
            return cls(replica=session.removeprefix(marker))
        key, _, rest = session.partition(_SEPARATOR)
        request_id = rest.removesuffix(_SEPARATOR)
        return cls(key, request_id, elsewhere=bool(request_id) and request_id != rest)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def _digest(*parts: bytes) -> str:
    digest = blake2b(digest_size=12)
    for part in parts:
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.hexdigest()
