"""What the stage exports, under the names of its metric families."""

from __future__ import annotations

from deployments.metrics import FAMILIES
from deployments.vision_encoder.deployment import encoder_samples
from deployments.vision_encoder.stats import EncoderStats, sum_stats


def test_every_sample_has_a_family_with_its_labels() -> None:
    stats = EncoderStats()
    stats.invocations["image", "graph"] += 1
    stats.graph_replays["image", 64] += 1
    stats.eager_fallbacks["slots"] += 1
    stats.batch_items[3] += 1
    families = {family.name: family for family in FAMILIES}
    for name, labels, _ in encoder_samples(stats):
        assert len(families[name].labels) == len(labels), name


def test_memory_and_capture_are_exported_of_all_devices_of_a_replica() -> None:
    first = EncoderStats(predicted_peak_bytes=5, measured_peak_bytes=4, graph_bytes=10, capture_seconds=2.0)
    second = EncoderStats(predicted_peak_bytes=3, measured_peak_bytes=7, graph_bytes=20, capture_seconds=1.0)
    values = {(name, labels): value for name, labels, value in encoder_samples(sum_stats([first, second]))}
    assert values["encoder_peak_bytes", ("predicted",)] == 5
    assert values["encoder_peak_bytes", ("measured",)] == 7
    assert values["encoder_graph_bytes", ()] == 30
    assert values["encoder_capture_seconds", ()] == 2.0
