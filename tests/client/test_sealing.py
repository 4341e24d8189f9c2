"""What a request that is to be sealed becomes for the client that seals it."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.client.sealing import SealingBackend
from sealring.gateway.metrics import Metrics
from sealring.mesh.errors import InvalidInput
from sealring.v1 import inference_pb2 as inference


class Client:
    """Keeps what it was asked, and answers nothing."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    async def models(self) -> list[Any]:
        return []

    def ask(self, prompt: Any, **asked: Any) -> Any:
        self.asked = asked
        raise InvalidInput("enough")


async def asked(**fields: Any) -> dict[str, Any]:
    stand_in: Any = Client()
    envelope = inference.Envelope(clear=inference.Prompt(text="x"))
    request = inference.GenerateRequest(model="demo", envelope=envelope, **fields)
    with pytest.raises(InvalidInput):
        async for _ in SealingBackend(stand_in, Metrics()).generate(request):
            raise AssertionError("nothing was answered")
    return dict(stand_in.asked)


async def test_who_says_nothing_of_choices_gets_one() -> None:
    plain = await asked()
    assert (plain["n"], plain["prompt_cache_key"], plain["model"]) == (1, None, "demo")
    assert (await asked(choices=3))["n"] == 3
    assert (await asked(prompt_cache_key=""))["prompt_cache_key"] == ""


async def test_what_is_sealed_already_is_refused() -> None:
    stand_in: Any = Client()
    sealed = inference.GenerateRequest(envelope=inference.Envelope(sealed=b"x"))
    with pytest.raises(InvalidInput) as refused:
        async for _ in SealingBackend(stand_in, Metrics()).generate(sealed):
            raise AssertionError("nothing was answered")
    assert (refused.value.reason, stand_in.asked) == ("SEALED_ALREADY", {})
