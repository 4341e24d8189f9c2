"""Ollama's fields about the loading of models, and its lists of them."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.api.answers import Asked, Loading, model_object
from sealring.api.ollama import ask_ollama_chat, ask_ollama_generate, keep_alive_of, loaded, tags
from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.limits import MAX_KEEP_ALIVE
from sealring.v1 import inference_pb2 as inference

MODELS = [
    inference.Model(
        name="small", availability=inference.MODEL_AVAILABILITY_LOADED, expires=1_800_000_000, memory=9
    ),
    inference.Model(name="kept", availability=inference.MODEL_AVAILABILITY_LOADED, aliases=["gpt-4o"]),
    inference.Model(name="coming", availability=inference.MODEL_AVAILABILITY_LOADING, reason="small goes"),
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
    assert keep_alive_of({"keep_alive": given}) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 m", "m", True, "1h-5m", "5m ", "٣s", "9" * 99])
def test_other_times_are_refused(given: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        keep_alive_of({"keep_alive": given})
    assert caught.value.metadata["param"] == "keep_alive"


def test_a_request_without_a_prompt_loads_or_unloads_the_model() -> None:
    for ask in (ask_ollama_chat, ask_ollama_generate):
        load = ask({"model": "big:latest"}, "r")
        assert isinstance(load, Loading)
        assert (load.model, load.keep_alive, load.answer["done_reason"]) == ("big", None, "load")
        unload = ask({"model": "big", "keep_alive": 0}, "r")
        assert isinstance(unload, Loading)
        assert (unload.keep_alive, unload.answer["done_reason"]) == (0, "unload")


def test_a_request_says_how_long_its_model_is_kept() -> None:
    asked = ask_ollama_generate({"model": "big", "prompt": "x", "keep_alive": "10m"}, "r")
    assert isinstance(asked, Asked)
    assert asked.request.keep_alive == 600
    asked = ask_ollama_generate({"model": "big", "prompt": "x"}, "r")
    assert isinstance(asked, Asked)
    assert not asked.request.HasField("keep_alive")


def test_lists_have_all_models_with_their_states_and_ps_those_that_are_loaded() -> None:
    states = {one["name"]: one["state"] for one in tags(MODELS)["models"]}
    assert states == {
        "small": "loaded",
        "kept": "loaded",
        "coming": "loading",
        "big": "not loaded",
        "broken": "down",
        "of an earlier gateway": "loaded",
    }
    running = {one["name"]: one["expires_at"] for one in loaded(MODELS)["models"]}
    never = "9999-12-31T23:59:59Z"
    assert running == {"small": "2027-01-15T08:00:00Z", "kept": never, "of an earlier gateway": never}
    objects = {one.name: model_object(one) for one in MODELS}
    assert objects["kept"]["aliases"] == ["gpt-4o"]
    assert (objects["coming"]["state"], objects["coming"]["reason"]) == ("loading", "small goes")
