"""Families of questions: how the facts of one question are drawn; `data/families.toml` has the words."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import facts
from facts import FACTS

Row = dict[str, str]


@dataclass(frozen=True)
class Family:
    """One kind of question: `draw` gives the slots; `answer` and `short` hold no alternatives."""

    name: str
    draw: Callable[[Random], Row]
    answer: str
    short: str
    weight: float
    nouns: list[str] = field(default_factory=list)
    asks: list[str] = field(default_factory=list)
    clauses: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    leads: list[str] = field(default_factory=list)
    lead_asks: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)


def one_of(rows: list[Row]) -> Callable[[Random], Row]:
    return lambda random: random.choice(rows)


def rows(names: str, table: list[list[str]]) -> Callable[[Random], Row]:
    return one_of([dict(zip(names.split(), fields, strict=True)) for fields in table])


def article(word: str) -> str:
    return ("an " if word[0] in "aeio" else "a ") + word


def cycle(items: list[str], step: int, wrap: bool = True) -> Callable[[Random], Row]:
    """Rows of an item `x` and the item `y` that is `step` places after it."""
    pairs = [
        (x, items[(i + step) % len(items)]) for i, x in enumerate(items) if wrap or 0 <= i + step < len(items)
    ]
    return one_of([{"x": x, "y": y} for x, y in pairs])


def operand(random: Random) -> int:
    return random.randint(0, random.choice([10, 20, 50, 100, 199]))


def sums(random: Random) -> Row:
    a, b = operand(random), operand(random)
    return {"a": str(a), "b": str(b), "c": str(a + b)}


def successive_sums(random: Random) -> Row:
    a = random.randint(0, 199)
    return {"a": str(a), "b": str(a + 1), "c": str(2 * a + 1)}


def differences(random: Random) -> Row:
    b, a = sorted([operand(random), operand(random)])
    return {"a": str(a), "b": str(b), "c": str(a - b)}


def products(random: Random) -> Row:
    a, b = random.randint(0, 12), random.randint(0, 12)
    return {"a": str(a), "b": str(b), "c": str(a * b)}


def quotients(random: Random) -> Row:
    b, c = random.randint(1, 12), random.randint(0, 12)
    return {"a": str(b * c), "b": str(b), "c": str(c)}


def word_sums(random: Random) -> Row:
    a, b = random.randint(0, 20), random.randint(0, 20)
    while a + b > 20:
        a, b = random.randint(0, 20), random.randint(0, 20)
    return {"a": FACTS.number_words[a], "b": FACTS.number_words[b], "c": FACTS.number_words[a + b]}


def doubles(random: Random) -> Row:
    a = random.randint(1, 100)
    return {"a": str(a), "b": str(2 * a)}


def squares(random: Random) -> Row:
    a = random.randint(0, 20)
    return {"a": str(a), "b": str(a * a)}


def neighbours(random: Random) -> Row:
    a = random.randint(1, 199)
    return {"a": str(a), "next": str(a + 1), "previous": str(a - 1)}


def parities(random: Random) -> Row:
    a = random.randint(0, 199)
    return {"a": str(a), "parity": "odd" if a % 2 else "even"}


def comparisons(random: Random) -> Row:
    low, high = sorted(random.sample(range(200), 2))
    a, b = random.sample([low, high], 2)
    return {"a": str(a), "b": str(b), "low": str(low), "high": str(high)}


def times_tables(random: Random) -> Row:
    n = random.randint(2, 12)
    multiples = [str(n * i) for i in range(1, 11)]
    return {"n": str(n), "list": ", ".join(multiples[:-1]) + " and " + multiples[-1]}


def word_row(word: str) -> Row:
    return {
        "word": word,
        "spelled": "-".join(word.upper()),
        "n": str(len(word)),
        "first": word[0].upper(),
        "last": word[-1].upper(),
        "backwards": "-".join(word[::-1].upper()),
    }


COUNTRY = rows("country capital continent", FACTS.countries)
PLACED = rows("country capital continent", [row for row in FACTS.countries if row[2] != "-"])
ELEMENT = one_of(
    [{"name": name, "symbol": symbol, "n": str(i)} for i, (name, symbol) in enumerate(FACTS.elements, 1)]
)
MONTH = one_of(
    [
        {"month": month, "days": days, "nth": nth, "n": str(i)}
        for i, (month, days, nth) in enumerate(
            zip(FACTS.months, FACTS.month_days, FACTS.ordinals, strict=False), start=1
        )
    ]
)
PLANET = one_of([{"planet": p, "nth": n} for p, n in zip(FACTS.planets, FACTS.ordinals, strict=False)])
LETTER = one_of([{"letter": c, "n": str(i)} for i, c in enumerate(facts.ALPHABET, 1)])


def spelled_word(random: Random) -> Row:
    """Mostly a word of the list, else another of the tables or an invented one: letters must be looked up."""
    kind = random.random()
    if kind < 0.75:
        return word_row(random.choice(FACTS.words))
    return word_row(random.choice(facts.OTHER_WORDS) if kind < 0.9 else facts.invented(random))


OPPOSITE = rows("x y", FACTS.opposites + [[y, x] for x, y in FACTS.opposites])
MIX = rows("x y z", FACTS.colour_mixes + [[y, x, z] for x, y, z in FACTS.colour_mixes])
SHAPE = rows("shape n", [[article(shape), n] for shape, n in FACTS.shapes])
LEGS = rows("animal n", [[article(animal), n] for animal, n in FACTS.legs])
ANIMAL = rows(
    "animal young sound", [[article(animal), article(young), sound] for animal, young, sound in FACTS.animals]
)

DRAWS: dict[str, Callable[[Random], Row]] = {
    "capital": COUNTRY,
    "country": COUNTRY,
    "continent": PLACED,
    "plus": sums,
    "successive": successive_sums,
    "minus": differences,
    "times": products,
    "divided": quotients,
    "word_sum": word_sums,
    "double": doubles,
    "half": doubles,
    "square": squares,
    "next_number": neighbours,
    "previous_number": neighbours,
    "parity": parities,
    "larger": comparisons,
    "smaller": comparisons,
    "times_table": times_tables,
    "next_day": cycle(FACTS.weekdays, 1),
    "previous_day": cycle(FACTS.weekdays, -1),
    "two_days_on": cycle(FACTS.weekdays, 2),
    "next_month": cycle(FACTS.months, 1),
    "previous_month": cycle(FACTS.months, -1),
    "month_days": MONTH,
    "nth_month": MONTH,
    "month_number": MONTH,
    "symbol": ELEMENT,
    "element_of_symbol": ELEMENT,
    "atomic_number": ELEMENT,
    "element_of_number": ELEMENT,
    "planet_record": rows("record planet", FACTS.planet_records),
    "nth_planet": PLANET,
    "planet_place": PLANET,
    "next_planet": cycle(FACTS.planets, 1, wrap=False),
    "previous_planet": cycle(FACTS.planets, -1, wrap=False),
    "amount": rows("many one n", FACTS.amounts),
    "sides": SHAPE,
    "thing_colour": rows("thing colour", FACTS.thing_colours),
    "colour_mix": MIX,
    "legs": LEGS,
    "young": ANIMAL,
    "sound": ANIMAL,
    "opposite": OPPOSITE,
    "spelling": spelled_word,
    "letter_count": spelled_word,
    "first_letter": spelled_word,
    "last_letter": spelled_word,
    "backwards": spelled_word,
    "nth_letter": LETTER,
    "letter_place": LETTER,
    "next_letter": cycle(facts.ALPHABET, 1, wrap=False),
    "previous_letter": cycle(facts.ALPHABET, -1, wrap=False),
    "list": rows("what list", FACTS.lists),
}

FAMILIES = [Family(name=name, draw=DRAWS[name], **fields) for name, fields in facts.data("families").items()]
