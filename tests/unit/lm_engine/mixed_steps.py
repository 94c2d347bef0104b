"""Random steps over a few sequences: prompts in chunks, with pictures, beside decodes, as schedulers cut them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch

from cache_service.identity import EmbeddingIdentity
from deployments.lm_engine.model import LanguageModel
from deployments.lm_engine.plan import EmbedSlice, SequenceChunk, StepPlan

PICTURE_SLOTS = 6
PICTURE_AT = 3


class MixedSteps:
    """Args:
    block_size, blocks_each: Of the pool; each sequence owns the same blocks throughout.
    with_pictures: Whether odd sequences have a picture of PICTURE_SLOTS slots at PICTURE_AT.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        block_size: int,
        blocks_each: int,
        num_sequences: int = 5,
        longest: int = 40,
        with_pictures: bool = True,
        seed: int = 0,
    ) -> None:
        self._rng = random.Random(seed)
        self._model, self._block_size, self._blocks_each = model, block_size, blocks_each
        self._texts = [
            [self._rng.randrange(1, 50) for _ in range(self._rng.randrange(PICTURE_SLOTS + PICTURE_AT, longest))]
            for _ in range(num_sequences)
        ]
        self._pictures = {index for index in range(num_sequences) if index % 2 and with_pictures}
        self._starts = [0] * num_sequences

    def embeddings(self) -> dict[EmbeddingIdentity, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        return {
            _identity(index): torch.randn(PICTURE_SLOTS, self._model.embed_width, generator=generator)
            for index in self._pictures
        }

    def plans(self, num_steps: int) -> Iterator[StepPlan]:
        """Each must be run before the next one is asked for; fed tokens are random."""
        for _ in range(num_steps):
            chunks = []
            for index, text in enumerate(self._texts):
                start, left = self._starts[index], len(text) - self._starts[index]
                if self._rng.random() < 0.2:
                    continue
                num = left if self._rng.random() < 0.4 else self._rng.randint(1, left)
                chunks.append(self._chunk(index, start, num))
                self._starts[index] += num
                if num == left:
                    text.append(self._rng.randrange(1, 50))
            if chunks:
                yield StepPlan(tuple(chunks))

    def _chunk(self, index: int, start: int, num: int) -> SequenceChunk:
        stop, text = start + num, self._texts[index]
        positions = np.tile(np.arange(start, stop, dtype=np.int32), (self._model.position_rule.axes, 1))
        embeds = ()
        if index in self._pictures:
            first, last = max(start, PICTURE_AT), min(stop, PICTURE_AT + PICTURE_SLOTS)
            if first < last:
                embeds = (EmbedSlice(_identity(index), first - start, first - PICTURE_AT, last - first),)
        blocks = range(index * self._blocks_each, (index + 1) * self._blocks_each)
        return SequenceChunk(str(index), start, text[start:stop], positions, blocks, stop == len(text), embeds)


def _identity(index: int) -> EmbeddingIdentity:
    return EmbeddingIdentity(bytes([index]) * 32)
