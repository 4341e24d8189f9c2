"""Greedy output of real rings is token for token that of mlx_lm on the whole model, kept prefixes or not."""

import asyncio
import shutil

import pytest
from ringtest import CLUSTER, MODEL, chat
from sharing import ask, dialogue

from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER
ALONE = pytest.param(1, 0, marks=pytest.mark.sweep)  # whose engine has its own tests
LONGER = pytest.param(3, 0, marks=pytest.mark.sweep)  # as a ring of two with a draft model
SHAPES = pytest.mark.parametrize(("stages", "kv_bits"), [ALONE, LONGER, (2, 4)], scope="module")
ROWS = [
    (["What is the capital of France?"], 40, 0.0),
    (["What is 7+8? Answer with just the number."], 10, 0.0),
    (["List the months of the year."], 30, 0.1),
    (["Hello!", "Hello! How can I help you?", "What is the symbol of gold?"], 30, 0.2),
    (["Name the planets of the solar system in order, please, beginning with the nearest."], 40, 0.3),
    (["What is the opposite of hot?"], 1, 0.35),
    (["Who are you?"], 25, 0.5),
    (["What is the capital of Kenya? " * 20], 12, 0.6),
]
"""Contents, tokens at most, and seconds after which it comes."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

PREDICTIONS = ["January, February, March, April, May, June, July, August", "something else " * 9]

QUESTIONS = ["What is the capital of France?", "What is the opposite of hot?", "Who are you?"]


@pytest.mark.parametrize(("stages", "kv_bits"), [ALONE, (3, 0), (2, 4)], scope="module")
async def test_rows_that_come_and_go_get_the_tokens_of_the_whole_model(
    arrangements, reference, stages, kv_bits
):
    ring = await shaped(arrangements, stages, kv_bits)
    assert ring.deployment.plan.spec.kv_bits == kv_bits

    await rows_come_and_go(ring, reference, kv_bits)


@SHAPES
async def test_prompts_that_begin_alike_are_computed_once(arrangements, reference, stages, kv_bits):
    ring = await shaped(arrangements, stages, kv_bits)
    hits = await ring.counted("prefix_cache_hits_total")
    queries = await ring.counted("prefix_cache_queries_total")
    total = 0
    for number, question in enumerate(QUESTIONS):
        answer = await checked(ring, reference, dialogue(question), kv_bits)
        assert (answer.cached >= 64) == (number > 0)
        total += answer.cached

    follow = dialogue(QUESTIONS[-1], answer.text, "And what is the capital of Kenya?")
    again = await checked(ring, reference, follow, kv_bits)
    assert again.cached >= answer.prompt_tokens - 64
    total += again.cached

    together = await asyncio.gather(
        *(checked(ring, reference, dialogue(question), kv_bits) for question in QUESTIONS)
    )
    assert min(answer.cached for answer in together) >= 64
    total += sum(answer.cached for answer in together)
    assert await ring.counted("prefix_cache_hits_total") - hits == total
    assert await ring.counted("prefix_cache_queries_total") - queries > total


@SHAPES
async def test_an_answer_that_is_alone_gets_the_tokens_of_the_whole_model_by_drafts(
    arrangements, reference, stages, kv_bits
):
    ring = await shaped(arrangements, stages, kv_bits)
    messages = dialogue("The capital of France is Paris. " * 3 + "What is the capital of France?")
    answer = await checked(ring, reference, messages, kv_bits, max_tokens=50)
    assert answer.drafts[1] <= answer.drafts[0]  # whether there are any depends on how long steps take here
    seeded = {"temperature": 0.3, "seed": 7}
    answers = [
        await ask(ring, messages, max_tokens=50, sampling=inference.Sampling(**seeded, **limit))
        for limit in ({}, {"num_draft_tokens": 0})
    ]
    assert answers[0].text == answers[1].text
    assert answers[1].drafts == (0, 0)
    question = [{"role": "user", "content": "Name three colours."}]
    plain = await checked(ring, reference, question, kv_bits, max_tokens=50)
    async with ring.sealing() as client:
        for prediction in (plain.text, f"{plain.text[:20]} or {plain.text[20:]}", "something else " * 9):
            told = await client.chat(question, max_tokens=50, prediction=prediction)
            assert told.text == plain.text
            assert told.usage.accepted_tokens <= told.usage.drafted_tokens


@SHAPES
async def test_tools_and_stop_strings_end_an_answer_alike_with_right_and_wrong_drafts(
    arrangements, stages, kv_bits
):
    """A stop string may end inside a run of drafts, and a call is read when its last token is accepted."""
    ring = await shaped(arrangements, stages, kv_bits)
    counting = {"messages": [{"role": "user", "content": "List the months of the year."}]}
    whole = (await completed(ring, **counting)).message.content
    middle = len(whole) // 2
    stopped = counting | {"stop": [whole[middle : middle + 3]]}
    calling = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}], "tools": [WEATHER]}
    guessed = [{}, *({"prediction": {"type": "content", "content": text}} for text in PREDICTIONS)]
    for asked, reason, drafts in ((stopped, "stop", guessed), (calling, "tool_calls", [{}])):
        plain = await completed(ring, **asked, extra_body={"num_draft_tokens": 0})
        assert plain.finish_reason == reason
        for drafted in drafts:
            assert without_ids(await completed(ring, **asked, **drafted)) == without_ids(plain)


async def completed(ring, **asked):
    """The only choice of a chat completion over HTTP."""
    async with ring.openai() as client:
        asked |= {"model": ring.model, "temperature": 0, "max_tokens": 60}
        return (await client.chat.completions.create(**asked)).choices[0]


def without_ids(choice):
    """The choice without the ids of its calls, which are random."""
    calls = [call.function for call in choice.message.tool_calls or ()]
    return choice.finish_reason, choice.message.content, calls


async def shaped(arrangements, stages, kv_bits):
    """A ring that guesses tokens, by a draft model, too, if it has two stages: a copy of its own model."""
    draft = ""
    if stages == 2:
        draft = str(arrangements.cluster.state_dir / "small")
        shutil.copytree(MODEL, draft, dirs_exist_ok=True)
    spec = {"stages": stages, "kv_bits": kv_bits, "prefill_chunk": 64, "speculate": True, "draft": draft}
    ring = await arrangements.have(**spec)
    head, *others = ring.deployment.plan.rings[0].stages
    assert [one.model for one in head.residents] == [draft] * bool(draft)
    assert not any(stage.residents for stage in others)
    return ring


async def checked(ring, reference, messages, kv_bits, max_tokens=24):
    """What the ring answers, which is what the whole model would."""
    answer = await ask(ring, messages, max_tokens=max_tokens)
    expected = reference.reply(messages, max_tokens, kv_bits=kv_bits)
    assert (answer.text, answer.prompt_tokens) == (expected.text, expected.prompt_tokens)
    return answer


async def rows_come_and_go(ring, reference, kv_bits, rows=ROWS):
    """Each of them gets the tokens of the whole model."""

    async def row(contents, max_tokens, delay):
        await asyncio.sleep(delay)
        return await ring.ask(chat(*contents), max_tokens)

    replies = await asyncio.gather(*(row(*one) for one in rows))
    for (contents, max_tokens, _), reply in zip(rows, replies, strict=True):
        messages = [
            {"role": ("user", "assistant")[number % 2], "content": content}
            for number, content in enumerate(contents)
        ]
        assert reply == reference.reply(messages, max_tokens, kv_bits=kv_bits)
