"""The held-out questions: other wordings than in training, written down once and for all in `heldout.json`.

`python heldout.py > heldout.json` made the file. Training throws away any conversation that holds one of its questions.
"""

import json
import re
from random import Random

import smalltalk
from conversations import answer_to, capitalised, short_kind
from families import FAMILIES, Family

QUESTIONS = 200

SHELLS = (
    "Kindly tell me {}.", "Would you tell me {}?", "Please let me know {}.", "I am trying to remember {}.", "Could you remind me what {} is?", "Remind me: what is {}?", "Would you know {}?",
    "I was wondering what {} is.", "So what is {} then?", "Hi! Do you happen to know {}?", "Could you please name {}?", "I can't remember {}.", "What is {}, please?", "Give me {}, please.", "Hello there, what's {}?",
)  # fmt: skip

BRIEFLY = (
    "Respond with the {kind} alone.",
    "Please answer with only the {kind}.",
    "I only want the {kind}.",
    "Write just the {kind}.",
)

# family : nouns for the shells, or whole sentences
WORDINGS: dict[str, tuple[str, ...]] = {
    "capital": ("the capital that {country} has", "Which city serves as the capital of {country}?", "{country} - what is its capital city?", "Do you know which city is the capital of {country}?", "I am visiting {country}. What is its capital?", "Name the city that is the capital of {country}."),
    "country": ("the country that {capital} is the capital of", "{capital} is a capital city. Of which country?", "Do you know which country {capital} is the capital of?", "Tell me which country has its capital in {capital}."),
    "continent": ("the continent where {country} is", "Do you know which continent {country} is in?", "In which continent does {country} lie?", "Can you tell me where in the world {country} is?"),
    "plus": ("the total of {a} and {b}", "How much do you get for {a} + {b}?", "Can you add {a} and {b} for me?", "What number is {a} plus {b}?", "Please work out what {a} + {b} is.", "I have {a} apples and buy {b} more. How many apples do I have?"),
    "successive": ("How much is {a}+{b}? Answer with just the number.", "What is {a} + {b}? Only the number, please."),
    "minus": ("the result of {a} - {b}", "How much do you get for {a} - {b}?", "Can you subtract {b} from {a}?", "What number is {a} minus {b}?", "I had {a} apples and ate {b}. How many apples are left?", "What remains if you take {b} away from {a}?"),
    "times": ("the result of {a} times {b}", "Can you multiply {a} by {b}?", "What number is {a} times {b}?", "How much do you get for {a} * {b}?", "{a} rows of {b} chairs: how many chairs, that is {a} times {b}?"),
    "divided": ("the result of {a} divided by {b}", "Can you divide {a} by {b}?", "What do you get if you divide {a} by {b}?", "What number is {a} divided by {b}?"),
    "word sum": ("the result of {a} plus {b}", "Can you add {a} and {b}?", "What number is {a} plus {b}?"),
    "double": ("the result of doubling {a}", "What do you get if you double {a}?", "What number is twice {a}?"),
    "half": ("the half of {b}", "What do you get if you halve {b}?", "What number is half of {b}?"),
    "square": ("the result of {a} squared", "What do you get if you square {a}?", "What number is the square of {a}?"),
    "next number": ("the number right after {a}", "If I count up, what number comes after {a}?"),
    "previous number": ("the number right before {a}", "If I count down, what number comes before {a}?"),
    "parity": ("Would you say {a} is even or odd?", "{a}: even or odd?", "Do you know if {a} is an odd or an even number?"),
    "larger": ("the larger of the numbers {a} and {b}", "Of {a} and {b}, which is larger?", "Which one is bigger, {a} or {b}?"),
    "smaller": ("the smaller of the numbers {a} and {b}", "Of {a} and {b}, which is smaller?", "Which one is smaller, {a} or {b}?"),
    "times table": ("the table of {n} times", "Can you count by {n}s?", "Can you say the {n} times table?"),
    "next day": ("the day right after {x}", "Which day of the week comes after {x}?", "Yesterday was not it: today is {x}, what day will tomorrow be?"),
    "previous day": ("the day right before {x}", "Which day of the week comes before {x}?", "It is {x} today. Which day was yesterday?"),
    "two days on": ("the day that comes two days after {x}", "It is {x}. What day is it in two days?"),
    "next month": ("the month right after {x}", "Which month of the year comes after {x}?", "It is {x}. What is the next month?"),
    "previous month": ("the month right before {x}", "Which month of the year comes before {x}?"),
    "month days": ("the number of days that {month} has", "Do you know how many days {month} has?", "How many days long is the month of {month}?", "Tell me how many days there are in {month}."),
    "nth month": ("the month that comes {nth} in the year", "Which month is the {nth} one of the year?"),
    "month number": ("the number that {month} has in the year", "Do you know which month number {month} is?"),
    "symbol": ("the symbol that {name} has in the periodic table", "Which letters are the symbol of {name}?", "Do you know which symbol {name} has?", "How do chemists write {name}?", "What is {name} written as in the periodic table?"),
    "element of symbol": ("the element that has the symbol {symbol}", "Which element does the symbol {symbol} stand for?", "In the periodic table, what is {symbol}?", "Do you know which element is written {symbol}?"),
    "atomic number": ("the number of protons that {name} has", "Do you happen to know the atomic number of {name}?", "Tell me which atomic number {name} has.", "What is the number of {name} in the table of elements?"),
    "element of number": ("the element that has atomic number {n}", "Do you know which element has {n} protons?", "In the periodic table, which element is number {n}?", "Tell me which of the elements has atomic number {n}."),
    "planet record": ("the planet that is called {record}", "Which of the planets is {record}?", "Do you know which planet is {record}?"),
    "nth planet": ("the planet that is {nth} from the Sun", "Counting from the Sun, which planet is the {nth}?"),
    "planet place": ("the place that {planet} has in the Solar System", "Counting from the Sun, which planet is {planet}?"),
    "next planet": ("the planet right after {x}", "Which planet of the Solar System comes after {x}?"),
    "previous planet": ("the planet right before {x}", "Which planet of the Solar System comes before {x}?"),
    "amount": ("the number of {many} that {one} has", "Do you know how many {many} there are in {one}?", "Tell me how many {many} you find in {one}.", "How many {many} can I find in {one}?"),
    "sides": ("the number of sides that {shape} has", "Do you know how many sides {shape} has?", "Tell me how many corners {shape} has."),
    "thing colour": ("the colour that {thing} has", "Do you know what colour {thing} is?", "Tell me which colour {thing} has.", "What is the usual colour of {thing}?"),
    "colour mix": ("the result of mixing {x} and {y}", "If I mix {x} and {y}, which colour do I get?", "Which colour do {x} and {y} give together?"),
    "legs": ("the number of legs that {animal} has", "Do you know how many legs {animal} has?", "How many legs can you count on {animal}?"),
    "young": ("the name of the young of {animal}", "Do you know what the baby of {animal} is called?"),
    "sound": ("the sound that comes from {animal}", "Do you know what {animal} says?", "Which sound does {animal} make?"),
    "opposite": ("the word with the opposite meaning of {x}", "Which word is opposite to {x}?", "If it is not {x}, it is the opposite. What is the opposite of {x}?", "Do you happen to know the opposite of {x}?", "What word means the contrary of {x}?"),
    "spelling": ("the right spelling of {word}", "Could you spell {word} for me?", "How would you spell {word}?", "Which letters spell the word {word}?"),
    "letter count": ("the number of letters that {word} has", "Do you know how many letters {word} has?", "Can you count the letters in {word}?"),
    "first letter": ("the first of the letters of {word}", "Which letter is the first in {word}?"),
    "last letter": ("the last of the letters of {word}", "Which letter is the last in {word}?"),
    "backwards": ("the letters of {word} backwards", "Can you spell {word} backwards?"),
    "nth letter": ("the letter with number {n} in the alphabet", "In the alphabet, which letter is number {n}?"),
    "letter place": ("the number of the letter {letter} in the alphabet", "In the alphabet, which number is {letter}?"),
    "next letter": ("the letter right after {x}", "In the alphabet, which letter comes after {x}?"),
    "previous letter": ("the letter right before {x}", "In the alphabet, which letter comes before {x}?"),
    "list": ("the full list of {what}", "Could you list {what}?", "I want to hear {what}.", "Please write a list of {what}.", "Can you recite {what}?", "Would you name {what} for me?"),
}  # fmt: skip

