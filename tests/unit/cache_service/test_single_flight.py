import asyncio

import pytest

from cache_service.single_flight import Flight, SingleFlight
from deployments.errors import MediaError


class Work:
    """A computation whose end the test decides."""

    def __init__(self) -> None:
        self.calls = 0
        self.cancelled = 0
        self.gates: list[asyncio.Future[int]] = []

    async def __call__(self) -> int:
        self.calls += 1
        gate: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.gates.append(gate)
        try:
            return await gate
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_hundred_callers_compute_once() -> None:
    flight: SingleFlight[int] = SingleFlight()
    work = Work()
    callers = [asyncio.ensure_future(flight.run("k", work)) for _ in range(100)]
    await settle()
    assert (work.calls, len(flight)) == (1, 1)
    work.gates[0].set_result(7)
    results = await asyncio.gather(*callers)
    assert results == [Flight(7, joined=False)] + [Flight(7, joined=True)] * 99
    assert (flight.stats.leads, flight.stats.joins, len(flight)) == (1, 99, 0)


async def test_nothing_is_remembered_afterwards_and_keys_are_apart() -> None:
    flight: SingleFlight[int] = SingleFlight()
    work = Work()
    for value in (1, 2):
        caller = asyncio.ensure_future(flight.run("k", work))
        other = asyncio.ensure_future(flight.run("other", work))
        await settle()
        work.gates[-2].set_result(value)
        work.gates[-1].set_result(-value)
        assert (await caller).value == value
        assert (await other).value == -value
    assert work.calls == 4


async def test_a_cancelled_leader_takes_nothing_from_the_others() -> None:
    flight: SingleFlight[int] = SingleFlight()
    work = Work()
    leader, joiner = (asyncio.ensure_future(flight.run("k", work)) for _ in range(2))
    await settle()
    leader.cancel()
    await settle()
    assert leader.cancelled()
    work.gates[0].set_result(7)
    assert await joiner == Flight(7, joined=True)
    assert (work.calls, work.cancelled) == (1, 0)


async def test_the_last_to_leave_cancels_and_who_comes_next_starts_anew() -> None:
    flight: SingleFlight[int] = SingleFlight()
    work = Work()
    callers = [asyncio.ensure_future(flight.run("k", work)) for _ in range(3)]
    await settle()
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)
    late = asyncio.ensure_future(flight.run("k", work))  # before the cancelled task has ended
    await settle()
    assert (work.calls, work.cancelled, flight.stats.abandoned) == (2, 1, 1)
    work.gates[1].set_result(8)
    assert await late == Flight(8, joined=False)


async def test_nobody_joins_a_computation_that_is_still_cleaning_up() -> None:
    flight: SingleFlight[str] = SingleFlight()
    cleaned = asyncio.Event()

    async def slow_to_stop() -> str:
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            await cleaned.wait()

    async def quick() -> str:
        return "fresh"

    caller = asyncio.ensure_future(flight.run("k", slow_to_stop))
    await settle()
    caller.cancel()
    await settle()
    assert await flight.run("k", quick) == Flight("fresh", joined=False)
    cleaned.set()
    await settle()


async def test_joiners_of_a_failed_computation_try_once_together() -> None:
    flight: SingleFlight[int] = SingleFlight()
    work = Work()
    callers = [asyncio.ensure_future(flight.run("k", work)) for _ in range(4)]
    await settle()
    work.gates[0].set_exception(RuntimeError("first"))
    await settle()
    assert work.calls == 2
    work.gates[1].set_result(9)
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(results[0], RuntimeError)
    assert [result.value for result in results[1:] if isinstance(result, Flight)] == [9, 9, 9]
    assert flight.stats.retries == 3


async def test_a_second_failure_reaches_all_and_each_has_its_own_error() -> None:
    flight: SingleFlight[int] = SingleFlight()
    work = Work()
    callers = [asyncio.ensure_future(flight.run("k", work)) for _ in range(4)]
    await settle()
    work.gates[0].set_exception(RuntimeError("first"))
    await settle()
    work.gates[1].set_exception(RuntimeError("second"))
    errors = await asyncio.gather(*callers, return_exceptions=True)
    assert [str(error) for error in errors] == ["first", "second", "second", "second"]
    assert len({id(error) for error in errors}) == 4
    assert work.calls == 2


async def test_final_errors_are_shared_as_copies_without_another_try() -> None:
    flight: SingleFlight[int] = SingleFlight(is_final=lambda error: isinstance(error, MediaError))
    work = Work()
    callers = [asyncio.ensure_future(flight.run("k", work)) for _ in range(3)]
    await settle()
    work.gates[0].set_exception(MediaError("not a picture"))
    errors = await asyncio.gather(*callers, return_exceptions=True)
    for position, error in enumerate(errors):
        assert isinstance(error, MediaError)
        error.at(f"content[{position}]")
    assert [error.param for error in errors if isinstance(error, MediaError)] == [
        "content[0]",
        "content[1]",
        "content[2]",
    ]
    assert work.calls == 1


async def test_a_computation_that_is_cancelled_from_inside_is_not_inherited() -> None:
    flight: SingleFlight[int] = SingleFlight()
    work = Work()
    leader, joiner = (asyncio.ensure_future(flight.run("k", work)) for _ in range(2))
    await settle()
    work.gates[0].cancel()
    await settle()
    assert leader.cancelled()
    work.gates[1].cancel()  # and once more: then the joiner computes by itself
    await settle()
    assert joiner.cancelled()
    assert work.calls == 2

    first, second, third = (asyncio.ensure_future(flight.run("k", work)) for _ in range(3))
    await settle()
    work.gates[2].cancel()
    await settle()
    work.gates[3].cancel()
    await settle()
    work.gates[4].set_result(5)
    assert (await third).value == 5
    assert first.cancelled()
    assert second.cancelled()


async def test_bounded_wait_then_own_computation() -> None:
    flight: SingleFlight[int] = SingleFlight()
    work = Work()
    leader = asyncio.ensure_future(flight.run("k", work, timeout_s=0))  # a leader is not bounded
    await settle()
    joiner = asyncio.ensure_future(flight.run("k", work, timeout_s=0))
    while work.calls < 2:  # noqa: ASYNC110 - turns of the loop, not time
        await asyncio.sleep(0)
    work.gates[1].set_result(2)
    assert await joiner == Flight(2, joined=False)
    assert flight.stats.timeouts == 1
    work.gates[0].set_result(1)
    assert await leader == Flight(1, joined=False)


async def test_error_of_an_abandoned_computation_is_not_reported_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    flight: SingleFlight[int] = SingleFlight()

    async def stubborn() -> int:
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise RuntimeError("while cleaning up") from None

    caller = asyncio.ensure_future(flight.run("k", stubborn))
    await settle()
    caller.cancel()
    await settle()
    del caller
    assert not caplog.records


async def test_errors_that_cannot_be_copied_are_passed_on_as_they_are() -> None:
    class AwkwardError(Exception):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(first)

    flight: SingleFlight[int] = SingleFlight(is_final=lambda error: True)
    work = Work()
    callers = [asyncio.ensure_future(flight.run("k", work)) for _ in range(2)]
    await settle()
    work.gates[0].set_exception(AwkwardError("a", "b"))
    errors = await asyncio.gather(*callers, return_exceptions=True)
    assert all(isinstance(error, AwkwardError) for error in errors)
