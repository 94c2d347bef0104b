"""Whole conversations: the unit of training and of evaluation.

`make(kind, seed)` gives the conversation of a kind and seed, always the same. In evaluation each has the turns its
kind needs and the last answer is scored; in training more questions about the same picture follow.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pictures
import questions as q
from chat import small_talk
from pictures import Picture

Part = str | int  # text, or the index of a picture
Maker = Callable[[random.Random], Picture]


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user sends, in order, and the right reply."""

    parts: tuple[Part, ...]
    answer: str


@dataclass(slots=True)
class Dialogue:
    """A conversation about `pictures`; integers in the turns' parts index them."""

    kind: str
    pictures: list[Picture] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    system: str | None = None

    def messages(self) -> list[dict]:
        """The chat up to the last question, in the OpenAI shape, with {"type": "image", "index": i} for pictures."""
        out: list[dict] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            content = [
                {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "index": p} for p in turn.parts
            ]
            out.append({"role": "user", "content": content})
            out.append({"role": "assistant", "content": turn.answer})
        return out[:-1]


Filler = Callable[[random.Random, Dialogue], None]

SYSTEMS = (
    "You are a helpful assistant.",
    "Be brief.",
    "Answer briefly.",
    "You answer questions about pictures.",
    "You are a careful assistant. Answer in one word where you can.",
    "Reply in English.",
)
BRIEF = (
    "Answer in one word.",
    "One word.",
    "Answer briefly.",
    "Please be brief.",
    "Answer with one word only.",
    "Short answer.",
    "Answer only.",
)
ORDINALS = ("first", "second", "third", "fourth")


def restyle(rng: random.Random, text: str, brief: bool = True) -> str:
    """The same question as other people would type it."""
    if rng.random() < 0.12:
        text = rng.choice(("Please tell me: ", "Look at the picture. ", "Question: ", "Hi! ", "Tell me, ")) + text
    if brief and rng.random() < 0.25:
        text = f"{text} {rng.choice(BRIEF)}"
    roll = rng.random()
    if roll < 0.14:
        text = text.lower()
    elif roll < 0.16:
        text = text.upper()
    if rng.random() < 0.08:
        text = text.rstrip("?.")
    return text


def open_turn(rng: random.Random, qa: q.QA, index: int = 0) -> Turn:
    """A question with its picture before or, sometimes, after it."""
    text = restyle(rng, qa.question, len(qa.answer) < 24)
    return Turn((text, index) if rng.random() < 0.25 else (index, text), qa.answer)


def talk_turn(rng: random.Random, qa: q.QA) -> Turn:
    """A question without a new picture."""
    return Turn((restyle(rng, qa.question, len(qa.answer) < 24),), qa.answer)


def any_picture(rng: random.Random) -> Picture:
    """A picture of any topic."""
    makers: tuple[Maker, ...] = (
        pictures.shapes,
        lambda r: pictures.shapes(r, 1, 3),
        pictures.solid,
        pictures.blocks,
        pictures.number,
        pictures.word,
        pictures.chart,
    )
    return rng.choice(makers)(rng)


def single(make_picture: Maker, asker: q.Asker) -> Filler:
    """A filler for kinds with one picture and one question: draws until the asker has something to ask."""

    def fill(rng: random.Random, talk: Dialogue) -> None:
        while True:
            pic = make_picture(rng)
            qa = asker(rng, pic)
            if qa is not None:
                break
        talk.pictures.append(pic)
        talk.turns.append(open_turn(rng, qa))

    return fill


def multi_turn(rng: random.Random, talk: Dialogue) -> None:
    """Two or three questions about one picture; the later ones must look again."""
    pic = any_picture(rng)
    talk.pictures.append(pic)
    talk.turns.append(open_turn(rng, q.ask_any(rng, pic)))
    for _ in range(rng.randint(1, 2)):
        talk.turns.append(talk_turn(rng, q.ask_any(rng, pic, short=True)))


def in_picture(rng: random.Random, text: str, index: int) -> str:
    """A question about the picture of that place among several."""
    place = rng.choice(
        (f"the {ORDINALS[index]} picture", f"the {ORDINALS[index]} image", f"picture {index + 1}", f"image {index + 1}")
    )
    low = text[0].lower() + text[1:]
    return rng.choice((f"In {place}: {low}", f"In {place}, {low}", f"Look at {place}. {text}", f"About {place}: {low}"))


