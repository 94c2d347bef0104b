"""Packs conversations into batches of one fixed shape.

Many conversations lie end to end in one row of text and their pictures end to end in one row of patches; segment
borders (`*_borders`) keep attention apart. All arrays of a batch have the same shape every time, so that compiled
code is compiled once. What the packer cannot fill is padding, in segments of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from dialogues import Dialogue
from mixture import make_for_training
from preprocess import patches
from shape import MERGE, PATCH, WINDOW
from tokenizers import Tokenizer

SPAN = WINDOW // PATCH // MERGE  # a window's side in merged slots
FULL_LIMIT = 1024  # the most patches of a picture (448 x 448)


@dataclass(frozen=True, slots=True)
class Room:
    """How much a batch holds."""

    patches: int = 32_768
    tokens: int = 21_504
    labels: int = 3072
    pictures: int = 320
    dialogues: int = 256
    windows: int = 1792
    longest: int = 4096  # tokens in one conversation


@dataclass(frozen=True, slots=True)
class Encoded:
    """One conversation as numbers."""

    ids: np.ndarray  # [T]
    positions: np.ndarray  # [3, T]
    scored: np.ndarray  # indices t whose token t+1 the model must predict
    weights: np.ndarray  # how much each scored token counts
    pictures: list[tuple[np.ndarray, tuple[int, int]]]


@functools.cache
def window_order(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Merged slots of a picture in window order, and the number of slots in each window."""
    index = np.arange(rows * columns).reshape(rows, columns)
    windows = [index[r : r + SPAN, c : c + SPAN].ravel() for r in range(0, rows, SPAN) for c in range(0, columns, SPAN)]
    return np.concatenate(windows), np.array([len(w) for w in windows])


