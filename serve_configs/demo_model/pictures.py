"""Random pictures together with what is true of them.

A `Picture` carries its facts, so that any number of questions can be asked about it. Every maker takes its random
generator as an argument: the same seed gives the same picture.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import pathlib
import random
import string
from dataclasses import dataclass

from draw import SHAPES, as_jpeg, as_png, disturb, draw_shape, text_mask
from palette import NAMES, RGB, contrasting, distance, luma, shade, visible_on
from PIL import Image, ImageDraw

CELLS = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")


@dataclass(frozen=True, slots=True)
class Item:
    """One shape; x, y and r are shares of the picture's width, height and shorter side."""

    shape: str
    colour: str
    x: float
    y: float
    r: float

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def cell(self) -> str:
        """Which ninth of the picture the centre lies in."""
        return CELLS[3 * min(2, int(self.y * 3)) + min(2, int(self.x * 3))]


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn picture and its facts; `topic` says which of the facts are filled."""

    image: Image.Image
    topic: str  # shapes | solid | blocks | number | word | chart
    jpeg: bytes | None = None  # the encoded form, when it went through JPEG
    background: str = ""
    ink: str = ""
    items: tuple[Item, ...] = ()
    text: str = ""
    bars: tuple[tuple[str, int], ...] = ()  # (colour, value), left to right
    blocks: tuple[tuple[str, str], ...] = ()  # (place, colour)

    def encoded(self) -> tuple[bytes, str]:
        """The file a client would send, and its media type."""
        if self.jpeg is not None:
            return self.jpeg, "image/jpeg"
        return as_png(self.image), "image/png"


@functools.cache
def words(held_out: bool) -> tuple[str, ...]:
    """Printable words of 3 to 6 letters, in capitals; one in eight is held out of training, chosen by its hash."""
    text = pathlib.Path(__file__).with_name("english.txt").read_text()
    plain = (w for w in text.split() if w.isascii() and w.isalpha() and w.islower())
    found = sorted({w.upper() for w in plain if 3 <= len(w) <= 6})
    return tuple(w for w in found if (hashlib.sha256(w.encode()).digest()[0] % 8 == 0) == held_out)


def size(rng: random.Random, low: int = 84, high: int = 352, stretch: float = 1.7) -> tuple[int, int]:
    """Width and height, in varied sizes and aspect ratios; a few are bigger than the model's pixel limit."""
    side = low * (high / low) ** rng.random()
    if rng.random() < 0.03:
        side = rng.uniform(448, 720)
    aspect = stretch ** rng.uniform(-1, 1)
    return max(low, round(side * aspect**0.5)), max(low, round(side / aspect**0.5))


def finish(rng: random.Random, image: Image.Image) -> tuple[Image.Image, bytes | None]:
    """Disturbs the picture and, half of the time, sends it through JPEG."""
    image = disturb(rng, image)
    if rng.random() < 0.5:
        jpeg = as_jpeg(image, rng.randint(60, 95))
        return Image.open(io.BytesIO(jpeg)).convert("RGB"), jpeg
    return image, None


def plain_or_any_background(rng: random.Random) -> tuple[str, RGB]:
    """A background colour: mostly white, else any."""
    name = "white" if rng.random() < 0.4 else rng.choice(NAMES)
    return name, shade(rng, name)


def decorate(rng: random.Random, image: Image.Image, ground: RGB) -> None:
    """Thin lines or a frame close to the ground's shade: clutter that is no shape."""
    roll = rng.random()
    if roll > 0.25:
        return
    pen = ImageDraw.Draw(image)
    sign = 1 if sum(ground) < 384 else -1
    faint: RGB = tuple(min(255, max(0, c + sign * rng.randint(15, 35))) for c in ground)  # type: ignore[assignment]
    if roll < 0.12:
        step = rng.randint(14, 40)
        for x in range(step, image.width, step):
            pen.line((x, 0, x, image.height), fill=faint)
        for y in range(step, image.height, step):
            pen.line((0, y, image.width, y), fill=faint)
    elif roll < 0.2:
        pen.rectangle((0, 0, image.width - 1, image.height - 1), outline=faint, width=rng.randint(1, 3))
    else:
        for _ in range(rng.randint(1, 3)):
            ends = [rng.randint(0, image.width), rng.randint(0, image.height)]
            pen.line((*ends, rng.randint(0, image.width), rng.randint(0, image.height)), fill=faint)


def spots(rng: random.Random, count: int, aspect: float) -> tuple[list[tuple[float, float]], float, float]:
    """Places for `count` shapes in a loose grid, and the half width and half height of its cells (as shares)."""
    grids = [(c, r) for c in (1, 2, 3) for r in (1, 2, 3) if c * r >= count and not (c * r > 3 * max(count, 1))]
    # Cells should not be much longer than wide, or all shapes become small.
    fitting = [g for g in grids if 0.4 < (aspect / g[0] * g[1]) < 2.5] or grids
    columns, rows = rng.choice(fitting)
    cells = [(c, r) for c in range(columns) for r in range(rows)]
    rng.shuffle(cells)
    return [((c + 0.5) / columns, (r + 0.5) / rows) for c, r in cells[:count]], 0.5 / columns, 0.5 / rows


