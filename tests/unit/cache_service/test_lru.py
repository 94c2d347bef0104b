import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_service.lru import ByteLRU

CAPACITY = 20
KEYS = st.integers(0, 7)


class LRUMachine(RuleBasedStateMachine):
    """Against a model so plain that it can be checked by eye: a list in order of use, least recent first."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[tuple[int, object]] = []
        self.expected_evicted: list[tuple[int, object]] = []
        self.lru: ByteLRU[int, object] = ByteLRU(
            CAPACITY, on_evict=lambda key, value: self.evicted.append((key, value))
        )
        self.order: list[int] = []
        self.values: dict[int, tuple[object, int]] = {}
        self.pins: dict[int, int] = {}
        self.hits = self.misses = self.refusals = 0

    @rule(key=KEYS, num_bytes=st.integers(0, CAPACITY + 3))
    def put(self, key: int, num_bytes: int) -> None:
        value = object()
        pinned_bytes = sum(self.values[pinned][1] for pinned in self.pins)
        fits = key not in self.pins and num_bytes + pinned_bytes <= CAPACITY
        assert self.lru.can_put(key, num_bytes) == fits
        assert self.lru.put(key, value, num_bytes) == fits
        if not fits:
            self.refusals += 1
            return
        self.values.pop(key, None)
        self.order = [other for other in self.order if other != key]
        while sum(size for _, size in self.values.values()) + num_bytes > CAPACITY:
            victim = next(other for other in self.order if other not in self.pins)
            self.order.remove(victim)
            self.expected_evicted.append((victim, self.values.pop(victim)[0]))
        self.values[key] = (value, num_bytes)
        self.order.append(key)

    @rule(key=KEYS)
    def get(self, key: int) -> None:
        value = self.lru.get(key)
        self._expect(key, value)
        if key in self.values:
            self._use(key)

    @rule(key=KEYS)
    def peek(self, key: int) -> None:
        assert self.lru.peek(key) is self.values.get(key, (None, 0))[0]
        assert (key in self.lru) == (key in self.values)

    @rule(key=KEYS)
    def pin(self, key: int) -> None:
        self._expect(key, self.lru.pin(key))
        if key in self.values:
            self.pins[key] = self.pins.get(key, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins)))
        self.lru.unpin(key)
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]
            self._use(key)

    @rule(key=KEYS)
    def pop(self, key: int) -> None:
        if key in self.pins:
            with pytest.raises(ValueError, match="pinned"):
                self.lru.pop(key)
            return
        assert self.lru.pop(key) is self.values.pop(key, (None, 0))[0]
        self.order = [other for other in self.order if other != key]

    @rule()
    def clear(self) -> None:
        self.lru.clear()
        self.values = {key: entry for key, entry in self.values.items() if key in self.pins}
        self.order = [key for key in self.order if key in self.pins]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.lru.check_integrity()
        assert self.evicted == self.expected_evicted
        assert set(self.lru) == set(self.values)
        stats = self.lru.stats()
        assert stats.entries == len(self.lru) == len(self.values)
        assert stats.bytes == self.lru.num_bytes == sum(size for _, size in self.values.values())
        assert stats.pinned_entries == len(self.pins)
        assert (stats.hits, stats.misses, stats.refusals) == (self.hits, self.misses, self.refusals)
        assert stats.evictions == len(self.evicted)

    def _expect(self, key: int, value: object) -> None:
        if key in self.values:
            self.hits += 1
            assert value is self.values[key][0]
        else:
            self.misses += 1
            assert value is None

    def _use(self, key: int) -> None:
        self.order.remove(key)
        self.order.append(key)


LRUMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestLRU = LRUMachine.TestCase


def test_pinned_block_survives_pressure_and_is_released_on_error() -> None:
    lru: ByteLRU[str, int] = ByteLRU(2)
    lru.put("a", 1, 1)

    def use() -> None:
        with lru.pinned("a") as value:
            assert value == 1
            assert lru.put("b", 2, 1)
            assert lru.put("c", 3, 1)  # evicts b, the only one it may
            assert "a" in lru
            assert "b" not in lru
            raise RuntimeError

    with pytest.raises(RuntimeError):
        use()
    assert lru.stats().pinned_entries == 0
    assert lru.put("d", 4, 2)
    assert set(lru) == {"d"}


def test_pinned_unknown_key_needs_no_unpin() -> None:
    lru: ByteLRU[str, int] = ByteLRU(2)
    with lru.pinned("a") as value:
        assert value is None
        lru.put("a", 1, 1)
    assert lru.stats().pinned_entries == 0


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_bytes = -1"):
        ByteLRU(-1)
    lru: ByteLRU[str, int] = ByteLRU(2)
    with pytest.raises(ValueError, match="num_bytes = -1"):
        lru.put("a", 1, -1)
    with pytest.raises(ValueError, match="without a matching pin"):
        lru.unpin("a")