def earlier_picture(rng: random.Random, talk: Dialogue) -> None:
    """A question about one picture, one about another, then one about either."""
    talk.pictures = [any_picture(rng), any_picture(rng)]
    for i, pic in enumerate(talk.pictures):
        talk.turns.append(open_turn(rng, q.ask_any(rng, pic, short=True), i))
    index = int(rng.random() < 0.3)
    qa = q.ask_any(rng, talk.pictures[index], short=True)
    talk.turns.append(talk_turn(rng, q.QA(in_picture(rng, qa.question, index), qa.answer)))


def pictures_then(rng: random.Random, text: str, count: int) -> tuple[Part, ...]:
    """Several pictures and a text: before, after, or each picture with a heading."""
    roll = rng.random()
    if roll < 0.2:
        heads = rng.choice(
            (
                ("First:", "Second:", "Third:", "Fourth:"),
                ("Picture 1:", "Picture 2:", "Picture 3:", "Picture 4:"),
                ("Image 1: ", "Image 2: ", "Image 3: ", "Image 4: "),
            )
        )
        parts: list[Part] = [p for i in range(count) for p in (heads[i], i)]
        return (*parts, text)
    if roll < 0.35:
        return (text, *range(count))
    return (*range(count), text)


def two_about(rng: random.Random, talk: Dialogue) -> None:
    """A question about one of two or three pictures that names which."""
    count = 3 if rng.random() < 0.1 else 2
    talk.pictures = [any_picture(rng) for _ in range(count)]
    index = rng.randrange(count)
    qa = q.ask_any(rng, talk.pictures[index], short=True)
    text = restyle(rng, in_picture(rng, qa.question, index))
    talk.turns.append(Turn(pictures_then(rng, text, count), qa.answer))


def two_which(rng: random.Random, talk: Dialogue) -> None:
    """Which of two pictures: has the red circle, has more shapes, is blue, shows the number 5."""
    which = rng.choice(("Which picture", "Which image", "Which one", "Which of the two pictures"))
    right = rng.randrange(2)
    while True:
        sort = rng.choice(("item", "item", "more", "solid", "number", "shape"))
        if sort in ("item", "shape", "more"):
            pair = [pictures.shapes(rng, 1, 5), pictures.shapes(rng, 1, 5)]
        elif sort == "solid":
            pair = [pictures.solid(rng), pictures.solid(rng)]
        else:
            pair = [pictures.number(rng), pictures.number(rng)]
        mine, other = pair[right], pair[1 - right]
        if sort == "item":
            names = sorted({i.name for i in mine.items} - {i.name for i in other.items})
            text = f"{which} has {rng.choice(('the', 'a'))} {rng.choice(names)}?" if names else ""
        elif sort == "shape":
            names = sorted({i.shape for i in mine.items} - {i.shape for i in other.items})
            text = f"{which} has a {rng.choice(names)}?" if names else ""
        elif sort == "more":
            word = "more" if len(mine.items) > len(other.items) else "fewer"
            text = f"{which} has {word} shapes?" if len(mine.items) != len(other.items) else ""
        elif sort == "solid":
            text = f"{which} is {mine.background}?" if mine.background != other.background else ""
        else:
            text = f"{which} shows the number {mine.text}?" if mine.text != other.text else ""
        if text:
            break
    talk.pictures = pair
    text = restyle(rng, text)
    talk.turns.append(Turn(pictures_then(rng, text, 2), ORDINALS[right]))


def two_digits(rng: random.Random, talk: Dialogue) -> None:
    """Cards with a digit each: read them in order, or name one by its place."""
    count = rng.choice((2, 2, 2, 3, 4))
    talk.pictures = [pictures.number(rng, 1) for _ in range(count)]
    if rng.random() < 0.5:
        text = rng.choice(
            (
                "Read the digits from left to right. Answer with the digits only.",
                "Read the digits in order.",
                "Which digits are shown?",
                "What digits do the pictures show, in order?",
                "Read the digits from left to right.",
            )
        )
        answer = "".join(p.text for p in talk.pictures)
    else:
        index = rng.randrange(count)
        text = rng.choice(
            (
                "What is the {} digit? One digit.",
                "What is the {} digit?",
                "Which digit is in the {} picture?",
                "Read the {} digit.",
                "Which digit is the {} one?",
            )
        ).format(ORDINALS[index])
        answer = talk.pictures[index].text
    talk.turns.append(Turn(pictures_then(rng, restyle(rng, text, False), count), answer))


