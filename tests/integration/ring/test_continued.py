"""An answer that the client has begun goes on, in every API, with a real ring in clear and sealed."""

import asyncio
from typing import Any

import httpx
from ringtest import CLUSTER, LIMIT_SECONDS, PROXY_KEY

pytestmark = CLUSTER
QUESTION = {"role": "user", "content": "What is the capital of France?"}
BEGUN = "The capital"
SAID = {"role": "assistant", "content": BEGUN}
ASKED = {"model": "demo", "messages": [QUESTION, SAID], "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**ASKED, "continue_final_message": True},
    "/v1/messages": {**ASKED, "max_tokens": 50},
    "/api/chat": {
        "model": "demo",
        "messages": [QUESTION, SAID],
        "stream": False,
        "options": {"temperature": 0},
    },
    "/v1/responses": {
        "model": "demo",
        "input": [QUESTION, {"type": "message", **SAID, "status": "incomplete"}],
        "temperature": 0,
    },
}


def told(path: str, body: Any) -> str:
    if path == "/v1/responses":
        (item,) = body["output"]
        return str(item["content"][0]["text"])
    message = body["choices"][0]["message"] if "choices" in body else body.get("message", body)
    content = message["content"]
    return str(content if isinstance(content, str) else content[0]["text"])


async def test_an_answer_goes_on_behind_its_beginning(ring, sealed, reference):
    whole = reference.reply([QUESTION], 50).text
    assert whole.startswith(f"{BEGUN} ")
    key = {"authorization": f"Bearer {PROXY_KEY}"}
    async with httpx.AsyncClient(headers=key, timeout=LIMIT_SECONDS) as http:

        async def asked(url: str, path: str, body: Any) -> str:
            answer = await http.post(f"{url}{path}", json=body)
            assert answer.status_code == 200, answer.text
            return told(path, answer.json())

        prefixed = {**ASKED, "messages": [QUESTION, {**SAID, "prefix": True}]}
        bodies = [*BODIES.items(), ("/v1/chat/completions", prefixed)]
        urls = (ring.cluster.http_url, sealed)
        answers = await asyncio.gather(*(asked(url, *one) for url in urls for one in bodies))
    assert [BEGUN + answer for answer in answers] == [whole] * len(answers)
