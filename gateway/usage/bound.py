"""How many tokens a request may use at most, by what is known of it before its prompt is read."""

from __future__ import annotations

from sealring.mesh.prompt.images import VISION, has_images
from sealring.mesh.prompt.tools import EMBEDDING, RERANK
from sealring.v1 import inference_pb2 as inference

TEMPLATE_TOKENS = 512
"""For what a chat template writes of its own. Policy: more than those of current models do."""

_ANY = 1 << 31


def most_tokens(request: inference.GenerateRequest, model: inference.Model) -> int:
    """The tokens of prompt and answers. No token of a text is shorter than a byte, sealed or not; an image in
    few bytes may have any number. `model` without a context has any length."""
    envelope, context = request.envelope, model.context or _ANY
    sees = has_images(envelope.clear) or (envelope.sealed and VISION in model.capabilities)
    prompt = context if sees else min(envelope.ByteSize() + TEMPLATE_TOKENS, context)
    if not {EMBEDDING, RERANK}.isdisjoint(model.capabilities):
        return prompt
    choices = max(1, request.choices)
    return min(prompt + choices * min(request.max_tokens or context, context), choices * context)