def long_text(rng: random.Random, talk: Dialogue) -> None:
    """Much text that says nothing, and a picture after (or before) it."""
    pic = rng.choice((pictures.number, pictures.solid, pictures.shapes))(rng)
    qa = q.ask_any(rng, pic, short=True)
    pool = pictures.words(False)
    phrases = [
        " ".join(rng.choice(pool).lower() for _ in range(rng.randint(2, 8))).capitalize() + ". "
        for _ in range(rng.randint(1, 4))
    ]
    if rng.random() < 0.3:
        phrases = [
            rng.choice(
                (
                    "The quick brown fox. ",
                    "This is a sentence about nothing in particular. ",
                    "Lorem ipsum dolor sit amet. ",
                    "The quick brown fox jumps over the lazy dog. ",
                )
            )
        ]
    filler = ""
    target = 60 * 180 ** rng.random()  # 60 to 10,800 characters
    while len(filler) < target:
        filler += rng.choice(phrases)
    text = restyle(rng, qa.question)
    talk.pictures.append(pic)
    talk.turns.append(Turn((filler, 0, text) if rng.random() < 0.7 else (0, filler, text), qa.answer))


def chat(rng: random.Random, talk: Dialogue) -> None:
    """Text alone."""
    for _ in range(rng.randint(1, 2)):
        question, answer = small_talk(rng)
        talk.turns.append(Turn((question,), answer))


def same_colour(rng: random.Random, talk: Dialogue) -> None:
    """Whether two plain pictures have one colour."""
    first = pictures.solid(rng)
    second = pictures.solid(rng)
    same = rng.random() < 0.5
    while (first.background == second.background) != same:
        second = pictures.solid(rng)
    talk.pictures = [first, second]
    text = q.say(
        rng,
        "Are both pictures the same {colour}?",
        "Do the two pictures have the same {colour}?",
        "Are the two images the same {colour}?",
        "Same {colour}?",
    )
    talk.turns.append(Turn(pictures_then(rng, restyle(rng, text), 2), "yes" if same else "no"))


def counting_scene(rng: random.Random) -> Picture:
    return pictures.shapes(rng, 1, 7, few_sorts=rng.random() < 0.7)


def pair_scene(rng: random.Random) -> Picture:
    return pictures.shapes(rng, 2, 4)


def size_scene(rng: random.Random) -> Picture:
    return pictures.shapes(rng, 2, 5, sizes=True)


def yes_no_picture(rng: random.Random) -> Picture:
    return pictures.shapes(rng, 1, 4) if rng.random() < 0.85 else pictures.solid(rng)


def described(rng: random.Random) -> Picture:
    if rng.random() < 0.6:
        return pictures.shapes(rng, 1, 4)
    return rng.choice((pictures.solid, pictures.number, pictures.word, pictures.chart, pictures.blocks))(rng)


def printed(rng: random.Random) -> Picture:
    """A printed number or word."""
    return pictures.number(rng) if rng.random() < 0.5 else pictures.word(rng)


# Every kind of question, and how to fill a conversation with it.
KINDS: dict[str, Filler] = {
    "solid_colour": single(pictures.solid, q.solid_colour),
    "colour_of_shape": single(pictures.shapes, q.colour_of_shape),
    "shape_of_colour": single(pictures.shapes, q.shape_of_colour),
    "single_shape": single(lambda r: pictures.shapes(r, 1, 1), q.only_shape),
    "count_all": single(counting_scene, q.count_all),
    "count_by_colour": single(counting_scene, q.count_colour),
    "count_by_shape": single(counting_scene, q.count_shape),
    "position": single(pictures.shapes, q.where),
    "at_position": single(pictures.shapes, q.at_place),
    "relation": single(pair_scene, q.relation),
    "size": single(size_scene, q.compare_size),
    "background": single(pictures.shapes, q.background),
    "blocks": single(pictures.blocks, q.block_colour),
    "number": single(pictures.number, q.read_number),
    "word": single(lambda r: pictures.word(r, "seen"), q.read_word),
    "letters": single(lambda r: pictures.word(r, "letters"), q.read_word),
    "unseen_word": single(lambda r: pictures.word(r, "unseen"), q.read_word),
    "ink": single(printed, q.ink),
    "chart_extreme": single(pictures.chart, q.chart_tallest),
    "chart_value": single(pictures.chart, q.chart_value),
    "chart_bars": single(pictures.chart, q.chart_count),
    "yes_no": single(yes_no_picture, q.yes_no),
    "describe": single(described, q.describe),
    "multi_turn": multi_turn,
    "earlier_picture": earlier_picture,
    "two_about": two_about,
    "two_which": two_which,
    "two_digits": two_digits,
    "same_colour": same_colour,
    "long_text": long_text,
    "chat": chat,
}


def make(kind: str, seed: int) -> Dialogue:
    """The conversation of this kind and seed, as evaluated."""
    rng = random.Random(f"{kind}/{seed}")
    talk = Dialogue(kind)
    KINDS[kind](rng, talk)
    if rng.random() < 0.15:
        talk.system = rng.choice(SYSTEMS)
    return talk
