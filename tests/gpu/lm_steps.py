"""Steps of the shipped model over fixed texts: all devices see the same tokens, so logits compare row by row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from cache_service.identity import EmbeddingIdentity, ItemIdentity
from deployments.fp8 import Fp8Ops
from deployments.lm_engine.build import capture_decodes, load_model
from deployments.lm_engine.config import EngineConfig
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.kernel_choice import choose_attention
from deployments.lm_engine.kv_tensors import KVTensors
from deployments.lm_engine.model import LanguageModel
from deployments.lm_engine.model_runner import DecodeReplay, ModelRunner
from deployments.lm_engine.plan import EmbedSlice, SequenceChunk, StepPlan
from deployments.messages import MediaItem

MODEL = Path(__file__).parents[2] / "serve_configs" / "demo_model"
BLOCK_SIZE = 16
BLOCKS_EACH = 16
QUESTIONS = (
    "What is in the picture?",
    "How many shapes are there? Count them, and say which one is the largest.",
    "Name the colours from left to right.",
    "Is the circle above the square?",
    "Write the word that is written in the picture, letter by letter, and nothing else.",
)


@dataclass
class Rig:
    model: LanguageModel
    runner: ModelRunner
    decodes: DecodeReplay | None


def make_rig(device: str, dtype: torch.dtype, *, fp8: Fp8Ops | None = None, **options: object) -> Rig:
    """A runner as the server builds it.

    Args:
        fp8: What `quantization="fp8"` computes with; what the device has if None.
    """
    config = EngineConfig(model=str(MODEL), device=device, max_num_seqs=8, **options)  # type: ignore[arg-type]
    model = load_model(config, MODEL, dtype, torch.device(device), fp8)
    layout = model.kv_layout(BLOCK_SIZE)
    make = choose_attention(config.attention_backend, layout, model.num_heads, torch.device(device))
    backend = make(KVTensors(layout, BLOCKS_EACH * len(QUESTIONS), device))
    decodes = capture_decodes(config, model, backend, BLOCKS_EACH * BLOCK_SIZE)
    return Rig(model, ModelRunner(model, backend, EmbedStore(), decodes), decodes)


def make_prompts() -> list[tuple[list[int], MediaItem]]:
    """Questions, each after an item of 16 placeholders."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompts = []
    for index, question in enumerate(QUESTIONS):
        before = tokenizer.encode("<|im_start|>user\n<|vision_start|>").ids
        after = tokenizer.encode(f"<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n").ids
        item = MediaItem(
            modality="image",
            identity=ItemIdentity(bytes([index]) * 32),
            grid=(1, 8, 8),
            offset=len(before),
            num_slots=16,
            num_patches=64,
        )
        prompts.append((before + [3068] * 16 + after, item))
    return prompts


def forced_logits(rig: Rig, answers: list[list[int]] | None, num_steps: int) -> tuple[torch.Tensor, list[list[int]]]:
    """float32 logits [num_steps, prompts, vocab] on the CPU, and the tokens that were fed after each prompt.

    Args:
        answers: Tokens to feed; None feeds the most likely ones.
    """
    prompts, model = make_prompts(), rig.model
    generator = torch.Generator().manual_seed(0)
    for index in range(len(prompts)):
        rows = torch.randn(16, model.embed_width, generator=generator) * 0.5
        rig.runner.put_embedding(EmbeddingIdentity(bytes([index])), rows)
    fed: list[list[int]] = [[] for _ in prompts]
    steps = []
    for step in range(num_steps):
        chunks = []
        for index, (prompt, item) in enumerate(prompts):
            text = prompt + fed[index]
            start = 0 if step == 0 else len(text) - 1
            positions = model.position_rule.positions(len(prompt), (item,)).slice(start, len(text))
            embeds = (EmbedSlice(EmbeddingIdentity(bytes([index])), item.offset, 0, 16),) if step == 0 else ()
            blocks = range(index * BLOCKS_EACH, (index + 1) * BLOCKS_EACH)
            chunks.append(SequenceChunk(str(index), start, text[start:], positions, blocks, True, embeds))
        logits = rig.runner.run(StepPlan(tuple(chunks))).cpu()
        steps.append(logits.clone())
        for index, token in enumerate(logits.argmax(-1).tolist()):
            fed[index].append(token if answers is None else answers[index][step])
    return torch.stack(steps), fed
