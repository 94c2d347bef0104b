from __future__ import annotations

from typing import Any

from deployments.lm_engine.queue import WaitingQueue
from deployments.lm_engine.request import Sequence, SequenceStatus
from tests.unit.lm_engine.host_side import sequence, text


def waiting(name: str, serial: int, tenant: str = "", **options: Any) -> Sequence:
    seq = text(name, 4, namespace=tenant, **options)
    seq.rank = (0.0, float(serial), serial)
    return seq


def drain(queue: WaitingQueue, cost: int = 10) -> list[str]:
    names = []
    while (seq := queue.pop()) is not None:
        queue.charge(seq.namespace, prompt_tokens=cost)
        names.append(seq.sequence_id)
        queue.check_integrity()
    return names


def test_one_tenant_is_served_by_rank() -> None:
    queue = WaitingQueue()
    for serial in (3, 1, 2):
        queue.push(waiting(f"r{serial}", serial))
    assert drain(queue) == ["r1", "r2", "r3"]


def test_a_flood_from_one_tenant_delays_another_by_one_turn() -> None:
    queue = WaitingQueue()
    for serial in range(100):
        queue.push(waiting(f"flood{serial}", serial, "flood"))
    queue.push(waiting("small0", 100, "small"))
    queue.push(waiting("small1", 101, "small"))
    assert drain(queue)[:4] == ["flood0", "small0", "flood1", "small1"]


def test_turns_follow_the_work_done_and_not_the_number_of_requests() -> None:
    queue = WaitingQueue()
    for serial in range(30):
        queue.push(waiting(f"long{serial}", serial, "long"))
        queue.push(waiting(f"short{serial}", serial, "short"))
    served = {"long": 0, "short": 0}
    for _ in range(22):
        seq = queue.pop()
        assert seq is not None
        served[seq.namespace] += 1
        queue.charge(seq.namespace, prompt_tokens=100 if seq.namespace == "long" else 10)
    assert served["short"] >= 9 * served["long"]


def test_output_is_charged_when_it_is_known() -> None:
    queue = WaitingQueue()
    for serial in range(3):
        queue.push(waiting(f"a{serial}", serial, "a"))
        queue.push(waiting(f"b{serial}", serial, "b"))
    first = queue.pop()
    assert first is not None
    assert first.sequence_id == "a0"
    queue.charge("a", prompt_tokens=1)
    queue.charge("a", output_tokens=100)
    assert drain(queue, cost=1) == ["b0", "b1", "b2", "a1", "a2"]


def test_absence_earns_no_credit() -> None:
    queue = WaitingQueue()
    for serial in range(20):
        queue.push(waiting(f"busy{serial}", serial, "busy"))
    for _ in range(10):
        seq = queue.pop()
        assert seq is not None
        queue.charge("busy", prompt_tokens=10)
    for serial in range(10):
        queue.push(waiting(f"new{serial}", 50 + serial, "new"))
    order = drain(queue)
    assert [name[:4] for name in order[:6]].count("busy") >= 2


def test_who_comes_back_starts_at_the_present() -> None:
    queue = WaitingQueue()
    queue.push(waiting("back0", 0, "back"))
    assert drain(queue) == ["back0"]
    for serial in range(1, 20):
        queue.push(waiting(f"busy{serial}", serial, "busy"))
    for _ in range(10):
        assert queue.pop() is not None
        queue.charge("busy", prompt_tokens=10)
    for serial in range(20, 30):
        queue.push(waiting(f"back{serial}", serial, "back"))
    assert [name[:4] for name in drain(queue)[:6]].count("busy") >= 2


def test_preempted_sequences_go_before_all_others() -> None:
    queue = WaitingQueue()
    queue.push(waiting("old", 1))
    preempted = waiting("preempted", 9, status=SequenceStatus.PREEMPTED)
    queue.push(preempted)
    assert drain(queue) == ["preempted", "old"]


def test_restore_and_peek_leave_the_order_as_it_was() -> None:
    queue = WaitingQueue()
    for serial in range(6):
        queue.push(waiting(f"r{serial}", serial, f"tenant{serial % 2}"))
    queue.charge("tenant1", prompt_tokens=15)
    ahead = [seq.sequence_id for seq in queue.peek(4)]
    queue.check_integrity()
    assert len(queue) == 6
    assert [seq.sequence_id for seq in queue.peek(4)] == ahead
    popped = queue.pop()
    assert popped is not None
    queue.restore([popped])
    assert [seq.sequence_id for seq in queue.peek(4)] == ahead


def test_peeking_costs_a_tenant_no_credit() -> None:
    queue = WaitingQueue()
    queue.push(waiting("a0", 0, "a"))
    queue.push(waiting("b0", 1, "b"))
    queue.push(waiting("b1", 2, "b"))
    queue.charge("b", prompt_tokens=100)
    for _ in range(3):
        queue.peek(3)
    queue.push(waiting("a1", 3, "a"))
    assert drain(queue, cost=10)[:2] == ["a0", "a1"]


def test_removed_sequences_never_come_up() -> None:
    queue = WaitingQueue()
    sequences = [waiting(f"r{serial}", serial) for serial in range(4)]
    for seq in sequences:
        queue.push(seq)
    queue.remove(sequences[0])
    queue.remove(sequences[2])
    assert ("r0" in queue, "r1" in queue, len(queue)) == (False, True, 2)
    assert drain(queue) == ["r1", "r3"]


def test_counts() -> None:
    queue = WaitingQueue()
    queue.push(waiting("a", 0, "x"))
    picture = sequence("b", (5, 4), [1], namespace="y")
    picture.rank = (0.0, 1.0, 1)
    queue.push(picture)
    assert (queue.num_with_items, queue.num_tenants, queue.num_of("x"), queue.num_of("z")) == (1, 2, 1, 0)


def test_tenants_of_the_past_are_forgotten() -> None:
    queue = WaitingQueue()
    for serial in range(500):
        queue.push(waiting(f"r{serial}", serial, f"tenant{serial}"))
        assert queue.pop() is not None
    assert len(queue._tenants) < 100
