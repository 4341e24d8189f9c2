"""The client library with a stopwatch: what sealing and the whole answer took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from sealring.client import AsyncClient, Completion
from sealring.client.core import View
from sealring.mesh.errors import SealringError


@dataclass
class Measured:
    """One request. Times in seconds; `segments` by name, `error` the reason of a failure."""

    segments: dict[str, float] = field(default_factory=dict)
    error: str = ""
    completion: Completion | None = None


class MeasuredClient(AsyncClient):
    """`AsyncClient` as it is, but that it notes times; one request after the other.

    `encrypt` is from having the rings to choose from until the request is sent.
    """

    def __init__(self, gateway: str, *, root_sha256: str, user: str) -> None:
        super().__init__(gateway, root_sha256=root_sha256, user=user)
        self._measured = Measured()
        self._seen = 0.0

    async def measure(self, content: str, *, model: str, max_tokens: int, stream: bool) -> Measured:
        """Asks once. With `stream` the time to the first piece of text is noted as `ttft`."""
        measured = self._measured = Measured()
        begun = time.perf_counter()
        try:
            reply = self.chat([{"role": "user", "content": content}], model=model, max_tokens=max_tokens)
            async for _ in reply:
                if stream:
                    measured.segments.setdefault("ttft", time.perf_counter() - begun)
            measured.completion = reply.completion
            measured.segments["total_e2e"] = time.perf_counter() - begun
        except SealringError as error:
            measured.error = error.reason
        return measured

    async def _view(self, *, fresh: bool = False) -> View:
        view = await super()._view(fresh=fresh)
        self._seen = time.perf_counter()
        return view

    def _stub(self, gateway: str) -> Any:
        stub = super()._stub(gateway)

        def generate(*request: Any, **options: Any) -> Any:
            self._measured.segments["encrypt"] = time.perf_counter() - self._seen
            return stub.Generate(*request, **options)

        return SimpleNamespace(GetRoster=stub.GetRoster, Generate=generate)
