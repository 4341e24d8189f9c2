"""Challenges: every node proves its identity and its software on connecting and every few minutes.

A node that lost a protection is evicted at once; one that fails three challenges in a row is evicted then. It
fails by silence, with invalid evidence, or when it does not know whether a protection is still on. Other
unknown facts lower its level at the third failure. An evicted node needs a new token, and joins new epochs
only. A node that was started again may run other software (decision 20). A node whose files changed while it
ran stays a member and is distrusted until it is started again. Evidence that grows old lowers the score
(`coordinator/auth/standing.py`).
"""

from __future__ import annotations

import asyncio
import math
import secrets

import structlog

from sealring.coordinator.members.evidence import Outcomes, Verifier
from sealring.coordinator.members.expulsion import Expulsion
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store, StoredMember
from sealring.coordinator.streams.sessions import Sessions
from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.crypto.identity import MAX_SIGNATURE_BYTES
from sealring.mesh.errors import AttestationError, InvalidInput, SealringError
from sealring.mesh.trust.attestation import MAX_STATEMENT_BYTES, NONCE_BYTES, decode_statement
from sealring.v1 import membership_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage

MAX_FAILURES = 3
_LOOKS = 6
_MAX_TICK_SECONDS = 1.0
log = structlog.get_logger()


class Challenges:
    """A listener of the sessions."""

    def __init__(
        self,
        store: Store,
        sessions: Sessions,
        verifier: Verifier,
        outcomes: Outcomes,
        expulsion: Expulsion,
        settings: CoordinatorSettings,
        *,
        awake: Clock = monotonic_clock,
    ) -> None:
        """`awake` is a clock that is never set."""
        self._awake = awake
        self._store = store
        self._sessions = sessions
        self._verifier = verifier
        self._outcomes = outcomes
        self._expulsion = expulsion
        self._interval = settings.challenge_interval
        self._tick = min(settings.challenge_timeout / _LOOKS, _MAX_TICK_SECONDS)
        self._patience = math.ceil(settings.challenge_timeout / self._tick)
        self._open: dict[str, bytes] = {}
        """The nonces of the challenges that wait for an answer."""
        self._looks: dict[str, int] = {}
        """For each member, the looks at unanswered challenges since its last answer. Looks are counted, not
        seconds: a process that stood still fails nobody."""
        self._due: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    # Sessions

    def online(self, member: str) -> None:
        """Sends the first challenge of a stream."""
        self._send(member)

    def left(self, member: str, *, gone: bool = False) -> None:
        """Forgets the open challenge of a stream that broke, and keeps its looks: a member cannot connect
        again for more time. A machine that sleeps is looked at only until its stream has ended."""
        if self._open.pop(member, None) is not None:
            self._looks[member] += 1  # also a stream that ends between two looks
        self._due.pop(member, None)

    # Time

    async def run(self) -> None:
        """Looks at every tick. Runs until cancelled."""
        while True:
            await asyncio.sleep(self._tick)
            self.look()

    def look(self) -> None:
        """Fails the challenges that have been open for too many looks, and sends those that are due."""
        for member in self._open:
            self._looks[member] += 1
        for member, looks in list(self._looks.items()):
            if looks > self._patience:
                self._guarded(member, "SILENT")
        now = self._awake()
        for member, due in list(self._due.items()):
            if now >= due and member not in self._open:
                self._send(member)

    @property
    def open(self) -> list[str]:
        """The members whose answer is awaited, in the order of the questions."""
        return list(self._open)

    def failures(self, member: str) -> int:
        """The challenges in a row that a member has failed."""
        return self._failures.get(member, 0)

    def _guarded(self, member: str, why: str) -> None:
        self._settle(member)
        try:
            self._failed(member, why)
        except SealringError as error:  # the database cannot be written: the next challenge decides
            log.error("challenge_not_recorded", member=member, reason=error.reason)

    def _send(self, member: str) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._open[member] = nonce
        self._looks.setdefault(member, 0)
        self._due[member] = self._awake() + self._interval
        challenge = membership_pb2.Challenge(nonce=nonce)
        self._sessions.send(member, CoordinatorMessage(challenge=challenge))

    def _settle(self, member: str) -> None:
        """Ends the wait for an answer."""
        self._open.pop(member, None)
        self._looks.pop(member, None)

    # Answers

    def answered(self, identifier: str, answer: membership_pb2.ChallengeAnswer) -> None:
        """Judges an answer. One that is late changes nothing. Raises InvalidInput (BAD_MESSAGE)."""
        sizes = (len(answer.statement) <= MAX_STATEMENT_BYTES, len(answer.signature) <= MAX_SIGNATURE_BYTES)
        if not all(sizes):
            raise InvalidInput("an answer to a challenge is too large", reason="BAD_MESSAGE")
        expected = self._open.get(identifier)
        member = self._store.members.find(identifier)
        try:
            nonce = decode_statement(answer.statement).nonce
            if expected is None or member is None or nonce != expected:
                log.info("challenge_answered_late", member=identifier)
                return
            self._settle(identifier)
            last = self.failures(identifier) + 1 >= MAX_FAILURES
            verdict = self._verifier.judge_answer(member, expected, answer, last=last)
        except AttestationError as error:
            self._settle(identifier)
            if member is not None and error.reason == "PROTECTION_LOST":
                self._throw_out(member, error.reason)
            elif member is not None and error.reason == "MANIFEST_CHANGED":
                self._failures.pop(identifier, None)
                self._outcomes.distrust(member, answer.statement, error)
            else:
                self._failed(identifier, error.reason)
            return
        self._failures.pop(identifier, None)
        self._outcomes.passed(member, verdict)

    def _failed(self, identifier: str, why: str) -> None:
        failures = self._failures[identifier] = self.failures(identifier) + 1
        log.warning("challenge_failed", member=identifier, why=why, failures=failures)
        member = self._store.members.find(identifier)
        if failures >= MAX_FAILURES and member is not None:
            self._throw_out(member, why)

    def _throw_out(self, member: StoredMember, why: str) -> None:
        log.error("member_failed_challenge", member=member.id, name=member.name, why=why)
        self._expulsion.evict(member, "coordinator", why=why)
        self._failures.pop(member.id, None)
