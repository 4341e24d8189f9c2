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

ELSEWHERE = facts.ELSEWHERE
Slots = dict[str, str]


def plain(text: str) -> str:
    """Letters, digits, slots and operators in lower case: what makes two wordings the same."""
    return re.sub(r"[^a-z0-9{}_+*/= -]", "", text.lower()).strip()


def development_wordings() -> set[str]:
    """The wordings of `data/development.toml`, plain, in all their shells; training says none of them."""
    table = facts.data("development")
    made = {plain(one) for one in [*table["shells"], *table["briefly"]]}
    made |= {plain(ask) for asks in table["small_talk"] for ask in asks}
    for wording in (one for wordings in table["families"].values() for one in wordings):
        shells = table["shells"] if wording[-1] not in ".?" else ["{}"]
        made |= {plain(shell.replace("{}", wording)) for shell in shells}
    return made


DEVELOPMENT = development_wordings()


def expand(template: str, random: Random) -> str:
    """Chooses one of each `[a|b]`, innermost first."""
    while match := re.search(r"\[([^\[\]]*)\]", template):
        template = template[: match.start()] + random.choice(match[1].split("|")) + template[match.end() :]
    return template


def chosen(templates: list[str], random: Random) -> str:
    """One of the templates, expanded, that is no wording of the development set."""
    while plain(text := expand(random.choice(templates), random)) in DEVELOPMENT:
        pass
    return text


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def answer_to(family: Family, row: Row, short: bool = False) -> str:
    """The one right answer: a sentence, or the bare name or number."""
    return capitalised((family.short if short else family.answer).format(**row))


KINDS = {
    "capital": ["city", "capital", "city name"],
    "country": ["country", "country name"],
    "continent": ["continent"],
    "symbol": ["symbol", "letters"],
    "list": ["list", "names", "items"],
    "times_table": ["list", "numbers", "multiples"],
    "element_of_symbol": ["element", "element name"],
    "element_of_number": ["element", "element name"],
    "thing_colour": ["colour", "color"],
    "colour_mix": ["colour", "color"],
    "sound": ["sound"],
    "planet_place": ["place", "position"],
    **{
        key: ["planet", "planet name"]
        for key in ["planet_record", "nth_planet", "next_planet", "previous_planet"]
    },
    **{key: ["month", "month name"] for key in ["nth_month", "next_month", "previous_month"]},
    **{key: ["day", "weekday"] for key in ["next_day", "previous_day", "two_days_on"]},
    **{
        key: ["letter"]
        for key in ["first_letter", "last_letter", "nth_letter", "next_letter", "previous_letter"]
    },
    **{key: ["letters", "spelling"] for key in ["spelling", "backwards"]},
}


def short_kind(family: Family, row: Row, random: Random) -> str:
    """What the bare answer is, in the words of a request for nothing else."""
    if random.random() < 0.2:
        return random.choice(["answer", "answer", "result", "name", "solution", "word"])
    if family.short.format(**row).isdigit():
        return random.choice(["number", "number", "number", "digits", "figure"])
    kinds = KINDS.get(family.name, ["word"])
    return random.choice([kinds[0], kinds[0], *kinds, "word" if family.name != "list" else "list"])


def framed(frames: list[str], text: str, random: Random) -> str:
    return chosen(frames, random).replace("{}", text)


def wording(family: Family, random: Random) -> str:
    """A question with its slots open: a noun, clause or order in a frame, an ask, or one after a lead."""
    ways: list[tuple[float, Callable[[], str]]] = [
        (
            1.0 * bool(family.nouns),
            lambda: framed(SHELLS, expand(random.choice(family.nouns), random), random),
        ),
        (1.2 * bool(family.asks), lambda: chosen(family.asks, random)),
        (
            0.7 * bool(family.clauses),
            lambda: framed(DRESSING["clause_shells"], expand(random.choice(family.clauses), random), random),
        ),
        (
            0.7 * bool(family.orders),
            lambda: framed(DRESSING["order_shells"], expand(random.choice(family.orders), random), random),
        ),
        (
            0.35 * bool(family.leads),
            lambda: (
                chosen(family.leads, random).rstrip()
                + " "
                + capitalised(expand(random.choice(family.lead_asks), random))
            ),
        ),
    ]
    way = random.choices([make for _, make in ways], [weight for weight, _ in ways])[0]
    while plain(text := way()) in DEVELOPMENT:
        pass
    return text


def misspelled(word: str, random: Random) -> str:
    """The word with two letters swapped, one lost or one doubled; short words and slots stay."""
    if len(word) < 5 or not word.isalpha():
        return word
    i = random.randint(1, len(word) - 3)
    swapped = word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    return random.choice([swapped, word[:i] + word[i + 1 :], word[: i + 1] + word[i:]])


def noisy(template: str, random: Random) -> str:
    """Now and then: a filler put in, a small word left out or doubled, a word misspelled; never in a slot."""
    if random.random() > 0.3:
        return template
    words: list[str] = []
    for word in template.split(" "):
        draw = random.random()
        if draw < 0.06:
            words.append(random.choice(DRESSING["fillers"]))
        if 0.06 < draw < 0.16 and word in ("the", "a", "please", "me", "is", "what", "are"):
            words += [] if draw < 0.13 else [word, word]
        else:
            words.append(misspelled(word, random) if 0.16 < draw < 0.2 else word)
    text = " ".join(words)
    return template if plain(text) in DEVELOPMENT or not text else text


def filled(template: str, row: Slots, random: Random) -> str:
    return template.format(**row, who=random.choice(facts.NAMES), items=random.choice(DRESSING["items"]))


