"""Writes training conversations: questions of the families in many wordings, small talk and refusals."""

import re
from collections.abc import Callable
from random import Random

import facts
from families import FAMILIES, Family, Row

Turn = tuple[str, str]
Message = dict[str, str]

TALK = facts.data("talk")
DRESSING = facts.data("dressing")
SHELLS, OPENERS, CLOSERS = DRESSING["shells"], DRESSING["openers"], DRESSING["closers"]

_SYLLABLES = TALK["syllables"]
_KNOWN = {field.lower() for row in facts.COUNTRIES + facts.ELEMENTS + facts.OPPOSITES for field in row} | set(
    facts.WORDS
)


def expand(template: str, random: Random) -> str:
    """Chooses one of each `[a|b]`, innermost first."""
    while match := re.search(r"\[([^\[\]]*)\]", template):
        template = template[: match.start()] + random.choice(match[1].split("|")) + template[match.end() :]
    return template


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def answer_to(family: Family, row: Row, short: bool = False) -> str:
    """The one right answer: a sentence, or the bare name or number."""
    return capitalised((family.short if short else family.answer).format(**row))


def short_kind(family: Family, row: Row) -> str:
    """What the bare answer is, in the words of a request for nothing else."""
    if family.short.format(**row).isdigit():
        return "number"
    kinds = {"capital": "city", "country": "country", "symbol": "symbol", "list": "list"}
    return kinds.get(family.name, "word")


def question(family: Family, row: Row, random: Random) -> str:
    """A question of the family without opener and closer; a noun is put into one of the shells."""
    nouns, asks = len(family.nouns), len(family.asks)
    if random.random() < nouns / max(1, nouns + asks):
        return random.choice(SHELLS).replace("{}", expand(random.choice(family.nouns), random)).format(**row)
    return expand(random.choice(family.asks), random).format(**row)


def dressed(text: str, random: Random) -> str:
    """The question as people type it: opener, closer, capitals, end mark, each there or not."""
    text = random.choice(OPENERS) + text if random.random() < 0.3 else text
    text = capitalised(text) if random.random() < 0.8 else text
    text = text + random.choice(CLOSERS) if random.random() < 0.1 and text[-1] in ".?!" else text
    if random.random() < 0.1:
        text = text.lower()
    if random.random() < 0.1:
        text = text.rstrip(".?!")
    return text


def family_turn(family: Family, random: Random) -> Turn:
    row = family.draw(random)
    if family.name == "successive":
        return family.asks[0].format(**row), answer_to(family, row)
    text = question(family, row, random)
    if random.random() < 0.85:
        return dressed(text, random), answer_to(family, row)
    kind = short_kind(family, row) if random.random() < 0.8 else random.choice(["answer", "result", "name"])
    suffix = random.choice(DRESSING["briefly"]).format(kind=kind)
    text = capitalised(text.rstrip(".? ")) + random.choice("???.") + " " + suffix
    return text, answer_to(family, row, short=True)


def small_talk_turn(random: Random) -> Turn:
    talk = random.choice(TALK["small_talk"])
    return dressed(expand(random.choice(talk["asks"]), random), random), talk["answer"]


def invented(random: Random) -> str:
    """A word of two to four syllables that is in none of the tables."""
    word = "".join(random.choice(_SYLLABLES) for _ in range(random.randint(2, 4)))
    if word in _KNOWN:
        return invented(random)
    return capitalised(word) if random.random() < 0.6 else word


def salad(random: Random) -> str:
    """Known words in no sensible order: the domain's vocabulary alone must not bring an answer."""
    tables = facts.COUNTRIES + facts.ELEMENTS + facts.OPPOSITES
    words = [row[0] for row in tables] + facts.WORDS + facts.WEEKDAYS + facts.PLANETS + facts.NAMES
    return " ".join(random.choice(words + TALK["small_words"]) for _ in range(random.randint(2, 5)))


def person(random: Random) -> str:
    if random.random() < 0.5:
        return random.choice(TALK["persons"])
    return f"{random.choice(facts.NAMES)} {capitalised(invented(random))}"


