"""Sampling fields and log-probabilities on a real ring: by OpenAI's client, gRPC, sealed, proxied."""

import asyncio
import contextlib

import openai
import pytest_asyncio
from ringtest import CLUSTER, LIMIT_SECONDS, chat

from sealring.client.sealing import SealingBackend
from sealring.edge.http.app import create_app
from sealring.edge.http.server import HttpServer
from sealring.edge.metrics import Metrics
from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER
QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
ASKED = {
    "temperature": 0.0,
    "repetition_penalty": 2.5,
    "repetition_context_size": 12,
    "presence_penalty": 1.75,
    "frequency_penalty": 1.5,
}
CLOSE = 2e-3
"""Between the ring's float32 and the reference's, which computes the whole answer at once."""


@pytest_asyncio.fixture(loop_scope="session")
async def sealing(ring):
    async with ring.sealing() as client:
        yield client


@contextlib.asynccontextmanager
async def proxied(sealing):
    """OpenAI's client, and what seals its questions."""
    metrics = Metrics()
    edge = HttpServer(create_app(SealingBackend(sealing, metrics), exposition=metrics.exposition))
    port = edge.listen("127.0.0.1:0")
    await edge.start()
    try:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            yield client
    finally:
        await edge.stop()


def prompt_ids(reference):
    return reference.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)


def reference_logits(reference, ids):
    """After each token, by the whole model at once; float64."""
    import mlx.core as mx
    import numpy as np

    return np.array(reference.model(mx.array([ids]))[0].astype(mx.float32)).astype(np.float64)


def adjusted(logits, prompt, answer, options):
    values = logits.copy()
    for token, bias in options.get("logit_bias", {}).items():
        values[int(token)] += bias
    penalty = options.get("repetition_penalty", 1.0)
    for token in set([*prompt, *answer][-options.get("repetition_context_size", 20) :]):
        values[token] = values[token] * penalty if values[token] < 0 else values[token] / penalty
    for token in set(answer):
        values[token] -= answer.count(token) * options.get("frequency_penalty", 0.0)
        values[token] -= options.get("presence_penalty", 0.0)
    return values


def check(reference, tokens, options):
    """(id, log-probability, [(id, log-probability)]) of each token of a greedy answer, by the whole model."""
    import numpy as np

    prompt = prompt_ids(reference)
    answer = [token for token, _, _ in tokens]
    logits = reference_logits(reference, [*prompt, *answer])[len(prompt) - 1 : -1]
    for place, (token, logprob, top) in enumerate(tokens):
        values = adjusted(logits[place], prompt, answer[:place], options)
        assert values[token] >= values.max() - CLOSE, place
        raw = logits[place] - np.logaddexp.reduce(logits[place])
        assert abs(raw[token] - logprob) < CLOSE
        likeliest = np.sort(raw)[::-1][: len(top)]
        assert np.allclose([value for _, value in top], likeliest, atol=CLOSE)
        assert np.allclose([raw[each] for each, _ in top], likeliest, atol=CLOSE)


async def test_grpc_tells_what_the_whole_model_would(ring, reference):
    request = inference.GenerateRequest(
        model="demo", envelope=inference.Envelope(clear=chat(QUESTION, **ASKED, logprobs=4)), max_tokens=24
    )
    deltas = [
        one.delta async for one in ring.stub.Generate(request, timeout=LIMIT_SECONDS) if one.HasField("delta")
    ]
    tokens = [one for delta in deltas for one in delta.logprobs]
    assert b"".join(one.spelling for one in tokens).decode() == "".join(delta.text for delta in deltas)
    assert len(tokens) > 4
    check(reference, [(one.id, one.logprob, [(t.id, t.logprob) for t in one.top]) for one in tokens], ASKED)
    plain = await ring.ask(chat(QUESTION), 24)
    assert plain.text != "".join(delta.text for delta in deltas)
    assert plain == reference.reply(MESSAGES, 24)