# one or more for each entry of smalltalk.SMALL_TALK, in its order
SMALL_TALK: tuple[tuple[str, ...], ...] = (
    ("Hello, how nice to meet you!", "A very good morning to you!"), ("How are you doing this morning?",), ("Please tell me your name.", "Could you introduce yourself?"), ("What sort of questions can you answer?",),
    ("Could you tell me what sealring is?", "Please explain what sealring does."), ("Can you explain how the ring works?",), ("Do you know who made you?",), ("Are you a human or a machine?",), ("Do you know how many parameters you have?",),
    ("Can anyone read my prompt?",), ("Thank you for your help!",), ("Goodbye, see you soon!",), ("Would you tell me a good joke?",), ("Would you tell me a story?",), ("Could you write a poem for me?",), ("That is very good!",), ("Can you say hello?",), ("Okay, I see.",),
)  # fmt: skip

OUT_OF_DOMAIN = (
    "Who wrote the novel Moby Dick?", "What is the tallest building in Dubai?", "How do I bake a sourdough loaf?", "Who is the king of Sweden?", "What is the population of Kenya?", "Which river flows through Vienna?",
    "Can you write a Python function that sorts a list?", "What is the weather like in Oslo today?", "Who won the World Cup in 1998?", "Translate good morning into Spanish.", "What is the boiling point of mercury?", "How far away is Saturn?",
    "What is 48291 plus 73920?", "What is the capital of Wakanda?", "How many people live in Lima?", "When did the Titanic sink?", "Why do we dream?", "Recommend a good restaurant in Rome.", "What is the speed of light?", "Who painted the Mona Lisa?",
    "How do vaccines work?", "What time does the bank open?", "Is it going to snow on Friday?", "What currency is used in Japan?", "Which language do people speak in Brazil?", "How tall is Mount Everest?", "Who directed Jaws?", "What is my favourite food?",
    "Summarize the plot of Hamlet.", "What is the best laptop for students?", "How many calories are in a croissant?", "When was gold discovered?", "What is the atomic mass of iron?", "Write a haiku about autumn leaves.", "What is the meaning of the word serendipity?",
    "How do I reset my router?", "Who was the first person on the Moon?", "What is the square root of 144?", "What is the derivative of x squared?", "Can you book me a flight to Madrid?", "Who is the president of Argentina?", "What is the longest bridge in China?",
    "Explain how blockchain works.", "What causes thunder?", "Is coffee bad for you?", "How old is the universe?", "What is the capital of Minnesota?", "Which company makes the iPhone?", "What is a good name for a parrot?", "How do I remove a wine stain?",
    "Who composed the Ninth Symphony?", "What are the symptoms of flu?", "How does inflation affect wages?", "What is a mortgage?", "How many moons does Jupiter have?", "What does the word cloud rhyme with?", "Who discovered oxygen?", "What should I cook for dinner tonight?",
    "Turn off the lights in the kitchen.", "What is the plot of Star Wars?", "How many bones does a giraffe have?", "What is 77 times 89?", "Give me the lyrics of a famous song.", "What is the symbol of unobtainium?",
)  # fmt: skip


