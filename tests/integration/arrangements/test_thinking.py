"""Budgets of thoughts hold on a real ring, in clear and sealed, in the APIs that have them."""

import asyncio
import json
import shutil

import httpx
from ringtest import CLUSTER, LIMIT_SECONDS, MODEL, PROXY_KEY, proxy

pytestmark = CLUSTER
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "<|assistant|><think>"
)
NAMES = {"<|pad|>": "<think>", "<|system|>": "</think>"}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def write_thinking(folder):
    """The demo model, whose answers begin as thoughts."""
    shutil.copytree(MODEL, folder)
    text = (folder / "tokenizer.json").read_text("utf-8")
    for name, other in NAMES.items():
        text = text.replace(json.dumps(name), json.dumps(other))
    (folder / "tokenizer.json").write_text(text, "utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    settings |= {"chat_template": TEMPLATE, "pad_token": "<think>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


async def test_thoughts_end_at_their_budget(arrangements, tmp_path):
    model = write_thinking(tmp_path / "model")
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text((await arrangements.some(stages=1)).key)
    async with (
        arrangements.beside(model=str(model), stages=2, max_rows=8, context=256) as ring,
        proxy(ring, tmp_path, "--api-key-file", str(key)) as (sealed, _),
        httpx.AsyncClient(timeout=LIMIT_SECONDS) as http,
    ):
        ways = [(ring.cluster.http_url, ring.key), (sealed, PROXY_KEY)]
        body = {"model": ring.model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}

        async def post(way, path, **fields):
            url, key = way
            headers = {"authorization": f"Bearer {key}"}
            answer = await http.post(f"{url}{path}", json={**body, **fields}, headers=headers)
            assert answer.status_code == 200, answer.text
            return answer.json()

        async def chat(way, **fields):
            (choice,) = (await post(way, "/v1/chat/completions", **fields))["choices"]
            return choice["message"].get("reasoning_content") or "", choice["message"]["content"] or ""

        async def messages(way, budget):
            thinking = {"type": "enabled", "budget_tokens": budget}
            said = await post(way, "/v1/messages", thinking=thinking)
            return tuple(
                "".join(one.get(kind, "") for one in said["content"]) for kind in ("thinking", "text")
            )

        async def all_of(way):
            return await asyncio.gather(
                chat(way),
                chat(way, thinking_budget=0),
                chat(way, thinking_budget=3),
                chat(way, reasoning={"max_tokens": 3}),
                messages(way, 3),
            )

        clear, hidden = [await all_of(way) for way in ways]
    assert clear == hidden
    (thought, nothing), (none, _), bounded, *others = clear
    assert (nothing, none) == ("", "")
    assert thought.startswith(bounded[0])
    assert 0 < len(bounded[0]) < len(thought)
    assert others == [bounded] * 2