SLOTS: dict[str, Callable[[Random], str]] = {
    "country": lambda random: random.choice(facts.COUNTRIES)[0],
    "capital": lambda random: random.choice(facts.COUNTRIES)[1],
    "element": lambda random: random.choice(facts.ELEMENTS)[0],
    "planet": lambda random: random.choice(facts.PLANETS),
    "month": lambda random: random.choice(facts.MONTHS),
    "weekday": lambda random: random.choice(facts.WEEKDAYS),
    "word": lambda random: random.choice(facts.WORDS),
    "topic": lambda random: random.choice(TALK["topics"]),
    "other": lambda random: random.choice(TALK["topics"]),
    "letters": lambda random: random.choice(TALK["no_symbols"]),
    "number": lambda random: str(random.randint(1000, 10 ** random.randint(4, 7))),
    "twodigit": lambda random: str(random.randint(21, 99)),
    "person": person,
    "fake": invented,
    "salad": salad,
}


def refusal_turn(random: Random) -> Turn:
    pool = TALK["near_misses"] if random.random() < 0.55 else TALK["topic_questions"]
    text = expand(random.choice(pool), random)
    text = re.sub(r"\{(\w+)\}", lambda slot: SLOTS[slot[1]](random), text)
    return dressed(text, random), TALK["refusal"]


def follow_ups(random: Random) -> list[Turn]:
    """A question and one or two more of the same family that leave out what was asked before."""
    family = random.choices([f for f in FAMILIES if f.again], [f.weight for f in FAMILIES if f.again])[0]
    row = family.draw(random)
    turns = [(dressed(question(family, row, random), random), answer_to(family, row))]
    for _ in range(random.randint(1, 2)):
        row = family.draw(random)
        ask = expand(random.choice(family.again), random).format(**row)
        turns.append((capitalised(ask) if random.random() < 0.8 else ask, answer_to(family, row)))
    return turns


def introduction(random: Random) -> list[Turn]:
    """The user says their name, perhaps talks of other things, and asks for it again."""
    name = random.choice(facts.NAMES) if random.random() < 0.6 else capitalised(invented(random))
    hello = capitalised(random.choice(TALK["introductions"])).format(name=name)
    again = capitalised(random.choice(TALK["name_questions"]))
    between = [one_turn(random) for _ in range(random.randint(0, 2))]
    introduced, known = TALK["introduced"].format(name=name), TALK["name_known"].format(name=name)
    return [(hello, introduced), *between, (again, known)]


def one_turn(random: Random) -> Turn:
    kind = random.random()
    if kind < 0.72:
        return family_turn(random.choices(FAMILIES, [family.weight for family in FAMILIES])[0], random)
    return small_talk_turn(random) if kind < 0.8 else refusal_turn(random)


def after_notes(random: Random) -> Turn:
    """A long message: some notes that do not matter, then a question."""
    notes = []
    for _ in range(random.randint(2, 12)):
        family = random.choices(FAMILIES, [family.weight for family in FAMILIES])[0]
        notes.append(answer_to(family, family.draw(random)))
    ask, answer = one_turn(random)
    before, after = random.choice(DRESSING["before_notes"]), random.choice(DRESSING["after_notes"])
    return f"{before} {' '.join(notes)} {after} {ask}", answer


def conversation(random: Random) -> list[Message]:
    """Chat messages of one to six turns, some of them under a system prompt."""
    kind = random.random()
    if kind < 0.15:
        turns = follow_ups(random)
    elif kind < 0.18:
        turns = introduction(random)
    elif kind < 0.19:
        turns = [(capitalised(random.choice(TALK["name_questions"])), TALK["name_unknown"])]
    elif kind < 0.22:
        turns = [after_notes(random)]
    else:
        turns = [one_turn(random) for _ in range(random.choice([1, 1, 1, 1, 1, 2, 3, 4]))]
    messages = []
    if random.random() < 0.2:
        messages.append({"role": "system", "content": random.choice(DRESSING["system_prompts"])})
    for ask, answer in turns:
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return messages
