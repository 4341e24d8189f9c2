"""What a request is to the scheduler."""

from __future__ import annotations

import pytest

from sealring.gateway.scheduler import Request
from sealring.mesh.errors import InvalidInput
from sealring.v1 import inference_pb2 as inference


@pytest.mark.parametrize(("prompt", "taken"), [({"pooled": {"text": "a"}}, True), ({"text": "a"}, False)])
def test_the_one_token_of_a_vector_may_be_as_large_as_log_probabilities(
    prompt: dict[str, object], taken: bool
) -> None:
    envelope = inference.Envelope(clear=inference.Prompt(**prompt))  # type: ignore[arg-type]
    asked = inference.GenerateRequest(envelope=envelope)
    request = Request.of(asked, "r", key="", tenant="", deployment="m")
    choice = request.progress.choices[0]
    choice.tokens.append(0)

    def spend() -> None:
        choice.spend(64 << 10, sealed=False, logprobs=request.logprobs)

    if taken:
        spend()
        return
    with pytest.raises(InvalidInput):
        spend()
