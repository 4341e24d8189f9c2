"""`POST /v1/responses/compact`: a conversation becomes a summary by the model, which its client cannot read.

The summary is sealed under a key that comes from the API key, so it needs no place here. Every gateway that
takes the API key opens it, also after a restart, and no other key does.
"""

from __future__ import annotations

import base64
import itertools
import json
import secrets
import time
from dataclasses import replace
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sealring.api.answers import Asked, Choice, Renderer, receipt_of
from sealring.api.fields import BOOKKEEPING, Rules, as_list, translate
from sealring.api.responses import RESPONSES, ask_responses, response_usage
from sealring.mesh.errors import InvalidInput, Unavailable
from sealring.v1 import inference_pb2 as inference

_KEY = b"sealring/v1 compaction"
_NONCE_BYTES = 12

_TASK = """Summarize this conversation for somebody who goes on with it and knows nothing of it. Say what \
the user wants, what was decided and done, what was found out, and what is open. Keep names of files, \
commands, values and errors as they are. Write the summary and nothing else."""

_PASSED = (
    *("model", "instructions", "reasoning", "prompt_cache_key", "service_tier", "prompt_cache_retention"),
    *("keep_alive", "priority", "deadline_ms", "min_trust", "chat_template_kwargs", "previous_response_id"),
)

COMPACT: Rules = {
    **{name: RESPONSES[name] for name in ("input", *_PASSED)},
    "parallel_tool_calls": BOOKKEEPING,  # this and the next ones: the summary is text, and calls nothing
    "text": BOOKKEEPING,
    "tools": BOOKKEEPING,
}
"""What becomes of the fields of `/v1/responses/compact`."""


class Summaries:
    """Seals and opens summaries for one API key. Without a key they are sealed under what everybody knows."""

    def __init__(self, api_key: str) -> None:
        derived = HKDF(hashes.SHA256(), 32, None, _KEY).derive(api_key.encode("utf-8", "surrogatepass"))
        self._cipher = ChaCha20Poly1305(derived)

    def seal(self, summary: str) -> str:
        """The summary as ASCII text."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, summary.encode("utf-8", "surrogatepass"), _KEY)
        return base64.b64encode(nonce + sealed).decode()

    def open(self, sealed: str, param: str) -> str:
        """Raises InvalidInput (COMPACTION_NOT_OPENED), with the name of the field."""
        try:
            data = base64.b64decode(sealed, validate=True)
            summary = self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], _KEY)
        except (ValueError, InvalidTag):  # binascii's error is a ValueError
            raise InvalidInput(
                "this summary was made elsewhere, or with another API key",
                hint="send the conversation that it stands for, or use the key that it was made with",
                reason="COMPACTION_NOT_OPENED",
                param=param,
            ) from None
        return summary.decode("utf-8", "surrogatepass")


def ask_compact(value: dict[str, Any], request_id: str, summaries: Summaries) -> Asked:
    """Asks the model for a summary of the conversation. Raises InvalidInput with `param`."""
    translate(value, COMPACT)
    if value.get("model") is None:
        raise InvalidInput("model is missing", reason="MISSING_FIELD", param="model")
    given = value.get("input") or []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else as_list(given, "input")
    body = {name: value[name] for name in _PASSED if name in value}
    body["input"] = [*items, {"role": "user", "content": _TASK}]
    asked = ask_responses(body, request_id, summaries.open)
    kept = list(itertools.takewhile(_is_of_system, items))
    return replace(asked, render=lambda started: CompactionRenderer(started, kept, summaries))


def _is_of_system(item: Any) -> bool:
    return item.get("type", "message") == "message" and item.get("role") in ("system", "developer")


class CompactionRenderer(Renderer):
    """The messages of the system at the beginning, as they are, and the summary of all that follows."""

    def __init__(self, started: inference.Started, kept: list[dict[str, Any]], summaries: Summaries) -> None:
        super().__init__(started)
        self._model = started.model
        self._kept = kept
        self._summaries = summaries

    def whole(self, answers: list[Choice], finished: inference.Finished) -> bytes:
        """Raises Unavailable (NO_SUMMARY)."""
        summary = answers[0].text.strip()
        if not summary:
            raise Unavailable(
                "the model wrote no summary", hint="ask again, or use another model", reason="NO_SUMMARY"
            )
        items = [self._message(number, one) for number, one in enumerate(self._kept)]
        sealed = {"type": "compaction", "encrypted_content": self._summaries.seal(summary)}
        compacted = {
            "id": f"resp_{self.request_id}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "model": self._model,
            "output": [*items, {"id": f"cmp_{self.request_id}", **sealed}],
            "usage": response_usage(finished, answers[0].reasoning_tokens),
            **receipt_of(finished),
        }
        return json.dumps(compacted).encode()

    def _message(self, number: int, item: dict[str, Any]) -> dict[str, Any]:
        content = item.get("content")
        parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
        told = {"id": f"msg_{self.request_id}_{number}", "type": "message", "status": "completed"}
        return {**told, "role": item["role"], "content": parts}
