"""Prompts with one beginning: less is computed, and API keys share it only where the deployment says so."""

import openai
import pytest
from ringtest import CLUSTER, chat
from sharing import SYSTEM, ask, dialogue

pytestmark = CLUSTER
QUESTION = "What is the capital of France?"
APART = {"stages": 1, "prefill_chunk": 128}
SHARED = APART | {"share_prefixes": True}


@pytest.mark.parametrize("share", [True, False])
async def test_api_keys_share_only_where_the_deployment_says_so(arrangements, other_key, share):
    ring = await arrangements.have(**(SHARED if share else APART))
    first = await ask(ring, dialogue(QUESTION))
    other = await ask(ring, dialogue(QUESTION), key=other_key)
    assert (other.cached >= 64) == share
    again = await ask(ring, dialogue(QUESTION))
    assert again.cached >= 64
    assert first.text == other.text == again.text

    url = f"{ring.cluster.http_url}/v1"
    for key, hits in ((ring.key, True), (other_key, share)):
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:

            async def cached(prompt, client=client, **fields):
                answer = await client.completions.create(
                    model=ring.model, prompt=prompt, max_tokens=1, **fields
                )
                return answer.usage.prompt_tokens_details.cached_tokens

            fresh = await cached(SYSTEM + "fresh", user="the same word")
            assert await cached(SYSTEM + "fresh again") >= 64
            if key == other_key:
                assert bool(fresh) == hits


async def test_a_chat_of_one_word_has_nothing_to_share(arrangements):
    ring = await arrangements.have(**APART)
    before = await ring.counted("prefix_cache_hits_total")
    first = await ring.ask(chat("Hello!"), 5)
    assert await ring.ask(chat("Hello!"), 5) == first
    assert await ring.counted("prefix_cache_hits_total") == before


async def test_sealed_prompts_share_with_those_of_the_same_client_only(arrangements):
    ring = await arrangements.have(**APART)
    clear = await ask(ring, dialogue(QUESTION), max_tokens=40)
    async with ring.sealing() as one, ring.sealing() as two:
        for client, cached in ((one, False), (one, True), (two, False), (two, True), (one, True)):
            answer = await client.chat(dialogue(QUESTION), model=ring.model, max_tokens=40).result()
            assert answer.text == clear.text
            assert (answer.usage.cached_tokens >= 64) == cached
    assert (await ask(ring, dialogue(QUESTION))).cached >= 64
