"""Captured forward passes at a ladder of budgets, for one path of any adapter. Knows no model names.

    items ──fill──▶ static input buffers of budget B ──replay──▶ static output ──▶ rows per item, to be copied out

All budgets of a path share their input memory, and those of all paths record into one memory pool, largest first, so
that smaller ones reuse its blocks. A replay therefore overwrites what any earlier replay left: whoever runs a budget
copies the rows out on the same stream before anything else runs there.

Without capture (CPU) the same buffers, padding and slicing are used and the forward pass is simply called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deployments.vision_encoder.adapters.base import VisionAdapter, VisionItem
from deployments.vision_encoder.costs import PassCost
from deployments.vision_encoder.forward import InputArena, InputBuffers, input_bytes, load_of, split_rows, to_host
from deployments.vision_encoder.packing import Budget, Capacity

logger = logging.getLogger(__name__)

Measure = Callable[[Callable[[], object]], float]
"""Seconds that one call takes, device work included."""

_WARM_UP_CALLS = 2


@dataclass(slots=True)
class _Captured:
    """One budget. Holds every tensor its graph touches: the graph itself keeps addresses, not references."""

    inputs: InputBuffers
    graph: torch.cuda.CUDAGraph | None
    output: torch.Tensor | None
    """Static result of the graph; None without capture."""


class GraphManager:
    """The ladder of one path.

    Args:
        capacities: Budgets to prepare, in any order.
        capture: Record CUDA graphs; False calls the forward pass on the same static buffers.
        pool: Memory pool to share with other paths (`torch.cuda.graph_pool_handle()`), or None.
    """

    def __init__(
        self,
        adapter: VisionAdapter,
        path: str,
        capacities: Sequence[Capacity],
        *,
        capture: bool,
        pool: Any = None,
    ) -> None:
        if capture and not adapter.capturable:
            raise ValueError("the attention backend reads from the host; it cannot be captured in a CUDA graph")
        self._adapter, self.path, self._capture, self._pool = adapter, path, capture, pool
        # One stream for warm-up and capture of all budgets: libraries keep a workspace per stream, and torch's own
        # default belongs to whichever device captured first.
        self._stream = torch.cuda.Stream(adapter.device) if capture else None
        self._capacities = sorted(capacities, key=lambda capacity: capacity.slots)
        sizes = [input_bytes(adapter, path, capacity) for capacity in capacities]
        self._arena = InputArena(max(sizes, default=0), adapter.device)
        self._captured: dict[int, _Captured] = {}
        self.budgets: tuple[Budget, ...] = ()
        """What may be replayed, ascending; empty until `prepare`."""

    @property
    def mode(self) -> str:
        return "graph" if self._capture else "static"

    @property
    def input_bytes(self) -> int:
        return self._arena.nbytes

    @torch.inference_mode()
    def prepare(
        self,
        measure: Measure,
        eager_cost: PassCost | None = None,
        progress: Callable[[Iterable[Capacity]], Iterable[Capacity]] = iter,
    ) -> None:
        """Capture and time every budget, largest first. A budget slower than eager at its own size is switched off.

        Args:
            eager_cost: Measured cost of eager passes; None keeps every budget.
            progress: Wraps the budgets as they are captured, such as a progress bar.
        """
        pair_s = eager_cost.pair_s if eager_cost else 0.0
        budgets: list[Budget] = []
        for capacity in progress(list(reversed(self._capacities))):
            items = self._adapter.sample_items(self.path, capacity.slots, -(-capacity.slots // capacity.items))
            load = load_of(self._adapter, self.path, items)
            captured = self._prepare_one(capacity, items)
            # Filling and copying out included, as in the eager passes that it is compared with.
            cost_s = measure(lambda captured=captured, items=items: self._timed(captured, items))  # type: ignore[misc]
            eager_s = eager_cost(load) if eager_cost else float("inf")
            if cost_s > eager_s:
                logger.warning(
                    "path %s: budget of %d slots is off: its graph takes %.2f ms, an eager pass %.2f ms",
                    self.path,
                    capacity.slots,
                    cost_s * 1e3,
                    eager_s * 1e3,
                )
                continue
            self._captured[capacity.slots] = captured
            fixed_s = max(0.0, cost_s - pair_s * load.pairs)
            # A larger budget does all that this one does: that it took less time can only be noise.
            if budgets:
                fixed_s = min(fixed_s, budgets[-1].cost_s)
            budgets.append(Budget(capacity, fixed_s, pair_s))
        self.budgets = tuple(reversed(budgets))

    @torch.inference_mode()
    def run(self, items: Sequence[VisionItem], budget_slots: int) -> list[torch.Tensor]:
        """Rows of each item, in order: views that the next run overwrites, so copy them out on this stream first. The
        items must fit the budget in every dimension."""
        return self._run(self._captured[budget_slots], items)

    def _run(self, captured: _Captured, items: Sequence[VisionItem]) -> list[torch.Tensor]:
        captured.inputs.fill(items)
        return split_rows(self._adapter, self.path, items, self._launch(captured))

    def _timed(self, captured: _Captured, items: Sequence[VisionItem]) -> list[torch.Tensor]:
        return [to_host(rows) for rows in self._run(captured, items)]

    def _launch(self, captured: _Captured) -> torch.Tensor:
        if captured.graph is None or captured.output is None:
            return self._forward(captured.inputs)
        captured.graph.replay()
        return captured.output

    def _forward(self, inputs: InputBuffers) -> torch.Tensor:
        # The host-side bound of an attention run is part of the capture, so it is the most that the budget can hold.
        return self._adapter.forward(self.path, inputs.device, inputs.capacity.patches)

    def _prepare_one(self, capacity: Capacity, items: Sequence[VisionItem]) -> _Captured:
        inputs = InputBuffers(self._adapter, self.path, capacity, self._arena)
        inputs.fill(items)
        if self._stream is None:
            return _Captured(inputs, None, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_CALLS):  # libraries choose kernels and allocate workspaces before capture
                self._forward(inputs)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = self._forward(inputs)
        return _Captured(inputs, graph, output)
