"""All stages in one process, without Ray and HTTP: what a server does between a request's JSON and its tokens."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.admission import Admission, AdmissionConfig
from app.model_card import read_model_card
from app.observer import NullObserver, RequestTrace
from app.openai_convert import RequestConverter
from app.openai_schema import ChatCompletionRequest
from app.pipeline import Pipeline
from app.settings import ApiSettings
from cache_service.identity import EncoderFingerprint
from cache_service.tenants import OpenTenant
from deployments.checkpoint import weights_revision
from deployments.errors import PayloadLostError
from deployments.lm_engine.build import build_engine
from deployments.lm_engine.config import EngineConfig
from deployments.messages import Ref
from deployments.preprocessor.build import build_preprocessor, worst_case_item
from deployments.preprocessor.config import PreprocessorConfig
from deployments.vision_encoder.batcher import DynamicBatcher
from deployments.vision_encoder.build import load_core
from deployments.vision_encoder.config import EncoderConfig
from deployments.vision_encoder.data_parallel import DataParallelCore
from deployments.vision_encoder.service import EncoderService
from deployments.vision_encoder.stats import EncoderStats


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    value: Any


class HeldValues:
    """ports.ObjectStore: a ref is the value itself."""

    def put(self, value: Any) -> Ref:
        return _Held(value)

    async def get(self, ref: Ref) -> Any:
        if not isinstance(ref, _Held):
            raise PayloadLostError(f"{ref!r} is no ref of this process")
        return ref.value


class Stack:
    """Answers OpenAI chat requests. Made by `open_stack`."""

    def __init__(self, pipeline: Pipeline, settings: ApiSettings) -> None:
        ids = itertools.count()
        self._pipeline, self._model = pipeline, settings.served_model_name[0]
        self._convert = RequestConverter(settings, lambda: f"bench-{next(ids)}")

    async def answer(self, body: Mapping[str, Any]) -> Answer:
        """The answer to a chat request's body, which needs no `model`. Raises SightlineErrors."""
        request = ChatCompletionRequest.model_validate({"model": self._model, **body})
        call = self._convert.chat(request, OpenTenant())
        tokens: list[int] = []
        text: list[str] = []
        trace = RequestTrace(NullObserver(), call.engine_id)
        async with aclosing(self._pipeline.generate(call, trace)) as batches:
            async for batch in batches:
                for delta in batch:
                    tokens += delta.token_ids
                    text.append(delta.text)
        return Answer(tuple(tokens), "".join(text))


@asynccontextmanager
async def open_stack(folder: Path, engine_config: EngineConfig, encoder_config: EncoderConfig) -> AsyncIterator[Stack]:
    """The stages over a model folder, loaded as a server loads them.

    Raises:
        CheckpointError: The folder cannot be used.
        ValueError: The options do not fit the model or the device.
    """
    store, stats = HeldValues(), EncoderStats()
    preprocessor_config = PreprocessorConfig()
    slots, patches = worst_case_item(preprocessor_config, folder)
    fingerprint = EncoderFingerprint(
        model_id=str(folder),
        weights_revision=weights_revision(folder, encoder_config.load_format),
        dtype=encoder_config.dtype,
        quantization=encoder_config.quantization or "",
    )
    core = load_core(encoder_config, stats=stats)
    assert not isinstance(core, DataParallelCore)
    preprocessor = build_preprocessor(preprocessor_config, folder, store)
    batcher = DynamicBatcher(
        core.encode,
        core.limit,
        max_wait_s=encoder_config.max_wait_s,
        max_queued_items=encoder_config.max_queued_items,
        stats=stats,
        num_threads=encoder_config.num_threads,
    )
    encoder = EncoderService(
        core,
        batcher,
        store,
        fingerprint=fingerprint,
        cache_bytes=encoder_config.cache_bytes,
        stats=stats,
        preprocessor=preprocessor,
    )
    engine = build_engine(
        engine_config,
        folder,
        encoder=encoder,
        store=store,
        fingerprint=fingerprint,
        max_item_slots=slots,
        max_item_patches=patches,
    )
    engine.start()
    card = read_model_card(folder, folder.name)
    settings = ApiSettings(
        served_model_name=(card.name,),
        max_model_len=engine_config.max_model_len or card.max_model_len,
        vocab_size=card.vocab_size,
        sampling_defaults=card.sampling_defaults,
    )
    pipeline = Pipeline(
        preprocessor,
        engine,
        Admission(AdmissionConfig()),
        max_model_len=settings.max_model_len,
        request_timeout_s=settings.request_timeout_s,
    )
    try:
        yield Stack(pipeline, settings)
    finally:
        await pipeline.drain()
        await engine.close()
        await encoder.close()
        await preprocessor.close()
