"""Ollama's fields about the loading of models, and its lists of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from refusals import refused

from sealring.api.answers import Choice, model_object
from sealring.api.chat import ask_chat
from sealring.api.completions import ask_completion
from sealring.api.ollama import ask_ollama_chat, ask_ollama_generate, loaded, show, tags
from sealring.api.responses import ask_responses
from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import MAX_KEEP_ALIVE
from sealring.v1 import inference_pb2 as inference

MODELS = [
    inference.Model(
        name="small", availability=inference.MODEL_AVAILABILITY_LOADED, expires=1_800_000_000, memory=9
    ),
    inference.Model(name="kept", availability=inference.MODEL_AVAILABILITY_LOADED, aliases=["gpt-4o"]),
    inference.Model(
        name="coming",
        availability=inference.MODEL_AVAILABILITY_LOADING,
        reason="loading 35 %",
        progress=35,
        memory=200,
    ),
    inference.Model(name="big", availability=inference.MODEL_AVAILABILITY_NOT_LOADED),
    inference.Model(name="broken"),
    inference.Model(name="of an earlier gateway", rings=1),
]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 2),
        ("250ms", 0),
        ("0s", 0),
        (0, 0),
        (0.0, 0),
        (3600, 3600),
        ("3600", 3600),
        (-1, -1),
        (-0.5, -1),
        ("-1", -1),
        ("-1m", -1),
        (10**11, MAX_KEEP_ALIVE),
        (None, None),
    ],
)
def test_the_time_that_a_model_is_kept_is_written_in_several_ways(given: Any, seconds: int | None) -> None:
    for body in ({"prompt": "x"}, {}):
        request = ask_ollama_generate({"model": "big", "keep_alive": given, **body}, "r").request
        assert (request.keep_alive if request.HasField("keep_alive") else None) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 m", "m", True, "1h-5m", "5m ", "٣s", "9" * 99])
def test_other_times_are_refused(given: Any) -> None:
    for body in ({"prompt": "x"}, {}):
        with pytest.raises(InvalidInput, match=r"^keep_alive is refused: it is neither") as caught:
            ask_ollama_generate({"model": "big", "keep_alive": given, **body}, "r")
        assert caught.value.metadata["param"] == "keep_alive"


def test_a_request_without_a_prompt_loads_or_unloads_the_model() -> None:
    for ask in (ask_ollama_chat, ask_ollama_generate):
        for body, reason in (
            ({"model": "big:latest"}, "load"),
            ({"model": "big", "keep_alive": 0}, "unload"),
        ):
            asked = ask(body, "r")
            assert (asked.loads, asked.stream, asked.request.model) == (True, True, "big")
            answer = asked.render(inference.Started(model="big")).last(inference.Finished())
            assert json.loads(answer)["done_reason"] == reason
        for model in (7, "half a pair \ud800"):
            with pytest.raises(InvalidInput) as caught:
                ask({"model": model}, "r")
            assert caught.value.metadata["param"] == "model"


@pytest.mark.parametrize(
    ("ask", "body"),
    [
        (ask_chat, {"messages": [{"role": "user", "content": "x"}]}),
        (ask_completion, {"prompt": "x"}),
        (ask_responses, {"input": "x"}),
        (ask_ollama_chat, {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_a_request_of_every_openai_api_says_how_long_its_model_is_kept(ask: Any, body: Any) -> None:
    assert ask({"model": "big", "keep_alive": "10m", **body}, "r").request.keep_alive == 600
    assert not ask({"model": "big", **body}, "r").request.HasField("keep_alive")


def test_lm_studios_name_for_it_is_taken_too() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "ttl": 300}
    assert ask_chat(body, "r").request.keep_alive == 300
    with pytest.raises(InvalidInput, match=r"^ttl is refused") as caught:
        ask_chat({**body, "ttl": "soon"}, "r")
    assert caught.value.metadata["param"] == "ttl"


def test_lists_tell_which_models_see() -> None:
    seeing = inference.Model(name="eyes", capabilities=["tools", "vision"])
    assert show(seeing)["capabilities"] == ["completion", "tools", "vision"]
    assert [one["capabilities"] for one in tags([seeing, MODELS[0]])["models"]] == [
        ["completion", "tools", "vision"],
        ["completion"],
    ]
    assert model_object(seeing)["capabilities"] == ["tools", "vision"]


def test_lists_have_all_models_with_their_states_and_ps_those_that_are_loaded_or_will_be() -> None:
    states = {one["name"]: one["state"] for one in tags(MODELS)["models"]}
    assert states == {
        "small": "loaded",
        "kept": "loaded",
        "gpt-4o": "loaded",
        "coming": "loading",
        "big": "not loaded",
        "broken": "down",
        "of an earlier gateway": "loaded",
    }
    running = {one["name"]: one for one in loaded(MODELS)["models"]}
    never = "9999-12-31T23:59:59Z"
    assert {name: one["expires_at"] for name, one in running.items()} == {
        "small": "2027-01-15T08:00:00Z",
        "kept": never,
        "coming": never,
        "of an earlier gateway": never,
    }
    assert (running["small"]["state"], running["small"]["size_vram"]) == ("loaded", 9)
    coming = {"state": "loading", "reason": "loading 35 %", "progress": 0.35, "size": 200, "size_vram": 70}
    assert running["coming"].items() >= coming.items()
    objects = {one.name: model_object(one) for one in MODELS}
    assert objects["kept"]["aliases"] == ["gpt-4o"]
    same = ("state", "reason", "progress")
    assert [objects["coming"][name] for name in same] == [coming[name] for name in same]


def test_what_is_known_of_a_model_is_shown() -> None:
    model = inference.Model(name="small", model_type="llama", context=512, digest="ab" * 32, memory=9)
    (listed,) = tags([model])["models"]
    assert (listed["digest"], listed["size"], listed["details"]["families"]) == ("ab" * 32, 9, ["llama"])
    shown = show(model)["model_info"]
    assert (shown["general.basename"], shown["llama.context_length"]) == ("small", 512)
    assert "digest" not in tags([inference.Model(name="of an earlier gateway")])["models"][0]


@pytest.mark.parametrize(("asked", "field"), [(ask_ollama_chat, "messages"), (ask_ollama_generate, "prompt")])
def test_log_probabilities_stand_beside_what_was_said(asked: Any, field: str) -> None:
    """As in Ollama: a list of all tokens, in each line of a stream and in the whole answer."""
    said = [{"role": "user", "content": "Hi"}] if field == "messages" else "Hi"
    token = inference.TokenLogprob(spelling=b"Hi", logprob=-0.5)
    token.top.add(spelling=b"Ho", logprob=-1.5)
    delta = inference.Delta(text="Hi", logprobs=[token])
    expected = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    told = [{**expected, "top_logprobs": [{"token": "Ho", "logprob": -1.5, "bytes": [72, 111]}]}]
    for wanted, found in (
        ({"logprobs": True, "top_logprobs": 1}, told),
        ({}, None),
        ({"logprobs": False}, None),
    ):
        one = asked({"model": "demo", field: said, **wanted}, "r")
        assert one.request.envelope.clear.sampling.HasField("logprobs") == (found is not None)
        renderer = one.render(inference.Started(model="demo"))
        assert json.loads(renderer.delta(delta)).get("logprobs") == found
        choice = Choice()
        choice.add(delta)
        assert json.loads(renderer.whole([choice], inference.Finished())).get("logprobs") == found
    with refused("BAD_FIELD", InvalidInput):
        asked({"model": "demo", field: said, "top_logprobs": 2}, "r")
