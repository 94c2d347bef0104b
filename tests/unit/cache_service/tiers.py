"""Tiers and lease stores as the tests want them: plain, in memory, and as broken as told."""

from collections import Counter
from collections.abc import Sequence

from cache_service.cluster_flight import Lease, LeaseUnavailableError
from cache_service.codec import CorruptValueError
from cache_service.tier import Lookup, LookupResult


class DictTier:
    """A shared tier: several replicas may be given the same one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[bytes, bytes] = {}
        self.newest_token: dict[bytes, int] = {}
        self.asked: list[list[bytes]] = []
        self.down = False
        self.full = False
        self.closed = False

    async def get_many(self, keys: Sequence[bytes]) -> list[Lookup]:
        self.asked.append(list(keys))
        if self.down:
            return [Lookup(LookupResult.ERROR) for _ in keys]
        return [
            Lookup(LookupResult.HIT, memoryview(self.values[key])) if key in self.values else Lookup(LookupResult.MISS)
            for key in keys
        ]

    async def put(self, key: bytes, value: bytes | memoryview) -> bool:
        if self.down or self.full:
            return False
        self.values[key] = bytes(value)
        return True

    async def put_fenced(self, key: bytes, value: bytes | memoryview, token: int | None) -> bool:
        if token is not None and token != self.newest_token.get(key, token):
            return False
        return await self.put(key, value)

    async def delete(self, key: bytes) -> None:
        self.values.pop(key, None)

    async def close(self) -> None:
        self.closed = True


class DictLeases:
    """Leases without a clock: `expire` is what a clock would do."""

    def __init__(self, tier: DictTier) -> None:
        self.tier = tier
        self.held: dict[bytes, int] = {}
        self.calls: Counter[str] = Counter()
        self.down = False

    async def acquire(self, key: bytes, ttl_s: float) -> Lease | None:
        self._count("acquire")
        if key in self.held:
            return None
        token = self.tier.newest_token[key] = self.tier.newest_token.get(key, 0) + 1
        self.held[key] = token
        return Lease(key, token)

    async def extend(self, lease: Lease, ttl_s: float) -> bool:
        self._count("extend")
        return self.held.get(lease.key) == lease.token

    async def release(self, lease: Lease) -> None:
        self._count("release")
        if self.held.get(lease.key) == lease.token:
            del self.held[lease.key]

    def expire(self, key: bytes) -> None:
        del self.held[key]

    def _count(self, call: str) -> None:
        self.calls[call] += 1
        if self.down:
            raise LeaseUnavailableError


def decode_text(key: bytes, value: memoryview, *, trusted: bool) -> str:
    """Values are `<key>:<text>`; anything else is corrupt. Trusted ones are not looked at."""
    head, _, text = bytes(value).partition(b":")
    if head != key and not trusted:
        raise CorruptValueError("made for another key")
    return text.decode()


def encode_text(key: bytes, text: str) -> bytes:
    return key + b":" + text.encode()
