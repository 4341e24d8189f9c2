"""Sealed requests made by hand, so that everything in them can be wrong."""

from __future__ import annotations

import secrets
import time
from typing import Any

import grpc
from ringtest import LIMIT_SECONDS, Ring, chat

from sealring.client.trust import RosterVerifier
from sealring.mesh.prompt.sealed import RequestInfo, seal_request
from sealring.mesh.roster import Roster
from sealring.mesh.rpc import from_rpc_error
from sealring.v1 import inference_pb2 as inference

QUESTION = "What is the capital of France?"


class Forger:
    """Seals for the head of a ring, as in the roster that the gateway tells."""

    def __init__(self, ring: Ring, roster: Roster) -> None:
        self._ring = ring
        self._roster = roster
        (self._entry,) = (one for one in roster.rings if one.deployment == ring.model)

    @classmethod
    async def meet(cls, ring: Ring) -> Forger:
        response = await ring.stub.GetRoster(
            inference.GetRosterRequest(), timeout=LIMIT_SECONDS, metadata=ring.metadata()
        )
        return cls(ring, RosterVerifier(bytes.fromhex(ring.pin)).verify(response))

    @property
    def keys(self) -> list[bytes]:
        """The sealing keys of the ring's members, the head's first."""
        return [self._roster.member(one.id).sealing_key for one in self._entry.members]

    def request(
        self,
        *,
        key: bytes | None = None,
        bound: dict[str, Any] | None = None,
        shown: dict[str, Any] | None = None,
        **fields: Any,
    ) -> inference.GenerateRequest:
        """With another key, other things that it is bound to, that it shows, or other fields."""
        info: dict[str, Any] = {
            "deployment": self._ring.model,
            "request_id": secrets.token_bytes(16),
            "expires": int(time.time()) + 200,
            "roster_hash": self._roster.hash,
        }
        info |= bound or {}
        body = inference.SealedPrompt(prompt=chat(QUESTION), max_tokens=5)
        sealed, _ = seal_request(key or self.keys[0], RequestInfo(**info), body.SerializeToString())
        info.pop("deployment")
        sealed_for = inference.SealedFor(**{"ring": self._entry.id, **info, **(shown or {})})
        envelope = inference.Envelope(sealed=sealed, sealed_for=sealed_for)
        given = {"model": self._ring.model, "envelope": envelope, "max_tokens": 5} | fields
        return inference.GenerateRequest(**given)

    async def outcome(self, request: inference.GenerateRequest) -> str | int:
        """The reason for which it is refused, or the number of sealed deltas."""
        deltas = 0
        try:
            async for response in self._ring.stub.Generate(
                request, timeout=LIMIT_SECONDS, metadata=self._ring.metadata()
            ):
                if response.HasField("delta"):
                    assert response.delta.WhichOneof("content") == "sealed"
                    deltas += 1
        except grpc.RpcError as error:
            return from_rpc_error(error).reason
        return deltas
