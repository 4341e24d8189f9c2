"""Load tools that others wrote, unmodified: every request is taken, and has as many tokens as it asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from programs import INSTALLED, LOADS, environment, note
from ringtest import AGENTS, PROXY_KEY
from scriptedring import NAME, WAYS, Served, run

pytestmark = AGENTS
REQUESTS, TOKENS, PROMPT = 6, 12, 64
FREE = 3
"""Tokens of the scripted model's answer to what is in no script, with the one that ends it."""

BOOK = "http://127.0.0.1/book"
"""The book from which llama-benchy makes its prompts. It fetches nothing that is in its cache."""


@dataclass(frozen=True)
class Load:
    """A tool: its command, in which `{url}`, `{key}`, `{model}` (a folder) and `{out}` are replaced, and the
    tokens of each answer by what it has written to `{out}`. `tokens` is how many there are to be."""

    command: str
    answers: Callable[[Path], list[float]]
    tokens: int = TOKENS


def _json(file: Path) -> Any:
    return json.loads(file.read_bytes())


def _guidellm(out: Path) -> list[float]:
    (run,) = _json(out)["benchmarks"]
    assert run["requests"]["errored"] == run["requests"]["incomplete"] == []
    return [one["output_metrics"]["text_tokens"] for one in run["requests"]["successful"]]


def _aiperf(out: Path) -> list[float]:
    lines = (out / "profile_export.jsonl").read_text().splitlines()
    assert all(not json.loads(line).get("error") for line in lines)
    return [json.loads(line)["metrics"]["output_sequence_length"]["value"] for line in lines]


def _vllm(out: Path) -> list[float]:
    assert _json(out)["failed"] == 0
    return list(_json(out)["output_lens"])


def _benchy(out: Path) -> list[float]:
    """It notes no tokens, but a rate for each request that had any."""
    (run,) = _json(out)["benchmarks"]
    return [run["response_size"] for rate in run["tg_req_throughput"]["values"] if rate > 0]


_AIPERF = (
    f"aiperf profile --model {NAME} --url {{url}} --streaming --tokenizer {{model}}"
    f" --request-count {REQUESTS} --concurrency 2 --synthetic-input-tokens-mean {PROMPT}"
    " --use-server-token-count --api-key {key} --ui none --output-artifact-dir {out}"
)
_FIXED = f"--output-tokens-mean {TOKENS} --extra-inputs ignore_eos:true --extra-inputs min_tokens:{TOKENS}"

_VLLM = (
    f"vllm bench serve --base-url {{url}} --model {NAME} --tokenizer {{model}} --dataset-name random"
    f" --random-input-len {PROMPT} --random-output-len {TOKENS} --num-prompts {REQUESTS} --max-concurrency 2"
    " --ignore-eos --save-result --save-detailed --result-filename {out}"
)

RUNS = {
    "guidellm": Load(
        f"guidellm run --backend kind=openai_http,target={{url}},model={NAME},api_key={{key}}"
        f" --profile kind=concurrent,streams=2 --constraint kind=max_requests,count={REQUESTS}"
        " --tokenizer kind=huggingface_auto,model={model} --disable-console --output kind=json,path={out}"
        f" --data kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={TOKENS}",
        _guidellm,
    ),
    "aiperf": Load(f"{_AIPERF} --endpoint-type chat {_FIXED}", _aiperf),
    "aiperf-completions": Load(f"{_AIPERF} --endpoint-type completions {_FIXED}", _aiperf),
    "aiperf-free": Load(f"{_AIPERF} --endpoint-type chat", _aiperf, FREE),
    "vllm-completions": Load(f"{_VLLM} --backend openai --endpoint /v1/completions", _vllm),
    "vllm-chat": Load(f"{_VLLM} --backend openai-chat --endpoint /v1/chat/completions", _vllm),
    "llama-benchy": Load(
        f"llama-benchy --base-url {{url}}/v1 --api-key {{key}} --model {NAME} --tokenizer {{model}}"
        f" --pp {PROMPT} --tg {TOKENS} --exact-tg --runs {REQUESTS // 2} --concurrency 2 --no-cache"
        f" --exit-on-first-fail --format json --save-result {{out}} --book-url {BOOK}",
        _benchy,
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOADS)
async def test_every_request_gets_its_tokens(name: str, way: str, served: Served, tmp_path: Path) -> None:
    load, out = RUNS[name], tmp_path / "out.json"
    book = tmp_path / ".cache" / "llama-benchy" / f"{hashlib.md5(BOOK.encode()).hexdigest()}.txt"
    book.parent.mkdir(parents=True)
    book.write_text(" ".join(f"Plum {number} lies in the basket." for number in range(2000)))
    names = {"url": served.urls[way], "key": PROXY_KEY, "model": str(served.model), "out": str(out)}
    options = {"OPENAI_API_KEY": PROXY_KEY, "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(INSTALLED / "vllm")}
    # On a busy machine 0.1 s are too short, and its last answers are not in its report
    options["GUIDELLM__MP_POLL_INTERVAL"] = "2"
    environ = environment(tmp_path, options)
    before = await served.ring.counted("generation_tokens_total")
    with note(name, way) as row:
        try:
            await run([word.format(**names) for word in load.command.split()], tmp_path, environ)
        finally:
            if way == "clear":
                served.relay.keep(INSTALLED / "bodies" / f"{name}.jsonl")
        assert load.answers(out) == [load.tokens] * REQUESTS
        assert await served.ring.counted("generation_tokens_total") >= before + REQUESTS * load.tokens
        row["tools"] = f"{REQUESTS} of {REQUESTS} requests, {load.tokens} tokens each"
