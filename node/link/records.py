"""Sealed records on a link: ciphertext || tag on the wire and nothing else.

The associated data is built by each end from its own expectation: domain, suite, session, roster hash, epoch,
link, direction, sequence, step, composition digest, kind, dtype, shape, length. The nonce is the direction's
IV XOR a sequence number that is never reset. Anything that goes wrong poisons the link in both directions.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import struct
import threading
import weakref
from collections.abc import Callable
from typing import NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.utils import Buffer

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.crypto.encoding import pack_fields
from sealring.mesh.crypto.keys import NONCE_BYTES, TAG_BYTES, Uncopyable
from sealring.mesh.errors import RecordError
from sealring.node.link.keys import HASH_BYTES, MAX_U64, LinkContext, SessionKeys
from sealring.node.wire.channel import MAX_RECORD_BYTES, Kind, RecordHeader

REKEY_RECORDS = 1 << 20
REKEY_BYTES = 64 << 30
REKEY_SECONDS = 600.0
CONFIRMATION_BYTES = HASH_BYTES + TAG_BYTES

_MAX_RECORDS = 2 * REKEY_RECORDS
_MAX_BYTES = 2 * REKEY_BYTES
_MAX_SECONDS = 2 * REKEY_SECONDS
"""A session refuses at twice the rekey limits: there is time to hand over without stopping the stream."""
_MAX_PENDING = 4
_NEVER = MAX_U64 + 1
_DOMAIN = b"sealring/v1 record"
pack_order = struct.Struct(">QQ").pack


@functools.lru_cache(maxsize=16, typed=True)
def describe(kind: int, dtype: str, shape: tuple[int, ...], length: int) -> bytes:
    """The part of the associated data that a record mostly shares with the one before it."""
    if not 0 <= length <= MAX_RECORD_BYTES:
        raise RecordError("record is too large", reason="RECORD_TOO_LARGE")
    name = dtype.encode("ascii")
    if len(name) > 16 or len(shape) > 8 or type(shape) is not tuple:
        raise RecordError("record header is malformed", reason="BAD_HEADER")
    sizes = struct.pack(f">{len(shape)}Q", *shape)
    return pack_fields(struct.pack(">BQ", kind, length), name, sizes)


class _Session(Uncopyable):
    """One direction of one session: the AEAD, the IV, the fixed part of the associated data, the counters."""

    __slots__ = ("bytes", "cross", "ends", "first_step", "iv", "prefix", "rekey_at", "sequence")

    def __init__(
        self, cross: Callable[..., int], iv: bytes, prefix: bytes, now: float, first_step: int
    ) -> None:
        """`cross` is the AEAD's `encrypt_into` or `decrypt_into`."""
        if len(iv) != NONCE_BYTES:
            raise RecordError("record IV is not 12 bytes", reason="BAD_NONCE_LENGTH")
        self.cross = cross
        self.iv = int.from_bytes(iv, "big")
        self.prefix = prefix
        self.sequence = 0
        self.bytes = 0
        self.rekey_at = now + REKEY_SECONDS
        self.ends = now + _MAX_SECONDS
        self.first_step = first_step


