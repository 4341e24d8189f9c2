"""Draws pictures of one to three shapes, and writes questions about them with their answers."""

from dataclasses import dataclass
from math import cos, pi, sin
from random import Random

from PIL import Image, ImageDraw

SIDE = 96
SIZES = ((96, 96), (96, 96), (96, 64), (64, 96), (96, 80), (80, 96))
"""Widths and heights of pictures, in pixels; SIDE is the longest."""

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 220),
    "yellow": (245, 215, 40),
    "orange": (245, 135, 20),
    "purple": (130, 50, 170),
    "pink": (250, 140, 190),
    "brown": (125, 75, 35),
    "black": (15, 15, 15),
    "grey": (130, 130, 130),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
NUMBERS = ("no", "one", "two", "three")
_DRAWN_LARGER = 3  # and made smaller again, for smooth edges


@dataclass(frozen=True)
class Shape:
    """One shape: its kind, its colour's name, and its middle and radius in pixels."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        """The shape with its article, as answers name it."""
        return f"{'an' if self.colour[0] in 'aeiou' else 'a'} {self.colour} {self.kind}"


def draw(shapes: list[Shape], size: tuple[int, int], background: tuple[int, int, int]) -> Image.Image:
    """The picture of this width and height in pixels, RGB."""
    picture = Image.new("RGB", (size[0] * _DRAWN_LARGER, size[1] * _DRAWN_LARGER), background)
    pen = ImageDraw.Draw(picture)
    for shape in shapes:
        x, y, r = (value * _DRAWN_LARGER for value in (shape.x, shape.y, shape.radius))
        fill = COLOURS[shape.colour]
        if shape.kind == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
        elif shape.kind == "ring":
            pen.ellipse((x - r, y - r, x + r, y + r), outline=fill, width=round(r * 0.35))
        elif shape.kind == "square":
            pen.rectangle((x - r * 0.85, y - r * 0.85, x + r * 0.85, y + r * 0.85), fill=fill)
        elif shape.kind == "cross":
            pen.rectangle((x - r, y - r * 0.3, x + r, y + r * 0.3), fill=fill)
            pen.rectangle((x - r * 0.3, y - r, x + r * 0.3, y + r), fill=fill)
        else:
            corners = 3 if shape.kind == "triangle" else 10
            lengths = [r if shape.kind == "triangle" or i % 2 == 0 else r * 0.42 for i in range(corners)]
            angles = [2 * pi * i / corners - pi / 2 for i in range(corners)]
            pen.polygon(
                [
                    (x + length * cos(a), y + length * sin(a))
                    for length, a in zip(lengths, angles, strict=True)
                ],
                fill=fill,
            )
    return picture.resize(size, Image.Resampling.BOX)


def shapes_of(random: Random, size: tuple[int, int]) -> list[Shape]:
    """One to three shapes side by side in a picture of this size, no two of one kind."""
    count = random.choice((1, 1, 1, 2, 2, 3))
    kinds = random.sample(SHAPES, count)
    width = size[0] / count
    found = []
    for place, kind in enumerate(kinds):
        radius = random.uniform(0.3, 0.46) * min(width, size[1], SIDE * 0.8)
        x = width * place + random.uniform(radius, width - radius)
        y = random.uniform(radius, size[1] - radius)
        found.append(Shape(kind, random.choice(list(COLOURS)), x, y, radius))
    return found


def background_of(random: Random) -> tuple[int, int, int]:
    """White or a light grey, from which each colour differs."""
    light = random.choice((255, random.randint(235, 255)))
    return (light, light, light)


def described(shapes: list[Shape]) -> str:
    """The sentence that names all shapes from left to right."""
    names = [shape.name for shape in shapes]
    told = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"The picture shows {told}."


WHAT = (
    "What is in this picture?",
    "What do you see?",
    "Describe this picture.",
    "Describe the image.",
    "What does the picture show?",
    "What is this?",
    "What's in the image?",
    "Tell me what you see in this image.",
    "Please describe what is shown.",
)


def question(shapes: list[Shape], random: Random) -> tuple[str, str]:
    """A question about a picture of these shapes, and its one right answer."""
    asked = random.random()
    one = random.choice(shapes)
    if asked < 0.5:
        return random.choice(WHAT), described(shapes)
    if asked < 0.65:
        wordings = ("What colour is the {}?", "Which colour does the {} have?", "What color is the {}?")
        return random.choice(wordings).format(one.kind), f"The {one.kind} is {one.colour}."
    if asked < 0.8:
        wordings = ("How many shapes are there?", "How many shapes do you see?", "Count the shapes.")
        count = NUMBERS[len(shapes)]
        verb, plural = ("is", "") if len(shapes) == 1 else ("are", "s")
        return random.choice(wordings), f"There {verb} {count} shape{plural}."
    kind = random.choice(SHAPES)
    there = any(shape.kind == kind for shape in shapes)
    wordings = ("Is there a {} in the picture?", "Do you see a {}?", "Does the picture show a {}?")
    return random.choice(wordings).format(
        kind
    ), f"{'Yes' if there else 'No'}, there is {'a' if there else 'no'} {kind}."
