"""A model's own options of sampling hold on a real ring where requests name none, in clear and sealed."""

import asyncio
import json
import shutil

import httpx
from ringtest import CLUSTER, LIMIT_SECONDS, MODEL, PROXY_KEY, chat, proxy

pytestmark = CLUSTER
QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
OWN = {"temperature": 0, "repetition_penalty": 2.5}
TOKENS = 16


async def test_what_requests_do_not_name_is_the_models_own(arrangements, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | OWN))
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text((await arrangements.some(stages=1)).key)
    async with (
        arrangements.beside(model=str(model), stages=2, max_rows=8, context=256) as ring,
        proxy(ring, tmp_path, "--api-key-file", str(key)) as (sealed, _),
        httpx.AsyncClient(timeout=LIMIT_SECONDS) as http,
    ):

        async def post(url, key, path, **fields):
            body = {"model": ring.model, "max_tokens": TOKENS, "stream": False, **fields}
            answer = await http.post(f"{url}{path}", json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            return answer.json()

        async def said(url, key, **named):
            chats = await post(url, key, "/v1/chat/completions", messages=MESSAGES, **named)
            responses = await post(url, key, "/v1/responses", input=QUESTION, **named)
            assert (responses["temperature"], responses["top_p"]) == (0, 1), "what was used"
            messages = await post(url, key, "/v1/messages", messages=MESSAGES, **named)
            ollama = await post(url, key, "/api/chat", messages=MESSAGES, **named)
            return {
                chats["choices"][0]["message"]["content"],
                "".join(part["text"] for one in responses["output"] for part in one.get("content") or []),
                "".join(part["text"] for part in messages["content"]),
                ollama["message"]["content"],
            }

        prompt = chat(QUESTION)
        plain = (await ring.reply(prompt, TOKENS)).text
        prompt.sampling.repetition_penalty = OWN["repetition_penalty"]
        own = (await ring.reply(prompt, TOKENS)).text
        assert own != plain
        for way in ((ring.cluster.http_url, ring.key), (sealed, PROXY_KEY)):
            found = await asyncio.gather(said(*way), said(*way, repetition_penalty=1))
            assert found == [{own}, {plain}], "what is named wins"
        (card,) = [
            one.plan.profile.card
            for one in (await ring.cluster.admin.call("ListDeployments")).deployments
            if one.plan.spec.name == ring.model
        ]
        assert (card.HasField("temperature"), card.repetition_penalty) == (True, OWN["repetition_penalty"])
