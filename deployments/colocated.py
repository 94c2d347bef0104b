"""One replica that is both LM engine and vision encoder, for a single GPU or few pictures.

The same core classes behind the same port as in deployments of their own; embeddings stay in the process, and on the
device where there is one, instead of crossing the object store.
"""

from __future__ import annotations

from collections.abc import Iterator

from ray.serve.handle import DeploymentHandle

from deployments.handles import LocalObjectStore, PreprocessorHandle
from deployments.lm_engine.deployment import EngineOptions, LMEngine
from deployments.messages import EncodedItem, EncodeRequest
from deployments.metrics import Sample
from deployments.vision_encoder.deployment import EncoderOptions, EncoderParts, encode_recorded


class ColocatedLMEngine(LMEngine):
    def __init__(self, options: EngineOptions, encoder: EncoderOptions, preprocessor: DeploymentHandle) -> None:
        store = LocalObjectStore()
        self._parts = EncoderParts(
            encoder,
            store,
            PreprocessorHandle(preprocessor),
            keep_on_device=True,
            is_decoding=lambda: self._engine.is_decoding,
        )
        self._setup(options, self, store)

    async def encode(self, request: EncodeRequest) -> tuple[EncodedItem, ...]:
        """ports.VisionEncoder, for the engine of this replica."""
        return await encode_recorded(self._parts.service, request, self._telemetry)

    def _samples(self) -> Iterator[Sample]:
        yield from super()._samples()
        yield from self._parts.samples()
