"""Puts the stage together from a model folder. The only place here that chooses implementations."""

from __future__ import annotations

from pathlib import Path

from deployments.ports import ObjectStore
from deployments.preprocessor.config import FetchConfig, PreprocessorConfig
from deployments.preprocessor.families.base import Family
from deployments.preprocessor.families.registry import load_family
from deployments.preprocessor.fetch import MediaFetcher, Resolver, resolve
from deployments.preprocessor.isolation import ProcessWorkers
from deployments.preprocessor.local_media import LocalMedia
from deployments.preprocessor.metered_workers import MeteredWorkers
from deployments.preprocessor.preprocess import PreprocessorCore, max_item_slots
from deployments.preprocessor.processor import MediaProcessor
from deployments.preprocessor.prompt import PromptBuilder
from deployments.preprocessor.shared_index import SharedIndex
from deployments.preprocessor.sources import MediaSources
from deployments.preprocessor.url_guard import FetchRules
from deployments.preprocessor.workers import DecodeWorkers, ThreadWorkers
from deployments.work_meter import WorkMeter


def build_preprocessor(
    config: PreprocessorConfig,
    folder: Path,
    store: ObjectStore,
    *,
    index: SharedIndex | None = None,
    meter: WorkMeter | None = None,
    resolver: Resolver = resolve,
) -> PreprocessorCore:
    """A ready core for the model in `folder`. Call it inside the event loop that will use it.

    `meter` counts the pixels that are decoded.

    Raises:
        CheckpointError: The folder's family, tokenizer or template cannot be used.
    """
    family = load_family(folder)
    processor = MediaProcessor(config, family)
    rules = fetch_rules(config.fetch)
    workers = _workers(config, processor, family)
    return PreprocessorCore(
        config,
        family=family,
        prompts=PromptBuilder.from_folder(folder, family),
        processor=processor,
        workers=workers if meter is None else MeteredWorkers(workers, meter),
        sources=MediaSources(
            rules,
            MediaFetcher(config.fetch, rules, resolver=resolver),
            config.source_cache_bytes,
            LocalMedia(config.allowed_local_media_path) if config.allowed_local_media_path else None,
        ),
        store=store,
        index=index,
    )


def worst_case_item(config: PreprocessorConfig, folder: Path) -> tuple[int, int]:
    """(slots, patches) of the largest picture or video that the preprocessor of this model lets through."""
    family = load_family(folder)
    slots = max_item_slots(config, family)
    return slots, slots * family.geometry.merge_size**2


def fetch_rules(config: FetchConfig) -> FetchRules:
    return FetchRules(
        allowed=config.allowed_media_domains,
        denied=config.denied_media_domains,
        internal=config.internal_media_hosts,
    )


def _workers(config: PreprocessorConfig, processor: MediaProcessor, family: Family) -> DecodeWorkers:
    if config.decode_isolation == "process":
        return ProcessWorkers.for_model(config, family)
    return ThreadWorkers(processor, config.decode_threads)
