"""What training shows: how much of each kind of question, in each of its two stages."""

from __future__ import annotations

import random

import questions as q
from dialogues import KINDS, Dialogue, in_picture, make, talk_turn

# kind -> its share in the first stage (all skills) and in the second (more of what the first leaves weak).
# Words held out for evaluation are never trained on.
SHARES: dict[str, tuple[float, float]] = {
    "solid_colour": (2.5, 2),
    "colour_of_shape": (4, 2),
    "shape_of_colour": (4, 3),
    "single_shape": (3, 2),
    "count_all": (5, 8),
    "count_by_colour": (6, 9),
    "count_by_shape": (7, 14),
    "position": (5, 5),
    "at_position": (6, 6),
    "relation": (7, 7),
    "size": (8, 14),
    "background": (1.5, 1),
    "blocks": (3, 1.5),
    "number": (8, 8),
    "word": (6, 16),
    "letters": (12, 5),
    "unseen_word": (0, 0),
    "ink": (2, 1.5),
    "chart_extreme": (4, 3),
    "chart_value": (7, 7),
    "chart_bars": (1, 1),
    "yes_no": (8, 8),
    "describe": (7, 9),
    "multi_turn": (5, 5),
    "earlier_picture": (6, 6),
    "two_about": (6, 6),
    "two_which": (8, 8),
    "two_digits": (4, 9),
    "same_colour": (2, 2),
    "long_text": (2.5, 2),
    "chat": (3, 3),
}


def make_for_training(seed: int, stage: int = 1) -> Dialogue:
    """A conversation from a stage's mixture: any kind, with up to four more questions about its picture."""
    rng = random.Random(f"train/{seed}")
    shares = [SHARES[kind][stage - 1] for kind in KINDS]
    kind = rng.choices(list(KINDS), shares)[0]
    talk = make(kind, rng.getrandbits(48) | 1 << 48)  # evaluation seeds are small numbers: never the same
    if len(talk.pictures) == 1 and rng.random() < 0.8:
        for _ in range(rng.randint(1, 4)):
            talk.turns.append(talk_turn(rng, q.ask_any(rng, talk.pictures[0], short=rng.random() < 0.7)))
    elif len(talk.pictures) == 2 and rng.random() < 0.7:
        for _ in range(rng.randint(1, 3)):
            index = rng.randrange(2)
            qa = q.ask_any(rng, talk.pictures[index], short=True)
            talk.turns.append(talk_turn(rng, q.QA(in_picture(rng, qa.question, index), qa.answer)))
    return talk