def shapes(rng: random.Random, low: int = 1, high: int = 6, few_sorts: bool = False, sizes: bool = False) -> Picture:
    """Between `low` and `high` shapes; `few_sorts` repeats colours and shapes, `sizes` spreads the sizes."""
    width, height = size(rng, 112 if high > 4 else 84)
    back, ground = plain_or_any_background(rng)
    count = rng.randint(low, high)
    places, half_w, half_h = spots(rng, count, width / height)
    short = min(width, height)
    room = min(half_w * width, half_h * height) / short  # a cell's half side as a share of the shorter side
    colours = visible_on(rng, ground, frozenset({back}))
    sorts = list(SHAPES)
    rng.shuffle(sorts)
    if few_sorts:
        colours, sorts = colours[: rng.randint(1, 3)], sorts[: rng.randint(1, 3)]
    shrink = [rng.uniform(0.55, 0.92) for _ in range(count)]
    if sizes and count > 1:
        # One clearly largest and one clearly smallest.
        order = rng.sample(range(count), count)
        shrink = [rng.uniform(0.55, 0.65) for _ in range(count)]
        shrink[order[0]], shrink[order[1]] = rng.uniform(0.85, 0.95), rng.uniform(0.33, 0.4)
    items = []
    for (x, y), s in zip(places, shrink, strict=True):
        r = max(6.5 / short, room * s)
        slack_w, slack_h = max(0.0, half_w - r * short / width), max(0.0, half_h - r * short / height)
        # Centres stay well inside their ninth of the picture, so that the place has one name.
        nudge_w, nudge_h = min(slack_w, 0.06), min(slack_h, 0.06)
        items.append(
            Item(
                rng.choice(sorts),
                rng.choice(colours),
                x + rng.uniform(-nudge_w, nudge_w),
                y + rng.uniform(-nudge_h, nudge_h),
                r,
            )
        )
    zoom = 2 if rng.random() < 0.2 and width * height < 90_000 else 1  # drawn larger and reduced: smooth edges
    image = Image.new("RGB", (width * zoom, height * zoom), ground)
    decorate(rng, image, ground)
    pen = ImageDraw.Draw(image)
    dark_edge: RGB | None = (20, 20, 20) if rng.random() < 0.12 else None
    for item in items:
        fill = contrasting(rng, item.colour, ground)
        edge = dark_edge if dark_edge and distance(fill, dark_edge) > 80 else None
        draw_shape(pen, item.shape, item.x * width * zoom, item.y * height * zoom, item.r * short * zoom, fill, edge)
    if zoom > 1:
        image = image.reduce(zoom)
    image, jpeg = finish(rng, image)
    return Picture(image, "shapes", jpeg, background=back, items=tuple(items))


def solid(rng: random.Random) -> Picture:
    """One colour all over; often tiny, which the preprocessor then enlarges."""
    name = rng.choice(NAMES)
    side = rng.choice((1, 2, 4, 8, 16, 28, 32, 48, 64, 96, 128, 224))
    width, height = side, side
    if rng.random() < 0.4:
        width, height = max(1, round(side * rng.uniform(0.3, 3))), side
    if rng.random() < 0.05:
        width, height = rng.choice(((150, 1), (27, 257), (5, 400), (600, 5)))
    image = Image.new("RGB", (width, height), shade(rng, name, 5))
    if rng.random() < 0.5:
        jpeg = as_jpeg(image, rng.randint(60, 95))
        return Picture(Image.open(io.BytesIO(jpeg)).convert("RGB"), "solid", jpeg, background=name)
    return Picture(image, "solid", background=name)


def blocks(rng: random.Random) -> Picture:
    """Two or four blocks of colour side by side, filling the picture."""
    width, height = (rng.randint(32, 64), rng.randint(32, 64)) if rng.random() < 0.25 else size(rng, 56, 280)
    layout = rng.choice(("row", "column", "quarters", "quarters"))
    places = {
        "row": ("left", "right"),
        "column": ("top", "bottom"),
        "quarters": ("top left", "top right", "bottom left", "bottom right"),
    }[layout]
    colours = rng.sample(NAMES, len(places))
    image = Image.new("RGB", (width, height))
    pen = ImageDraw.Draw(image)
    for place, colour in zip(places, colours, strict=True):
        x0 = width // 2 if "right" in place else 0
        y0 = height // 2 if "bottom" in place else 0
        x1 = width // 2 if "left" in place else width
        y1 = height // 2 if "top" in place else height
        pen.rectangle((x0, y0, x1 - 1, y1 - 1), fill=shade(rng, colour))
    image, jpeg = finish(rng, image)
    return Picture(image, "blocks", jpeg, blocks=tuple(zip(places, colours, strict=True)))


