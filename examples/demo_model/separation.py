"""Keeps training apart from the questions that the model is measured on.

`heldout.json` gives the score; `development.json` was looked at while the training wordings were written.
Training throws away any conversation that holds a question of either, and `conversations.py` any wording of
`data/development.toml`.
"""

import json
import re
from pathlib import Path
from random import Random

from conversations import Message, conversation

FILES = ("heldout.json", "development.json")


def normalised(text: str) -> str:
    """Lower case letters, digits and operators alone: what makes two questions the same."""
    return " ".join(re.findall(r"[a-z0-9+*/=-]+", text.lower()))


def held_out_questions() -> set[str]:
    """The questions of both files, normalised."""
    questions: set[str] = set()
    for name in FILES:
        cases = json.loads((Path(__file__).parent / name).read_text())
        asked = [case["question"] for case in cases["in_domain"]] + cases["out_of_domain"]
        questions |= {normalised(question) for question in asked}
    return questions


def training_conversation(random: Random, forbidden: set[str]) -> list[Message]:
    """A conversation in which nobody asks a held-out question."""
    while True:
        messages = conversation(random)
        if not any(normalised(message["content"]) in forbidden for message in messages):
            return messages
