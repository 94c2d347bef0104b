import asyncio

from hypothesis import given
from hypothesis import strategies as st

from cache_service.write_behind import Write, WriteBehind


class Store:
    """Takes one write for each `gate.release()`; records what it took."""

    def __init__(self, *, open_gate: bool = False) -> None:
        self.taken: list[tuple[bytes, bytes | memoryview | None]] = []
        self.gate = asyncio.Semaphore(1_000_000 if open_gate else 0)
        self.answer = True

    async def __call__(self, write: Write) -> bool:
        await self.gate.acquire()
        self.taken.append((write.key, write.value))
        return self.answer


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_writes_happen_in_order_and_idle_needs_no_task() -> None:
    store = Store(open_gate=True)
    queue = WriteBehind(store, max_bytes=100, max_entries=10)
    assert await queue.flush(1)
    for number in range(3):
        assert queue.offer(b"%d" % number, b"v") is not None
    assert await queue.flush(1)
    assert store.taken == [(b"0", b"v"), (b"1", b"v"), (b"2", b"v")]
    assert (queue.stats.written, queue.stats.queued_entries, queue.stats.queued_bytes) == (3, 0, 0)
    assert len(asyncio.all_tasks()) == 1


async def test_both_bounds_refuse_the_newest() -> None:
    queue = WriteBehind(Store(), max_bytes=10, max_entries=3)
    assert queue.offer(b"a", bytes(8))
    assert queue.offer(b"b", bytes(3)) is None
    assert queue.offer(b"c", bytes(1))
    assert queue.offer(b"d", bytes(1))
    assert queue.offer(b"e", b"") is None
    assert queue.stats.refused == 2
    await queue.close(0)


async def test_a_write_under_way_counts_until_it_is_done() -> None:
    store = Store()
    queue = WriteBehind(store, max_bytes=10, max_entries=3)
    first = queue.offer(b"a", bytes(8))
    await settle()
    assert queue.offer(b"b", bytes(8)) is None
    store.gate.release()
    assert first is not None
    assert await first.done
    assert queue.offer(b"b", bytes(8))
    await queue.close(0)


async def test_a_later_write_of_a_key_replaces_a_waiting_one() -> None:
    store = Store()
    queue = WriteBehind(store, max_bytes=10, max_entries=3)
    queue.offer(b"x", bytes(1))
    await settle()  # x is under way
    old = queue.offer(b"k", bytes(9))
    new = queue.offer(b"k", b"new")
    assert old is not None
    assert new is not None
    assert old.done.result() is False
    gone = queue.offer(b"x", None)
    assert gone is not None
    for _ in range(3):
        store.gate.release()
    assert await queue.flush(1)
    assert store.taken == [(b"x", bytes(1)), (b"k", b"new"), (b"x", None)]


async def test_refused_by_the_store_is_counted() -> None:
    store = Store(open_gate=True)
    store.answer = False
    queue = WriteBehind(store, max_bytes=10, max_entries=3)
    write = queue.offer(b"k", b"v")
    assert write is not None
    assert await write.done is False
    assert queue.stats.failed == 1


async def test_close_is_bounded_drops_the_rest_and_takes_no_more() -> None:
    queue = WriteBehind(Store(), max_bytes=10, max_entries=3)
    writes = [queue.offer(b"a", b"1"), queue.offer(b"b", b"2")]
    await settle()
    await queue.close(0)
    assert [write.done.result() for write in writes if write is not None] == [False, False]
    assert (queue.stats.failed, queue.stats.queued_entries, queue.stats.queued_bytes) == (2, 0, 0)
    assert queue.offer(b"c", b"3") is None
    assert len(asyncio.all_tasks()) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12) | st.none(), st.integers(0, 2)), max_size=40))
def test_books_balance(steps: list[tuple[int, int | None, int]]) -> None:
    async def scenario() -> None:
        store = Store()
        queue = WriteBehind(store, max_bytes=20, max_entries=3)
        offered: list[Write] = []
        for key, num_bytes, releases in steps:
            write = queue.offer(b"%d" % key, None if num_bytes is None else bytes(num_bytes))
            offered += [] if write is None else [write]
            for _ in range(releases):
                store.gate.release()
            await settle()
            open_writes = [write for write in offered if not write.done.done()]
            assert queue.stats.queued_entries == len(open_writes) <= 3
            assert queue.stats.queued_bytes == sum(write.num_bytes for write in open_writes) <= 20
        await queue.close(0)
        assert all(write.done.done() for write in offered)
        assert queue.stats.queued_entries == queue.stats.queued_bytes == 0

    asyncio.run(scenario())
