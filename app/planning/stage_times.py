"""Seconds of every stage's work for a model, from rates that were measured with another one.

A step of the LM engine takes, for `rows` tokens (decodes and prompts together):

    max(host, products(rows) + KV bytes of decodes / kv_bytes_per_s + FLOPs of prompts' pairs / attention_flop_per_s)

`products` goes through the measured steps less their attention. For another model each of its points is scaled by
arithmetic: what is bound by reading weights by bytes, what is bound by computing by FLOPs, whichever is more. The
encoder's passes are scaled by FLOPs a slot, pairs by FLOPs a pair. Scaling assumes that kernels are as good at the
other sizes, which nobody has measured: measure a model that matters.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from app.planning.curve import Curve, fit_rising
from app.planning.rates import Rates, StepPoint
from app.planning.shape import DecoderShape, ModelShape, shape_of
from deployments.vision_encoder.costs import PassCost, fit_pass_cost
from deployments.vision_encoder.packing import Batch, Budget, Capacity, Load, Rules, plan_batches

MAX_PASS_SLOTS = 16_384
MAX_PASS_PATCHES = 65_536
MAX_PASS_ITEMS = 256
MAX_PASS_FRAMES = 1_024
"""Of one pass: the defaults of `vision_encoder`."""

_BATCHES = (*range(1, 17), *range(20, 33, 4), 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the model's arithmetic compares to that of the measured one: 1 means equal."""

    flops_per_token: float
    flops_per_slot: float

    @property
    def is_none(self) -> bool:
        return math.isclose(self.flops_per_token, 1.0, rel_tol=1e-3) and math.isclose(
            self.flops_per_slot, 1.0, rel_tol=1e-3
        )


class StageTimes:
    """Args:
    rates: As measured.
    shape: Of the model to plan for.
    """

    def __init__(self, rates: Rates, shape: ModelShape) -> None:
        measured = shape_of(rates.config, rates.model)
        self.shape = shape
        self.scaling = Scaling(
            shape.decoder.flops_per_token / measured.decoder.flops_per_token,
            shape.tower.flops_per_slot / measured.tower.flops_per_slot,
        )
        self._engine, self._host = rates.engine, rates.host
        self._kv_token_s = shape.decoder.kv_bytes_per_token / rates.engine.kv_bytes_per_s
        self._pair_s = shape.decoder.flops_per_pair / rates.engine.attention_flop_per_s
        products = fit_rising((_rows(point), self._products_s(point, measured)) for point in rates.engine.steps)
        self._products = _scaled(products, measured.decoder, shape.decoder)
        self.pass_overhead_s = rates.encoder.pass_overhead_s
        self.rules = _pass_rules(rates, measured, shape)
        self._cheapest = lru_cache(1024)(self._compute_cheapest)
        self._request_s = lru_cache(4096)(self._compute_request_s)

    def _products_s(self, point: StepPoint, measured: ModelShape) -> float:
        """A measured step without its attention."""
        engine, decoder = self._engine, measured.decoder
        if point.new_tokens == 1:
            kv_bytes = point.sequences * point.context_tokens * decoder.kv_bytes_per_token
            return max(0.0, point.seconds - kv_bytes / engine.kv_bytes_per_s)
        pairs = point.sequences * point.new_tokens * (point.context_tokens + point.new_tokens / 2)
        return max(0.0, point.seconds - pairs * decoder.flops_per_pair / engine.attention_flop_per_s)

    # -- LM engine -----------------------------------------------------------------------------------------------------
    def step_s(self, rows: float, context_tokens: float, pairs: float) -> float:
        """One step.

        Args:
            rows: Tokens computed, decodes and prompts.
            context_tokens: In the KV cache before the step, of all decodes together.
            pairs: Of a prompt's tokens with those before them, of all prompts together.
        """
        busy_s = self._products(rows) + self._kv_token_s * context_tokens + self._pair_s * pairs
        return max(self._engine.host_step_s, busy_s)

    # -- vision encoder ------------------------------------------------------------------------------------------------
    def load_of(self, slots: int) -> Load:
        """A picture of so many slots."""
        patches = slots * self.shape.tower.unit
        return Load(slots, patches, frames=1, longest_patches=patches, pairs=patches**2)

    def passes(self, loads: Sequence[Load]) -> list[Batch]:
        """What the encoder makes of a round: its own packing with the measured costs."""
        return plan_batches(loads, self.rules)

    def pass_s(self, load: Load, items: int) -> float:
        """One pass, from pixels to rows in host memory."""
        return self.rules.choose(load, items)[0] + self.pass_overhead_s

    def round_s(self, item: Load, items: float) -> float:
        """Passes of a round of so many pictures that are alike, at least one; batches of the cheapest size are assumed,
        near to what the encoder's packing finds."""
        items = max(1.0, items)
        cheapest = self._cheapest(item)
        at = bisect_right(cheapest, items, key=lambda entry: entry[0]) - 1
        return cheapest[at][1] * items

    def _compute_cheapest(self, item: Load) -> tuple[tuple[int, float], ...]:
        """(items that may run together, least seconds of each of them), ascending in the first."""
        found, best = [], float("inf")
        for count in _BATCHES:
            total = Load(
                item.slots * count, item.patches * count, 0, item.frames * count, item.longest_patches,
                item.pairs * count,
            )  # fmt: skip
            if count > 1 and self.rules.limit.shortage(total, count) is not None:
                break
            best = min(best, self.pass_s(total, count) / count)
            found.append((count, best))
        return tuple(found)

    def _compute_request_s(self, slots: tuple[int, ...]) -> float:
        loads = [self.load_of(each) for each in slots]
        return sum(self.pass_s(batch.load, len(batch.indices)) for batch in self.passes(loads))

    def pictures_s(self, slots: tuple[int, ...]) -> float:
        """Passes of pictures of so many slots each, in a round of their own."""
        return self._request_s(slots)

    # -- host ----------------------------------------------------------------------------------------------------------
    @property
    def call_s(self) -> float:
        return self._host.call_s

    @property
    def receive_s(self) -> float:
        return self._host.receive_s

    def request_cpu_s(self) -> float:
        return self._host.request_cpu_s

    def picture_cpu_s(self, megapixels: float) -> float:
        return self._host.cpu_s_per_megapixel * megapixels

    def patches_transfer_s(self, slots: float) -> float:
        """Of a picture's patches from the preprocessor to where it is encoded."""
        tower = self.shape.tower
        return slots * tower.unit * tower.patch_bytes / self._host.payload_bytes_per_s

    def rows_transfer_s(self, slots: float) -> float:
        """Of a picture's embeddings from an encoder of its own to the LM engine."""
        return slots * self.shape.tower.row_bytes / self._host.payload_bytes_per_s


