"""The device side of the encoder: items in, rows out. One thread calls it; anything on the device happens from there.

    encode(items) ── per path: plan batches ──▶ replay or eager ──▶ rows per item and path ──▶ assemble ──▶ deliver

A batch that fails is taken apart: out of memory halves it, any other error runs its items one by one, so that what is
wrong with one item harms no other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from deployments.errors import ContextLengthError, InternalError, OverloadedError, SightlineError
from deployments.vision_encoder.adapters.base import ItemSpec, Modality, VisionAdapter, VisionItem
from deployments.vision_encoder.costs import PassCost
from deployments.vision_encoder.forward import run_eager, to_host
from deployments.vision_encoder.graphs import GraphManager
from deployments.vision_encoder.memory_model import MemoryModel
from deployments.vision_encoder.packing import Batch, Capacity, Load, Planner, Rules, plan_batches
from deployments.vision_encoder.stats import EncoderStats

logger = logging.getLogger(__name__)

Rows = np.ndarray | torch.Tensor
"""[num_slots, width] of one item: NumPy (bfloat16 viewed as uint16), or a device tensor in colocated mode."""
Deliver = Callable[[int, Rows | Exception], None]


@dataclass(slots=True)
class PathRunner:
    """What is known of one path: its graphs, if any, and what an eager pass costs."""

    name: str
    eager_cost: PassCost = field(default_factory=PassCost)
    graphs: GraphManager | None = None

    def marginal_seconds(self, load: Load) -> float:
        """What an item adds to a full pass; its share of the fixed part is that of its size."""
        cost = self.eager_cost
        full = max(load.slots, cost.points[-1][0])
        return cost.curve_s(full) * load.slots / full + cost.pair_s * load.pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    model: MemoryModel
    limit_bytes: int

    def bytes_of(self, load: Load) -> int:
        return self.model.predict_bytes(load.patches, load.longest_patches)


@dataclass(slots=True)
class _Pending:
    """An item on its way through its paths."""

    item: VisionItem
    loads: Mapping[str, Load]
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    failed: bool = False

    @property
    def complete(self) -> bool:
        return not self.failed and len(self.rows) == len(self.loads)


class EncoderCore:
    """Args:
    limit: Most of everything in one pass; an item over it is refused by `check`.
    runners: One per path of the adapter; paths left out run eagerly.
    keep_on_device: Deliver device tensors instead of NumPy (an engine in the same process takes them as they are).
    """

    def __init__(
        self,
        adapter: VisionAdapter,
        limit: Capacity,
        *,
        stats: EncoderStats | None = None,
        runners: Sequence[PathRunner] = (),
        memory: MemoryLimit | None = None,
        planner: Planner = plan_batches,
        keep_on_device: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.adapter, self.limit, self.memory = adapter, limit, memory
        self.stats = stats or EncoderStats()
        self._runners = {path.name: PathRunner(path.name) for path in adapter.paths}
        self._runners.update({runner.name: runner for runner in runners})
        # A language model in the same process computes on its own stream meanwhile.
        self._stream = torch.cuda.Stream(adapter.device) if adapter.device.type == "cuda" else None
        # What stays allocated between passes: weights, input buffers and whatever else lives on the device.
        self._resident_bytes = torch.cuda.memory_allocated(adapter.device) if self._stream is not None else 0
        self._planner, self._keep_on_device, self._clock = planner, keep_on_device, clock

    @property
    def width(self) -> int:
        return self.adapter.width

    @property
    def dtype_name(self) -> str:
        return str(self.adapter.dtype).removeprefix("torch.")

    def describe(self, modality: Modality, grid: tuple[int, int, int]) -> ItemSpec:
        """Shapes and loads of an item that fits the limits. Callable from any thread.

        Raises:
            InvalidRequestError: The grid is none of the model's.
            ContextLengthError: The item alone is over a limit; the message names limit and value.
        """
        spec = self.adapter.describe(modality, grid)
        for load in spec.loads.values():
            self._check_limits(modality, load)
        return spec

    def predict_seconds(self, item: VisionItem) -> float:
        """Device time that an item asks for beside others; 0 for one that will be refused."""
        try:
            loads = self.adapter.describe(item.modality, item.grid).loads
        except SightlineError:
            return 0.0
        return sum(self._runners[path].marginal_seconds(load) for path, load in loads.items())

    def _check_limits(self, modality: Modality, load: Load) -> None:
        for name, value, most in (
            ("patches", load.patches, self.limit.patches),
            ("slots", load.slots, self.limit.slots),
            ("frames", load.frames, self.limit.frames),
        ):
            if value > most:
                raise ContextLengthError(
                    f"the {modality} has {value} {name}; the vision encoder takes at most {most} (max_batch_{name})",
                    code=f"{modality}_too_large",
                )
        if self.memory is not None and self.memory.bytes_of(load) > self.memory.limit_bytes:
            raise ContextLengthError(
                f"the {modality} needs {self.memory.bytes_of(load)} bytes in the vision encoder;"
                f" at most {self.memory.limit_bytes} are set aside (batch_memory_bytes)",
                code=f"{modality}_too_large",
            )

    def encode_all(self, items: Sequence[VisionItem]) -> list[Rows | Exception]:
        """`encode` for callers that want everything at once, in order."""
        results: dict[int, Rows | Exception] = {}
        self.encode(items, results.__setitem__)
        return [results[i] for i in range(len(items))]

    def encode(self, items: Sequence[VisionItem], deliver: Deliver) -> None:
        """Encode items and call `deliver(position, rows or error)` once for each, as soon as its batch is done.

        On CUDA the work runs on a stream of the core's own and is complete when it is delivered. Whoever takes device
        tensors to another stream must call `record_stream` on them before letting go of them.
        """
        with torch.inference_mode(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            self._encode(items, deliver)

    def _encode(self, items: Sequence[VisionItem], deliver: Deliver) -> None:
        pending: dict[int, _Pending] = {}
        for position, item in enumerate(items):
            try:
                item, spec = self._accept(item)
            except SightlineError as error:
                deliver(position, error)
            else:
                pending[position] = _Pending(item, spec.loads)
        for runner in self._runners.values():
            positions = [position for position, entry in pending.items() if runner.name in entry.loads]
            if positions:
                self._run_path(runner, positions, pending, deliver)

    def _accept(self, item: VisionItem) -> tuple[VisionItem, ItemSpec]:
        """The item as it will be run. A video of one frame may come without temporal copies, as a picture does."""
        spec = self.describe(item.modality, item.grid)
        if item.modality == "video" and item.grid[0] == 1 and item.patches.shape != spec.patches_shape:
            picture = self.describe("image", item.grid)
            if item.patches.shape == picture.patches_shape:
                item, spec = VisionItem("image", item.grid, item.patches), picture
        _check_patches(item, spec)
        return item, spec

    def _run_path(
        self, runner: PathRunner, positions: Sequence[int], pending: Mapping[int, _Pending], deliver: Deliver
    ) -> None:
        loads = [pending[position].loads[runner.name] for position in positions]
        for batch in self._planner(loads, self._rules(runner)):
            members = [positions[i] for i in batch.indices if not pending[positions[i]].failed]
            if members:
                self._run_batch(runner, batch, members, pending, deliver)

    def _rules(self, runner: PathRunner) -> Rules:
        return Rules(
            budgets=runner.graphs.budgets if runner.graphs else (),
            limit=self.limit,
            eager_cost_s=runner.eager_cost,
            admits=self._admits,
        )

    def _admits(self, load: Load) -> bool:
        return self.memory is None or self.memory.bytes_of(load) <= self.memory.limit_bytes

    def _run_batch(
        self,
        runner: PathRunner,
        batch: Batch,
        members: Sequence[int],
        pending: Mapping[int, _Pending],
        deliver: Deliver,
    ) -> None:
        try:
            done, results = self._pass(runner, batch, members, pending)
        except torch.OutOfMemoryError:
            self.stats.batch_failures["out_of_memory"] += 1
            _release_memory()
            self._take_apart(runner, batch, members, pending, deliver, None)
        except Exception as exc:
            # Whatever a kernel or a bad input raises: find out whose fault it is, and fail only that item.
            self.stats.batch_failures["error"] += 1
            logger.exception("path %s: a batch of %d items failed", runner.name, len(members))
            self._take_apart(runner, batch, members, pending, deliver, exc)
        else:
            for position, result in zip(done, results, strict=True):
                pending[position].rows.clear()
                deliver(position, result)

    def _take_apart(
        self,
        runner: PathRunner,
        batch: Batch,
        members: Sequence[int],
        pending: Mapping[int, _Pending],
        deliver: Deliver,
        cause: Exception | None,
    ) -> None:
        """Run a failed batch again in parts, without its graph. `cause` is None if memory ran out."""
        parts: list[Sequence[int]]
        if batch.budget is not None:
            parts = [members]
        elif len(members) == 1:
            error: SightlineError = OverloadedError(
                "the vision encoder is out of memory for this item", retry_after_s=1.0
            )
            if cause is not None:
                error = InternalError(f"the vision encoder failed on an item: {type(cause).__name__}")
            self._fail(members[0], error, pending, deliver)
            return
        elif cause is None:
            half = len(members) // 2
            parts = [members[:half], members[half:]]
        else:
            parts = [[position] for position in members]
            self.stats.isolated_items += len(members)
        for part in parts:
            self._run_batch(runner, _eager(part, pending, runner.name), part, pending, deliver)

    def _pass(
        self, runner: PathRunner, batch: Batch, members: Sequence[int], pending: Mapping[int, _Pending]
    ) -> tuple[list[int], list[Rows]]:
        """One forward pass, timed and counted: the positions that it completes and their results.

        Waits for the device once, after the results have been queued for copying.
        """
        started = self._clock()
        items = [pending[position].item for position in members]
        if batch.budget is not None and runner.graphs is not None:
            mode = runner.graphs.mode
            rows = runner.graphs.run(items, batch.budget)
        else:
            mode = "eager"
            rows = run_eager(self.adapter, runner.name, items)
        for position, item_rows in zip(members, rows, strict=True):
            pending[position].rows[runner.name] = item_rows
        done = [position for position in members if pending[position].complete]
        results = [self._copy_out(pending[position]) for position in done]
        if len(done) < len(members):
            # Their other paths come later, and a replay overwrites what this one left.
            for position in set(members).difference(done):
                pending[position].rows[runner.name] = pending[position].rows[runner.name].clone()
        if self._stream is not None:
            self._stream.synchronize()
        self._count(runner, batch, mode, len(items), self._clock() - started)
        return done, [rows if self._keep_on_device else _as_numpy(rows) for rows in results]

    def _count(self, runner: PathRunner, batch: Batch, mode: str, items: int, seconds: float) -> None:
        stats, path = self.stats, runner.name
        stats.invocations[path, mode] += 1
        stats.items[path] += items
        stats.slots[path] += batch.load.slots
        stats.batch_items[items] += 1
        stats.batch_seconds[path] += seconds
        if batch.budget is not None:
            stats.graph_replays[path, batch.budget] += 1
            stats.padded_slots[path] += batch.budget - batch.load.slots
        elif runner.graphs is not None and batch.reason:
            stats.eager_fallbacks[batch.reason] += 1
        if self.memory is not None and self.memory.bytes_of(batch.load) > stats.predicted_peak_bytes:
            stats.predicted_peak_bytes = self.memory.bytes_of(batch.load)
            # Reading the allocator's counters costs as much as a small pass, and only larger passes raise the peak.
            if self.adapter.device.type == "cuda":
                peak_bytes = torch.cuda.max_memory_allocated(self.adapter.device)
                stats.measured_peak_bytes = peak_bytes - self._resident_bytes

    def _fail(self, position: int, error: Exception, pending: Mapping[int, _Pending], deliver: Deliver) -> None:
        pending[position].failed = True
        pending[position].rows.clear()
        deliver(position, error)

    def _copy_out(self, entry: _Pending) -> torch.Tensor:
        """Start copying an item's result into memory of its own: a view would keep the whole batch alive while one item
        is cached, and the next replay would overwrite it."""
        rows = self.adapter.assemble(entry.item, entry.rows)
        return rows.clone() if self._keep_on_device else to_host(rows)


def _as_numpy(host: torch.Tensor) -> np.ndarray:
    return (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()


def _check_patches(item: VisionItem, spec: ItemSpec) -> None:
    patches = item.patches
    if patches.dtype != np.uint8 or patches.shape != spec.patches_shape:
        raise InternalError(
            f"patches of the {item.modality} are {patches.dtype} {patches.shape}; the encoder needs uint8"
            f" {spec.patches_shape}"
        )


def _eager(members: Sequence[int], pending: Mapping[int, _Pending], path: str) -> Batch:
    """The part of a failed batch that holds `members`, to be run without its graph."""
    load = sum((pending[position].loads[path] for position in members), Load())
    return Batch(tuple(range(len(members))), load, None, "replay_failed")


def _release_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
