"""The waiting line: preempted sequences first, then tenants by turns, each tenant's own by rank.

Tenants share by virtual time, as processes share a CPU: a tenant's clock advances by the work done for it, and the
tenant whose clock is furthest behind is served next. A tenant that was away comes back at the present time, so absence
earns no credit. Prompt tokens count once, generated ones `OUTPUT_TOKEN_COST` times, since a decode step moves the
whole KV cache for one token. ("Fairness in Serving Large Language Models", Sheng et al., 2024, describes the idea.)
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field

from deployments.lm_engine.request import Rank, Sequence, SequenceStatus

OUTPUT_TOKEN_COST = 2.0

_Line = list[tuple[Rank, Sequence]]


@dataclass(slots=True, eq=False)
class _Tenant:
    namespace: str
    clock: float
    line: _Line = field(default_factory=list)
    """Heap by rank; entries whose sequence left otherwise are skipped."""
    in_turns: bool = False
    """Whether the heap of turns holds an entry for it."""


class WaitingQueue:
    def __init__(self) -> None:
        self._preempted: _Line = []
        self._tenants: dict[str, _Tenant] = {}
        self._turns: list[tuple[float, int, _Tenant]] = []
        self._serial = itertools.count()
        self._present = 0.0
        self._members: dict[str, Sequence] = {}
        self._per_tenant: Counter[str] = Counter()
        self._num_with_items = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._members

    @property
    def num_with_items(self) -> int:
        """Waiting sequences that have pictures or videos."""
        return self._num_with_items

    @property
    def num_tenants(self) -> int:
        return len(self._per_tenant)

    def num_of(self, namespace: str) -> int:
        """Waiting sequences of one tenant."""
        return self._per_tenant.get(namespace, 0)

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence; a preempted one goes before all that never ran."""
        if sequence.status == SequenceStatus.WAITING:
            tenant = self._tenants.get(sequence.namespace)
            if tenant is None:
                self._forget_idle_tenants()
                self._tenants[sequence.namespace] = _Tenant(sequence.namespace, self._present)
            elif not tenant.in_turns:
                tenant.clock = max(tenant.clock, self._present)
        self._insert(sequence)

    def pop(self) -> Sequence | None:
        """Take the next sequence out; None if nobody waits. Follow up with `charge` or `restore`."""
        self._drop_departed(self._preempted)
        if self._preempted:
            return self._leave(heapq.heappop(self._preempted)[1])
        while self._turns:
            clock, _, tenant = heapq.heappop(self._turns)
            tenant.in_turns = False
            self._drop_departed(tenant.line)
            if not tenant.line:
                continue
            if clock < tenant.clock:  # it was charged while it waited for its turn
                self._take_turns(tenant)
                continue
            sequence = heapq.heappop(tenant.line)[1]
            self._take_turns(tenant)
            return self._leave(sequence)
        return None

    def restore(self, sequences: list[Sequence]) -> None:
        """Put popped sequences back where they were: their tenants' clocks have not moved."""
        for sequence in sequences:
            self._insert(sequence)

    def peek(self, count: int) -> list[Sequence]:
        """The next `count` sequences, in order."""
        ahead: list[Sequence] = []
        while len(ahead) < count and (sequence := self.pop()) is not None:
            ahead.append(sequence)
        self.restore(ahead)
        return ahead

    def remove(self, sequence: Sequence) -> None:
        """Take a given sequence out; its heap entry goes when it comes up."""
        self._leave(sequence)

    def charge(self, namespace: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Advance a tenant's clock by work done for it. Prompt tokens are charged when the sequence starts to run,
        which is the moment that `present` follows."""
        tenant = self._tenants.get(namespace)
        if tenant is not None:
            if prompt_tokens:
                self._present = max(self._present, tenant.clock)
            tenant.clock += prompt_tokens + OUTPUT_TOKEN_COST * output_tokens

    def check_integrity(self) -> None:
        """Raise AssertionError unless every member can be popped exactly once."""
        entries = itertools.chain(self._preempted, *(tenant.line for tenant in self._tenants.values()))
        found = Counter(sequence.sequence_id for _, sequence in entries if self._is_member(sequence))
        assert set(found) == set(self._members), "members and heap entries disagree"
        assert Counter(s.namespace for s in self._members.values()) == self._per_tenant, "tenant counts disagree"
        assert sum(bool(s.items) for s in self._members.values()) == self._num_with_items, "item counts disagree"
        in_turns = Counter(tenant.namespace for _, _, tenant in self._turns)
        assert all(count == 1 for count in in_turns.values()), "a tenant has two turns"
        for namespace, tenant in self._tenants.items():
            assert tenant.in_turns == (namespace in in_turns), f"tenant's turn is not as noted: {namespace!r}"
            assert tenant.in_turns or not any(self._is_member(s) for _, s in tenant.line), "a tenant has no turn"

    def _insert(self, sequence: Sequence) -> None:
        self._members[sequence.sequence_id] = sequence
        self._per_tenant[sequence.namespace] += 1
        self._num_with_items += bool(sequence.items)
        if sequence.status == SequenceStatus.PREEMPTED:
            heapq.heappush(self._preempted, (sequence.rank, sequence))
        else:
            tenant = self._tenants[sequence.namespace]
            heapq.heappush(tenant.line, (sequence.rank, sequence))
            self._take_turns(tenant)

    def _is_member(self, sequence: Sequence) -> bool:
        return self._members.get(sequence.sequence_id) is sequence

    def _leave(self, sequence: Sequence) -> Sequence:
        del self._members[sequence.sequence_id]
        self._per_tenant[sequence.namespace] -= 1
        if not self._per_tenant[sequence.namespace]:
            del self._per_tenant[sequence.namespace]
        self._num_with_items -= bool(sequence.items)
        return sequence

    def _take_turns(self, tenant: _Tenant) -> None:
        if tenant.line and not tenant.in_turns:
            tenant.in_turns = True
            heapq.heappush(self._turns, (tenant.clock, next(self._serial), tenant))

    def _drop_departed(self, line: _Line) -> None:
        while line and not self._is_member(line[0][1]):
            heapq.heappop(line)

    def _forget_idle_tenants(self) -> None:
        """A tenant without a line whose clock is not ahead of the present has nothing to remember."""
        if len(self._tenants) > 2 * len(self._per_tenant) + 64:
            self._tenants = {n: t for n, t in self._tenants.items() if t.line or t.clock > self._present}
