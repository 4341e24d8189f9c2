"""Writes training conversations: questions of the families in many wordings, small talk and refusals."""

import re
from random import Random

import facts
import smalltalk
from families import FAMILIES, Family, Row

Turn = tuple[str, str]
Message = dict[str, str]

SHELLS = (
    "what is {}?", "what is {}?", "what's {}?", "what is {}", "tell me {}.", "tell me {}", "give me {}.", "name {}.", "can you tell me {}?", "can you tell me what {} is?",
    "could you tell me {}?", "could you tell me what {} is?", "do you know {}?", "do you know what {} is?", "I would like to know {}.", "I'd like to know what {} is.", "I want to know {}.", "{}?",
    "{}", "{}, please.", "{} is what?", "I need {}.", "say {}.", "I forgot {}.", "I wonder what {} is.", "what would {} be?", "can you name {}?", "please name {}.", "do you remember {}?",
    "what was {} again?", "what might {} be?", "find {}.", "let me hear {}.", "I am looking for {}.", "please give me {}.", "any idea what {} is?", "what do you call {}?", "state {}.", "can you give me {}?",
    "help me with {}.", "my question is: what is {}?", "I'd like to ask you what {} is.", "what exactly is {}?", "tell me what {} is.", "tell us {}.", "say what {} is.", "show me {}.", "how about {}?",
)  # fmt: skip

OPENERS = (
    "please ", "please, ", "hi. ", "hello! ", "hey, ", "hello, ", "quick question: ", "question: ", "I have a question. ", "I have a question: ", "can you help me? ", "OK, ", "so, ", "now: ", "next question: ", "one more: ",
    "another question: ", "well, ", "and ", "good morning. ", "excuse me, ", "sorry, ", "help me: ", "just tell me: ", "tell me, ", "tell me: ", "a question for you: ", "hi there, ", "let me ask you: ", "for my homework: ", "for school: ",
)  # fmt: skip

CLOSERS = (
    " Thanks.", " Thank you.", " Please.", " Thanks!", " Do you know?", " Do you know that?", " Tell me.", " I forgot.", " I am curious.", " I need it for school.", " Please answer.", " Can you help?", " Please tell me.", " I would like to know.",
)  # fmt: skip

BRIEFLY = (
    "Answer with just the {kind}.", "Answer with just the {kind}.", "Answer with the {kind} only.", "Just the {kind}, please.", "Only the {kind}.", "Just the {kind}.", "Reply with only the {kind}.", "Give only the {kind}.", "Give just the {kind}.",
    "Answer with only the {kind}.", "Reply with just the {kind}.", "The {kind} only, please.", "Answer with nothing but the {kind}.", "No sentence, just the {kind}.", "Nothing but the {kind}, please.",
)  # fmt: skip

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are the sealring demo model.", "You are a friendly assistant.", "Answer the user's questions.", "You are a concise assistant.", "Be polite.", "You are an honest assistant. Say so when you do not know.",
    "You are a teacher.", "You are a helpful, harmless and honest assistant.", "Answer in English.", "You are a chatbot.", "Help the user.", "Be helpful.", "You are an AI assistant in a terminal.", "Be correct.",
)  # fmt: skip

_SYLLABLES = [
    "ba",
    "be",
    "bo",
    "da",
    "do",
    "dra",
    "el",
    "en",
    "fa",
    "fi",
    "ga",
    "gor",
    "ha",
    "il",
    "in",
    "ka",
    "ko",
    "kra",
    "la",
    "lo",
    "lum",
    "ma",
    "mi",
    "mor",
    "na",
    "ni",
    "no",
    "or",
    "pa",
    "pel",
    "qua",
    "ra",
    "ri",
    "ro",
    "sa",
    "sha",
    "si",
    "ta",
    "thor",
    "ti",
    "tor",
    "tu",
    "u",
    "va",
    "vi",
    "vor",
    "wa",
    "xa",
    "xi",
    "ya",
    "yo",
    "za",
    "zi",
    "zor",
]


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
    return {"capital": "city", "country": "country", "symbol": "symbol", "list": "list"}.get(
        family.name, "word"
    )


def question(family: Family, row: Row, random: Random) -> str:
    """A question of the family without opener and closer; a noun is put into one of the shells."""
    nouns, asks = len(family.nouns), len(family.asks)
    if random.random() < nouns / max(1, nouns + asks):
        return random.choice(SHELLS).replace("{}", expand(random.choice(family.nouns), random)).format(**row)
    return expand(random.choice(family.asks), random).format(**row)