def dressed(template: str, row: Slots, random: Random) -> str:
    """The question as people type it: opener, closer, capitals, end mark, noise, each there or not."""
    text = random.choice(OPENERS) + template if random.random() < 0.35 else template
    text = text + random.choice(CLOSERS) if random.random() < 0.12 and text[-1] in ".?!" else text
    if plain(text) in DEVELOPMENT:
        text = template
    text = filled(noisy(text, random), row, random)
    text = capitalised(text) if random.random() < 0.8 else text
    if random.random() < 0.1:
        text = text.lower()
    if random.random() < 0.12:
        text = text.rstrip(".?!")
    return text


def family_turn(family: Family, random: Random) -> Turn:
    row = family.draw(random)
    if family.name == "successive":
        return family.asks[0].format(**row), answer_to(family, row)
    template = wording(family, random)
    if random.random() < 0.8:
        return dressed(template, row, random), answer_to(family, row)
    kind = short_kind(family, row, random)
    if random.random() < 0.15:
        before = expand(random.choice(DRESSING["briefly_before"]), random).format(kind=kind)
        return capitalised(before + dressed(template, row, random)), answer_to(family, row, short=True)
    suffix = capitalised(chosen(DRESSING["briefly"], random).format(kind=kind))
    text = dressed(template.rstrip(".? "), row, random).rstrip(".?! ")
    text = text + random.choice(["? ", "? ", "? ", ". ", ", ", " - ", " "]) + suffix
    return text.lower() if random.random() < 0.08 else text, answer_to(family, row, short=True)


def small_talk_turn(random: Random) -> Turn:
    talk = random.choice(TALK["small_talk"])
    text = chosen(talk["asks"], random)
    if random.random() < 0.6:
        return capitalised(text) if random.random() < 0.7 else text, talk["answer"]
    return dressed(text, {}, random), talk["answer"]


def invented(random: Random) -> str:
    """A name or word that is in none of the tables."""
    word = facts.invented(random)
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
    "noun2": lambda random: random.choice(ELSEWHERE["nouns"]),
    **{
        name: (lambda words: lambda random: random.choice(words))(ELSEWHERE[name + "s"])
        for name in ("noun", "verb", "adjective", "place", "material")
    },
    "attribute": lambda random: random.choice(ELSEWHERE["attributes"]),
}


def place(random: Random) -> str:
    return (
        random.choice(ELSEWHERE["places"]) if random.random() < 0.3 else capitalised(facts.invented(random))
    )


def substance(random: Random) -> str:
    return random.choice(ELSEWHERE["materials"]) if random.random() < 0.3 else facts.invented(random)


def thing(random: Random) -> str:
    return "a " + (random.choice(ELSEWHERE["nouns"]) if random.random() < 0.7 else facts.invented(random))


def many(random: Random) -> str:
    return (random.choice(ELSEWHERE["nouns"]) if random.random() < 0.7 else facts.invented(random)) + "s"


def beyond(first: int, last: int) -> Callable[[Random], str]:
    return lambda random: str(random.randint(first, last))


# What to put in a family's slots so that the question has no answer here
STRANGERS: dict[str, dict[str, Callable[[Random], str]]] = {
    "capital": {"country": place},
    "country": {"capital": place},
    "continent": {"country": place},
    "symbol": {"name": substance},
    "element_of_symbol": {"symbol": SLOTS["letters"]},
    "atomic_number": {"name": substance},
    "element_of_number": {"n": beyond(119, 9999)},
    "opposite": {"x": lambda random: random.choice([facts.invented(random), SLOTS["noun"](random)])},
    "thing_colour": {"thing": thing},
    "legs": {"animal": thing},
    "young": {"animal": thing},
    "sound": {"animal": thing},
    "sides": {"shape": thing},
    "amount": {"many": many, "one": thing},
    "list": {"what": lambda random: "the " + many(random)},
    "planet_place": {"planet": place},
    "next_planet": {"x": place},
    "next_day": {"x": place},
    "next_month": {"x": place},
    "nth_letter": {"n": beyond(27, 999)},
    "plus": {"a": beyond(1000, 99999), "b": beyond(1000, 99999)},
    "minus": {"a": beyond(1000, 99999), "b": beyond(1000, 99999)},
    "times": {"a": beyond(21, 999), "b": beyond(21, 999)},
}


def stranger_turn(random: Random) -> Turn:
    """A family's question about something that is not in its tables."""
    family = random.choice([one for one in FAMILIES if one.name in STRANGERS])
    row = family.draw(random) | {slot: make(random) for slot, make in STRANGERS[family.name].items()}
    return dressed(wording(family, random), row, random), TALK["refusal"]


def refusal_turn(random: Random) -> Turn:
    kind = random.random()
    if kind < 0.3:
        return stranger_turn(random)
    pool = ELSEWHERE["questions"]
    if kind < 0.6:
        pool = TALK["near_misses"] if kind < 0.45 else TALK["topic_questions"]
    template = expand(random.choice(pool), random)
    return dressed(template, {name: make(random) for name, make in SLOTS.items()}, random), TALK["refusal"]


def follow_ups(random: Random) -> list[Turn]:
    """A question and one or two more of the same family that leave out what was asked before."""
    family = random.choices([f for f in FAMILIES if f.again], [f.weight for f in FAMILIES if f.again])[0]
    row = family.draw(random)
    turns = [(dressed(wording(family, random), row, random), answer_to(family, row))]
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
    if kind < 0.68:
        return family_turn(random.choices(FAMILIES, [family.weight for family in FAMILIES])[0], random)
    return small_talk_turn(random) if kind < 0.78 else refusal_turn(random)


def after_notes(random: Random) -> Turn:
    """A long message: some notes that do not matter, then a question."""
    notes = []
    for _ in range(random.randint(2, 12) if random.random() < 0.8 else random.randint(20, 110)):
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
