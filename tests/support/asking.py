"""Programs that stream answers while a cluster's machines go and come."""

from __future__ import annotations

import json
import secrets
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from sealring.api.receipts import text_digests
from sealring.client import Client
from sealring.mesh.receipt.form import NAME, receipts_of
from sealring.mesh.receipt.verify import Known, verify_receipt

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TOKENS = 400
OPTIONS = {"model": "demo", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
SECONDS = 300.0


class Program:
    """It asks the same each time. Every answer has a receipt that holds for its text."""

    def __init__(self, root_sha256: str) -> None:
        self.root = root_sha256
        self._thread = ThreadPoolExecutor(1)

    def ask(self) -> Future[str]:
        """Returns in the midst of the answer, which is the result."""
        begun = threading.Event()

        def read() -> str:
            try:
                texts = []
                for text in self.pieces():
                    texts.append(text)
                    if len(texts) > TOKENS // 20:
                        begun.set()
                return "".join(texts)
            finally:
                begun.set()

        answer = self._thread.submit(read)
        assert begun.wait(SECONDS)
        return answer

    def pieces(self) -> Iterator[str]:
        """The texts of one answer. Raises what a user would see."""
        raise NotImplementedError


class OverHttp(Program):
    """A program of another library at a machine's HTTP address."""

    def __init__(self, root_sha256: str, url: str, path: str, key: str) -> None:
        super().__init__(root_sha256)
        self._url, self._key = f"{url}{path}", key

    def pieces(self) -> Iterator[str]:
        nonce, texts, ended = secrets.token_bytes(16), [], False
        headers = {"content-type": "application/json", "sealring-receipt": nonce.hex()}
        headers["authorization"] = f"Bearer {self._key}"
        body = json.dumps(OPTIONS | {"messages": MESSAGES, "stream": True}).encode()
        request = urllib.request.Request(self._url, body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            for line in answer:
                data = line.decode().removeprefix("data:").strip()
                ended |= data == "[DONE]"
                if not data.startswith("{"):
                    continue
                event = json.loads(data)
                assert not event.get("error"), event
                ended |= event.get("type") == "message_stop"
                if NAME in event:
                    receipts = event[NAME]
                text = self._text(event)
                if text:
                    texts.append(text)
                    yield text
        assert ended, "the answer was cut off"
        (receipt,) = receipts_of(receipts)
        # some of its tokens may be of another gateway's time, for which nobody has signed
        known = Known(nonce=nonce, text=text_digests("".join(texts)).text, tokens=TOKENS, given=None)
        verify_receipt(receipt, bytes.fromhex(self.root), known)

    @staticmethod
    def _text(event: dict) -> str:
        if event.get("type") == "content_block_delta":
            return str(event["delta"].get("text", ""))
        with suppress(KeyError, IndexError):
            return str(event["choices"][0]["delta"].get("content") or "")
        return ""


class Sealed(Program):
    """A program of the client library, which seals its prompts."""

    def __init__(self, root_sha256: str, gateway: str) -> None:
        super().__init__(root_sha256)
        self._gateway = gateway

    def pieces(self) -> Iterator[str]:
        client = Client(self._gateway, root_sha256=self.root, timeout=SECONDS)
        with client, client.chat(MESSAGES, **OPTIONS) as reply:
            for delta in reply:
                yield delta.text
            assert reply.completion.receipts[0].head.signature