def readable_ink(rng: random.Random, back: str, ground: RGB) -> tuple[str, RGB]:
    """A colour to write in that differs from the ground in brightness, not in hue alone."""
    names = visible_on(rng, ground, frozenset({back}))
    if back != "black" and rng.random() < 0.4:
        names.insert(0, "black")
    for name in (*names, "white" if back != "white" and luma(ground) < 128 else "black"):
        fill = contrasting(rng, name, ground)
        if abs(luma(fill) - luma(ground)) > 50:
            return name, fill
    return name, fill


def printed(rng: random.Random, text: str, topic: str) -> Picture:
    """`text` on a plain ground, in a random face, size and place."""
    back, ground = plain_or_any_background(rng)
    ink, fill = readable_ink(rng, back, ground)
    width, height = size(rng, 84, 300, 2.2)
    shown = text.lower() if topic == "word" and rng.random() < 0.3 else text
    faces = ("smooth", "smooth", "pixel", "segment") if topic == "number" else ("smooth", "smooth", "smooth", "pixel")
    face = rng.choice(faces)
    tall = rng.randint(16, 180) if len(text) < 3 or rng.random() < 0.3 else rng.randint(14, 56)
    tall = min(tall, round(height * 0.75))
    stroke = rng.choice((0, 0, 1, 2)) if tall > 40 else rng.choice((0, 0, 0, 1))
    mask = text_mask(shown, face, tall, stroke)
    if mask.width > width * 0.9:
        fit = width * 0.9 / mask.width
        if mask.height * fit < 13:  # too small to read: give it a wider picture instead
            width = round(mask.width / 0.88)
        else:
            mask = mask.resize((round(mask.width * fit), max(1, round(mask.height * fit))), Image.Resampling.BILINEAR)
    if mask.height > height * 0.92:
        height = round(mask.height / 0.9)
    image = Image.new("RGB", (width, height), ground)
    decorate(rng, image, ground)
    left, top = width - mask.width, height - mask.height
    where = (left // 2, top // 2) if rng.random() < 0.35 else (rng.randint(0, left), rng.randint(0, top))
    image.paste(fill, (*where, where[0] + mask.width, where[1] + mask.height), mask)
    image, jpeg = finish(rng, image)
    return Picture(image, topic, jpeg, background=back, ink=ink, text=text)


def number(rng: random.Random, digits: int | None = None) -> Picture:
    """A number of one to three digits."""
    count = digits or rng.choice((1, 1, 2, 2, 3))
    text = str(rng.randint(1, 9)) + "".join(rng.choice(string.digits) for _ in range(count - 1))
    return printed(rng, rng.choice(string.digits) if count == 1 else text, "number")


def word(rng: random.Random, source: str = "mixed") -> Picture:
    """A printed word: "seen" (training list), "unseen" (held-out list), "letters" (3 to 5 random letters)."""
    if source == "mixed":
        source = "seen" if rng.random() < 0.5 else "letters"
    if source == "letters":
        text = "".join(rng.choice(string.ascii_uppercase) for _ in range(rng.randint(3, 5)))
        while text in words(True):
            text = "".join(rng.choice(string.ascii_uppercase) for _ in range(4))
    else:
        text = rng.choice(words(source == "unseen"))
    return printed(rng, text, "word")


def chart(rng: random.Random) -> Picture:
    """Two or three bars of different colours and heights, each with its value above it."""
    width, height = size(rng, 140, 300, 1.5)
    back = rng.choice(("white", "white", "white", "gray", "black", "yellow", "cyan"))
    ground = shade(rng, back)
    count = rng.choice((2, 3))
    colours = visible_on(rng, ground, frozenset({back}))[:count]
    top = rng.choice((9, 9, 20, 99))
    while True:
        values = [rng.randint(1, top) for _ in range(count)]
        ranked = sorted(values)
        if all(b - a >= max(1, 0.12 * ranked[-1]) for a, b in itertools.pairwise(ranked)):
            break
    image = Image.new("RGB", (width, height), ground)
    pen = ImageDraw.Draw(image)
    dark = (20, 20, 20) if sum(ground) > 300 else (235, 235, 235)
    label = max(13, round(height * rng.uniform(0.08, 0.12)))
    base, ceiling = height - rng.randint(6, 14), label + rng.randint(8, 14)
    slot = (width - 12) / count
    for i, (colour, value) in enumerate(zip(colours, values, strict=True)):
        tall = max(3, round((base - ceiling) * value / ranked[-1]))
        x0, x1 = round(6 + slot * (i + 0.18)), round(6 + slot * (i + 0.82))
        pen.rectangle((x0, base - tall, x1, base), fill=contrasting(rng, colour, ground))
        mask = text_mask(str(value), "smooth", label, 0)
        at = ((x0 + x1 - mask.width) // 2, base - tall - mask.height - 4)
        image.paste(dark, (*at, at[0] + mask.width, at[1] + mask.height), mask)
    pen.line((4, base, width - 4, base), fill=dark, width=rng.randint(1, 2))
    if rng.random() < 0.5:
        pen.line((4, ceiling - label, 4, base), fill=dark)
    image, jpeg = finish(rng, image)
    return Picture(image, "chart", jpeg, background=back, bars=tuple(zip(colours, values, strict=True)))
