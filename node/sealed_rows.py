"""Sealed prompts at the head: opened on their way to the engine, the answers sealed on their way back.

The engine never knows. A sealed envelope is four fields, each behind its length: request id (16 bytes),
expiry (8 bytes, big-endian seconds since 1970), roster hash (32 bytes), and the HPKE ciphertext of a Prompt;
the first three and the deployment are what the ciphertext is bound to (`mesh.envelope.RequestInfo`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from google.protobuf.message import DecodeError

from mesh.encoding import FormatError, pack_fields, unpack_fields
from mesh.envelope import (
    MAX_REQUEST_BYTES,
    REQUEST_ID_BYTES,
    ReplayGuard,
    ReplySealer,
    RequestInfo,
    SealingKey,
)
from mesh.errors import EnvelopeError, InvalidInput
from sealring.v1 import control_pb2, inference_pb2

_EXPIRY = struct.Struct(">Q")
_MAX_BYTES = MAX_REQUEST_BYTES + 4096


def pack_envelope(info: RequestInfo, ciphertext: bytes) -> bytes:
    """The bytes of `Envelope.sealed`."""
    return pack_fields(info.request_id, _EXPIRY.pack(info.expires), info.roster_hash, ciphertext)


def unpack_envelope(sealed: bytes, deployment: str) -> tuple[RequestInfo, bytes]:
    """What a sealed envelope is bound to, and its ciphertext. Raises EnvelopeError (ENVELOPE_REFUSED)."""
    try:
        request_id, expiry, roster_hash, ciphertext = unpack_fields(sealed, count=4, max_bytes=_MAX_BYTES)
        if len(request_id) != REQUEST_ID_BYTES or len(expiry) != _EXPIRY.size:
            raise FormatError("wrong lengths")
        return RequestInfo(deployment, request_id, _EXPIRY.unpack(expiry)[0], roster_hash), ciphertext
    except (FormatError, InvalidInput):
        raise EnvelopeError("sealed envelope is malformed") from None


class Unsealer:
    """Opens sealed envelopes; one per daemon, because request ids are single use at the head."""

    def __init__(self, key: SealingKey, knows_roster: Callable[[bytes], bool]) -> None:
        self._key = key
        self._guard = ReplayGuard()
        self._knows_roster = knows_roster

    def open(self, sealed: bytes, deployment: str, epoch: int) -> tuple[inference_pb2.Prompt, ReplySealer]:
        """The prompt, and what seals its answer.

        Raises EnvelopeError (ENVELOPE_*), ResourceExhausted (REPLAY_GUARD_FULL).
        """
        info, ciphertext = unpack_envelope(sealed, deployment)
        if not self._knows_roster(info.roster_hash):
            raise EnvelopeError(
                "sealed request names a roster that this member does not go by",
                hint="fetch the newest roster and seal again",
                reason="ENVELOPE_ROSTER",
            )
        opened = self._key.open_request(ciphertext, info, self._guard, epoch=epoch)
        try:
            return inference_pb2.Prompt.FromString(opened.body), opened.reply
        except DecodeError:
            raise EnvelopeError("sealed request holds no prompt") from None


class SealedRows:
    """The rows of one control stream whose answers are sealed."""

    def __init__(self) -> None:
        self._sealers: dict[int, ReplySealer] = {}

    def __bool__(self) -> bool:
        return bool(self._sealers)

    def add(self, row: int, sealer: ReplySealer) -> None:
        self._sealers[row] = sealer

    def forget(self, row: int) -> None:
        self._sealers.pop(row, None)

    def forget_evicted(self, step: control_pb2.Step) -> None:
        """A row that is evicted says nothing any more."""
        for change in step.changes:
            if change.WhichOneof("change") == "evict":
                self.forget(change.evict.row)

    def seal(self, done: control_pb2.StepDone) -> None:
        """Replaces the text of sealed rows by the next chunk of their replies."""
        for output in done.outputs:
            sealer = self._sealers.get(output.row)
            if sealer is None:
                continue
            last = output.finish != inference_pb2.FINISH_REASON_UNSPECIFIED
            text = output.text.encode()
            if text or last:
                output.sealed = sealer.seal(text, last=last)
            else:
                output.ClearField("content")
            if last:
                self.forget(output.row)
