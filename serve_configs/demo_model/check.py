"""Proves on a CPU that the recipe computes what transformers computes.

    python check.py FOLDER

Compares, on fresh conversations: token ids with the chat template, patches with HF's image processor, positions with
`get_rope_index`, and the training forward's logits with the HF model's. FOLDER needs the tokenizer's files; weights
are drawn at random. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np
import torch
from dialogues import Dialogue
from mixture import make_for_training
from net import Net
from packing import Encoded, Encoder, Packer, Room
from preprocess import patches
from shape import config, write_processor
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


def full_ids(tokenizer, talk: Dialogue, grids: list[tuple[int, int]]) -> list[int]:
    """The whole conversation through the chat template, with the picture token repeated as the processor does."""
    messages = [*talk.messages(), {"role": "assistant", "content": talk.turns[-1].answer}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    order = [p for turn in talk.turns for p in turn.parts if isinstance(p, int)]
    pieces = text.split("<|image_pad|>")
    for index, piece in zip(order, pieces[1:], strict=True):
        rows, columns = grids[index]
        pieces[0] += "<|image_pad|>" * (rows * columns // 4) + piece
    return tokenizer(pieces[0].removesuffix("\n"))["input_ids"]


def compare(
    model, net: Net, tokenizer, processor, talks: list[Dialogue], encoded: list[Encoded], room: Room
) -> list[str]:
    """What differs, in words."""
    wrong = []
    packer = Packer(room, model.config.image_token_id)
    for talk in encoded:
        if not packer.add(talk):
            raise ValueError("the check's batch is too small")
    batch = packer.batch()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        mine = net(weights, batch, torch.float32, room.longest)
    at = 0
    for talk, seen in zip(talks, encoded, strict=True):
        grids = [g for _, g in seen.pictures]
        if full_ids(tokenizer, talk, grids) != seen.ids.tolist():
            wrong.append(f"ids of {talk.kind}")
            continue
        ids = torch.from_numpy(seen.ids)[None]
        kwargs = {}
        if talk.pictures:
            theirs = processor([p.image for p in talk.pictures], return_tensors="pt")
            own = torch.cat([torch.from_numpy(patches(p.image)[0].copy()) for p in talk.pictures])
            own = ((own.float() / 255 - net.mean) / net.std).view(-1, 3, 1, 196)
            own = own.expand(-1, 3, 2, 196).reshape(len(own), -1)
            if own.shape != theirs["pixel_values"].shape or (own - theirs["pixel_values"]).abs().max() > 1e-5:
                wrong.append(f"patches of {talk.kind}")
                continue
            kinds = (ids == model.config.image_token_id).int()
            kwargs = {
                "pixel_values": theirs["pixel_values"],
                "image_grid_thw": theirs["image_grid_thw"],
                "mm_token_type_ids": kinds,
            }
            positions, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=theirs["image_grid_thw"])
            if not np.array_equal(positions[:, 0].numpy(), seen.positions):
                wrong.append(f"positions of {talk.kind}")
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **kwargs).logits[0, seen.scored]
        apart = (mine[at : at + len(seen.scored)] - logits).abs().max().item()
        at += len(seen.scored)
        if not apart < 1e-4:
            wrong.append(f"logits of {talk.kind}: {apart:.1e} apart")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the recipe's arithmetic with transformers' on a CPU.")
    parser.add_argument("folder", type=pathlib.Path, help="the folder with the tokenizer's files")
    parser.add_argument("--count", type=int, default=24, help="how many conversations to compare")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    raw = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    write_processor(args.folder, raw)
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    odd = "na\u00efve \u1e9b\u0323 \U0001f469\u200d\U0001f680 \x00\ufffd \u4f60\u597d\r\n\t <tool_call> e\u0301"
    if tokenizer.decode(tokenizer(odd)["input_ids"]) != odd:
        print("the tokenizer loses text")
        return 1
    model = Qwen2_5_VLForConditionalGeneration(config(raw)).eval()
    for name, p in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # zeros and ones would hide a missing bias or gain
            torch.nn.init.normal_(p, float("norm" in name), 0.1)
    encoder = Encoder(raw)
    talks: list[Dialogue] = []
    encoded: list[Encoded] = []
    seed = args.seed * 1000
    while len(talks) < args.count:
        talk = make_for_training(seed)
        seed += 1
        if talk.kind != "long_text" or len(talks) == 0:
            talks.append(talk)
            encoded.append(encoder(talk))
    room = Room(patches=16_384, tokens=16_384, labels=4096, pictures=200, dialogues=100, windows=2048)
    net = Net(model.config, torch.device("cpu"), compiled=False)
    processor = Qwen2VLImageProcessorPil.from_pretrained(args.folder)
    wrong = compare(model, net, tokenizer, processor, talks, encoded, room)
    count = sum(p.numel() for p in model.parameters())
    print(f"{len(talks)} conversations compared, {count:,} parameters: " + ("; ".join(wrong) or "all equal"))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
