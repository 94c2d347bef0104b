"""Twelve colour names and the shades that count as each; no shade is near that of another name."""

from __future__ import annotations

import random

RGB = tuple[int, int, int]

# Several anchors a name: the pure value, the CSS value where it differs, and muted ones, so that the
# model learns a region of colour space and not one point.
SHADES: dict[str, tuple[RGB, ...]] = {
    "red": ((220, 30, 30), (255, 0, 0), (205, 25, 45), (235, 55, 50)),
    "green": ((30, 170, 60), (0, 128, 0), (0, 255, 0), (60, 190, 80), (20, 140, 50)),
    "blue": ((40, 60, 210), (0, 0, 255), (30, 90, 225), (25, 40, 170)),
    "yellow": ((245, 220, 40), (255, 255, 0), (240, 210, 20), (250, 235, 80)),
    "orange": ((245, 140, 20), (255, 165, 0), (240, 120, 20), (255, 140, 40)),
    "purple": ((140, 50, 180), (128, 0, 128), (120, 40, 160), (155, 70, 200)),
    "black": ((0, 0, 0), (15, 15, 15), (28, 28, 30)),
    "white": ((255, 255, 255), (245, 245, 245), (250, 248, 244)),
    "gray": ((128, 128, 128), (150, 150, 152), (105, 107, 110), (175, 175, 175), (200, 200, 200)),
    "pink": ((250, 150, 190), (255, 192, 203), (255, 130, 180), (245, 170, 195)),
    "brown": ((130, 80, 40), (165, 42, 42), (120, 70, 35), (145, 95, 55)),
    "cyan": ((40, 205, 220), (0, 255, 255), (30, 190, 210), (80, 225, 235)),
}
NAMES: tuple[str, ...] = tuple(SHADES)


def shade(rng: random.Random, name: str, jitter: int = 9) -> RGB:
    """A shade of `name`: one of its anchors, moved a little."""
    red, green, blue = rng.choice(SHADES[name])

    def near(value: int) -> int:
        return min(255, max(0, value + rng.randint(-jitter, jitter)))

    return near(red), near(green), near(blue)


def luma(a: RGB) -> float:
    """Brightness, as JPEG and eyes weigh it."""
    return 0.3 * a[0] + 0.59 * a[1] + 0.11 * a[2]


def distance(a: RGB, b: RGB) -> float:
    """How far two shades lie apart; luma counts double, since JPEG keeps it best."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / 3 + abs(luma(a) - luma(b))


def contrasting(rng: random.Random, name: str, against: RGB) -> RGB:
    """A shade of `name` that is plain to see on `against` (the best of a few draws)."""
    best = shade(rng, name)
    for _ in range(4):
        if distance(best, against) > 90:
            break
        other = shade(rng, name)
        if distance(other, against) > distance(best, against):
            best = other
    return best


def visible_on(rng: random.Random, against: RGB, avoid: frozenset[str] = frozenset()) -> list[str]:
    """Colour names that stand out on `against`, shuffled."""
    names = [n for n in NAMES if n not in avoid and max(distance(s, against) for s in SHADES[n]) > 95]
    rng.shuffle(names)
    return names
