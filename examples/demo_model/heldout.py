"""The held-out questions: other wordings than in training, written down once and for all in `heldout.json`.

`python heldout.py > heldout.json` made the file. Training throws away any conversation that holds one of its
questions.
"""

import json
import re
from pathlib import Path
from random import Random

import facts
from conversations import TALK, Message, answer_to, capitalised, conversation, short_kind
from families import FAMILIES, Family

QUESTIONS = 200

WORDINGS = facts.data("heldout")


def normalised(text: str) -> str:
    """Lower case letters, digits and operators alone: what makes two questions the same."""
    return " ".join(re.findall(r"[a-z0-9+*/=-]+", text.lower()))


def held_out_questions() -> set[str]:
    """The questions of `heldout.json`, normalised."""
    cases = json.loads((Path(__file__).parent / "heldout.json").read_text())
    questions = [case["question"] for case in cases["in_domain"]] + cases["out_of_domain"]
    return {normalised(question) for question in questions}


def training_conversation(random: Random, forbidden: set[str]) -> list[Message]:
    """A conversation in which nobody asks a held-out question."""
    while True:
        messages = conversation(random)
        if not any(normalised(message["content"]) in forbidden for message in messages):
            return messages


def in_domain(random: Random) -> list[dict[str, str]]:
    """The small talk, two questions of each family, and the rest by the families' weights."""
    cases = [
        {"family": "small_talk", "question": ask, "answer": talk["answer"]}
        for asks, talk in zip(WORDINGS["small_talk"], TALK["small_talk"], strict=True)
        for ask in asks
    ]
    rest = QUESTIONS - len(cases) - 2 * len(FAMILIES)
    weights = [family.weight for family in FAMILIES]
    for family in [*FAMILIES, *FAMILIES, *random.choices(FAMILIES, weights, k=rest)]:
        cases.append(case(family, {one["question"] for one in cases}, random))
    return cases


def case(family: Family, taken: set[str], random: Random) -> dict[str, str]:
    """A question not yet taken; one in eight asks for the bare answer."""
    row = family.draw(random)
    text = random.choice(WORDINGS["families"][family.name])
    if text[-1] not in ".?":
        text = random.choice(WORDINGS["shells"]).replace("{}", text)
    short = family.name == "successive"
    text = capitalised(text.format(**row))
    if not short and random.random() < 0.125:
        short = True
        text += " " + random.choice(WORDINGS["briefly"]).format(kind=short_kind(family, row))
    if text in taken:
        return case(family, taken, random)
    return {"family": family.name, "question": text, "answer": answer_to(family, row, short)}


def questions() -> dict[str, list]:
    return {"in_domain": in_domain(Random(2024)), "out_of_domain": WORDINGS["out_of_domain"]}


def main() -> None:
    print(json.dumps(questions(), indent=1))


if __name__ == "__main__":
    main()
