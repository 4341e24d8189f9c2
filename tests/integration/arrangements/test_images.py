"""Prompts with images on a real ring: the answers are those of mlx-vlm's whole model to the same files."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from hostileimages import HOSTILE, picture, saved
from PIL import Image
from ringtest import CLUSTER, LIMIT_SECONDS, PROXY_KEY, Arrangements, Ring, proxy
from visionmodels import REFERENCE, write_model

from sealring.mesh.prompt.images import MAX_IMAGE_BYTES, MAX_IMAGES_BYTES
from sealring.node.engine.text import load_tokenizer
from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER

SEED, TOKENS, REPLAYED = 3, 16, 200
BESIDE: dict[str, Any] = {"stages": 2, "max_rows": 4}
FILES = {
    "ramp.png": saved(picture(300, 200), "PNG"),
    "photo.jpeg": saved(picture(90, 200).rotate(90), "JPEG"),
    "flat.webp": saved(picture(64, 64).point(lambda value: 255 - value // 3), "WEBP"),
}
ONE: list[list[str]] = [["ramp.png"], ["photo.jpeg"], ["flat.webp"], ["ramp.png", "flat.webp"], []]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sees") / "gemma3", SEED)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, str]]:
    """The prompt's tokens and the answer of mlx-vlm to each of ONE."""
    for name, file in FILES.items():
        (model.parent / name).write_bytes(file)
    lines = []
    for names in ONE:
        parts = [*({"type": "image"} for _ in names), {"type": "text", "text": "What is it?"}]
        messages = [{"role": "user", "content": parts}]
        lines.append(json.dumps({"messages": messages, "files": [str(model.parent / one) for one in names]}))
    command = [sys.executable, "-P", "-c", REFERENCE, str(model), str(SEED), str(TOKENS)]
    done = subprocess.run(command, input="\n".join(lines), check=True, capture_output=True, text=True)
    tokenizer, found = load_tokenizer(model, chats=False), []
    for line in done.stdout.splitlines():
        answer = json.loads(line)
        detokenizer = tokenizer.detokenizer()
        text = "".join(map(detokenizer.add, [one for one in answer["tokens"] if one not in (1, 4)]))
        found.append((answer["prompt"], text + detokenizer.flush()))
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ring(arrangements: Arrangements, model: Path) -> Any:
    """Over two of the cluster's nodes, beside the demo model in any arrangement."""
    await arrangements.some(**BESIDE)
    async with arrangements.beside(model=str(model), stages=2, max_rows=4, context=1024) as ring:
        yield ring


def asked(names: list[str]) -> list[dict[str, Any]]:
    """As OpenAI's clients show images."""
    urls = [f"data:image/{name.partition('.')[2]};base64,{_base64(FILES[name])}" for name in names]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def _base64(file: bytes) -> str:
    return base64.b64encode(file).decode()


async def post(
    ring: Ring, messages: list[dict[str, Any]], *, url: str = "", key: str = "", **fields: Any
) -> Any:
    body = {"model": ring.model, "messages": messages, "max_tokens": TOKENS, "temperature": 0, **fields}
    headers = {"authorization": f"Bearer {key or ring.key}"}
    async with httpx.AsyncClient(base_url=url or ring.cluster.http_url, timeout=LIMIT_SECONDS) as http:
        return (await http.post("/v1/chat/completions", json=body, headers=headers)).json()


async def test_answers_are_those_of_mlx_vlm(ring: Ring, expected: list[tuple[int, str]]) -> None:
    """All at once, so that they decode together."""
    answers = await asyncio.gather(*(post(ring, asked(names)) for names in ONE))
    told = [(one["usage"]["prompt_tokens"], one["choices"][0]["message"]["content"]) for one in answers]
    assert told == expected
    assert len({text for _, text in expected}) == len(ONE)  # each image makes another answer


async def test_an_image_that_was_shown_before_is_a_prefix(
    ring: Ring, expected: list[tuple[int, str]]
) -> None:
    names = ONE[3] + ONE[1] + ONE[0]
    first, again = await post(ring, asked(names)), await post(ring, asked(names))
    other = await post(ring, asked(names[::-1]))
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, again, other)]
    assert cached[1] >= 64 > cached[2]
    texts = [one["choices"][0]["message"]["content"] for one in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]


