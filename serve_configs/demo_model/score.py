"""Quick scores while training: the share of answers whose every token is the model's first choice.

Given the right answer's beginning, greedy decoding would then produce exactly that answer, so this is exact match
without generating. `evaluate.py` scores finished models the plain way.
"""

from __future__ import annotations

import multiprocessing

import torch
from dialogues import KINDS, make
from net import Net
from packing import Encoded, Encoder, Packer, Room
from tokenizers import Tokenizer

FIRST_SEED = 500_000_000  # far from evaluate.py's seeds


class Drawer:
    """Draws held-out conversations in worker processes."""

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer = tokenizer

    def __call__(self, job: tuple[str, int]) -> Encoded:
        torch.set_num_threads(1)
        talk = make(*job)
        encoded = Encoder(Tokenizer.from_file(self.tokenizer))(talk)
        # Only the last answer counts.
        last = len(encoded.scored) - len(Tokenizer.from_file(self.tokenizer).encode(talk.turns[-1].answer).ids) - 1
        return Encoded(encoded.ids, encoded.positions, encoded.scored[last:], encoded.weights[last:], encoded.pictures)


def draw(tokenizer: str, each: int, workers: int) -> list[tuple[str, Encoded]]:
    """`each` conversations of every kind."""
    jobs = [(kind, FIRST_SEED + i) for kind in KINDS for i in range(each)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return list(zip([kind for kind, _ in jobs], pool.map(Drawer(tokenizer), jobs, chunksize=8), strict=True))


@torch.no_grad()
def score(
    net: Net, weights: dict[str, torch.Tensor], talks: list[tuple[str, Encoded]], room: Room, dtype: torch.dtype
) -> dict[str, float]:
    """Exact match by kind."""
    hits: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    rest = [t for t in talks if len(t[1].ids) < room.longest]
    while rest:
        packer, taken = Packer(room, net.config.image_token_id), 0
        while taken < len(rest) and packer.add(rest[taken][1]):
            taken += 1
        batch = {k: v.to(net.device) for k, v in packer.batch().items()}
        right = (net(weights, batch, dtype, room.longest).argmax(-1) == batch["targets"]).tolist()
        at = 0
        for kind, talk in rest[:taken]:
            hits[kind].append(all(right[at : at + len(talk.scored)]))
            at += len(talk.scored)
        rest = rest[taken:]
    return {kind: sum(h) / max(1, len(h)) for kind, h in hits.items()}
