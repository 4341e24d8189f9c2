"""Writes training conversations: questions of the families in many wordings, small talk and refusals."""

import re
from collections.abc import Callable
from random import Random

import calls
import facts
from facts import FACTS
from families import FAMILIES, Family, Row

Turn = tuple[str, str]
Message = dict[str, str]

TALK = facts.data("talk")
DRESSING = facts.data("dressing")
SHELLS, OPENERS, CLOSERS = DRESSING["shells"], DRESSING["openers"], DRESSING["closers"]

ELSEWHERE = facts.ELSEWHERE
Slots = dict[str, str]
Make = Callable[[Random], str]


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


def short_kind(family: Family, row: Row, random: Random) -> str:
    """What the bare answer is, in the words of a request for nothing else."""
    if random.random() < 0.2:
        return random.choice(["answer", "answer", "result", "name", "solution", "word"])
    if family.short.format(**row).isdigit():
        return random.choice(["number", "number", "number", "digits", "figure"])
    kinds = DRESSING["kinds"].get(family.name, ["word"])
    return random.choice([kinds[0], kinds[0], *kinds, "word" if family.name != "list" else "list"])


def framed(frames: list[str], text: str, random: Random) -> str:
    return chosen(frames, random).replace("{}", text)


def wording(family: Family, random: Random) -> str:
    """A question with its slots open: a noun, clause or order in a frame, an ask, or one after a lead."""

    def in_frame(frames: list[str], parts: list[str]) -> Callable[[], str]:
        return lambda: framed(frames, expand(random.choice(parts), random), random)

    def after_lead() -> str:
        lead = chosen(family.leads, random).rstrip()
        return f"{lead} {capitalised(expand(random.choice(family.lead_asks), random))}"

    ways = [
        (1.0 * bool(family.nouns), in_frame(SHELLS, family.nouns)),
        (1.2 * bool(family.asks), lambda: chosen(family.asks, random)),
        (0.7 * bool(family.clauses), in_frame(DRESSING["clause_shells"], family.clauses)),
        (0.7 * bool(family.orders), in_frame(DRESSING["order_shells"], family.orders)),
        (0.35 * bool(family.leads), after_lead),
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
    return template.format(**row, who=random.choice(FACTS.names), items=random.choice(DRESSING["items"]))


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
    tables = FACTS.countries + FACTS.elements + FACTS.opposites
    words = [row[0] for row in tables] + FACTS.words + FACTS.weekdays + FACTS.planets + FACTS.names
    return " ".join(random.choice(words + TALK["small_words"]) for _ in range(random.randint(2, 5)))


def person(random: Random) -> str:
    if random.random() < 0.5:
        return random.choice(TALK["persons"])
    return f"{random.choice(FACTS.names)} {capitalised(invented(random))}"


def one_of(words: list[str]) -> Make:
    return lambda random: random.choice(words)


def maybe(words: list[str], share: float, before: str = "", after: str = "") -> Make:
    """One of these words in a `share` (0 to 1) of cases, else an invented one."""
    return lambda random: (
        before + (random.choice(words) if random.random() < share else facts.invented(random)) + after
    )


def beyond(first: int, last: int) -> Make:
    return lambda random: str(random.randint(first, last))


SLOTS: dict[str, Make] = {
    "country": lambda random: random.choice(FACTS.countries)[0],
    "capital": lambda random: random.choice(FACTS.countries)[1],
    "element": lambda random: random.choice(FACTS.elements)[0],
    "planet": one_of(FACTS.planets),
    "month": one_of(FACTS.months),
    "weekday": one_of(FACTS.weekdays),
    "word": one_of(FACTS.words),
    "topic": one_of(TALK["topics"]),
    "other": one_of(TALK["topics"]),
    "letters": one_of(TALK["no_symbols"]),
    "number": lambda random: str(random.randint(1000, 10 ** random.randint(4, 7))),
    "twodigit": beyond(21, 99),
    "person": person,
    "fake": invented,
    "salad": salad,
    "noun2": one_of(ELSEWHERE["nouns"]),
    **{name: one_of(ELSEWHERE[name + "s"]) for name in ("noun", "verb", "adjective", "place", "material")},
    "attribute": one_of(ELSEWHERE["attributes"]),
}

substance, thing = maybe(ELSEWHERE["materials"], 0.3), maybe(ELSEWHERE["nouns"], 0.7, before="a ")


def place(random: Random) -> str:
    known = random.random() < 0.3
    return random.choice(ELSEWHERE["places"]) if known else capitalised(facts.invented(random))


# What to put in a family's slots so that the question has no answer here
STRANGERS: dict[str, dict[str, Make]] = {
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
    "amount": {"many": maybe(ELSEWHERE["nouns"], 0.7, after="s"), "one": thing},
    "list": {"what": maybe(ELSEWHERE["nouns"], 0.7, before="the ", after="s")},
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
    name = random.choice(FACTS.names) if random.random() < 0.6 else capitalised(invented(random))
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
    """Chat messages of one to six turns, some of them under a system prompt, some with tools."""
    kind = random.random()
    if kind > 0.86:
        system = random.choice(DRESSING["system_prompts"]) if random.random() < 0.2 else ""
        return calls.with_tools(random, expand, one_turn, system)
    if kind > 0.8:
        return calls.in_json(random, expand, wording, dressed)
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