async def test_tokens_are_counted_with_the_image(ring: Ring, expected: list[tuple[int, str]]) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": _base64(FILES["ramp.png"])}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    body = {"model": ring.model, "messages": [{"role": "user", "content": blocks}]}
    async with httpx.AsyncClient(base_url=ring.cluster.http_url, timeout=LIMIT_SECONDS) as http:
        answer = await http.post("/v1/messages/count_tokens", json=body, headers={"x-api-key": ring.key})
    assert answer.json() == {"input_tokens": expected[0][0]}


async def test_choices_see_the_same_image(ring: Ring, expected: list[tuple[int, str]]) -> None:
    answer = await post(ring, asked(ONE[0]), n=3)
    assert [one["message"]["content"] for one in answer["choices"]] == [expected[0][1]] * 3


async def test_a_sealed_prompt_shows_its_image(
    ring: Ring, expected: list[tuple[int, str]], tmp_path: Path
) -> None:
    (key := tmp_path / "key").write_text(ring.key)
    key.chmod(0o600)
    async with proxy(ring, tmp_path, "--api-key-file", str(key)) as (url, _):
        answer = await post(ring, asked(ONE[0]), url=url, key=PROXY_KEY)
    assert answer["choices"][0]["message"]["content"] == expected[0][1]
    assert answer["usage"]["prompt_tokens"] == expected[0][0]


def noise(seed: int) -> bytes:
    """A file that is little smaller than the largest, since noise cannot be compressed."""
    values = np.random.default_rng(seed).integers(0, 256, (1600, 1720, 3), np.uint8)
    file = saved(Image.fromarray(values), "PNG", compress_level=0)
    assert 7.8 * 2**20 < len(file) < MAX_IMAGE_BYTES
    return file


async def test_the_largest_images_pass_every_hop_in_clear_and_sealed(ring: Ring, tmp_path: Path) -> None:
    urls = [_url(noise(seed)) for seed in range(MAX_IMAGES_BYTES // MAX_IMAGE_BYTES)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages: list[Any] = [{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}]
    (key := tmp_path / "key").write_text(ring.key)
    key.chmod(0o600)
    clear = await post(ring, messages)
    async with proxy(ring, tmp_path, "--api-key-file", str(key)) as (url, _):
        sealed = await post(ring, messages, url=url, key=PROXY_KEY)
        one_more = [{"role": "user", "content": [*parts, parts[0]]}]
        refused = [await post(ring, one_more), await post(ring, one_more, url=url, key=PROXY_KEY)]
    assert clear["choices"] == sealed["choices"]
    assert clear["usage"]["prompt_tokens"] == sealed["usage"]["prompt_tokens"]
    assert {one["error"]["code"] for one in refused} <= {"body_too_large", "image_too_large"}


async def test_an_answer_that_is_replayed_after_a_fault_sees_the_image_again(
    ring: Ring, arrangements: Arrangements
) -> None:
    message = inference.ChatMessage(role="user", content="What is it?")
    message.images.add(data=FILES["ramp.png"])
    prompt = inference.Prompt(chat=inference.Chat(messages=[message]))
    whole, epoch = await ring.ask(prompt, REPLAYED), (await ring.status()).epoch
    request = inference.GenerateRequest(
        model=ring.model, envelope=inference.Envelope(clear=prompt), max_tokens=REPLAYED
    )
    node = ring.node_of(ring.deployment.plan.rings[0].stages[1].member)
    text, alive = "", True
    async for response in ring.stub.Generate(request, timeout=LIMIT_SECONDS, metadata=ring.metadata()):
        if response.HasField("delta"):
            for engine in ring.parts(node, "engine.main") if alive else ():
                engine.kill()
            alive = False
            text += response.delta.text
    assert text == whole.text
    assert (await ring.serving()).epoch > epoch
    await (await arrangements.some(**BESIDE)).serving()


async def test_hostile_images_are_refused_while_others_are_answered(
    ring: Ring, expected: list[tuple[int, str]]
) -> None:
    files = [HOSTILE[name][1]() for name in ("a page", "a PNG of 1 x 1e9", "a PNG with a text of 200 MB")]
    shown = [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": _url(file)}}]}]
        for file in files
    ]
    *refused, answer = await asyncio.gather(
        *(post(ring, messages) for messages in shown), post(ring, asked(ONE[2]))
    )
    assert [one["error"]["code"] for one in refused] == ["bad_image", "image_too_large", "bad_image"]
    assert answer["choices"][0]["message"]["content"] == expected[2][1]


def _url(file: bytes) -> str:
    return f"data:image/png;base64,{_base64(file)}"
