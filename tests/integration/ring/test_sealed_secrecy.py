"""While it serves marked sealed prompts, a gateway's memory, the logs and every socket hold nothing of them.

The answers are of words drawn by lot: nobody is answered the same in clear by the ring that all tests share.
"""

import asyncio
import secrets

import httpx
from capture import Capture, forms_of, found, found_in_files, found_in_memory
from ringtest import CLUSTER, LIMIT_SECONDS, chat

from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER


def messages(text):
    return [{"role": "user", "content": text}]


async def test_the_gateway_holds_neither_prompt_nor_tokens_nor_text(ring, reference):
    mark = "quixotic zeppelin wharf 58213 obelisk"
    prompt = forms_of(mark, reference.tokenizer)
    gateway = ring.cluster.processes["gateway"]
    drawn = secrets.SystemRandom().sample(range(600, 1500), 60)
    sampling = {"temperature": 2.0, "logit_bias": dict.fromkeys(drawn, 100.0), "logprobs": 5}
    with Capture() as capture:
        async with ring.sealing() as client:
            replies = [
                client.chat(messages(f"Please repeat: {mark}"), max_tokens=40, **sampling) for _ in range(2)
            ]
            others = asyncio.gather(*(reply.result() for reply in replies[1:]))
            during, pieces = set(), 0
            async for _ in replies[0]:
                pieces += 1
                if pieces == 2:
                    during = await asyncio.to_thread(found_in_memory, gateway, prompt)
            await others
            text = max((reply.completion.text for reply in replies), key=len)
        await capture.caught_up()
    assert pieces >= 2
    assert len(text) >= 40, "a short answer may be found by chance"
    answer = forms_of(text, reference.tokenizer)
    del answer["longest word"]
    forms = prompt | {f"answer, {name}": form for name, form in answer.items()}
    own = list(capture.own(ring.cluster.processes.values()).values())
    assert sum(map(len, own)) > 10000, "the cluster's own traffic was not captured"
    seen = {
        "memory while it serves": during,
        "memory afterwards": await asyncio.to_thread(found_in_memory, gateway, forms),
        "sockets": {name for data in own for name in found(data, forms)},
        "logs and other files": found_in_files(ring.cluster.state_dir, forms),
    }
    assert seen == {place: set() for place in seen}


async def test_the_same_search_finds_a_clear_prompt_and_its_answer(ring, reference):
    mark = "verbatim gargoyle plinth 77031 quagmire"
    prompt = forms_of(mark, reference.tokenizer)
    gateway = ring.cluster.processes["gateway"]
    during, texts = set(), []
    call = ring.stub.Generate(
        inference.GenerateRequest(
            model="demo",
            envelope=inference.Envelope(clear=chat(f"Please repeat: {mark}", temperature=1.4, seed=5)),
            max_tokens=60,
        ),
        timeout=LIMIT_SECONDS,
    )
    with Capture() as capture:
        async for response in call:
            if response.HasField("delta"):
                texts.append(response.delta.text)
                if len(texts) == 2:
                    during = await asyncio.to_thread(found_in_memory, gateway, prompt)
        body = {
            "model": "demo",
            "messages": messages(f"Say {mark}"),
            "temperature": 1.4,
            "seed": 6,
            "max_tokens": 60,
        }
        async with httpx.AsyncClient(base_url=ring.cluster.http_url, timeout=LIMIT_SECONDS) as http:
            whole = (await http.post("/v1/chat/completions", json=body)).json()
        await capture.caught_up()
    text = whole["choices"][0]["message"]["content"]
    assert "utf-8" in during
    assert "utf-8" in await asyncio.to_thread(found_in_memory, gateway, {"utf-8": text.encode()})
    assert any("utf-8" in found(bytes(data), prompt) for data in capture.streams.values())