async def test_chat_log_probabilities_whole_and_streamed(client, reference):
    asked = {"model": "demo", "messages": MESSAGES, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    assert whole.message.content == reference.reply(MESSAGES, 200).text
    content = whole.logprobs.content
    assert "".join(one.token for one in content) == whole.message.content
    ids = [reference.tokenizer.convert_tokens_to_ids(name) for name in names(reference, content)]
    check(
        reference,
        [(token, one.logprob, []) for token, one in zip(ids, content, strict=True)],
        {},
    )
    for one in content:
        assert bytes(one.bytes).decode() == one.token
        assert one.top_logprobs[0].token == one.token
        values = [each.logprob for each in one.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
    stream = await client.chat.completions.create(**asked, stream=True)
    pieces = [chunk.choices[0].logprobs async for chunk in stream]
    assert [one for piece in pieces if piece for one in piece.content] == content


def names(reference, content):
    """The vocabulary's names of the tokens of an answer, by the tokenizer alone."""
    text = "".join(one.token for one in content)
    encoded = reference.tokenizer.encode(text, add_special_tokens=False)
    return reference.tokenizer.convert_ids_to_tokens(encoded)[: len(content)]


async def test_completion_log_probabilities(client):
    asked = {"model": "demo", "prompt": "The capital of", "max_tokens": 6, "temperature": 0, "logprobs": 5}
    whole = (await client.completions.create(**asked)).choices[0]
    logged = whole.logprobs
    assert "".join(logged.tokens) == whole.text
    assert logged.text_offset == [whole.text.index(whole.text[at:]) for at in logged.text_offset]
    assert [len(each) for each in logged.top_logprobs] == [5] * len(logged.tokens)
    for token, logprob, top in zip(logged.tokens, logged.token_logprobs, logged.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
    stream = await client.completions.create(**asked, stream=True)
    pieces = [chunk.choices[0].logprobs async for chunk in stream]
    assert [one for piece in pieces if piece for one in piece.tokens] == logged.tokens


async def test_log_probabilities_of_prompts_are_the_whole_models(ring, client, sealing, reference):
    """As lm-evaluation-harness asks for them, twice: no prefix that is kept takes their place."""
    import numpy as np

    text = "The capital of France is Paris. The capital of Italy is Rome. " * 3
    ids = reference.tokenizer.encode(text)
    begin = reference.tokenizer.decode(ids[:1])
    logits = reference_logits(reference, ids)
    raw = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    own = [raw[place][token] for place, token in enumerate(ids[1:])]
    asked = {"model": "demo", "temperature": 0, "logprobs": 1, "echo": True}
    async with proxied(sealing) as through:
        for speaks, prompt, most in ((client, text, 0), (client, ids, 1), (through, [ids, ids], 1)):
            answer = await speaks.completions.create(**asked, prompt=prompt, max_tokens=most)
            for choice in answer.choices:
                logged = choice.logprobs
                assert "".join(logged.tokens[: len(ids)]) == begin + text
                assert choice.text.startswith(text if prompt is text else begin + text)
                assert logged.token_logprobs[0] is None
                assert np.allclose(logged.token_logprobs[1 : len(ids)], own, atol=CLOSE)
                likeliest = [max(top.values()) for top in logged.top_logprobs[1 : len(ids)]]
                assert np.allclose(likeliest, raw[:-1].max(axis=-1), atol=CLOSE)
                assert logged.text_offset[: len(ids)] == sorted(logged.text_offset[: len(ids)])
                assert len(logged.tokens) == len(ids) + most
            assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_bias_forces_and_forbids(client, reference):
    encoded = reference.tokenizer.encode("7", add_special_tokens=False)
    asked = {"model": "demo", "messages": MESSAGES, "max_tokens": 5}
    forced = await client.chat.completions.create(**asked, logit_bias={str(encoded[-1]): 100})
    assert forced.choices[0].message.content == "77777"
    first = reference.reply(MESSAGES, 1).text
    ids = reference.tokenizer.encode(first, add_special_tokens=False)
    other = await client.chat.completions.create(
        **asked, temperature=0, logit_bias={str(token): -100 for token in ids}, logprobs=True
    )
    assert not other.choices[0].message.content.startswith(first)
    logged = other.choices[0].logprobs.content[0]
    assert logged.logprob < -0.5, "the model's own probability, not the one after the bias"


async def test_a_stop_string_cuts_the_tokens_with_the_text(client, reference):
    text = reference.reply(MESSAGES, 100).text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    answer = await client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, stop=stop, logprobs=True
    )
    spelt = "".join(one.token for one in answer.choices[0].logprobs.content)
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert spelt.startswith(answer.choices[0].message.content)
    last = answer.choices[0].logprobs.content[-1].token
    assert len(spelt) - len(answer.choices[0].message.content) < len(last)


async def test_each_choice_has_its_own_penalties_and_tokens(client):
    asked = {"model": "demo", "prompt": "The capital of", "max_tokens": 8, "temperature": 1.2, "seed": 3}
    asked |= {"presence_penalty": 1.5, "extra_body": {"repetition_penalty": 1.5}, "logprobs": 2, "n": 3}
    whole = (await client.completions.create(**asked)).choices
    for choice in whole:
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.text_offset[0] == 0
    for number, choice in enumerate(whole):
        alone = await client.completions.create(**asked | {"seed": 3 + number, "n": 1})
        assert alone.choices[0].text == choice.text
        assert alone.choices[0].logprobs == choice.logprobs
    chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
    for number, choice in enumerate(whole):
        own = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].index == number]
        offsets = [one for piece in own if piece for one in piece.text_offset]
        assert offsets == choice.logprobs.text_offset


