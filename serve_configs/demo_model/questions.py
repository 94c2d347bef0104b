"""Questions about one picture, with their only right answer.

An asker takes the random generator and a picture and returns a `QA`, or None where the picture has nothing to ask
about in that way (two red circles and no other shape leave "the red one" unclear).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from draw import SHAPES
from palette import NAMES
from pictures import Item, Picture


@dataclass(frozen=True, slots=True)
class QA:
    """A question and its answer."""

    question: str
    answer: str


Asker = Callable[[random.Random, Picture], QA | None]


def say(rng: random.Random, *forms: str, **fill: str) -> str:
    """One of the `forms`, filled in; {colour} is spelt either way unless it is given."""
    fill.setdefault("colour", rng.choice(("colour", "color")))
    return rng.choice(forms).format(**fill)


def alone(items: tuple[Item, ...]) -> list[Item]:
    """The shapes whose colour and shape together occur once."""
    seen = Counter(i.name for i in items)
    return [i for i in items if seen[i.name] == 1]


def colour_of_shape(rng: random.Random, pic: Picture) -> QA | None:
    seen = Counter(i.shape for i in pic.items)
    ones = [i for i in pic.items if seen[i.shape] == 1]
    if not ones:
        return None
    item = rng.choice(ones)
    text = say(
        rng,
        "What {colour} is the {shape}?",
        "Which {colour} is the {shape}?",
        "What is the {colour} of the {shape}?",
        "What {colour} does the {shape} have?",
        "The {shape} has which {colour}?",
        "Tell me the {colour} of the {shape}.",
        "Name the {shape}'s {colour}.",
        shape=item.shape,
    )
    return QA(text, item.colour)


def shape_of_colour(rng: random.Random, pic: Picture) -> QA | None:
    seen = Counter(i.colour for i in pic.items)
    ones = [i for i in pic.items if seen[i.colour] == 1]
    if not ones:
        return None
    item = rng.choice(ones)
    text = say(
        rng,
        "What shape is {c}?",
        "Which shape is {c}?",
        "What is the {c} shape?",
        "What shape is the {c} one?",
        "What is the {c} thing?",
        "Name the {c} shape.",
        "Which shape is the {c} one?",
        c=item.colour,
    )
    return QA(text, item.shape)


def only_shape(rng: random.Random, pic: Picture) -> QA | None:
    if len(pic.items) != 1:
        return None
    item = pic.items[0]
    if rng.random() < 0.5:
        return QA(
            say(
                rng,
                "What shape is this?",
                "Which shape is shown?",
                "What shape do you see?",
                "Shape?",
                "What shape is in the picture?",
                "Name the shape.",
            ),
            item.shape,
        )
    return QA(
        say(
            rng,
            "What is shown?",
            "What is in this picture?",
            "What do you see?",
            "What is this?",
            "What object is in the image?",
        ),
        item.name,
    )


def count_all(rng: random.Random, pic: Picture) -> QA | None:
    text = say(
        rng,
        "How many shapes are there?",
        "How many shapes do you see?",
        "Count the shapes.",
        "How many shapes are in the picture?",
        "How many objects are shown?",
        "What is the number of shapes?",
        "How many shapes does this picture have?",
        "How many things are in the image?",
    )
    return QA(text, str(len(pic.items)))


def count_colour(rng: random.Random, pic: Picture) -> QA | None:
    if not pic.items:
        return None
    here = sorted({i.colour for i in pic.items})
    colour = rng.choice(here) if rng.random() < 0.85 else rng.choice([n for n in NAMES if n != pic.background])
    text = say(
        rng,
        "How many {c} shapes are there?",
        "How many shapes are {c}?",
        "Count the {c} shapes.",
        "How many {c} ones do you see?",
        "How many {c} objects are in the picture?",
        c=colour,
    )
    return QA(text, str(sum(i.colour == colour for i in pic.items)))


def count_shape(rng: random.Random, pic: Picture) -> QA | None:
    if not pic.items:
        return None
    here = sorted({i.shape for i in pic.items})
    shape = rng.choice(here) if rng.random() < 0.85 else rng.choice(SHAPES)
    many = {"cross": "crosses"}.get(shape, shape + "s")
    text = say(
        rng,
        "How many {s} are there?",
        "How many {s} do you see?",
        "Count the {s}.",
        "How many {s} are in the picture?",
        "What is the number of {s}?",
        "How many {s} does the image show?",
        s=many,
    )
    return QA(text, str(sum(i.shape == shape for i in pic.items)))


def where(rng: random.Random, pic: Picture) -> QA | None:
    ones = alone(pic.items)
    if not ones:
        return None
    item = rng.choice(ones)
    text = say(
        rng,
        "Where is the {n}?",
        "Where in the picture is the {n}?",
        "In which part of the picture is the {n}?",
        "What is the position of the {n}?",
        "Where can I find the {n}?",
        "Which part of the image holds the {n}?",
        n=item.name,
    )
    return QA(text, item.cell)


def at_place(rng: random.Random, pic: Picture) -> QA | None:
    cells = Counter(i.cell for i in pic.items)
    ones = [i for i in pic.items if cells[i.cell] == 1]
    if not ones:
        return None
    item = rng.choice(ones)
    text = say(
        rng,
        "Which shape is at the {p}?",
        "What is at the {p}?",
        "What is in the {p} of the picture?",
        "What do you see at the {p}?",
        p=item.cell,
    )
    return QA(text, item.name)


def pair(rng: random.Random, pic: Picture, across: bool) -> tuple[Item, Item] | None:
    """Two shapes with names of their own, plainly apart sideways (`across`) or up and down."""
    ones = alone(pic.items)
    pairs = [(a, b) for a in ones for b in ones if a is not b and (abs(a.x - b.x) if across else abs(a.y - b.y)) > 0.2]
    return rng.choice(pairs) if pairs else None


def relation(rng: random.Random, pic: Picture) -> QA | None:
    across = rng.random() < 0.5
    two = pair(rng, pic, across)
    if two is None:
        return None
    a, b = two
    if across:
        text = say(
            rng,
            "Is the {a} to the left or to the right of the {b}?",
            "Is the {a} left or right of the {b}?",
            "Left or right of the {b}: where is the {a}?",
            "Relative to the {b}, is the {a} left or right?",
            a=a.name,
            b=b.name,
        )
        return QA(text, "left" if a.x < b.x else "right")
    text = say(
        rng,
        "Is the {a} above or below the {b}?",
        "Above or below the {b}: where is the {a}?",
        "Is the {a} higher or lower than the {b}? Say above or below.",
        "Relative to the {b}, is the {a} above or below?",
        a=a.name,
        b=b.name,
    )
    return QA(text, "above" if a.y < b.y else "below")


def compare_size(rng: random.Random, pic: Picture) -> QA | None:
    ones = alone(pic.items)
    if len(pic.items) < 2 or len(ones) < 2:
        return None
    big = rng.random() < 0.5
    ranked = sorted(pic.items, key=lambda i: -i.r if big else i.r)
    clear = ranked[0].r > 1.28 * ranked[1].r if big else ranked[0].r * 1.28 < ranked[1].r
    if clear and ranked[0] in ones and rng.random() < 0.7:
        words = ("largest", "biggest") if big else ("smallest",)
        text = say(
            rng,
            "Which shape is the {w}?",
            "What is the {w} shape?",
            "Which is the {w} shape?",
            "Name the {w} shape.",
            "Which object is {w}?",
            w=rng.choice(words),
        )
        return QA(text, ranked[0].name)
    pairs = [(a, b) for a in ones for b in ones if a.r > 1.28 * b.r]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    first, second = (a, b) if rng.random() < 0.5 else (b, a)
    w = rng.choice(("bigger", "larger")) if big else "smaller"
    text = say(
        rng,
        "Which is {w}, the {f} or the {s}?",
        "Which one is {w}: the {f} or the {s}?",
        "Is the {f} or the {s} {w}?",
        w=w,
        f=first.name,
        s=second.name,
    )
    return QA(text, (a if big else b).name)


def background(rng: random.Random, pic: Picture) -> QA | None:
    text = say(
        rng,
        "What {colour} is the background?",
        "What is the background {colour}?",
        "Which {colour} is the background?",
        "Background {colour}?",
        "What {colour} is behind everything?",
        "Name the {colour} of the background.",
    )
    return QA(text, pic.background) if pic.background else None


def solid_colour(rng: random.Random, pic: Picture) -> QA | None:
    text = say(
        rng,
        "What {colour} is this picture?",
        "{Colour}?",
        "What {colour} is it?",
        "What is this?",
        "Which {colour} is this?",
        "What {colour} is the image?",
        "What {colour} do you see?",
        "Name the {colour}.",
        "Which {colour} fills the picture?",
        "What {colour} is this?",
        "What is it?",
        "The {colour} of this picture is",
        "What {colour}?",
        Colour=rng.choice(("Colour", "Color")),
    )
    return QA(text, pic.background)


def block_colour(rng: random.Random, pic: Picture) -> QA | None:
    place, colour = rng.choice(pic.blocks)
    part = rng.choice(("corner", "part", "quarter", "block")) if " " in place else rng.choice(("half", "side", "part"))
    text = say(
        rng,
        "What {colour} is the {p} {part}?",
        "Which {colour} is at the {p}?",
        "What {colour} is {p}?",
        "What is the {colour} of the {p} {part}?",
        "{colour} at the {p}?",
        "What {colour} is the {p}?",
        p=place,
        part=part,
    )
    return QA(text, colour)


def read_number(rng: random.Random, pic: Picture) -> QA | None:
    forms = [
        "What number is shown?",
        "Which number is this?",
        "What number do you see?",
        "Read the number.",
        "What is the number?",
        "What number is in the picture?",
        "Read the digits from left to right. Answer with the digits only.",
        "Which number is printed here?",
        "What does it say?",
        "Number?",
    ]
    if len(pic.text) == 1:
        forms += [
            "Which digit is shown? One digit.",
            "What digit is this?",
            "Which digit do you see?",
            "Read the digit.",
            "Digit?",
            "What is the digit? One digit.",
        ] * 2
    return QA(say(rng, *forms), pic.text)


def read_word(rng: random.Random, pic: Picture) -> QA | None:
    text = say(
        rng,
        "What does it say?",
        "What word is shown?",
        "Read the word.",
        "Which word is printed?",
        "What is written here?",
        "What does the text say?",
        "Read the text.",
        "What text is in the picture?",
        "Which word do you see?",
        "What letters are shown?",
        "Text?",
        "Read it.",
        "What is the word?",
    )
    return QA(text, pic.text)


def ink(rng: random.Random, pic: Picture) -> QA | None:
    what = {"number": ("number", "text", "digits"), "word": ("word", "text", "letters")}[pic.topic]
    text = say(
        rng,
        "What {colour} is the {w}?",
        "Which {colour} is the {w}?",
        "In which {colour} is the {w} written?",
        "What is the {colour} of the {w}?",
        w=rng.choice(what),
    )
    return QA(text.replace("is the digits", "are the digits").replace("is the letters", "are the letters"), pic.ink)


def chart_tallest(rng: random.Random, pic: Picture) -> QA | None:
    high = rng.random() < 0.5
    pick = max if high else min
    words = ("tallest", "highest", "largest") if high else ("shortest", "lowest", "smallest")
    text = say(
        rng,
        "Which bar is the {w}?",
        "What {colour} is the {w} bar?",
        "Which {colour} is the {w} bar?",
        "Which {colour} has the {w} value?",
        "Name the {colour} of the {w} bar.",
        w=rng.choice(words),
    )
    return QA(text, pick(pic.bars, key=lambda b: b[1])[0])


def chart_value(rng: random.Random, pic: Picture) -> QA | None:
    colour, value = rng.choice(pic.bars)
    text = say(
        rng,
        "What is the value of the {c} bar?",
        "How much is {c}?",
        "What value does the {c} bar have?",
        "What number is above the {c} bar?",
        "How high is the {c} bar?",
        "Value of {c}?",
        c=colour,
    )
    return QA(text, str(value))


def chart_count(rng: random.Random, pic: Picture) -> QA | None:
    text = say(
        rng,
        "How many bars are there?",
        "How many bars does the chart have?",
        "Count the bars.",
        "How many bars do you see?",
        "What is the number of bars?",
    )
    return QA(text, str(len(pic.bars)))


def yes_no(rng: random.Random, pic: Picture) -> QA | None:
    """True and false statements in equal parts; the false ones are near misses."""
    true = rng.random() < 0.5
    answer = "yes" if true else "no"
    if pic.topic == "solid":
        colour = pic.background if true else rng.choice([n for n in NAMES if n != pic.background])
        return QA(say(rng, "Is this {c}?", "Is the picture {c}?", "Is it {c}?", "Is this image {c}?", c=colour), answer)
    if pic.topic != "shapes" or not pic.items:
        return None
    names = {i.name for i in pic.items}
    item = rng.choice(pic.items)
    roll = rng.random()
    if roll < 0.5:
        if true:
            name = item.name
        else:
            near = [f"{c} {s}" for c in {i.colour for i in pic.items} for s in SHAPES]
            near += [f"{c} {s}" for c in NAMES if c != pic.background for s in {i.shape for i in pic.items}]
            name = rng.choice(sorted(set(near) - names))
        return QA(
            say(
                rng,
                "Is there a {n}?",
                "Do you see a {n}?",
                "Is a {n} in the picture?",
                "Does the picture show a {n}?",
                "Can you see a {n}?",
                n=name,
            ),
            answer,
        )
    if roll < 0.7:
        shapes = {i.shape for i in pic.items}
        absent = [s for s in SHAPES if s not in shapes]
        if not true and not absent:
            return None
        shape = item.shape if true else rng.choice(absent)
        return QA(say(rng, "Is there a {s}?", "Do you see a {s}?", "Does the picture show a {s}?", s=shape), answer)
    two = pair(rng, pic, roll < 0.85)
    if two is None:
        return None
    a, b = two
    if roll < 0.85:
        word = "left" if (a.x < b.x) == true else "right"
        return QA(
            say(rng, "Is the {a} to the {w} of the {b}?", "Is the {a} {w} of the {b}?", a=a.name, b=b.name, w=word),
            answer,
        )
    word = "above" if (a.y < b.y) == true else "below"
    return QA(
        say(rng, "Is the {a} {w} the {b}?", "Is the {a} somewhere {w} the {b}?", a=a.name, b=b.name, w=word), answer
    )


def listing(parts: list[str]) -> str:
    """a; a and b; a, b, and c."""
    if len(parts) < 3:
        return " and ".join(parts)
    return ", ".join(parts[:-1]) + ", and " + parts[-1]


def article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def reading_order(items: tuple[Item, ...]) -> list[Item]:
    """Row by row, left to right."""
    return sorted(items, key=lambda i: (min(2, int(i.y * 3)), i.x))


def sentence(pic: Picture) -> str:
    """The one description a picture has."""
    if pic.topic == "solid":
        return f"The picture is plain {pic.background}."
    if pic.topic in ("number", "word"):
        return f"The picture shows the {pic.topic} {pic.text} in {pic.ink} on {article(pic.background)} background."
    if pic.topic == "chart":
        bars = listing([f"{c} is {v}" for c, v in pic.bars])
        return f"The picture is a bar chart with {len(pic.bars)} bars: {bars}."
    if pic.topic == "blocks":
        return "The picture is divided into blocks: " + listing([f"{p} is {c}" for p, c in pic.blocks]) + "."
    parts = [f"{article(i.name)} at the {i.cell}" for i in reading_order(pic.items)]
    many = "1 shape" if len(parts) == 1 else f"{len(parts)} shapes"
    return f"The picture shows {many} on {article(pic.background)} background: {listing(parts)}."


def describe(rng: random.Random, pic: Picture) -> QA | None:
    text = say(
        rng,
        "Describe the picture.",
        "Describe this image.",
        "Describe it.",
        "Please describe the picture.",
        "Describe the image in one sentence.",
        "What does the picture show? Describe it.",
        "Describe it at length.",
        "Give a description of the picture.",
        "Describe what you see.",
        "What is in this image? Describe it in detail.",
    )
    return QA(text, sentence(pic)) if len(pic.items) <= 4 else None


ASKERS: dict[str, tuple[Asker, ...]] = {
    "shapes": (
        colour_of_shape,
        shape_of_colour,
        only_shape,
        count_all,
        count_colour,
        count_shape,
        where,
        at_place,
        relation,
        compare_size,
        background,
        yes_no,
        describe,
    ),
    "solid": (solid_colour, solid_colour, yes_no, describe, background, count_all),
    "blocks": (block_colour, block_colour, block_colour, describe),
    "number": (read_number, read_number, read_number, ink, background, describe),
    "word": (read_word, read_word, read_word, ink, background, describe),
    "chart": (chart_tallest, chart_value, chart_value, chart_count, background, describe),
}


def ask_any(rng: random.Random, pic: Picture, short: bool = False) -> QA:
    """Some question that fits the picture; `short` leaves descriptions out."""
    while True:
        asker = rng.choice(ASKERS[pic.topic])
        if short and asker is describe:
            continue
        qa = asker(rng, pic)
        if qa is not None:
            return qa
