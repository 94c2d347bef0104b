"""The whole engine over a tiny model, with transformers' own vision tower as encoder and transformers as oracle."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from transformers import PreTrainedModel

from cache_service.identity import EmbeddingIdentity, EncoderFingerprint, ItemIdentity
from deployments.errors import SightlineError
from deployments.lm_engine.attention import SdpaBackend
from deployments.lm_engine.config import EngineConfig, ModelLimits
from deployments.lm_engine.embed_store import EmbedStore
from deployments.lm_engine.engine import EncodeBatch, Encodes, Engine
from deployments.lm_engine.grammar import GrammarCompiler
from deployments.lm_engine.kv_tensors import KVTensors
from deployments.lm_engine.model import LanguageModel, load_language_model
from deployments.lm_engine.model_runner import ModelRunner
from deployments.lm_engine.plan import EncodeStart
from deployments.lm_engine.request_stream import fold
from deployments.lm_engine.sampler import PendingSamples, Sampler, SamplingState
from deployments.lm_engine.scheduler import Scheduler
from deployments.lm_engine.tokenizer import TokenDecoder, eos_token_ids, load_tokenizer
from deployments.messages import GenerateRequest, MediaItem, Modality, SamplingParams, SequenceDelta

FINGERPRINT = EncoderFingerprint(model_id="tiny", weights_revision="1", dtype="float32")
MERGE = 2


@dataclass(frozen=True)
class Picture:
    """Random pixels: equal seeds and grids are equal pictures."""

    seed: int
    height: int = 4
    width: int = 6
    """In patches."""

    @property
    def num_slots(self) -> int:
        return self.height * self.width // MERGE**2

    def pixels(self, patch_values: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.height * self.width, patch_values, generator=generator)


@dataclass(frozen=True)
class Clip:
    """A video of Qwen3-VL, whose temporal steps are items with text between them."""

    steps: tuple[Picture, ...]


Part = str | Picture | Clip


@dataclass
class Prompt:
    """Parts of a user turn, with the ids and items they become."""

    parts: tuple[Part, ...]
    token_ids: list[int] = field(default_factory=list)
    items: tuple[MediaItem, ...] = ()

    @property
    def pictures(self) -> list[Picture]:
        return [part for part in self.parts if isinstance(part, Picture)]

    @property
    def clips(self) -> list[Clip]:
        return [part for part in self.parts if isinstance(part, Clip)]


class TinyVlm:
    """A saved checkpoint, loaded twice: by transformers whole, by us without its tower."""

    def __init__(self, folder: Path, hf: PreTrainedModel) -> None:
        self.folder, self.hf = folder, hf
        self.hf.generation_config.eos_token_id = None
        self.lm: LanguageModel = load_language_model(folder, dtype=torch.float32)
        self.tokenizer = load_tokenizer(folder)
        vision = hf.config.vision_config
        self.patch_values = 3 * vision.temporal_patch_size * vision.patch_size**2
        self._expected: dict[tuple[tuple[Part, ...], int], tuple[list[int], torch.Tensor]] = {}

    def prompt(self, *parts: Part) -> Prompt:
        ids: list[int] = []
        items: list[MediaItem] = []
        for part in parts:
            if isinstance(part, str):
                ids += self.tokenizer.encode(part).ids
            elif isinstance(part, Picture):
                self._add(part, "image", ids, items)
            else:
                for second, step in enumerate(part.steps):
                    ids += self.tokenizer.encode(f"<{second:.1f} seconds>").ids
                    self._add(step, "video", ids, items)
        return Prompt(parts, ids, tuple(items))

    def _add(self, picture: Picture, modality: Modality, ids: list[int], items: list[MediaItem]) -> None:
        ids += self.tokenizer.encode("<|vision_start|>").ids
        items.append(
            MediaItem(
                modality=modality,
                identity=ItemIdentity(blake3(f"{modality} {picture!r}".encode()).digest()),
                grid=(1, picture.height, picture.width),
                offset=len(ids),
                num_slots=picture.num_slots,
                num_patches=picture.height * picture.width,
                patches=picture,
            )
        )
        config = self.hf.config
        ids += [config.image_token_id if modality == "image" else config.video_token_id] * picture.num_slots
        ids += self.tokenizer.encode("<|vision_end|>").ids

    @torch.no_grad()
    def encode(self, picture: Picture) -> torch.Tensor:
        """Embedding rows of transformers' tower, deepstack levels side by side."""
        grid = torch.tensor([[1, picture.height, picture.width]])
        output = self.hf.model.get_image_features(picture.pixels(self.patch_values), grid)
        blocks = [torch.cat(list(output.pooler_output))]
        for level in getattr(output, "deepstack_features", None) or ():
            blocks.append(torch.cat(list(level)) if isinstance(level, (list, tuple)) else level)
        return torch.cat(blocks, dim=1)

    def expected(self, prompt: Prompt, num_tokens: int) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens and raw logits [num_tokens, vocab] of transformers' generate()."""
        key = (prompt.parts, num_tokens)
        if key not in self._expected:
            self._expected[key] = self._generate(prompt, num_tokens)
        return self._expected[key]

    def _generate(self, prompt: Prompt, num_tokens: int) -> tuple[list[int], torch.Tensor]:
        input_ids = torch.tensor([prompt.token_ids])
        inputs: dict[str, Any] = {"input_ids": input_ids}
        if prompt.pictures:
            inputs["mm_token_type_ids"] = (input_ids == self.hf.config.image_token_id).int()
            inputs["pixel_values"] = torch.cat([picture.pixels(self.patch_values) for picture in prompt.pictures])
            inputs["image_grid_thw"] = torch.tensor([[1, p.height, p.width] for p in prompt.pictures])
        if prompt.clips:
            types = inputs.setdefault("mm_token_type_ids", torch.zeros_like(input_ids, dtype=torch.int))
            inputs["mm_token_type_ids"] = types + 2 * (input_ids == self.hf.config.video_token_id).int()
            steps = [step for clip in prompt.clips for step in clip.steps]
            inputs["pixel_values_videos"] = torch.cat([step.pixels(self.patch_values) for step in steps])
            inputs["video_grid_thw"] = torch.tensor(
                [[len(clip.steps), clip.steps[0].height, clip.steps[0].width] for clip in prompt.clips]
            )
        output = self.hf.generate(  # type: ignore[operator]
            **inputs, max_new_tokens=num_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        return output.sequences[0, input_ids.shape[1] :].tolist(), torch.cat(output.logits)


class RecordingSampler(Sampler):
    """Keeps the logits that each sequence's tokens were chosen from."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.rows: dict[int, list[torch.Tensor]] = defaultdict(list)

    def draw(self, states: Sequence[SamplingState], logits: torch.Tensor) -> PendingSamples:
        for state, row in zip(states, logits, strict=True):
            self.rows[id(state)].append(row.clone())
        return super().draw(states, logits)


class DelayedEncodes:
    """Answers each encode `delay_steps` steps later, with the tower's rows, or with the error set for its identity."""

    def __init__(self, vlm: TinyVlm, delay_steps: int) -> None:
        self._vlm, self._delay = vlm, delay_steps
        self._due: deque[tuple[int, EncodeStart]] = deque()
        self._now = 0
        self.started: list[EmbeddingIdentity] = []
        self.errors: dict[ItemIdentity, SightlineError] = {}

    def handle(self, cancelled: tuple[EmbeddingIdentity, ...], batches: tuple[EncodeBatch, ...]) -> None:
        self._due = deque(entry for entry in self._due if entry[1].identity not in cancelled)
        for batch in batches:
            for start in batch.starts:
                self.started.append(start.identity)
                self._due.append((self._now + self._delay, start))

    def deliver(self, rig: Rig) -> None:
        self._now += 1
        while self._due and self._due[0][0] < self._now:
            start = self._due.popleft()[1]
            error = self.errors.get(start.item.identity)
            if error is None:
                assert isinstance(start.item.patches, Picture)
                rig.engine.put_embedding(start.identity, self._vlm.encode(start.item.patches), start.sequence_id)
            else:
                rig.take(rig.engine.fail_embedding(start, error))


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Wait for a condition, plain or asynchronous, that nothing announces."""
    async with asyncio.timeout(timeout_s):
        while True:
            answer = condition()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.002)


class Rig:
    """An engine whose steps the test drives. `options` are EngineConfig's."""

    def __init__(self, vlm: TinyVlm, *, delay_steps: int = 0, max_item_slots: int = 16, **options: Any) -> None:
        options = {"max_num_batched_tokens": 64, "block_size": 4, "num_gpu_blocks_override": 256} | options
        config = EngineConfig(model="tiny", max_queue_s=0, request_timeout_s=0, **options)
        num_blocks = config.num_kv_blocks(1, 0)
        limits = ModelLimits(
            max_model_len=2048,
            num_blocks=num_blocks,
            max_item_slots=max_item_slots,
            max_item_patches=max_item_slots * MERGE**2,
        )
        self.scheduler_config = config.resolve(limits)
        self.overlap = bool(config.async_scheduling)
        self.vlm = vlm
        self.sampler = RecordingSampler(seed=config.seed)
        self.encodes = DelayedEncodes(vlm, delay_steps)
        self.store = EmbedStore()
        kv = KVTensors(vlm.lm.kv_layout(config.block_size), num_blocks)
        self.runner = ModelRunner(vlm.lm, SdpaBackend(kv), self.store)
        self.eos_token_ids = eos_token_ids(vlm.folder, vlm.tokenizer)
        self.engine = self.make_engine(self.encodes)
        self.deltas: dict[tuple[str, int], list[SequenceDelta]] = defaultdict(list)
        self._states: dict[str, SamplingState] = {}

    def make_engine(self, encodes: Encodes) -> Engine:
        return Engine(
            make_scheduler=lambda: Scheduler(self.scheduler_config),
            runner=self.runner,
            sampler=self.sampler,
            encodes=encodes,
            decoder=TokenDecoder(self.vlm.tokenizer),
            position_rule=self.vlm.lm.position_rule,
            fingerprint=FINGERPRINT,
            eos_token_ids=self.eos_token_ids,
            overlap=self.overlap,
        )

    def grammar_compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.vlm.tokenizer.to_str(), self.vlm.lm.vocab_size, self.eos_token_ids)

    def request(self, request_id: str, prompt: Prompt, num_tokens: int = 8, **options: Any) -> GenerateRequest:
        options = {"temperature": 0.0, "ignore_eos": True} | options
        return GenerateRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt.token_ids),
            items=prompt.items,
            sampling=SamplingParams(max_tokens=num_tokens, **options),
        )

    def add(self, request_id: str, prompt: Prompt, num_tokens: int = 8, **options: Any) -> None:
        request = self.request(request_id, prompt, num_tokens, **options)
        spec = request.sampling.grammar
        grammars = (
            () if spec is None else tuple(self.grammar_compiler().compile(spec) for _ in range(request.sampling.n))
        )
        self.engine.add(request, grammars)
        self._states[request_id] = self.engine._choices[request_id].sampling

    def step(self) -> None:
        self.encodes.deliver(self)
        self.take(self.engine.step().outputs)
        self.engine.check_integrity()

    def take(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.deltas[output.request_id, output.delta.index].append(output.delta)

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def result(self, request_id: str, index: int = 0) -> SequenceDelta:
        """All deltas of one choice as one."""
        return fold(self.deltas[request_id, index])

    def logits(self, request_id: str) -> torch.Tensor:
        """[tokens, vocab] that the first choice's tokens were chosen from."""
        # With overlap there may be one more, computed in vain.
        num_tokens = len(self.result(request_id).token_ids)
        return torch.stack(self.sampler.rows[id(self._states[request_id])][:num_tokens])

    def assert_equals_generate(self, request_id: str, prompt: Prompt, num_tokens: int = 8) -> None:
        """Same greedy tokens as transformers' generate(), and logits within 1e-4."""
        tokens, logits = self.vlm.expected(prompt, num_tokens)
        result = self.result(request_id)
        assert result.error is None, result.error
        difference = (self.logits(request_id) - logits).abs().max().item()
        assert difference < 1e-4, f"{request_id}: logits differ by {difference}"
        assert list(result.token_ids) == tokens, request_id
