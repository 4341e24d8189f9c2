"""Vectors at the head: the prompts that are made of inputs, and what is made of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.tools import EMBEDDING, RERANK
from sealring.node.engine.staging.pooling import Pooling
from sealring.node.engine.text.tokenizer import Tokenizer
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Those of Qwen3-Reranker's model card."""

_LEAST_NORM = 1e-12


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of a model: how they are made, and of how many numbers the tail's are."""

    pooling: Pooling
    width: int

    @property
    def capability(self) -> str:
        return RERANK if self.pooling.tokens else EMBEDDING

    def check(self, command: engine.OpenEngineRow) -> None:
        """Refuses what this model does not make. Raises InvalidInput (WRONG_KIND_OF_MODEL,
        BAD_FIELD)."""
        asked = command.prompt
        if not asked.HasField("pooled"):
            raise other_kind(self.capability)
        scores = bool(self.pooling.tokens)
        if scores != bool(asked.pooled.query):
            raise other_kind(self.capability)
        if asked.pooled.dimensions > self.width:
            raise InvalidInput(
                f"the model's embeddings have {self.width} numbers",
                hint=f"ask for at most {self.width} dimensions, or leave them out",
                reason="BAD_FIELD",
                param="dimensions",
            )
        if command.choices > 1:
            raise InvalidInput("an input has one vector", reason="BAD_FIELD", param="choices")

    def encode(self, tokenizer: Tokenizer, asked: inference.Pooled) -> list[int]:
        """The tokens of an input, with those that its tokenizer puts behind a text. Raises InvalidInput."""
        if not asked.query:
            return list(asked.tokens.ids) or tokenizer.encode_text(asked.text)
        parts = asked.instruction or _INSTRUCTION, asked.query, asked.text
        return tokenizer.encode_within(
            "".join(parts),
            lambda write: (
                f"{_JUDGE}<Instruct>: {write(parts[0])}\n<Query>: {write(parts[1])}\n"
                f"<Document>: {write(parts[2])}{_ANSWER}"
            ),
        )

    def made(self, vector: Sequence[float], dimensions: int) -> list[float]:
        """The answer of a tail's vector: an embedding in float32, or the probability of yes against no."""
        if self.pooling.tokens:
            no, yes = vector
            return [float(1 / (1 + np.exp(np.float64(no) - np.float64(yes))))]
        found = np.array(vector[: dimensions or None], np.float32)
        if self.pooling.normalized:
            found /= max(np.float32(_LEAST_NORM), np.linalg.norm(found))
        made: list[float] = found.tolist()
        return made


def other_kind(capability: str) -> InvalidInput:
    """The refusal of a model that is asked for what it does not make; `capability` is its own, empty for a
    model that generates."""
    makes, use = {
        EMBEDDING: ("embeddings and nothing else", "/v1/embeddings or /api/embed"),
        RERANK: ("scores of texts for a query and nothing else", "/v1/rerank"),
    }.get(capability, ("answers, and neither embeddings nor scores", "/v1/chat/completions"))
    return InvalidInput(
        f"this model makes {makes}",
        hint=f"ask it at {use}, or name another model",
        reason="WRONG_KIND_OF_MODEL",
        param="model",
    )