class _Direction(Uncopyable):
    """Sealing or opening in one direction; single owner: a second thread inside it is a failure.

    A session that is not confirmed yet has a first step that never comes, a poisoned one has ended: so one
    comparison each covers those.
    """

    def __init__(self, link: Link, session: _Session, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self.session = session
        self.pending: list[_Session] = []
        self._switch_at = _NEVER + 1
        self.last_step = -1
        self._owner = threading.Lock()

    @property
    def needs_rekey(self) -> bool:
        """Whether a limit of the newest session is reached: 2^20 records, 64 GiB or 10 minutes."""
        newest = self.pending[-1] if self.pending else self.session
        return (
            newest.sequence >= REKEY_RECORDS
            or newest.bytes >= REKEY_BYTES
            or self._clock() >= newest.rekey_at
        )

    def install(self, session: _Session) -> None:
        """Queues a session for its first step; at most 4 wait."""
        self.pending = [*self.pending, session][-_MAX_PENDING:]
        self._switch_at = self.pending[0].first_step

    def _switch(self, step: int) -> _Session:
        """Take the newest pending session whose first step has come; the older ones are gone for good."""
        if self.session.first_step == _NEVER:
            raise RecordError("first record is not the confirmation", reason="NOT_CONFIRMED")
        while self.pending and step >= self.pending[0].first_step:
            self.session = self.pending.pop(0)
        self._switch_at = self.pending[0].first_step if self.pending else _NEVER + 1
        return self.session

    def _cross(self, source: Buffer, out: Buffer, header: RecordHeader, added: int) -> int:
        """Seals or opens one record, whose result is `added` bytes longer than its plaintext."""
        if not self._owner.acquire(blocking=False):
            self._link.poison("TWO_OWNERS")
            raise RecordError("two threads use one direction of a link", reason="TWO_OWNERS")
        try:
            kind, step, digest, dtype, shape, length = header
            session = self.session if step < self._switch_at else self._switch(step)
            # The number is used up before any check: whatever fails below, its nonce is never used again, and
            # no other record is accepted under it.
            sequence = session.sequence
            session.sequence = sequence + 1
            session.bytes += length
            if (
                step < session.first_step
                or len(digest) != HASH_BYTES
                or sequence >= _MAX_RECORDS
                or session.bytes > _MAX_BYTES
                or self._clock() >= session.ends
            ):
                raise self._refusal(session, header)
            if kind == Kind.CONFIRM:
                raise RecordError("only a link itself makes its confirmation", reason="BAD_HEADER")
            self.last_step = step
            written = session.cross(
                (session.iv ^ sequence).to_bytes(12, "big"),
                source,
                session.prefix + pack_order(sequence, step) + digest + describe(kind, dtype, shape, length),
                out,
            )
            if written != length + added:
                raise RecordError("record has not the announced length", reason="BAD_LENGTH")
            return written
        except BaseException as error:
            self._failed(error, out)
        finally:
            self._owner.release()

    def _begin(self) -> _Session:
        """The session for the confirmation, which is the very first record."""
        session = self.session
        if self._link.poisoned:
            raise RecordError("link is poisoned", reason="LINK_POISONED", cause=self._link.poisoned)
        if session.sequence or session.first_step != _NEVER:
            self._failed(RecordError("link was confirmed before", reason="CONFIRMED_BEFORE"))
        # Number 0 is the confirmation's, and it is used up before anything is sealed or opened under it.
        session.sequence = 1
        session.first_step = 0
        return session

    def end(self) -> None:
        """Makes all sessions refuse from now on."""
        for session in (self.session, *self.pending):
            session.ends = -math.inf

    def _refusal(self, session: _Session, header: RecordHeader) -> RecordError:
        if self._link.poisoned:
            return RecordError("link is poisoned", reason="LINK_POISONED", cause=self._link.poisoned)
        if session.first_step == _NEVER:
            return RecordError("first record is not the confirmation", reason="NOT_CONFIRMED")
        if len(header.digest) != HASH_BYTES:
            return RecordError("record header is malformed", reason="BAD_HEADER")
        if header.step < session.first_step:
            return RecordError("record belongs to a session that is over", reason="STEP_PAST")
        return RecordError(
            "session is used up", reason="SESSION_USED_UP", hint="the next session was not prepared in time"
        )

    def _failed(self, error: BaseException, out: Buffer = b"") -> NoReturn:
        refusal = error if isinstance(error, RecordError) else None
        self._link.poison(refusal.reason if refusal else "RECORD_REFUSED")
        _wipe(out)
        if not isinstance(error, Exception):
            raise error
        raise refusal or RecordError("record cannot be sealed or opened", reason="RECORD_REFUSED") from None


class Sealer(_Direction):
    """The sending direction of a link."""

    def seal_confirmation(self) -> bytes:
        """The first record of the link, 48 bytes: proof to the receiver that it talks to the right peer.

        Raises RecordError (CONFIRMED_BEFORE).
        """
        session = self._begin()
        sealed = bytearray(CONFIRMATION_BYTES)
        nonce = session.iv.to_bytes(NONCE_BYTES, "big")
        session.cross(nonce, self._link.transcript_hash, session.prefix + _CONFIRMATION, sealed)
        return bytes(sealed)

    def seal_into(self, plaintext: Buffer, out: Buffer, header: RecordHeader) -> int:
        """Seal `plaintext` into `out`, which is exactly 16 bytes longer; both may start at one address.

        Returns the length written. Raises RecordError, and then the link is poisoned.
        """
        return self._cross(plaintext, out, header, TAG_BYTES)


class Opener(_Direction):
    """The receiving direction of a link."""

    def open_confirmation(self, sealed: Buffer) -> None:
        """Check the first record of the link. Raises RecordError (CONFIRMED_BEFORE, RECORD_REFUSED)."""
        session = self._begin()
        opened = bytearray(HASH_BYTES)
        nonce = session.iv.to_bytes(NONCE_BYTES, "big")
        try:
            session.cross(nonce, sealed, session.prefix + _CONFIRMATION, opened)
        except (InvalidTag, ValueError) as error:
            self._failed(error)
        if opened != self._link.transcript_hash:
            self._failed(RecordError("confirmation is of another session", reason="RECORD_REFUSED"))

    def open_into(self, ciphertext: Buffer, out: Buffer, header: RecordHeader) -> int:
        """Open `ciphertext` into `out`, which is exactly 16 bytes shorter; both may start at one address.

        Returns the length written. Raises RecordError; then the link is poisoned and `out` is wiped.
        """
        return self._cross(ciphertext, out, header, 0)


class Link(Uncopyable):
    """One end of a link: its sealer, its opener, and the error state (poisoned) that stops both.

    Give it the keys of a handshake and keep it in one process. A forked child's copy is poisoned.
    """

    def __init__(self, keys: SessionKeys, *, clock: Clock = monotonic_clock) -> None:
        """Raises RecordError (KEYS_TAKEN, SESSION_REUSED)."""
        self.poisoned = ""
        """Why the link is unusable: a reason, or nothing while it is usable."""
        self.context = keys.context
        self.transcript_hash = keys.transcript_hash
        self._clock = clock
        send, receive = self._sessions(keys, first_step=_NEVER)
        self.sealer = Sealer(self, send, clock)
        self.opener = Opener(self, receive, clock)
        _links.add(self)

    @property
    def needs_rekey(self) -> bool:
        """Whether a new handshake is due. Nothing stops yet: refusal comes at twice the limits."""
        return self.sealer.needs_rekey or self.opener.needs_rekey

    @property
    def last_step(self) -> int:
        """The newest step seen in either direction, -1 before the first."""
        return max(self.sealer.last_step, self.opener.last_step)

    def install(self, keys: SessionKeys, at_step: int) -> None:
        """Prepare the next session of this link: records of steps from `at_step` on use it.

        Both ends have to install it with the same step before that step. Raises RecordError (LINK_POISONED,
        OTHER_LINK, STEP_PAST, KEYS_TAKEN, SESSION_REUSED); the present session goes on.
        """
        if self.poisoned:
            raise RecordError("link is poisoned", reason="LINK_POISONED", cause=self.poisoned)
        if not self.context.same_link(keys.context):
            raise RecordError("session keys are of another link or epoch", reason="OTHER_LINK")
        newest = max(
            (session.first_step for d in (self.sealer, self.opener) for session in d.pending), default=0
        )
        if not max(self.last_step, newest) < at_step <= MAX_U64:
            raise RecordError("step has passed already", reason="STEP_PAST", last_step=self.last_step)
        send, receive = self._sessions(keys, first_step=at_step)
        self.sealer.install(send)
        self.opener.install(receive)

    def poison(self, reason: str) -> None:
        """Make both directions unusable for good."""
        self.poisoned = self.poisoned or reason or "POISONED"
        self.sealer.end()
        self.opener.end()

    def _sessions(self, keys: SessionKeys, *, first_step: int) -> tuple[_Session, _Session]:
        _claim(keys)
        now = self._clock()
        initiates = keys.context.initiates
        send, receive = keys.take()
        seal, open_ = keys.suite.aead(send.key).encrypt_into, keys.suite.aead(receive.key).decrypt_into
        return (
            _Session(seal, send.iv, _prefix(keys, from_initiator=initiates), now, first_step),
            _Session(open_, receive.iv, _prefix(keys, from_initiator=not initiates), now, first_step),
        )


_CONFIRMATION = pack_order(0, 0) + bytes(HASH_BYTES) + describe(Kind.CONFIRM, "", (), HASH_BYTES)
_links: weakref.WeakSet[Link] = weakref.WeakSet()
_used_sessions: set[tuple[bytes, int]] = set()
_claims = threading.Lock()


def _claim(keys: SessionKeys) -> None:
    """Let each session be used once by each end in this process, wherever its keys came from."""
    name = (keys.session_id, keys.context.own_rank)
    with _claims:
        if name in _used_sessions:
            raise RecordError("session is in use already", reason="SESSION_REUSED")
        _used_sessions.add(name)


def _prefix(keys: SessionKeys, *, from_initiator: bool) -> bytes:
    context: LinkContext = keys.context
    numbers = struct.pack(
        ">BQIIB",
        keys.suite.code,
        context.epoch,
        context.from_rank,
        context.to_rank,
        from_initiator,
    )
    fields = (
        _DOMAIN,
        numbers,
        context.cluster.encode(),
        context.ring.encode(),
        keys.session_id,
        context.roster_hash,
    )
    return hashlib.sha256(pack_fields(*fields)).digest()


def _wipe(out: Buffer) -> None:
    """Overwrite a buffer into which the AEAD wrote plaintext before it found the tag wrong."""
    with memoryview(out) as view:
        if not view.readonly:
            view.cast("B")[:] = bytes(view.nbytes)


def _poison_child() -> None:
    for link in list(_links):
        link.poison("FORKED")


os.register_at_fork(after_in_child=_poison_child)