def _rows(point: StepPoint) -> float:
    return float(point.sequences * point.new_tokens)


def _scaled(products: Curve, measured: DecoderShape, shape: DecoderShape) -> Curve:
    least_rows, least_s = products.points[0]
    flops = shape.flops_per_token / measured.flops_per_token

    def point(rows: float, seconds: float) -> tuple[float, float]:
        reading_s = least_s * shape.read_bytes(rows) / measured.read_bytes(least_rows)
        return rows, max(reading_s, seconds * flops)

    return fit_rising(point(rows, seconds) for rows, seconds in products.points)


def _pass_rules(rates: Rates, measured: ModelShape, shape: ModelShape) -> Rules:
    encoder, tower = rates.encoder, shape.tower
    slot_scale = tower.flops_per_slot / measured.tower.flops_per_slot
    pair_scale = tower.flops_per_pair / measured.tower.flops_per_pair if measured.tower.flops_per_pair else 0.0
    pair_s = encoder.pair_s * pair_scale
    limit = Capacity(MAX_PASS_SLOTS, MAX_PASS_PATCHES, MAX_PASS_ITEMS, MAX_PASS_PATCHES, MAX_PASS_FRAMES)
    budgets = tuple(
        Budget(
            Capacity(point.slots, point.slots * tower.unit, point.items, point.slots, point.items),
            point.graph_s * slot_scale,
            pair_s,
        )
        for point in sorted(encoder.budgets, key=lambda point: point.slots)
    )
    eager = [(Load(point.slots), point.seconds * slot_scale) for point in encoder.eager]
    largest, seconds = max(eager, key=lambda pass_: pass_[0].slots)
    if largest.slots < MAX_PASS_SLOTS:
        # Larger passes than the largest that was measured are no better: a slot costs what it does there.
        eager.append((Load(MAX_PASS_SLOTS), seconds * MAX_PASS_SLOTS / largest.slots))
    return Rules(budgets, limit, PassCost(fit_pass_cost(eager, 0.0).points, pair_s))