async def test_company_changes_nothing(ring):
    prompt = chat("Tell me about the planets.", **{**ASKED, "temperature": 1.1}, seed=5, logprobs=2)
    alone = await ring.ask(prompt, 30)
    others = [ring.ask(chat(f"What is {n}+{n}?", temperature=1.0), 5 * n + 3) for n in range(6)]
    together = await asyncio.gather(ring.ask(prompt, 30), *others, ring.ask(prompt, 30))
    assert together[0] == alone
    assert together[-1] == alone


async def test_sealed_and_through_the_proxy_it_is_the_same(ring, client, sealing, reference):
    asked = {"model": "demo", "messages": MESSAGES, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    extra = {"repetition_penalty": 1.2, "repetition_context_size": 12}
    clear = (await client.chat.completions.create(**asked, max_tokens=12, extra_body=extra)).choices[0]
    reply = sealing.chat(MESSAGES, max_tokens=12, logprobs=2, **extra)
    deltas = [delta async for delta in reply]
    done = reply.completion
    logged = [(one.token, one.logprob, [(t.token, t.logprob) for t in one.top]) for one in done.logprobs]
    assert [one for delta in deltas for one in delta.logprobs] == list(done.logprobs)
    assert done.text == clear.message.content
    assert logged == [
        (one.token, one.logprob, [(t.token, t.logprob) for t in one.top_logprobs])
        for one in clear.logprobs.content
    ]
    check(
        reference,
        [(one.id, one.logprob, [(t.id, t.logprob) for t in one.top]) for one in done.logprobs],
        extra,
    )
    async with proxied(sealing) as through:
        whole = await through.chat.completions.create(**asked, max_tokens=12, extra_body=extra)
        streamed = await through.chat.completions.create(
            **asked, max_tokens=12, extra_body=extra, stream=True
        )
        pieces = [chunk.choices[0].logprobs async for chunk in streamed]
    assert whole.choices[0] == clear
    assert [one for piece in pieces if piece for one in piece.content] == clear.logprobs.content


async def test_an_answer_has_the_length_that_was_asked_for(ring, client, sealing, reference):
    """In clear by three ways, sealed, and through the proxy: as clients that measure speed ask."""
    short = reference.reply(MESSAGES, 200)
    length = short.completion_tokens + 5
    extra = {"ignore_eos": True, "min_tokens": length}
    asked = {"model": "demo", "max_tokens": length, "temperature": 0, "extra_body": extra}
    clear = await client.chat.completions.create(messages=MESSAGES, **asked)
    text = clear.choices[0].message.content
    assert (clear.choices[0].finish_reason, clear.usage.completion_tokens) == ("length", length)
    assert text.startswith(short.text)
    clear_reply = await ring.ask(chat(QUESTION, ignore_eos=True), length)
    assert (clear_reply.text, clear_reply.completion_tokens) == (text, length)
    reply = await sealing.chat(MESSAGES, max_tokens=length, ignore_eos=True)
    assert (reply.text, reply.finish_reason) == (text, "length")
    async with proxied(sealing) as through:
        assert (await through.chat.completions.create(messages=MESSAGES, **asked)).choices == clear.choices
    completed = await client.completions.create(prompt="The capital of", **asked)
    assert (completed.choices[0].finish_reason, completed.usage.completion_tokens) == ("length", length)
    least = await client.chat.completions.create(
        **{
            **asked,
            "messages": MESSAGES,
            "max_tokens": 200,
            "extra_body": {"min_tokens": short.completion_tokens + 1},
        }
    )
    assert least.usage.completion_tokens > short.completion_tokens
    first = reference.tokenizer.encode(reference.reply(MESSAGES, 1).text, add_special_tokens=False)
    ends = await client.chat.completions.create(
        **{**asked, "messages": MESSAGES, "extra_body": {"stop_token_ids": first}}
    )
    assert (ends.choices[0].finish_reason, ends.choices[0].message.content) == ("stop", "")
