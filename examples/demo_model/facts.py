"""The tables of `data/facts.toml`, and words that are in none of them."""

import re
import tomllib
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

DATA = Path(__file__).parent / "data"


def data(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text())


FACTS = SimpleNamespace(**data("facts"))
ALPHABET = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")

ELSEWHERE = data("elsewhere")
_SYLLABLES: list[str] = data("talk")["syllables"]
_NAMES = [field for row in FACTS.countries for field in row[:2]] + [row[0] for row in FACTS.elements]
_KNOWN = {
    re.sub("^the ", "", word.lower())
    for word in [
        *_NAMES,
        *FACTS.words,
        *(x for row in FACTS.opposites for x in row),
        *(row[1] for row in FACTS.elements),
    ]
}
OTHER_WORDS = sorted(
    {x for row in FACTS.opposites for x in row if len(x) > 2}
    | {row[0] for row in [*FACTS.animals, *FACTS.shapes, *FACTS.legs]}
    | {noun for noun in ELSEWHERE["nouns"] if noun.isalpha()}
)


def _followers() -> dict[str, list[str]]:
    """For each two letters of the known names, the letters that follow them."""
    table: dict[str, list[str]] = {}
    for name in [*_NAMES, *FACTS.words]:
        text = "^^" + re.sub("[^a-z]", "", name.lower()) + "$"
        for i in range(len(text) - 2):
            table.setdefault(text[i : i + 2], []).append(text[i + 2])
    return table


_FOLLOWERS = _followers()


def invented(random: Random) -> str:
    """A lower-case word of no table: made of syllables or of likely letters, or a name bent."""
    kind = random.random()
    if kind < 0.35:
        word = "".join(random.choice(_SYLLABLES) for _ in range(random.randint(2, 4)))
    elif kind < 0.75:
        word = "^^"
        while not word.endswith("$") and len(word) < 14:
            word += random.choice(_FOLLOWERS[word[-2:]])
        word = word.strip("^$")
    else:
        stem = re.sub("^the |[^a-z]", "", random.choice(_NAMES).lower())
        word = stem[: random.randint(2, 6)] + random.choice(ELSEWHERE["endings"])
    return invented(random) if word in _KNOWN or len(word) < 4 else word
