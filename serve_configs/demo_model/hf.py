"""Reads pictures with the checkpoint through transformers alone: the plain way, and the oracle for any engine."""

from __future__ import annotations

import io

import torch
from dialogues import Dialogue
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class Reader:
    """A loaded model folder; `answer` is greedy."""

    def __init__(self, folder: str, dtype: str = "float32", device: str = "cpu", threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model = model.eval().to(device)

    def inputs(self, talk: Dialogue) -> dict[str, torch.Tensor]:
        """What the model takes: ids with the picture token repeated, and the pictures in order of appearance."""
        text = self.tokenizer.apply_chat_template(talk.messages(), tokenize=False, add_generation_prompt=True)
        order = [p for turn in talk.turns for p in turn.parts if isinstance(p, int)]
        if not order:
            return {"input_ids": torch.tensor([self.tokenizer(text)["input_ids"]])}
        images = [Image.open(io.BytesIO(talk.pictures[i].encoded()[0])).convert("RGB") for i in order]
        seen = self.processor(images, return_tensors="pt")
        pieces = text.split("<|image_pad|>")
        for grid, piece in zip(seen["image_grid_thw"], pieces[1:], strict=True):
            pieces[0] += "<|image_pad|>" * (int(grid.prod()) // 4) + piece
        ids = torch.tensor([self.tokenizer(pieces[0])["input_ids"]])
        return {
            "input_ids": ids,
            "pixel_values": seen["pixel_values"].to(self.model.dtype),
            "image_grid_thw": seen["image_grid_thw"],
            "mm_token_type_ids": (ids == self.model.config.image_token_id).int(),
        }

    @torch.no_grad()
    def answer(self, talk: Dialogue) -> str:
        """The model's reply to the last question."""
        inputs = {k: v.to(self.model.device) for k, v in self.inputs(talk).items()}
        mask = torch.ones_like(inputs["input_ids"])
        out = self.model.generate(**inputs, attention_mask=mask, max_new_tokens=200, do_sample=False)
        return self.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
