"""New keys for the links of a running epoch, without stopping its stream.

Both ends of a link change keys at the same step. After the new handshake each end holds the steps that its
engine does not have yet, and sends the number of the last one that it has. The new keys begin with the step
after the later of the two. Steps flow again as soon as the own carrier has the keys: the pause is a round
trip between neighbours and one to the carrier.

Keys are changed while steps flow. In a ring at rest new keys would age unused, so both ends wait for the next
step and hold it until the keys are new.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import struct
from collections.abc import Callable, Iterator
from typing import Protocol

import structlog

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import HandshakeError, SealringError
from sealring.node.daemon.plan import EpochPlan, LinkPlan
from sealring.node.link.exchange import Conversation, Handshakes
from sealring.node.link.params import LinkParams
from sealring.node.link.records import REKEY_SECONDS

log = structlog.get_logger()

RENEW_SECONDS = REKEY_SECONDS * 0.8
LATER_SECONDS = 2.0
"""Delay of the responder behind the initiator, which starts the change of keys."""

RETRY_SECONDS = 30.0
_REST_SECONDS = 1.0
_PATIENCE_SECONDS = 3.0
_EXCHANGE_SECONDS = 4.0
_LABEL = b"last step"
_STEP = struct.Struct(">Q")


class StepGate:
    """Holds back the steps of an epoch. `last` is the number of the last step that passed."""

    def __init__(self, clock: Clock = monotonic_clock) -> None:
        self.last = 0
        self._clock = clock
        self._last_at = -math.inf
        self._holds = 0
        self._open = asyncio.Event()
        self._open.set()
        self._knocked = asyncio.Event()
        self.on_step: Callable[[], None] = lambda: None
        """Called with the first step after a rest."""

    async def pass_step(self) -> None:
        """Waits while the gate is held."""
        if not self._open.is_set():
            self._knocked.set()
            await self._open.wait()

    def passed(self, step: int) -> None:
        """Notes that a step was given to the engine."""
        rested = self.resting
        self.last = step
        self._last_at = self._clock()
        if rested:
            self.on_step()

    @property
    def resting(self) -> bool:
        """Whether no step has passed for a while."""
        return self.rested(_REST_SECONDS)

    def rested(self, seconds: float) -> bool:
        """Whether no step has passed for this time."""
        return self._clock() - self._last_at > seconds

    async def knocked(self) -> None:
        """Returns when a step waits at the held gate."""
        await self._knocked.wait()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No step passes within the block."""
        self._holds += 1
        self._open.clear()
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._knocked.clear()
                self._open.set()


class KeyTaker(Protocol):
    """A carrier that accepts new keys."""

    def rekey_wanted(self, *, outgoing: bool) -> asyncio.Event:
        """Set when the keys of a link near the limit of their use."""

    async def install(self, keys: bytes, *, outgoing: bool, at_step: int) -> None: ...


class Rotation:
    """Renews the keys of one epoch's links until it is cancelled. A failed attempt is repeated.

    The old keys stay in use meanwhile. The carrier ends the epoch when they are used up.
    """

    def __init__(
        self,
        plan: EpochPlan,
        handshakes: Handshakes,
        gate: StepGate,
        carrier: KeyTaker,
        params: Callable[[LinkPlan], LinkParams],
    ) -> None:
        """`params` returns a link's parameters by the current roster, or raises a SealringError."""
        self._plan = plan
        self._handshakes = handshakes
        self._gate = gate
        self._carrier = carrier
        self._params = params
        self._changed_at: dict[LinkPlan, int] = {}

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as group:
            for link in self._plan.links:
                group.create_task(self._call(link) if link.params.initiates else self._answer(link))

    async def _call(self, link: LinkPlan) -> None:
        session = 0
        while True:
            await self._due(link, RENEW_SECONDS)
            session += 1
            if self._gate.resting:
                with self._gate.held():
                    await self._gate.knocked()
                    changed = await self._attempt(link, session)
            else:
                changed = await self._attempt(link, session)
            if not changed:
                await asyncio.sleep(RETRY_SECONDS * random.uniform(0.8, 1.2))  # noqa: S311

    async def _attempt(self, link: LinkPlan, session: int) -> bool:
        try:
            await self._handshakes.call(
                self._params(link),
                link.peer_addresses,
                session,
                lambda found: self.change(link, found),
                seconds=_PATIENCE_SECONDS,
            )
        except SealringError as error:
            log.warning("link_keys_not_renewed", peer=link.params.peer_id, reason=error.reason)
            return False
        return True

    async def _answer(self, link: LinkPlan) -> None:
        session = 1
        while True:
            waiting = asyncio.create_task(self._hold_when_due(link))
            try:
                await self._handshakes.answer(
                    link.params,
                    session,
                    lambda found: self.change(link, found),
                    params=lambda: self._params(link),
                )
                session += 1
            except SealringError as error:
                log.warning("link_keys_not_renewed", peer=link.params.peer_id, reason=error.reason)
            finally:
                waiting.cancel()
                await asyncio.wait((waiting,))

    async def _hold_when_due(self, link: LinkPlan) -> None:
        """Holds the first step after a long rest for 3 s, so that the neighbour can start its handshake."""
        delay = RENEW_SECONDS + LATER_SECONDS
        while True:
            await self._due(link, delay)
            delay = RETRY_SECONDS
            if self._gate.resting:
                with self._gate.held():
                    await self._gate.knocked()
                    await asyncio.sleep(_PATIENCE_SECONDS)

    async def _due(self, link: LinkPlan, seconds: float) -> None:
        """Returns after `seconds`, or earlier when the carrier wants new keys."""
        wanted = self._carrier.rekey_wanted(outgoing=not link.receives)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await wanted.wait()
        wanted.clear()

    async def change(self, link: LinkPlan, found: Conversation) -> None:
        """Agrees on a step under a finished handshake and installs its keys. Raises HandshakeError."""
        with self._gate.held():
            try:
                async with asyncio.timeout(_EXCHANGE_SECONDS):
                    own = self._gate.last
                    await found.tell(_LABEL, _STEP.pack(own))
                    at_step = max(own, _unpack(await found.hear(_LABEL))) + 1
                    if at_step <= self._changed_at.get(link, 0):
                        return  # the keys prepared last have not been used yet
                    keys = found.session.to_carrier()
                    await self._carrier.install(keys, outgoing=not link.receives, at_step=at_step)
                    self._changed_at[link] = at_step
            except TimeoutError:
                raise HandshakeError("the change of keys took too long", reason="REKEY_TIMEOUT") from None
        log.info("link_keys_renewed", peer=link.params.peer_id, at_step=at_step)


def _unpack(note: bytes) -> int:
    if len(note) != _STEP.size:
        raise HandshakeError("the neighbour's last step is malformed", reason="BAD_STEP_NOTE")
    (step,) = _STEP.unpack(note)
    return int(step)
