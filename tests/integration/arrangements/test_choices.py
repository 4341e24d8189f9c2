"""Several answers to one prompt where few rows fit."""

import openai
import pytest
from ringtest import CLUSTER, LIMIT_SECONDS, chat

from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER
QUESTION = [{"role": "user", "content": "Tell me about the planets."}]


async def test_what_can_never_fit_is_refused_and_a_cancelled_call_frees_all(arrangements):
    ring = await arrangements.have(stages=2, max_rows=4)
    async with ring.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=ring.model, messages=QUESTION, n=5)
        assert caught.value.param == "n"
        prompt = chat(QUESTION[0]["content"], temperature=1.5, seed=3)
        request = inference.GenerateRequest(
            model=ring.model, envelope=inference.Envelope(clear=prompt), choices=4, max_tokens=1000
        )
        for _ in range(3):
            call = ring.stub.Generate(request, timeout=LIMIT_SECONDS, metadata=ring.metadata())
            async for response in call:
                if response.HasField("delta"):
                    break
            call.cancel()
        answer = await client.chat.completions.create(
            model=ring.model, messages=QUESTION, n=4, temperature=1.2, max_tokens=12
        )
        assert len(answer.choices) == 4