@functools.cache
def patch_places(rows: int, columns: int) -> np.ndarray:
    """(row, column) of each patch, in merge-block order."""
    r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    blocks = (rows // MERGE, MERGE, columns // MERGE, MERGE)
    return np.stack([a.reshape(blocks).transpose(0, 2, 1, 3).ravel() for a in (r, c)], axis=1)


class Encoder:
    """Turns conversations into tokens, M-RoPE positions and targets, as the chat template and HF would."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.pad_id = tokenizer.token_to_id("<|image_pad|>")

    def text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def __call__(self, talk: Dialogue) -> Encoded:
        seen = [patches(p.image) for p in talk.pictures]
        ids: list[int] = []
        columns: list[np.ndarray] = []
        scored: list[int] = []
        weights: list[float] = []
        next_position = 0

        def add(tokens: list[int]) -> None:
            nonlocal next_position
            ids.extend(tokens)
            columns.append(np.tile(np.arange(next_position, next_position + len(tokens)), (3, 1)))
            next_position += len(tokens)

        def add_picture(index: int) -> None:
            nonlocal next_position
            rows, cols = (side // MERGE for side in seen[index][1])
            ids.extend([self.pad_id] * (rows * cols))
            place = np.stack(
                [np.zeros(rows * cols, np.int64), np.repeat(np.arange(rows), cols), np.tile(np.arange(cols), rows)]
            )
            columns.append(place + next_position)
            next_position += max(rows, cols)

        prompt = "" if talk.system is None else f"<|im_start|>system\n{talk.system}<|im_end|>\n"
        for turn in talk.turns:
            prompt += "<|im_start|>user\n"
            for part in turn.parts:
                if isinstance(part, str):
                    prompt += part
                else:
                    add(self.text(prompt + "<|vision_start|>"))
                    add_picture(part)
                    prompt = "<|vision_end|>"
            add(self.text(prompt + "<|im_end|>\n<|im_start|>assistant\n"))
            answer = self.text(turn.answer + "<|im_end|>")
            scored.extend(range(len(ids) - 1, len(ids) - 1 + len(answer)))
            weights.extend([len(answer) ** -0.5] * len(answer))  # long answers must not drown the short ones
            add(answer)
            prompt = "\n"
        return Encoded(np.array(ids), np.concatenate(columns, axis=1), np.array(scored), np.array(weights), seen)


class Packer:
    """Fills one batch; `add` says whether the conversation still fitted."""

    def __init__(self, room: Room, image_id: int) -> None:
        self.room, self.image_id = room, image_id
        self.talks: list[Encoded] = []
        self.used = {"patches": 0, "tokens": 0, "labels": 0, "pictures": 0, "dialogues": 0, "windows": 0}

    def add(self, talk: Encoded) -> bool:
        grids = [grid for _, grid in talk.pictures]
        need = {
            "patches": sum(r * c for r, c in grids),
            "tokens": len(talk.ids),
            "labels": len(talk.scored),
            "pictures": len(grids),
            "dialogues": 1,
            "windows": sum(len(window_order(r // MERGE, c // MERGE)[1]) for r, c in grids),
        }
        # A spare token row takes the padding patches' features; spare segments take the padding rows.
        spare = {
            "tokens": 1,
            "pictures": room_for(self.room.patches, FULL_LIMIT),
            "dialogues": 20,
            "windows": room_for(self.room.patches, (SPAN * MERGE) ** 2),
        }
        if any(self.used[k] + n > getattr(self.room, k) - spare.get(k, 0) for k, n in need.items()):
            return False
        for key, n in need.items():
            self.used[key] += n
        self.talks.append(talk)
        return True

    def batch(self) -> dict[str, torch.Tensor]:
        """The arrays of the batch. Patches and their slots are in window order."""
        room = self.room
        pixels = np.zeros((room.patches, 3 * PATCH * PATCH), np.uint8)
        places = np.zeros((room.patches, 2), np.int64)
        slots = np.full(room.patches // 4, room.tokens - 1, np.int64)
        ids, positions = np.zeros(room.tokens, np.int64), np.zeros((3, room.tokens), np.int64)
        rows, targets = np.zeros(room.labels, np.int64), np.full(room.labels, -100, np.int64)
        weights = np.zeros(room.labels, np.float32)
        full, window, text = [0], [0], [0]
        token = patch = label = 0
        for talk in self.talks:
            end = token + len(talk.ids)
            ids[token:end], positions[:, token:end] = talk.ids, talk.positions
            pads = token + np.flatnonzero(talk.ids == self.image_id)
            for data, (r, c) in talk.pictures:
                order, sizes = window_order(r // MERGE, c // MERGE)
                stop = patch + r * c
                pixels[patch:stop] = data.reshape(-1, 4, data.shape[1])[order].reshape(r * c, -1)
                places[patch:stop] = patch_places(r, c).reshape(-1, 4, 2)[order].reshape(r * c, 2)
                slots[patch // 4 : stop // 4] = pads[: len(order)][order]
                pads = pads[len(order) :]
                window.extend((patch + np.cumsum(sizes) * 4).tolist())
                full.append(stop)
                patch = stop
            n = len(talk.scored)
            rows[label : label + n] = token + talk.scored
            targets[label : label + n] = talk.ids[talk.scored + 1]
            weights[label : label + n] = talk.weights
            label += n
            token = end
            text.append(token)
        return {
            name: torch.from_numpy(a)
            for name, a in {
                "pixels": pixels,
                "places": places,
                "slots": slots,
                "ids": ids,
                "positions": positions,
                "rows": rows,
                "targets": targets,
                "weights": weights,
                "full_borders": borders(full, room.patches, FULL_LIMIT, room.pictures),
                "window_borders": borders(window, room.patches, (SPAN * MERGE) ** 2, room.windows),
                "text_borders": borders(text, room.tokens, room.longest, room.dialogues),
            }.items()
        }


def room_for(rows: int, limit: int) -> int:
    """The most segments that padding can need."""
    return -(-rows // limit) + 1


def borders(found: list[int], end: int, limit: int, count: int) -> np.ndarray:
    """Segment borders up to `end`, the padding cut into segments of at most `limit`, then empty segments."""
    while found[-1] < end:
        found.append(min(end, found[-1] + limit))
    if len(found) > count + 1:
        raise ValueError(f"{len(found)} borders do not fit in {count + 1}")
    return np.array(found + [end] * (count + 1 - len(found)), np.int32)


class Stream(torch.utils.data.IterableDataset):
    """Endless batches of the training mixture; worker w of n draws the seeds w, w + n, w + 2n, ..."""

    def __init__(self, tokenizer: str, room: Room, seed: int, stage: int) -> None:
        self.tokenizer, self.room, self.seed, self.stage = tokenizer, room, seed, stage

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        torch.set_num_threads(1)
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        encoder = Encoder(Tokenizer.from_file(self.tokenizer))
        packer = Packer(self.room, encoder.pad_id)
        seed = self.seed * 1_000_000_000 + worker
        while True:
            talk = encoder(make_for_training(seed, self.stage))
            seed += workers
            if len(talk.ids) > self.room.longest:
                continue
            if not packer.add(talk):
                yield packer.batch()
                packer = Packer(self.room, encoder.pad_id)
                packer.add(talk)