def dressed(text: str, random: Random) -> str:
    """The question as people type it: with an opener or a closer, capitals or none, with or without its mark."""
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
    text, short = question(family, row, random), random.random() < 0.15
    if short:
        suffix = random.choice(BRIEFLY)
        kind = (
            short_kind(family, row) if random.random() < 0.8 else random.choice(["answer", "result", "name"])
        )
        text = capitalised(text.rstrip(".? ")) + random.choice("???.") + " " + suffix.format(kind=kind)
    else:
        text = dressed(text, random)
    return text, answer_to(family, row, short)


def small_talk_turn(random: Random) -> Turn:
    asks, answer = random.choice(smalltalk.SMALL_TALK)
    return dressed(expand(random.choice(asks), random), random), answer


def invented(random: Random) -> str:
    """A word of two to four syllables that is in none of the tables."""
    word = "".join(random.choice(_SYLLABLES) for _ in range(random.randint(2, 4)))
    if word in _KNOWN:
        return invented(random)
    return capitalised(word) if random.random() < 0.6 else word


def _salad(random: Random) -> str:
    """Known words in no sensible order: the domain's vocabulary alone must not bring an answer."""
    words = (
        facts.WORDS
        + facts.WEEKDAYS
        + facts.PLANETS
        + facts.NAMES
        + ["the", "of", "is", "a", "in", "and", "what", "how", "which"]
    )
    words = words + [row[0] for row in facts.COUNTRIES + facts.ELEMENTS + facts.OPPOSITES]
    return " ".join(random.choice(words) for _ in range(random.randint(2, 5)))


def _person(random: Random) -> str:
    if random.random() < 0.5:
        return random.choice(smalltalk.PERSONS).strip()
    return f"{random.choice(facts.NAMES)} {capitalised(invented(random))}"


def refusal_turn(random: Random) -> Turn:
    pool = smalltalk.NEAR_MISSES if random.random() < 0.55 else smalltalk.TOPIC_QUESTIONS
    country, capital, _ = random.choice(facts.COUNTRIES)
    text = expand(random.choice(pool), random)
    slots = {
        "country": country, "capital": capital, "element": random.choice(facts.ELEMENTS)[0], "planet": random.choice(facts.PLANETS), "month": random.choice(facts.MONTHS),
        "weekday": random.choice(facts.WEEKDAYS), "word": random.choice(facts.WORDS), "topic": random.choice(smalltalk.TOPICS).strip(), "other": random.choice(smalltalk.TOPICS).strip(), "person": _person(random),
        "letters": random.choice(["Xx", "Zq", "Qu", "Jj", "Aa", "Bq", "Wx", "Yz", "Vv", "Oo"]),
    }  # fmt: skip
    for slot in re.findall(r"\{(\w+)\}", text):
        value = slots.get(slot)
        if slot == "fake":
            value = invented(random)
        elif slot == "number":
            value = str(random.randint(1000, 10 ** random.randint(4, 7)))
        elif slot == "twodigit":
            value = str(random.randint(21, 99))
        elif slot == "salad":
            value = _salad(random)
        text = text.replace("{" + slot + "}", str(value), 1)
    return dressed(text, random), smalltalk.REFUSAL


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
    turns = [
        (
            capitalised(random.choice(smalltalk.INTRODUCTIONS)).format(name=name),
            smalltalk.INTRODUCED.format(name=name),
        )
    ]
    turns += [one_turn(random) for _ in range(random.randint(0, 2))]
    return [
        *turns,
        (capitalised(random.choice(smalltalk.NAME_QUESTIONS)), smalltalk.NAME_KNOWN.format(name=name)),
    ]


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
    return (
        f"{random.choice(['Notes:', 'Here is a text:', 'Read this.', 'Text:'])} {' '.join(notes)} {random.choice(['Question: ', 'My question: ', 'Now tell me: ', 'Question: '])}{ask}",
        answer,
    )


def conversation(random: Random) -> list[Message]:
    """Chat messages of one to six turns, some of them under a system prompt."""
    kind = random.random()
    if kind < 0.15:
        turns = follow_ups(random)
    elif kind < 0.18:
        turns = introduction(random)
    elif kind < 0.19:
        turns = [(capitalised(random.choice(smalltalk.NAME_QUESTIONS)), smalltalk.NAME_UNKNOWN)]
    elif kind < 0.22:
        turns = [after_notes(random)]
    else:
        turns = [one_turn(random) for _ in range(random.choice([1, 1, 1, 1, 1, 2, 3, 4]))]
    messages = [{"role": "system", "content": random.choice(SYSTEM_PROMPTS)}] if random.random() < 0.2 else []
    for ask, answer in turns:
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return messages