def normalised(text: str) -> str:
    """Lower case letters, digits and operators alone: what makes two questions the same."""
    return " ".join(re.findall(r"[a-z0-9+*/=-]+", text.lower()))


def in_domain(random: Random) -> list[dict[str, str]]:
    cases = [
        {"family": "small talk", "question": ask, "answer": answer}
        for asks, (_, answer) in zip(SMALL_TALK, smalltalk.SMALL_TALK, strict=True)
        for ask in asks
    ]
    rest = QUESTIONS - len(cases) - 2 * len(FAMILIES)
    for family in [
        *FAMILIES,
        *FAMILIES,
        *random.choices(FAMILIES, [family.weight for family in FAMILIES], k=rest),
    ]:
        cases.append(case(family, {one["question"] for one in cases}, random))
    return cases


def case(family: Family, taken: set[str], random: Random) -> dict[str, str]:
    """A question not yet taken; one in eight asks for the bare answer."""
    row = family.draw(random)
    text = random.choice(WORDINGS[family.name])
    if text[-1] not in ".?":
        text = random.choice(SHELLS).replace("{}", text)
    short = family.name == "successive"
    text = capitalised(text.format(**row))
    if not short and random.random() < 0.125:
        short = True
        text += " " + random.choice(BRIEFLY).format(kind=short_kind(family, row))
    if text in taken:
        return case(family, taken, random)
    return {"family": family.name, "question": text, "answer": answer_to(family, row, short)}


def main() -> None:
    cases = {"in_domain": in_domain(Random(2024)), "out_of_domain": list(OUT_OF_DOMAIN)}
    print(json.dumps(cases, indent=1))


if __name__ == "__main__":
    main()
