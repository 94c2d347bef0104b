"""Demand of a trace, what splits carry, replays, and which one is chosen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.planning.choose import Candidate, Targets, best_of, choose, in_order, make_candidate
from app.planning.errors import PlanError
from app.planning.estimate import Estimate
from app.planning.replay import Clock, Cores, Gpu, Played
from app.planning.splits import EngineOptions, Split, splits_of
from app.planning.workload import Caches, SyntheticWorkload, at_rate, demand_of, rate_of
from deployments.lm_engine.trace import TracePicture, TraceRequest
from tests.unit.app.plan_rig import estimate, measured_times, replay, workload

NO_CACHE = Caches(0, 0)
ROOMY = Caches(1e9, 1e9)

# Settings of whole workloads: small numbers, so that each takes milliseconds.
workloads = st.builds(
    workload,
    requests=st.just(40),
    images=st.integers(0, 6),
    slots=st.integers(16, 1400),
    prompt_tokens=st.integers(1, 1500),
    output_tokens=st.integers(1, 300),
    reuse=st.sampled_from([0.0, 0.5]),
    requests_per_s=st.sampled_from([1.0, 30.0]),
)


def candidates(gpus: int, requests: list[TraceRequest], targets: Targets) -> list[Candidate]:
    rate = rate_of(requests)
    splits = [split for count in range(1, gpus + 1) for split in splits_of(count)]
    return [make_candidate(estimate(split, requests), rate, targets) for split in splits]


# -- demand -----------------------------------------------------------------------------------------------------------
def request(arrival_s: float, *pictures: int, prefix: int = 0) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s,
        text_tokens=10,
        output_tokens=5,
        pictures=tuple(TracePicture(picture, 100) for picture in pictures),
        prefix_id=7 if prefix else 0,
        prefix_tokens=prefix,
    )


def test_caches_spare_encodes_and_prefill() -> None:
    trace = [request(0.0, 1, 2, prefix=50), request(1.0, 1, 2, prefix=50), request(2.0, 2, prefix=50)]
    first, second, third = demand_of(trace, ROOMY).requests
    assert (first.encode, first.decode, first.cached_tokens) == ((100, 100), (100, 100), 0)
    assert (second.encode, second.decode, second.cached_tokens, second.new_tokens) == ((), (), 250, 10)
    # Another picture comes right after the prefix: its KV is not there, its embedding is.
    assert (third.encode, third.decode, third.cached_tokens) == ((), (), 50)
    for cold in demand_of(trace, NO_CACHE).requests[1:]:
        assert cold.encode
        assert not cold.decode, "the preprocessor knows a picture by its bytes"
        assert cold.cached_tokens == 0


def test_what_was_used_long_ago_is_given_up() -> None:
    trace = [request(float(i), picture) for i, picture in enumerate((1, 2, 3, 1))]
    assert demand_of(trace, Caches(300, 0)).requests[-1].encode == ()
    assert demand_of(trace, Caches(200, 0)).requests[-1].encode == (100,)


@given(workloads, st.floats(0, 1e5), st.floats(1, 4))
@settings(max_examples=30)
def test_larger_caches_never_ask_for_more(trace: list[TraceRequest], slots: float, times: float) -> None:
    small, large = (demand_of(trace, Caches(slots * scale, 0.0)) for scale in (1.0, times))
    assert sum(sum(r.encode) for r in large.requests) <= sum(sum(r.encode) for r in small.requests)


def test_arrivals_are_stretched_to_a_rate() -> None:
    trace = workload(requests=50, requests_per_s=3.0)
    faster = at_rate(trace, 12.0)
    assert rate_of(faster) == pytest.approx(12.0)
    ratio = demand_of(faster, ROOMY).burstiness / demand_of(trace, ROOMY).burstiness
    assert ratio == pytest.approx(1.0)
    at_once = [replace(one, arrival_s=5.0) for one in trace]
    assert math.isinf(rate_of(at_once))
    assert rate_of(at_rate(at_once, 12.0)) == pytest.approx(12.0)


def test_synthetic_pictures_come_again_as_often_as_asked() -> None:
    trace = workload(requests=2000, images=2, reuse=0.4)
    new = sum(len(r.decode) for r in demand_of(trace, ROOMY).requests)
    assert new / 4000 == pytest.approx(0.6, abs=0.04)


@pytest.mark.parametrize(
    "options", [{"requests": 1}, {"images": -1}, {"slots": 0}, {"reuse": 1.0}, {"requests_per_s": 0.0}]
)
def test_a_wrong_workload_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(PlanError, match="it must be"):
        SyntheticWorkload(**options)  # type: ignore[arg-type]


# -- estimates --------------------------------------------------------------------------------------------------------
@given(workloads, st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_more_gpus_never_carry_less(trace: list[TraceRequest], encoders: int, engines: int) -> None:
    here = estimate(Split(encoders, engines), trace).capacity_per_s
    assert estimate(Split(encoders, engines + 1), trace).capacity_per_s >= here * (1 - 1e-9)
    if encoders:
        assert estimate(Split(encoders + 1, engines), trace).capacity_per_s >= here * (1 - 1e-9)


@given(workloads, st.sampled_from([Split(0, 1), Split(1, 1), Split(1, 3)]))
@settings(max_examples=40, deadline=None)
def test_times_are_finite_and_grow_with_the_rate(trace: list[TraceRequest], split: Split) -> None:
    found = estimate(split, trace)
    latencies = [found.latency(found.capacity_per_s * load) for load in (0.05, 0.5, 0.95, 3.0)]
    for latency in latencies:
        assert 0 < latency.ttft_p50_s <= latency.ttft_p95_s < math.inf
        assert 0 <= latency.tpot_p50_s <= latency.tpot_p95_s < math.inf
    for before, after in itertools.pairwise(latencies):
        assert after.ttft_p95_s >= before.ttft_p95_s * 0.99
        assert after.tpot_p50_s >= before.tpot_p50_s * 0.99


def test_a_share_of_the_gpus_time_goes_to_a_colocated_encoder() -> None:
    trace = workload(images=8)
    text, pictures = (
        estimate(Split(0, 1), workload(images=0, prompt_tokens=128 + 8 * 144)),
        estimate(Split(0, 1), trace),
    )
    rate = pictures.capacity_per_s
    use = pictures.use(rate)
    assert use.engine == pytest.approx(1.0)
    # Time adds: what the pictures take is what is missing of the rate of equal prompts without.
    assert use.encoder == pytest.approx(1 - rate / text.capacity_per_s, abs=0.05)
    assert use.encoder > 0.1


def test_decodes_pay_for_prompts_unless_they_are_chunked() -> None:
    trace = workload(prompt_tokens=4000, images=0, output_tokens=200)
    whole = estimate(Split(0, 1), trace)
    chunked = estimate(Split(0, 1), trace, EngineOptions(max_prefill_tokens_while_decoding=256))
    assert chunked.capacity_per_s <= whole.capacity_per_s
    rate = chunked.capacity_per_s * 0.5
    assert chunked.latency(rate).ttft_p50_s > whole.latency(rate).ttft_p50_s


def test_embedding_slots_can_be_what_bounds() -> None:
    trace = workload(images=4, slots=1369, output_tokens=16)
    tight, roomy = (estimate(Split(1, 1), trace, EngineOptions(encoder_cache_slots=slots)) for slots in (0, 65_536))
    assert tight.use(1.0).bottleneck == "embedding slots"
    assert roomy.use(1.0).bottleneck == "LM engine"
    assert tight.capacity_per_s < roomy.capacity_per_s


@pytest.mark.parametrize(
    ("split", "images", "slots", "output_tokens"),
    [
        (Split(0, 1), 0, 1, 128),
        (Split(0, 1), 1, 144, 128),
        (Split(0, 2), 8, 144, 64),
        (Split(1, 1), 1, 144, 128),
        (Split(1, 2), 2, 529, 64),
        (Split(2, 1), 8, 144, 128),
    ],
    ids=str,
)
@pytest.mark.parametrize("load", [0.3, 0.6])
def test_the_estimate_is_near_the_replay(
    split: Split, images: int, slots: int, output_tokens: int, load: float
) -> None:
    trace = workload(requests=600, images=images, slots=slots, output_tokens=output_tokens)
    found = estimate(split, trace)
    rate = found.capacity_per_s * load
    guess, truth = found.latency(rate), replay(split, at_rate(trace, rate), found.preprocess_cpu_s()).latency()
    assert guess.tpot_p50_s == pytest.approx(truth.tpot_p50_s, rel=0.15)
    assert guess.tpot_p95_s == pytest.approx(truth.tpot_p95_s, rel=0.25)
    assert guess.ttft_p50_s == pytest.approx(truth.ttft_p50_s, rel=0.25)
    assert guess.ttft_p95_s == pytest.approx(truth.ttft_p95_s, rel=0.40)


@pytest.mark.parametrize(
    ("split", "images", "slots", "output_tokens"),
    [(Split(0, 1), 8, 144, 64), (Split(1, 1), 8, 144, 64), (Split(1, 4), 4, 529, 2), (Split(2, 4), 4, 529, 2)],
    ids=str,
)
def test_the_capacity_is_near_what_a_flood_gets_through(
    split: Split, images: int, slots: int, output_tokens: int
) -> None:
    trace = workload(requests=max(1000, 400 * split.engines), images=images, slots=slots, output_tokens=output_tokens)
    found = estimate(split, trace)
    played = replay(split, at_rate(trace, found.capacity_per_s * 3), found.preprocess_cpu_s())
    assert played.requests_per_s == pytest.approx(found.capacity_per_s, rel=0.15)


# -- replays ----------------------------------------------------------------------------------------------------------
def test_a_gpu_is_shared_evenly_and_nothing_is_lost() -> None:
    clock, ends = Clock(), {}
    gpu = Gpu(clock)

    def job(name: str, begin_s: float, seconds: float) -> None:
        clock.after(begin_s, lambda: gpu.run(seconds, lambda: ends.update({name: clock.now_s})))

    job("long", 0.0, 10.0)
    job("short", 2.0, 3.0)
    job("late", 100.0, 1.0)
    clock.run()
    # From 2 to 8 both run at half speed; then the long one has 5 left.
    assert ends == pytest.approx({"short": 8.0, "long": 13.0, "late": 101.0})


def test_no_core_idles_while_something_waits() -> None:
    clock, ends = Clock(), []
    cores = Cores(clock, 2)
    for begin_s, seconds in ((0.0, 4.0), (0.0, 1.0), (0.5, 2.0), (0.5, 1.0), (9.0, 1.0)):
        clock.after(begin_s, lambda seconds=seconds: cores.run(seconds, lambda: ends.append(clock.now_s)))  # type: ignore[misc]
    clock.run()
    assert ends == [1.0, 3.0, 4.0, 4.0, 10.0]


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5)), min_size=1, max_size=12))
def test_all_work_ends_when_a_busy_gpu_has_spent_its_time(jobs: list[tuple[float, float]]) -> None:
    clock, ends = Clock(), []
    gpu = Gpu(clock)
    for begin_s, seconds in jobs:
        clock.after(begin_s, lambda seconds=seconds: gpu.run(seconds, lambda: ends.append(clock.now_s)))  # type: ignore[misc]
    clock.run()
    free_s = 0.0
    for begin_s, seconds in sorted(jobs):
        free_s = max(free_s, begin_s) + seconds
    assert len(ends) == len(jobs)
    assert max(ends) == pytest.approx(free_s)


def test_a_lone_request_takes_its_stages_one_after_the_other() -> None:
    trace = [replace(one, arrival_s=60.0 * i) for i, one in enumerate(workload(requests=4, images=1, output_tokens=11))]
    times = measured_times()
    pass_s = times.pass_s(times.load_of(144), 1)
    for split, hops_s in ((Split(0, 1), 0.0), (Split(1, 1), times.call_s + times.rows_transfer_s(144))):
        latency = replay(split, trace).latency()
        least_s = (
            times.receive_s + times.request_cpu_s() + times.picture_cpu_s(144 * 784e-6) + 2 * times.call_s
            + times.patches_transfer_s(144) + hops_s + times.step_s(272, 0, 0)
        )  # fmt: skip
        # The text before the picture is prefilled beside the encode: shared or not, that is all there is to wait for.
        assert least_s + pass_s <= latency.ttft_p50_s <= least_s + pass_s + 2 * times.step_s(1, 0, 0)
        assert latency.tpot_p50_s == pytest.approx(times.step_s(1, 280, 0), rel=0.01)


def test_a_repeat_is_not_encoded_again() -> None:
    one = workload(requests=2)[0]
    trace = [replace(one, arrival_s=10.0 * i, text_tokens=100 + i) for i in range(5)]
    for split in (Split(0, 1), Split(1, 1), Split(2, 2)):
        played = replay(split, trace)
        assert (played.finished, played.encoded_items) == (5, 1)


def test_equal_pictures_at_once_are_encoded_once_in_an_encoder() -> None:
    one = workload(requests=2)[0]
    played = replay(Split(1, 4), [replace(one, arrival_s=0.0, text_tokens=100 + i) for i in range(40)])
    assert (played.finished, played.encoded_items) == (40, 1)


def test_a_prompt_over_the_limit_is_refused_not_lost() -> None:
    trace = [*workload(requests=3), TraceRequest(arrival_s=9.0, text_tokens=40_000, output_tokens=1)]
    played = replay(Split(0, 1), trace)
    assert (played.finished, played.refused) == (3, 1)


@given(workloads, st.sampled_from([Split(0, 2), Split(1, 1), Split(2, 2)]))
@settings(max_examples=8, deadline=None)
def test_every_request_ends(trace: list[TraceRequest], split: Split) -> None:
    played = replay(split, trace)
    assert played.finished == played.requests == 40
    assert played.engine_busy_s <= played.duration_s * split.engines * (1 + 1e-6)
    assert played.engine_busy_s + played.encoder_busy_s <= played.duration_s * split.gpus * (1 + 1e-6)


def test_the_replay_takes_as_long_as_the_measured_engine() -> None:
    """tests/bench/results/engine_h200.json, part engine: 32 prompts of 1,518 tokens, 64 out, in 1.512 s; one, 16 out,
    in 0.113 s. These runs are not among the figures that the rates were made of."""
    for count, output_tokens, seconds in ((32, 64, 1.512), (1, 16, 0.113)):
        one = TraceRequest(arrival_s=0.0, text_tokens=1518, output_tokens=output_tokens)
        played = replay(Split(0, 1), [one] * count)
        times = measured_times()
        began_s = times.receive_s + times.request_cpu_s() + 1.5 * times.call_s
        assert played.duration_s - began_s == pytest.approx(seconds, rel=0.1)


# -- choice -----------------------------------------------------------------------------------------------------------
def test_text_alone_needs_no_encoders() -> None:
    targets = Targets(ttft_s=1.0, tpot_s=0.02)
    trace = workload(images=0, requests_per_s=200.0)
    found = choose(candidates(8, trace, targets), targets)
    assert found.recommended is not None
    assert found.recommended.split.colocated
    assert all(together.good_rate_per_s > apart.good_rate_per_s for together, apart in found.rivals)


def test_more_pictures_want_more_encoders() -> None:
    def encoders(images: int, slots: int) -> int:
        trace = workload(images=images, slots=slots, output_tokens=8, prompt_tokens=32, reuse=0.0)
        options = EngineOptions(encoder_cache_slots=200_000)
        made = [
            make_candidate(estimate(split, trace, options), 1.0, Targets()) for split in splits_of(8) if split.encoders
        ]
        return best_of(made).split.encoders

    found = [encoders(1, 64), encoders(2, 529), encoders(4, 1369)]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_fewest_gpus_that_meet_the_targets_are_taken() -> None:
    targets = Targets(ttft_s=0.5, tpot_s=0.02)
    chosen = []
    for rate in (5.0, 30.0, 80.0):
        found = choose(candidates(8, at_rate(workload(images=8), rate), targets), targets)
        assert found.recommended is not None
        chosen.append(found.recommended.split.gpus)
        for other in found.candidates:
            if other.split.gpus < found.recommended.split.gpus:
                assert other.shortfall(targets) > 1
    assert chosen == sorted(chosen)
    assert chosen[0] == 1
    assert chosen[-1] > 2


def test_the_nearest_is_named_if_none_does() -> None:
    targets = Targets(ttft_s=0.5, tpot_s=0.001)
    found = choose(candidates(3, at_rate(workload(), 5.0), targets), targets)
    assert found.recommended is None
    assert found.nearest.shortfall(targets) == min(c.shortfall(targets) for c in found.candidates)
    (miss,) = targets.misses(found.nearest.latency, found.nearest.total_use)
    assert miss.startswith("TPOT p95")
    assert "(target 1)" in miss


def slow(factor: float) -> Callable[[Candidate], Played]:
    """A replay in which everything takes so much longer than was estimated."""

    def play(candidate: Candidate) -> Played:
        latency = candidate.estimated
        return Played(
            requests=20, finished=20, duration_s=1.0,
            ttft_s=[latency.ttft_p95_s * factor] * 20, tpot_s=[latency.tpot_p95_s * factor] * 20,
        )  # fmt: skip

    return play


def test_a_replay_overrules_the_estimate() -> None:
    trace = at_rate(workload(images=8), 10.0)
    plain = Targets()
    one = next(c for c in candidates(1, trace, plain))
    # The estimate just holds for one GPU; the replay says twice as long.
    targets = Targets(ttft_s=one.estimated.ttft_p95_s * 1.01)
    by_estimate = choose(candidates(4, trace, targets), targets)
    assert by_estimate.recommended is not None
    assert by_estimate.recommended.split.gpus == 1
    by_replay = choose(candidates(4, trace, targets), targets, slow(2.0), max_replays=50)
    assert by_replay.recommended is not None
    assert by_replay.recommended.split.gpus > 1
    assert by_replay.recommended.played is not None
    none = choose(candidates(4, trace, targets), targets, slow(100.0), max_replays=50)
    assert none.recommended is None
    played = choose(candidates(4, trace, targets), targets, slow(1.0), max_replays=1)
    assert sum(c.played is not None for c in played.candidates) == 1


def test_close_rates_leave_the_simpler_split_first() -> None:
    made = candidates(4, workload(), Targets())
    for candidate in made:
        candidate.good_rate_per_s = 10.0 + 0.01 * candidate.split.encoders
    assert next(c for c in in_order(made) if c.split.gpus == 4).split == Split(0, 4)
    made[-1].good_rate_per_s = 20.0
    assert next(c for c in in_order(made) if c.split.gpus == 4) is made[-1]


@pytest.mark.parametrize("targets", [{"ttft_s": 0.0}, {"tpot_s": -1.0}, {"max_use": 0.0}, {"max_use": 1.5}])
def test_wrong_targets_are_refused(targets: dict[str, float]) -> None:
    with pytest.raises(PlanError, match="it must be above 0"):
        Targets(**targets)


def test_the_good_rate_meets_the_targets_and_no_more() -> None:
    found: Estimate = estimate(Split(0, 1), workload(images=8))
    targets = Targets(tpot_s=0.015)
    good = found.good_rate_per_s(lambda latency: targets.shortfall(latency) <= 1, 0.9)
    assert 0 < good < found.capacity_per_s
    assert targets.shortfall(found.latency(good * 0.999)) <= 1
    assert targets.shortfall(found.latency(good * 1.01)) > 1
