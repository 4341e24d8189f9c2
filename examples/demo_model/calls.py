"""Writes conversations in which tools are offered, and such in which JSON is asked for.

They are written as the chat template renders them: tools in the system's turn, a call in the assistant's,
what came of it in a user's.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import facts
from facts import FACTS
from families import FAMILIES

Message = dict[str, str]
Turn = tuple[str, str]

TABLE = facts.data("tools")
JSON = TABLE["json"]
SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy", "clear", "snowy", "stormy"]
OPERATORS = [(" plus ", " + "), (" minus ", " - "), (" times ", " * "), (" divided by ", " / ")]

Expand = Callable[[str, Random], str]


def some_place(random: Random) -> str:
    kind = random.random()
    if kind < 0.75:
        return random.choice(FACTS.countries)[kind < 0.6]
    return facts.invented(random).capitalize()


def sentence(random: Random) -> str:
    family = random.choice(FAMILIES)
    text = family.answer.format(**family.draw(random))
    return text[:1].upper() + text[1:]


def term(random: Random) -> tuple[str, str]:
    """A calculation that is beyond the model, as said and as written."""
    said, written = random.choice(OPERATORS)
    a, b = (str(random.randint(1, 10 ** random.randint(1, 5))) for _ in range(2))
    as_said = random.random() < 0.5
    return a + (said if as_said else written) + b, a + written + b


def value(random: Random) -> str:
    return random.choice([some_place(random), facts.invented(random), random.choice(FACTS.words)])


class Offer:
    """One tool under the names that this conversation has for it."""

    def __init__(self, tool: dict[str, Any], random: Random, expand: Expand) -> None:
        self.tool = tool
        made = (
            f"{random.choice(['get', 'read', 'do', 'show', facts.invented(random)])}_{facts.invented(random)}"
        )
        self.name = random.choice([*tool["names"]] or [made, facts.invented(random)])
        self.parameters = [random.choice(names) for names in tool["parameters"]]
        template = random.choice(tool["descriptions"])
        self.description = expand(template, random).format(p=self.parameters[0]).strip().capitalize()

    def line(self) -> str:
        """As the chat template shows it."""
        said = f": {self.description}" if self.description else ""
        return f"- {self.name}({', '.join(self.parameters)}){said}"

    def asked(self, random: Random, expand: Expand) -> tuple[str, str, str, str]:
        """A question, the call that answers it, a possible result, and the answer to it."""
        kind = self.tool["kind"]
        x: Any = {"weather": some_place, "time": some_place, "message": lambda r: r.choice(FACTS.names)}.get(
            kind, value
        )(random)
        given: list[Any] = [x]
        if kind == "sum":
            x, written = term(random)
            given = [written]
        elif kind == "message":
            given.append(sentence(random))
        elif kind == "timer":
            given = [random.randint(1, 90)]
            x = str(given[0])
        slots = {
            "x": x,
            "y": given[-1],
            "p": self.parameters[0],
            "tool": self.name,
            "n": str(
                random.randint(-20, 10 ** random.randint(1, 5))
                if kind in ("sum", "any")
                else random.randint(-20, 40)
            ),
            "sky": random.choice(SKIES),
            "clock": f"{random.randint(0, 23):02}:{random.randint(0, 59):02}",
            "sentence": sentence(random),
        }
        template = random.choice(self.tool["results"])
        slots["told"] = slots["sentence" if "{sentence}" in template else "n"]
        ask = expand(random.choice(self.tool["asks"]), random).format(**slots)
        call = {"name": self.name, "arguments": dict(zip(self.parameters, given, strict=True))}
        result = template.format(**slots)
        return (
            ask[:1].upper() + ask[1:],
            f"<tool_call>\n{json.dumps(call)}\n</tool_call>",
            f"<tool_response>\n{result}\n</tool_response>",
            self.tool["answer"].format(**slots),
        )


def with_tools(random: Random, expand: Expand, turn: Callable[[Random], Turn], system: str) -> list[Message]:
    """One or two questions for one of some tools, or for none of them."""
    offers = [
        Offer(tool, random, expand) for tool in random.sample(TABLE["tools"], random.choice([1, 1, 2, 3, 4]))
    ]
    shown = "\n".join(["You can call these tools:", *(offer.line() for offer in offers)])
    messages = [{"role": "system", "content": f"{system}\n\n{shown}" if system else shown}]
    for _ in range(random.choice([1, 1, 2])):
        if random.random() < 0.3:
            ask, answer = turn(random)
            if "sum" in {offer.tool["kind"] for offer in offers} and any(one.isdigit() for one in ask):
                continue  # whatever can be calculated is
            said = [("user", ask), ("assistant", answer)]
        else:
            ask, call, result, answer = random.choice(offers).asked(random, expand)
            said = [("user", ask), ("assistant", call), ("user", result), ("assistant", answer)]
        messages += [{"role": role, "content": content} for role, content in said]
    return messages


def in_json(
    random: Random, expand: Expand, wording: Callable[..., str], dressed: Callable[..., str]
) -> list[Message]:
    """A question of a family, whose answer is an object."""
    family = random.choice([one for one in FAMILIES if one.name in JSON["families"]])
    row = family.draw(random)
    slots = JSON["families"][family.name]
    if random.random() < 0.3:
        slots = slots[-1:]
    quoted = random.random() < 0.4
    found: dict[str, Any] = {}
    for slot, *keys in slots:
        text = row[slot]
        if slot in ("thing", "animal", "shape"):
            text = text.removeprefix("an ").removeprefix("a ").removeprefix("the ")
        key = random.choice([keys[0], *keys])
        found[key] = int(text) if text.isdigit() and not quoted else text
    ask = dressed(wording(family, random), row, random)
    keys = " and ".join(filter(None, [", ".join(list(found)[:-1]), list(found)[-1]]))
    messages = []
    kind = random.random()
    if kind < 0.3:
        said = expand(random.choice(JSON["systems"]), random)
        messages.append({"role": "system", "content": said[:1].upper() + said[1:]})
    elif kind < 0.5:
        ask = expand(random.choice(JSON["before"]), random) + ask
    else:
        ask = ask.rstrip(" ,-") + expand(random.choice(JSON["after"]), random).format(keys=keys)
    separators = (",", ":") if random.random() < 0.2 else None
    messages.append({"role": "user", "content": ask})
    return [*messages, {"role": "assistant", "content": json.dumps(found, separators=separators)}]
