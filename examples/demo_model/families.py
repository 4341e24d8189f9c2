"""Families of questions: what can be asked, in which words it is asked in training, and the one right answer.

`[a|b|]` in a template means one of the alternatives, `{name}` a slot of the row. A *noun* is a phrase such as
"the capital of {country}" that every shell ("What is ...?", "Tell me ...") can hold; an *ask* is a whole sentence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import facts

Row = dict[str, str]


@dataclass(frozen=True)
class Family:
    """One kind of question: `draw` gives the slots, `answer` and `short` are templates without alternatives."""

    name: str
    draw: Callable[[Random], Row]
    answer: str
    short: str = ""
    nouns: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    weight: float = 1.0


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
    return {"a": facts.NUMBER_WORDS[a], "b": facts.NUMBER_WORDS[b], "c": facts.NUMBER_WORDS[a + b]}


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


COUNTRY = rows("country capital continent", facts.COUNTRIES)
PLACED = rows("country capital continent", [row for row in facts.COUNTRIES if row[2] != "-"])
ELEMENT = one_of(
    [{"name": name, "symbol": symbol, "n": str(i)} for i, (name, symbol) in enumerate(facts.ELEMENTS, 1)]
)
MONTH = one_of(
    [
        {"month": month, "days": days, "nth": nth, "n": str(i)}
        for i, (month, days, nth) in enumerate(
            zip(facts.MONTHS, facts.MONTH_DAYS, facts.ORDINALS, strict=False), start=1
        )
    ]
)
PLANET = one_of([{"planet": p, "nth": n} for p, n in zip(facts.PLANETS, facts.ORDINALS, strict=False)])
LETTER = one_of([{"letter": c, "n": str(i)} for i, c in enumerate(facts.ALPHABET, 1)])
WORD = one_of([word_row(word) for word in facts.WORDS])
OPPOSITE = rows("x y", facts.OPPOSITES + [[y, x] for x, y in facts.OPPOSITES])
MIX = rows("x y z", facts.COLOUR_MIXES + [[y, x, z] for x, y, z in facts.COLOUR_MIXES])
SHAPE = rows("shape n", [[article(shape), n] for shape, n in facts.SHAPES])
LEGS = rows("animal n", [[article(animal), n] for animal, n in facts.LEGS])
ANIMAL = rows(
    "animal young sound", [[article(animal), article(young), sound] for animal, young, sound in facts.ANIMALS]
)

GEOGRAPHY = [
    Family(
        "capital", COUNTRY, "The capital of {country} is {capital}.", "{capital}",
        ("the capital [|city ]of {country}", "{country}'s capital[| city]", "the name of the capital of {country}"),
        ("[which|what] city is the capital of {country}?", "what is {country}'s capital[| called]?",
         "what is the capital of {country} called?", "{country}: what is [its|the] capital?",
         "which capital [belongs to|goes with|does] {country}[| have]?", "capital of {country}[?|]",
         "what city is the seat of government of {country}?", "{country} has which capital?"),
        ("and [|of |for ][|that of ]{country}?", "what about {country}?", "and the capital of {country}?", "{country}?"),
        5,
    ),
    Family(
        "country", COUNTRY, "{capital} is the capital of {country}.", "{country}",
        ("the country [whose capital is|that has the capital] {capital}", "the country of which {capital} is the capital"),
        ("{capital} is the capital of [which|what] country?", "of which country is {capital} the capital?",
         "which country has {capital} as [its|the] capital[| city]?", "what country's capital is {capital}?",
         "which country's capital [city |]is [called |]{capital}?", "[which|what] country has the capital {capital}?"),
        ("and {capital}?", "what about {capital}?"),
        4,
    ),
    Family(
        "continent", PLACED, "{country} is in {continent}.", "{continent}",
        ("the continent of {country}", "the continent that {country} [is in|lies in|belongs to]"),
        ("[which|what|on which|in which|on what] continent is {country}[| in| on]?", "where is {country}?",
         "in which part of the world is {country}?", "{country} is on which continent?",
         "what continent does {country} [belong to|lie in]?", "where [in the world |]is {country}[| located]?"),
        ("and {country}?", "what about {country}?"),
        2.5,
    ),
]  # fmt: skip

ARITHMETIC = [
    Family(
        "plus", sums, "{a} plus {b} is {c}.", "{c}",
        ("{a}[+| + | plus ]{b}", "the sum of {a} and {b}", "{a} added to {b}", "the result of {a}[+| + | plus ]{b}"),
        ("how much is {a}[+| + | plus | and ]{b}?", "add {a} [and|to] {b}.", "[calculate|compute|work out] {a}[+| + | plus ]{b}.",
         "{a}[+| + ]{b}[=| =| = ?|=?]", "what do you get [if|when] you add {a} [and|to] {b}?", "{a} plus {b} [equals|is|makes] what?",
         "what does {a}[+| + | plus ]{b} [equal|make|give]?", "if I have {a} and get {b} more, how many do I have?"),
        ("and {a}[+| + | plus ]{b}?", "what about {a}[+| + | plus ]{b}?"),
        5,
    ),
    Family(
        "successive", successive_sums, "{c}", "{c}", (), ("What is {a}+{b}? Answer with just the number.",), (), 1.5
    ),
    Family(
        "minus", differences, "{a} minus {b} is {c}.", "{c}",
        ("{a}[-| - | minus ]{b}", "the difference between {a} and {b}", "{b} subtracted from {a}", "{b} taken from {a}"),
        ("how much is {a}[-| - | minus | less ]{b}?", "subtract {b} from {a}.", "[calculate|compute|work out] {a}[-| - | minus ]{b}.",
         "{a}[-| - ]{b}[=| =| = ?|=?]", "what do you get [if|when] you take {b} [away |]from {a}?", "{a} minus {b} [equals|is|makes] what?",
         "what does {a}[-| - | minus ]{b} [equal|make|give]?", "if I have {a} and lose {b}, how many are left?"),
        ("and {a}[-| - | minus ]{b}?", "what about {a}[-| - | minus ]{b}?"),
        4,
    ),
    Family(
        "times", products, "{a} times {b} is {c}.", "{c}",
        ("{a}[*| * |x| x | times ]{b}", "the product of {a} and {b}", "{a} multiplied by {b}"),
        ("how much is {a}[*| * | x | times ]{b}?", "multiply {a} [and|by|with] {b}.", "[calculate|compute|work out] {a}[*| * | x | times ]{b}.",
         "{a}[*| * | x ]{b}[=| =| = ?|=?]", "what do you get [if|when] you multiply {a} [and|by] {b}?", "{a} times {b} [equals|is|makes] what?",
         "what does {a}[*| * | times ]{b} [equal|make|give]?"),
        ("and {a}[*| * | times ]{b}?", "what about {a}[*| * | times ]{b}?"),
        3,
    ),
    Family(
        "divided", quotients, "{a} divided by {b} is {c}.", "{c}",
        ("{a}[/| / | divided by ]{b}", "the quotient of {a} and {b}"),
        ("how much is {a}[/| / | divided by ]{b}?", "divide {a} by {b}.", "[calculate|compute|work out] {a}[/| / | divided by ]{b}.",
         "{a}[/| / ]{b}[=| =| = ?|=?]", "how many times does {b} go into {a}?", "{a} divided by {b} [equals|is|makes] what?"),
        ("and {a}[/| / | divided by ]{b}?",),
        2,
    ),
    Family(
        "word sum", word_sums, "{a} plus {b} is {c}.", "{c}", ("{a} plus {b}", "the sum of {a} and {b}"),
        ("how much is {a} [plus|and] {b}?", "add {a} [and|to] {b}.", "[calculate|compute|work out] {a} plus {b}.",
         "{a} plus {b} [equals|is|makes] what?"),
        ("and {a} plus {b}?",),
    ),
    Family(
        "double", doubles, "Twice {a} is {b}.", "{b}", ("twice {a}", "double {a}", "the double of {a}", "two times {a}"),
        ("how much is [twice|double|two times] {a}?", "double [the number |]{a}."), ("and [twice|double] {a}?",), 0.7,
    ),
    Family(
        "half", doubles, "Half of {b} is {a}.", "{a}", ("half of {b}", "one half of {b}"),
        ("how much is half of {b}?", "halve [the number |]{b}."), ("and half of {b}?",), 0.7,
    ),
    Family(
        "square", squares, "{a} squared is {b}.", "{b}", ("{a} squared", "the square of {a}"),
        ("how much is {a} squared?", "square [the number |]{a}."), ("and the square of {a}?",), 0.7,
    ),
    Family(
        "next number", neighbours, "After {a} comes {next}.", "{next}",
        ("the number [after|that comes after|that follows] {a}", "the next number after {a}"),
        ("what number [comes [right |]after|follows] {a}?", "what comes after {a}?", "which number is next after {a}?"),
        ("and after {a}?",), 0.7,
    ),
    Family(
        "previous number", neighbours, "Before {a} comes {previous}.", "{previous}",
        ("the number [|that comes |just ]before {a}",),
        ("what number comes [right |]before {a}?", "what comes before {a}?", "which number is before {a}?"),
        ("and before {a}?",), 0.7,
    ),
    Family(
        "parity", parities, "{a} is an {parity} number.", "{parity}", (),
        ("is {a} [even or odd|odd or even]?", "is {a} an [even or an odd|odd or an even] number?", "is the number {a} [even or odd|odd or even]?",
         "tell me [if|whether] {a} is [even or odd|odd or even]."), ("and {a}?", "what about {a}?"),
    ),
    Family(
        "larger", comparisons, "{high} is larger than {low}.", "{high}",
        ("the [larger|bigger|greater] [of|number of|one of] {a} and {b}", "the larger number, {a} or {b}", "the maximum of {a} and {b}"),
        ("which [|number ]is [larger|bigger|greater|more][,|:|] {a} or {b}?", "what is [more|larger|bigger], {a} or {b}?"),
        ("and {a} or {b}?",),
    ),
    Family(
        "smaller", comparisons, "{low} is smaller than {high}.", "{low}",
        ("the [smaller|lesser] [of|number of|one of] {a} and {b}", "the smaller number, {a} or {b}", "the minimum of {a} and {b}"),
        ("which [|number ]is [smaller|less][,|:|] {a} or {b}?", "what is [less|smaller], {a} or {b}?"),
        ("and {a} or {b}?",),
    ),
    Family(
        "times table", times_tables, "The first ten multiples of {n} are {list}.", "{list}",
        ("the {n} times table", "the times table of {n}", "the first ten multiples of {n}", "the multiples of {n}"),
        ("count [up |]by {n}s.", "say the {n} times table.", "count in steps of {n}."), ("and of {n}?",),
    ),
]  # fmt: skip

CALENDAR = [
    Family(
        "next day", cycle(facts.WEEKDAYS, 1), "The day after {x} is {y}.", "{y}",
        ("the day [after|that comes after|that follows] {x}", "the [next day|weekday|day of the week] after {x}"),
        ("[which|what] day [comes [right |]after|follows] {x}?", "what comes after {x}?", "if today is {x}, what day is tomorrow?",
         "today is {x}. what [day |]is tomorrow?"), ("and after {x}?",),
    ),
    Family(
        "previous day", cycle(facts.WEEKDAYS, -1), "The day before {x} is {y}.", "{y}",
        ("the day [before|that comes before] {x}", "the [weekday|day of the week] before {x}"),
        ("[which|what] day [comes [right |]before|precedes] {x}?", "what comes before {x}?", "if today is {x}, what day was yesterday?",
         "today is {x}. what [day |]was yesterday?"), ("and before {x}?",),
    ),
    Family(
        "two days on", cycle(facts.WEEKDAYS, 2), "Two days after {x} is {y}.", "{y}",
        ("the day two days after {x}", "the weekday two days after {x}"),
        ("[which|what] day is [it |]two days after {x}?", "if today is {x}, what day is the day after tomorrow?",
         "what is two days after {x}?"), ("and two days after {x}?",), 0.7,
    ),
    Family(
        "next month", cycle(facts.MONTHS, 1), "The month after {x} is {y}.", "{y}",
        ("the month [after|that comes after|that follows] {x}", "the next month after {x}"),
        ("[which|what] month [comes [right |]after|follows] {x}?", "what comes after {x}?", "if it is {x} now, what month is next?"),
        ("and after {x}?",),
    ),
    Family(
        "previous month", cycle(facts.MONTHS, -1), "The month before {x} is {y}.", "{y}",
        ("the month [before|that comes before] {x}",),
        ("[which|what] month [comes [right |]before|precedes] {x}?", "what comes before {x}?", "if it is {x} now, what was last month?"),
        ("and before {x}?",),
    ),
    Family(
        "month days", MONTH, "{month} has {days} days.", "{days}",
        ("the number of days in {month}", "the length of {month} in days"),
        ("how many days [are [there |]in|does] {month}[| have]?", "how many days are there in [the month of |]{month}?",
         "how long is [the month of |]{month}?", "how many days long is {month}?", "{month} has how many days?"),
        ("and {month}?", "what about {month}?", "and in {month}?"), 1.5,
    ),
    Family(
        "nth month", MONTH, "The {nth} month of the year is {month}.", "{month}",
        ("the {nth} month[| of the year]", "month number {n}", "the name of the {nth} month"),
        ("which month is [the {nth}|number {n}][| in the year| of the year]?", "which month comes {nth} in the year?"), ("and the {nth}?",),
    ),
    Family(
        "month number", MONTH, "{month} is month number {n}.", "{n}", ("the number of the month {month}",),
        ("[which|what] number [month |]is [the month |]{month}?", "what number does {month} have in the year?",
         "where in the year does {month} come?", "which month number is {month}?"), ("and {month}?",),
    ),
]  # fmt: skip

ELEMENTS = [
    Family(
        "symbol", ELEMENT, "The symbol of {name} is {symbol}.", "{symbol}",
        ("the [|chemical |element ]symbol [of|for] [|the element ]{name}", "{name}'s [|chemical ]symbol", "the symbol [|that is ]used for {name}"),
        ("[which|what] [|chemical ]symbol does [|the element ]{name} have?", "how is {name} written in the periodic table?",
         "which symbol stands for {name}?", "what letters stand for {name}[| in chemistry]?", "symbol [of|for] {name}[?|]", "what is the symbol for {name} in the periodic table?"),
        ("and [|of |for ]{name}?", "what about {name}?"), 3,
    ),
    Family(
        "element of symbol", ELEMENT, "{symbol} is the symbol of {name}.", "{name}",
        ("the element with the symbol {symbol}", "the name of the element {symbol}", "the element [that is |]written {symbol}"),
        ("[which|what] element [has|is given|uses] the symbol {symbol}?", "what does [|the symbol ]{symbol} stand for[| in chemistry| in the periodic table]?",
         "{symbol} is the symbol of which element?", "[which|what] element is {symbol}?", "which chemical element is written as {symbol}?"),
        ("and {symbol}?", "what about {symbol}?"), 3,
    ),
    Family(
        "atomic number", ELEMENT, "The atomic number of {name} is {n}.", "{n}",
        ("the atomic number of [|the element ]{name}", "{name}'s atomic number", "the number of protons in {name}", "the number of {name} in the periodic table"),
        ("[which|what] atomic number does {name} have?", "how many protons does [|an atom of ]{name} have?", "how many protons are [there |]in [|an atom of ]{name}?",
         "what number is {name} in the periodic table?", "which number does {name} have in the periodic table?", "atomic number of {name}[?|]"),
        ("and [|of |for ]{name}?", "what about {name}?"), 3,
    ),
    Family(
        "element of number", ELEMENT, "The element with atomic number {n} is {name}.", "{name}",
        ("the element with [|the ]atomic number {n}", "element number {n}", "the element with {n} protons", "the element with number {n}"),
        ("[which|what] element has [|the ]atomic number {n}?", "[which|what] element has {n} protons?", "which element is number {n} in the periodic table?",
         "{n} is the atomic number of which element?"),
        ("and [|number ]{n}?", "what about [|number ]{n}?"), 3,
    ),
]  # fmt: skip

WORLD = [
    Family(
        "planet record", rows("record planet", facts.PLANET_RECORDS), "{planet} is {record}.", "{planet}",
        ("{record}", "the name of {record}"), ("which [one |]is {record}?", "which planet is {record}?"), (),
    ),
    Family(
        "nth planet", PLANET, "The {nth} planet from the Sun is {planet}.", "{planet}",
        ("the {nth} planet[| from the Sun| of the Solar System]",),
        ("which planet is [the |]{nth} from the Sun?", "which planet comes {nth}?"), ("and the {nth}?",),
    ),
    Family(
        "planet place", PLANET, "{planet} is the {nth} planet from the Sun.", "{nth}",
        ("the [position|place] of {planet} [in the Solar System|from the Sun]",),
        ("which planet from the Sun is {planet}?", "where in the Solar System is {planet}?", "where does {planet} come [in order |]from the Sun?"), ("and {planet}?",), 0.7,
    ),
    Family(
        "next planet", cycle(facts.PLANETS, 1, wrap=False), "The planet after {x} is {y}.", "{y}",
        ("the planet [after|that comes after|that follows|beyond] {x}", "the next planet after {x}"),
        ("[which|what] planet [comes [right |]after|follows] {x}?",), ("and after {x}?",), 0.7,
    ),
    Family(
        "previous planet", cycle(facts.PLANETS, -1, wrap=False), "The planet before {x} is {y}.", "{y}",
        ("the planet [before|that comes before] {x}",), ("[which|what] planet comes [right |]before {x}?",), ("and before {x}?",), 0.7,
    ),
    Family(
        "amount", rows("many one n", facts.AMOUNTS), "There are {n} {many} in {one}.", "{n}", ("the number of {many} in {one}",),
        ("how many {many} are [|there ]in {one}?", "how many {many} does {one} have?", "how many {many} make [up |]{one}?", "{one} has how many {many}?",
         "in {one}, how many {many} are there?"), ("and {many} in {one}?",), 3,
    ),
    Family(
        "sides", SHAPE, "{shape} has {n} sides.", "{n}", ("the number of sides [of|in] {shape}",),
        ("how many [sides|corners] does {shape} have?", "how many sides are [there |]in {shape}?", "{shape} has how many sides?"),
        ("and {shape}?", "what about {shape}?"),
    ),
    Family(
        "thing colour", rows("thing colour", facts.THING_COLOURS), "The colour of {thing} is {colour}.", "{colour}",
        ("the [colour|color] of {thing}",), ("what [colour|color] is {thing}?", "which [colour|color] does {thing} have?", "what [colour|color] does {thing} have?"),
        ("and {thing}?", "what about {thing}?"), 2,
    ),
    Family(
        "colour mix", MIX, "Mixing {x} and {y} gives {z}.", "{z}",
        ("the mix of {x} and {y}", "the [colour|color] [of|from] mixing {x} and {y}", "{x} mixed with {y}"),
        ("what [|colour |color ]do you get [if|when] you mix {x} [and|with] {y}?", "what [colour|color] do {x} and {y} make?",
         "mix {x} [and|with] {y}. what do you get?", "which [colour|color] results from mixing {x} and {y}?", "what do {x} and {y} make?"), ("and {x} with {y}?",),
    ),
    Family(
        "legs", LEGS, "The number of legs of {animal} is {n}.", "{n}",
        ("the number of legs [of|on] {animal}",), ("how many legs does {animal} have?", "how many legs [are there |]on {animal}?", "{animal} has how many legs?"),
        ("and {animal}?", "what about {animal}?"),
    ),
    Family(
        "young", ANIMAL, "The young of {animal} is called {young}.", "{young}",
        ("the [word|name] for the young of {animal}", "the young of {animal}"),
        ("what do you call the [baby|young] of {animal}?", "[what|how] is the [baby|young] of {animal} called?", "what is the baby of {animal}?"), ("and of {animal}?",),
    ),
    Family(
        "sound", ANIMAL, "{animal} says {sound}.", "{sound}",
        ("the sound of {animal}", "the sound [that |]{animal} makes"), ("what does {animal} say?", "what sound does {animal} make?", "how does {animal} sound?"),
        ("and {animal}?", "what about {animal}?"),
    ),
]  # fmt: skip

LANGUAGE = [
    Family(
        "opposite", OPPOSITE, "The opposite of {x} is {y}.", "{y}",
        ("the opposite of [|the word ]{x}", "the antonym of {x}", "the word that means the opposite of {x}", "the opposite word of {x}", "the contrary of {x}"),
        ("what [word |]is opposite to {x}?", "which word is the opposite of {x}?", "opposite of {x}[?|]", "what is the reverse of {x}?", "which word means the opposite of {x}?"),
        ("and [|of ]{x}?", "what about {x}?"), 4,
    ),
    Family(
        "spelling", WORD, "The word {word} is spelled {spelled}.", "{spelled}",
        ("the spelling of [|the word ]{word}",),
        ("spell [|the word |out ]{word}[|.| for me.]", "how do you spell [|the word ]{word}?", "how is [|the word ]{word} spelled?", "can you spell {word}?"), ("and {word}?",), 2,
    ),
    Family(
        "letter count", WORD, "The word {word} has {n} letters.", "{n}",
        ("the number of letters in [|the word ]{word}", "the length of the word {word}"),
        ("how many letters [are [there |]in|does] [|the word ]{word}[| have]?", "count the letters [in|of] [|the word ]{word}.", "how long is the word {word}?"), ("and {word}?",), 2,
    ),
    Family(
        "first letter", WORD, "The first letter of {word} is {first}.", "{first}",
        ("the first letter of [|the word ]{word}", "the letter that [|the word ]{word} [starts|begins] with"),
        ("which letter does {word} [start|begin] with?", "what letter does the word {word} [start|begin] with?"), ("and of {word}?",), 0.8,
    ),
    Family(
        "last letter", WORD, "The last letter of {word} is {last}.", "{last}",
        ("the last letter of [|the word ]{word}", "the letter that [|the word ]{word} ends with"),
        ("which letter does {word} end with?", "what letter does the word {word} end with?"), ("and of {word}?",), 0.8,
    ),
    Family(
        "backwards", WORD, "Backwards, {word} is spelled {backwards}.", "{backwards}",
        ("the word {word} [spelled |]backwards", "the word {word} in reverse"),
        ("spell [|the word ]{word} backwards.", "how do you spell [|the word ]{word} backwards?", "reverse the [letters of the |]word {word}."), ("and {word}?",), 0.8,
    ),
    Family(
        "nth letter", LETTER, "Letter number {n} of the alphabet is {letter}.", "{letter}",
        ("letter number {n} of the alphabet", "letter {n} of the alphabet"), ("which letter is number {n} in the alphabet?", "which letter of the alphabet is number {n}?"), ("and number {n}?",), 0.8,
    ),
    Family(
        "letter place", LETTER, "{letter} is letter number {n} of the alphabet.", "{n}",
        ("the [position|place] of [|the letter ]{letter} in the alphabet",),
        ("which number is [|the letter ]{letter} in the alphabet?", "what number letter is {letter}?", "where in the alphabet is [|the letter ]{letter}?"), ("and {letter}?",), 0.8,
    ),
    Family(
        "next letter", cycle(facts.ALPHABET, 1, wrap=False), "After {x} comes {y}.", "{y}",
        ("the letter [after|that comes after|that follows] {x}", "the next letter after {x}"),
        ("[which|what] letter [comes [right |]after|follows] {x}?", "what comes after {x} in the alphabet?"), ("and after {x}?",), 0.8,
    ),
    Family(
        "previous letter", cycle(facts.ALPHABET, -1, wrap=False), "Before {x} comes {y}.", "{y}",
        ("the letter [|that comes |just ]before {x}",),
        ("[which|what] letter comes [right |]before {x}?", "what comes before {x} in the alphabet?"), ("and before {x}?",), 0.8,
    ),
    Family(
        "list", rows("what list", facts.LISTS), "Here you are: {list}.", "{list}",
        ("{what}", "a list of {what}", "all of {what}"),
        ("list {what}.", "name {what}.", "what are {what}?", "which are {what}?", "can you list {what}?", "say {what}.", "write down {what}.", "give me a list of {what}.",
         "{what}[|, please|, in order]", "recite {what}.", "enumerate {what}.", "show me {what}."),
        ("and {what}?",), 5,
    ),
]  # fmt: skip

FAMILIES = GEOGRAPHY + ARITHMETIC + CALENDAR + ELEMENTS + WORLD + LANGUAGE
