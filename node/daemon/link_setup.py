"""The links of a new epoch: handshakes on all of them at once, and the ring's addresses.

The receiving end of a link listens on a new free port for each epoch, and sends it to the sender alone,
sealed under the handshake.

A handshake that breaks off is retried on a new connection with new ephemeral keys. A handshake in which
anything is wrong is not. The responder cannot know whether its last message arrived, so it answers repeated
handshakes until the epoch is committed; the newest keys count.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable

import structlog

from sealring.mesh.errors import DeadlineExceeded, HandshakeError, InvalidInput, SealringError
from sealring.mesh.system.addresses import listen_error, parse_address
from sealring.mesh.system.networks import ANY_HOST, hosts_with
from sealring.node.carrier.neighbours import PASS_BYTES, listen
from sealring.node.daemon.epoch import LinkSecrets
from sealring.node.daemon.plan import EpochPlan, LinkPlan
from sealring.node.link.exchange import Conversation, Handshakes, Talk, is_broken_off
from sealring.v1 import membership_pb2

log = structlog.get_logger()

PEER_SECONDS = 40.0
"""Timeout for the whole handshake of the lower-ranked neighbour."""

CALL_SECONDS = 30.0
"""Time during which handshakes with the higher-ranked neighbour are retried."""

_FIRST_ATTEMPT = 4.0
_LONGER = 1.5
_PAUSE, _MOST_PAUSE = 0.2, 1.0
MAX_RING_HOSTS = 8
_BACKLOG = 128
_ADDRESS_LABEL = b"ring address"
_PASS_LABEL = b"ring pass"


def listen_for_neighbour(ring_host: str, *, everywhere: bool) -> tuple[socket.socket, str]:
    """A socket at a free port of `ring_host` or of every interface, and its addresses, separated by commas.

    Raises ConfigError (CANNOT_LISTEN).
    """
    hosts = hosts_with(ring_host, MAX_RING_HOSTS) if everywhere else (ring_host,)
    host = hosts[0] if len(hosts) == 1 else ANY_HOST
    try:
        listener = listen(host, _BACKLOG)
    except OSError:
        raise listen_error(f"{host}:0") from None
    port = listener.getsockname()[1]
    return listener, ",".join(f"{one}:{port}" for one in hosts)


class LinkSetup:
    """The handshakes of one epoch, from `establish` until `close`."""

    def __init__(
        self,
        handshakes: Handshakes,
        plan: EpochPlan,
        own_addresses: str,
        again: Callable[[LinkSecrets], None],
        *,
        peer_seconds: float = PEER_SECONDS,
        call_seconds: float = CALL_SECONDS,
        first_attempt: float = _FIRST_ATTEMPT,
    ) -> None:
        """`own_addresses` are those of the listener, separated by commas. `again` receives the new keys of
        each handshake that a neighbour repeats after `establish`.
        """
        self._handshakes = handshakes
        self._plan = plan
        self._own_addresses = own_addresses
        self._again = again
        self._peer_seconds = peer_seconds
        self._call_seconds = call_seconds
        self._first_attempt = first_attempt
        self._answering: list[asyncio.Task[None]] = []

    async def establish(self) -> LinkSecrets:
        """Shakes hands on all links of the epoch.

        Raises an ExceptionGroup of HandshakeError, Unavailable (PEER_UNREACHABLE), DeadlineExceeded
        (PEER_SILENT) and others. After an error no handshake is answered and no keys are left.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._establish(link)) for link in self._plan.links]
        except BaseException:
            self.close()
            raise
        secrets = LinkSecrets()
        for task in tasks:
            secrets = secrets.renewed(task.result())
            secrets.infos.extend(task.result().infos)
        return secrets

    def close(self) -> None:
        """Stops answering handshakes."""
        for task in self._answering:
            task.cancel()

    async def _establish(self, link: LinkPlan) -> LinkSecrets:
        if link.params.initiates:
            return await self._call(link)
        result: asyncio.Future[LinkSecrets] = asyncio.get_running_loop().create_future()
        task = asyncio.get_running_loop().create_task(self._answer(link, result))
        self._answering.append(task)
        try:
            async with asyncio.timeout(self._peer_seconds):
                return await result
        except TimeoutError:
            raise DeadlineExceeded(
                "the neighbour did not shake hands", reason="PEER_SILENT", peer=link.params.peer_id
            ) from None

    async def _call(self, link: LinkPlan) -> LinkSecrets:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._call_seconds
        patience, pause = self._first_attempt, _PAUSE
        while True:
            try:
                return await self._handshakes.call(
                    link.params, link.peer_addresses, 0, self._talk(link), seconds=patience
                )
            except SealringError as error:
                if not is_broken_off(error) or loop.time() > until:
                    raise
                log.info("handshake_repeated", peer=link.params.peer_id, reason=error.reason)
            await asyncio.sleep(pause)
            patience, pause = patience * _LONGER, min(pause * _LONGER, _MOST_PAUSE)

    async def _answer(self, link: LinkPlan, first: asyncio.Future[LinkSecrets]) -> None:
        def done(result: LinkSecrets) -> None:
            if not first.done():
                first.set_result(result)
            elif not first.cancelled():
                log.info("handshake_repeated_by_neighbour", peer=link.params.peer_id)
                self._again(result)

        def failed(error: SealringError) -> None:
            if not first.done():
                first.set_exception(error)

        with contextlib.suppress(asyncio.CancelledError):
            async with self._handshakes.answering(link.params, self._talk(link), done, failed):
                await asyncio.get_running_loop().create_future()

    def _talk(self, link: LinkPlan) -> Talk[LinkSecrets]:
        async def talk(conversation: Conversation) -> LinkSecrets:
            session, params = conversation.session, link.params
            info = membership_pb2.LinkInfo(
                from_rank=params.from_rank, to_rank=params.to_rank, suite=session.suite.value
            )
            row_key = session.row_key() if link.closes and self._plan.seals_rows else b""
            if link.receives:
                await conversation.tell(_ADDRESS_LABEL, self._own_addresses.encode("ascii"))
                return LinkSecrets(
                    incoming_pass=session.export(_PASS_LABEL, length=PASS_BYTES),
                    incoming_keys=session.to_carrier(),
                    infos=[info],
                    row_key=row_key,
                )
            return LinkSecrets(
                next_address=ring_addresses(await conversation.hear(_ADDRESS_LABEL)),
                outgoing_pass=session.export(_PASS_LABEL, length=PASS_BYTES),
                outgoing_keys=session.to_carrier(),
                infos=[info],
                row_key=row_key,
            )

        return talk


def ring_addresses(note: bytes) -> str:
    """The neighbour's ring addresses, separated by commas. Raises HandshakeError (BAD_RING_ADDRESS)."""
    try:
        addresses = note.decode("ascii")
        found = [parse_address(one) for one in addresses.split(",")]
        for host, _ in found:
            ipaddress.IPv4Address(host)
        if len(found) <= MAX_RING_HOSTS and all(port for _, port in found):
            return addresses
    except (ValueError, InvalidInput):
        pass
    raise HandshakeError("the neighbour's ring address is malformed", reason="BAD_RING_ADDRESS")
