"""The tables of `data/facts.toml`, under names of their own."""

import tomllib
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def data(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text())


_FACTS = data("facts")

COUNTRIES: list[list[str]] = _FACTS["countries"]
ELEMENTS: list[list[str]] = _FACTS["elements"]
PLANET_RECORDS: list[list[str]] = _FACTS["planet_records"]
AMOUNTS: list[list[str]] = _FACTS["amounts"]
SHAPES: list[list[str]] = _FACTS["shapes"]
OPPOSITES: list[list[str]] = _FACTS["opposites"]
THING_COLOURS: list[list[str]] = _FACTS["thing_colours"]
COLOUR_MIXES: list[list[str]] = _FACTS["colour_mixes"]
ANIMALS: list[list[str]] = _FACTS["animals"]
LEGS: list[list[str]] = _FACTS["legs"]
LISTS: list[list[str]] = _FACTS["lists"]
MONTHS: list[str] = _FACTS["months"]
MONTH_DAYS: list[str] = _FACTS["month_days"]
WEEKDAYS: list[str] = _FACTS["weekdays"]
PLANETS: list[str] = _FACTS["planets"]
ORDINALS: list[str] = _FACTS["ordinals"]
NUMBER_WORDS: list[str] = _FACTS["number_words"]
WORDS: list[str] = _FACTS["words"]
NAMES: list[str] = _FACTS["names"]
ALPHABET = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
