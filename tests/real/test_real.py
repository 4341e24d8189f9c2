"""Models with real weights, over rings of two and three nodes: their answers are those of mlx_lm on the whole
model, token for token, but for near ties, of which the output tells (`-rP`)."""

import asyncio
import json

import jsonschema
import pytest
import sixty
from realmodels import prompts
from ringtest import CLUSTER, chat, proxy
from sixty import LIMIT_SECONDS, ask, ask_all, said
from weather import BY_HTTP, over_grpc, with_the_library

from sealring.v1 import inference_pb2 as inference

pytestmark = [*CLUSTER, pytest.mark.real, pytest.mark.timeout(LIMIT_SECONDS)]
WHOLE = ["smollm2", "gemma3", "qwen2"]
"""The bytes of weights decide about the time: one token of SmolLM2 takes 0.1 s of a CPU, of Qwen2 0.5 s."""

TOKENS = 6
PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "country": {"enum": ["France", "Peru", "Kenya"]},
        "people": {"type": "integer", "minimum": 1, "maximum": 9999},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
        "capital": {"type": "boolean"},
    },
    "required": ["name", "country", "people", "rivers", "capital"],
    "additionalProperties": False,
}

DEGREES = {
    "type": "object",
    "required": ["degrees"],
    "properties": {"degrees": {"type": "integer"}},
    "additionalProperties": False,
}


def check_all(whole, asked, answers, tokens, kv_bits=0):
    """The answers are those of the whole model, or near ties, and of equal ones the text as well."""
    for answer, expected in sixty.check_all(whole, asked, answers, tokens, kv_bits):
        assert answer.text == whole.tokenizer.decode(expected)


@pytest.mark.parametrize(
    ("name", "stages"), [(name, stages) for name in WHOLE for stages in (2, 3)], scope="module"
)
async def test_sixty_answers_are_those_of_the_whole_model(arrangements, wholes, name, stages):
    whole = wholes(name)
    ring = await arrangements.have(model=str(whole.folder), stages=stages, context=4096)
    asked = prompts(whole)
    assert len(asked) == 60
    check_all(whole, asked, await ask_all(ring, asked, TOKENS), TOKENS)


async def test_answers_of_a_quantized_model_are_those_of_the_whole(arrangements, wholes):
    whole = wholes("smollm2-8bit")
    ring = await arrangements.have(model=str(whole.folder), stages=3, context=4096)
    asked = prompts(whole)[::5]
    check_all(whole, asked, await ask_all(ring, asked, TOKENS), TOKENS)


@pytest.mark.parametrize("kv_bits", [8, 4])
async def test_answers_with_a_quantized_cache_are_those_of_mlx_lm_with_one(arrangements, wholes, kv_bits):
    whole = wholes("smollm2")
    ring = await arrangements.have(model=str(whole.folder), stages=2, context=4096, kv_bits=kv_bits)
    asked = prompts(whole)[::5]
    check_all(whole, asked, await ask_all(ring, asked, TOKENS), TOKENS, kv_bits)


def chairs(rooms):
    """A long text of which an answer needs the beginning."""
    return " ".join(f"Room {number} has {number * 7 % 50} chairs." for number in range(rooms))


async def test_a_prompt_of_three_thousand_tokens_is_answered_as_by_the_whole_model(arrangements, wholes):
    """Most layers of gemma3 see 512 tokens. The prompt is computed in chunks, over two stages."""
    whole = wholes("gemma3")
    ring = await arrangements.have(model=str(whole.folder), stages=2, context=4096)
    prompt = inference.Prompt(text=chairs(288) + " Room 3 has")
    assert len(whole.ids(prompt)) > 3000
    answer = await ask(ring, prompt, TOKENS, sealed=True)
    assert not answer.cached
    check_all(whole, [prompt], [answer], TOKENS)


