"""Models with real weights, which `make real` fetches and converts, and what plain mlx_lm makes of them."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sixty
from ringtest import chat
from sixty import CHATS, TEXTS, said

from sealring.v1 import inference_pb2 as inference

FOLDER = Path(__file__).parents[2] / "build" / "real"


def prompts(whole: Whole) -> list[inference.Prompt]:
    """Sixty short prompts: texts, and chats where the model has a template for them."""
    asked = [inference.Prompt(text=text) for text in TEXTS]
    return asked + [
        said(chat("", text)) if whole.tokenizer.has_chat_template else inference.Prompt(text=text)
        for text in CHATS
    ]


class Whole(sixty.Whole):
    """The whole model in plain mlx_lm. Its answers are kept from one run to the next."""

    def __init__(self, name: str) -> None:
        from sealring.node.engine import import_whole

        self.folder = FOLDER / "models" / name
        if not self.folder.exists():
            pytest.skip("there are no real models: make real")
        model, self.tokenizer = import_whole().load(str(self.folder))
        super().__init__(model, self._encode, self.tokenizer.eos_token_ids)
        versions = [importlib.metadata.version(package) for package in ("mlx", "mlx-lm")]
        self._file = FOLDER / f"answers-{name}-{'-'.join(versions)}.json"
        self._kept: dict[str, list[int]] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def _encode(self, prompt: inference.Prompt) -> list[int]:
        if prompt.WhichOneof("input") == "text":
            return list(self.tokenizer.encode(prompt.text))
        messages = [{"role": one.role, "content": one.content} for one in prompt.chat.messages]
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    def answer(
        self, ids: Sequence[int], max_tokens: int, *, kv_bits: int = 0, cache: Any = None
    ) -> list[int]:
        """As for other models. A `cache` has the first tokens of `ids` and keeps all of them."""
        asked = json.dumps([list(ids), max_tokens, kv_bits])
        if cache is not None:
            self._kept[asked] = self._continued(ids, max_tokens, cache)
        elif asked not in self._kept:
            self._kept[asked] = super().answer(ids, max_tokens, kv_bits=kv_bits)
        self._file.write_text(json.dumps(self._kept))
        return self._kept[asked]

    def _continued(self, ids: Sequence[int], max_tokens: int, cache: Any) -> list[int]:
        from mlx_lm.models.cache import trim_prompt_cache

        tokens = self.go_on(ids[cache[0].offset :], max_tokens, cache)
        trim_prompt_cache(cache, cache[0].offset - len(ids))
        return tokens