async def test_a_conversation_of_thousands_of_tokens_is_computed_once(arrangements, wholes):
    whole = wholes("smollm2")
    ring = await arrangements.have(model=str(whole.folder), stages=3, context=4096)
    asked = [chairs(230) + " How many chairs are in room 3?"]
    cache, held, total = whole.cache(), 0, 0
    for question in ("And in room 4?", "And in room 9?"):
        prompt = said(chat("", *asked))
        ids = whole.ids(prompt)
        assert len(ids) > 2000
        expected = whole.answer(ids, TOKENS, cache=cache)
        answer = await ask(ring, prompt, TOKENS)
        assert (tie := whole.tie(prompt, answer.tokens, expected)) is None or tie.is_near(), tie
        assert answer.cached >= held - 64
        held = len(ids)
        total += answer.cached
        asked += [whole.tokenizer.decode(expected), question]
    assert total > 2000


async def test_answers_go_on_when_an_engine_is_killed_in_their_middle(arrangements, wholes):
    whole = wholes("smollm2")
    ring = await arrangements.have(model=str(whole.folder), stages=3, context=4096)
    status = await ring.serving()
    middle = ring.node_of(ring.deployment.plan.rings[0].stages[1].member)
    pieces = []

    def count():
        pieces.append(None)
        if len(pieces) == 20:
            ring.part(middle, "engine").kill()

    asked = prompts(whole)[-8:]
    answers = await ask_all(ring, asked, 2 * TOKENS, on_piece=count)
    assert (await ring.serving()).epoch > status.epoch
    check_all(whole, asked, answers, 2 * TOKENS)


@pytest.mark.parametrize("name", WHOLE)
async def test_answers_are_instances_of_a_schema(arrangements, wholes, name):
    whole = wholes(name)
    ring = await arrangements.have(model=str(whole.folder), stages=2, context=4096)
    words = f"Paris as JSON, by the schema {json.dumps(PLACE)}:"
    prompt = said(chat("", words)) if whole.tokenizer.has_chat_template else inference.Prompt(text=words)
    prompt.schema = json.dumps(PLACE)
    clear, sealed = await ask_all(ring, [prompt] * 2, 200)
    jsonschema.validate(json.loads(clear.text), PLACE)
    jsonschema.validate(json.loads(sealed.text), PLACE)


async def test_a_call_that_is_required_keeps_to_its_tools_schema(arrangements, wholes):
    """Qwen2's template names its tools, which those of the other models do not."""
    whole = wholes("qwen2")
    ring = await arrangements.have(model=str(whole.folder), stages=2, context=4096)
    function = {"name": "keep", "description": "Keep a place", "parameters": PLACE, "strict": True}
    async with ring.openai() as client:
        said = await client.chat.completions.create(
            model=ring.model,
            messages=[{"role": "user", "content": "Keep Paris."}],
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=200,
            timeout=LIMIT_SECONDS,
        )
    (call,) = said.choices[0].message.tool_calls
    assert call.function.name == "keep"
    jsonschema.validate(json.loads(call.function.arguments), PLACE)


async def test_qwen2_calls_a_tool_and_goes_on_after_its_result_in_each_api(arrangements, wholes, tmp_path):
    """Chats, Responses, Messages, Ollama's API and prompts of the contract, each in clear and sealed.

    It calls of itself, and writes the JSON of a call without the marks that its template asks for. After the
    result it writes the same again, unless its answer has a form.
    """
    ring = await arrangements.have(model=str(wholes("qwen2").folder), stages=2, context=4096)
    async with proxy(ring, tmp_path) as (sealed, _):
        # first the two whose prompts are prefixes that are kept for the others
        answers = [await over_grpc(ring, DEGREES), await with_the_library(ring, DEGREES)]
        urls = ring.cluster.http_url, sealed
        asked = [converse(url, ring.model, DEGREES) for converse in BY_HTTP.values() for url in urls]
        answers += await asyncio.gather(*asked)
    assert [json.loads(answer) for answer in answers] == [{"degrees": 21}] * 10
