"""The OpenAI HTTP edge on the user's own machine: prompts reach it in clear and leave it sealed.

Other accounts of the machine reach its port as well, so it answers only requests with its own key, which is
in a file of the user's. Without that, they would ask with the user's API key, and learn from cached prefixes
what the user asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import structlog

from sealring.cli.calls.member import MemberChannels
from sealring.client import AsyncClient, Ring
from sealring.client.sealing import SealingBackend
from sealring.client.trust import default_state_file
from sealring.edge.access.gate import ATTEMPTS_AT_ONCE, ATTEMPTS_PER_SECOND, Caller
from sealring.edge.access.keys import ApiKey, Scope, new_key, parse_key
from sealring.edge.http.app import create_app
from sealring.edge.http.server import HttpServer
from sealring.edge.metrics import Metrics
from sealring.mesh.errors import ConfigError, SealringError, Unauthenticated
from sealring.mesh.rpc.limits import Buckets
from sealring.mesh.system.files import create_exclusive, read_secret, unwritable
from sealring.mesh.system.lock import require_own_state
from sealring.mesh.system.processes import first_of, stop_on_signals
from sealring.mesh.trust.levels import described

log = structlog.get_logger()

T = TypeVar("T")

_SECONDS = 3600.0
"""The longest answer."""

_LOOK_SECONDS = 1.0
_LOOKS = 30
"""Looks until the gateways are asked for again."""


class OwnGate:
    """Lets in the programs that have the one key (edge.access.gate.Door).

    It has 256 random bits: nobody guesses it, so attempts are neither counted nor made slow. A program that
    has no key, or an old one, keeps no other out. Its calls that need no key are few: some ask the gateway,
    with the API key of the proxy's owner.
    """

    required = True

    def __init__(self, key_sha256: str) -> None:
        """`key_sha256` is as `digest_of` gives it."""
        self._key_sha256 = key_sha256
        self.strangers = Buckets(ATTEMPTS_PER_SECOND, ATTEMPTS_AT_ONCE)

    @asynccontextmanager
    async def admit(
        self, peer: str, authorization: str | None, scopes: Collection[Scope] | None
    ) -> AsyncIterator[Caller]:
        """Lets a request in if one of its keys is right: some programs also send that of another service.

        Raises Unauthenticated (INVALID_API_KEY), ResourceExhausted (RATE_LIMITED).
        """
        given = [digest_of(one.rpartition(" ")[2]) for one in (authorization or "").split(", ")]
        known = any(hmac.compare_digest(one, self._key_sha256) for one in given)
        if not known and scopes is None:
            self.strangers.check(peer)
        elif not known:
            raise Unauthenticated(
                "the proxy's key is missing or not the right one",
                hint="`sealring connect NAME --write` puts it into a program's settings",
                reason="INVALID_API_KEY",
            )
        yield Caller(known=known, name="own" if known else "")


def digest_of(key: str) -> str:
    """The SHA-256 of a key's text, in hex: of 256 random bits it tells nobody anything."""
    return hashlib.sha256(key.encode()).hexdigest()


def own_key(file: Path) -> ApiKey:
    """The key in the file; a missing file is made.

    Raises ConfigError (BAD_API_KEY_FILE, SECRET_FILE_UNSAFE, STATE_UNWRITABLE), PermissionDenied
    (OTHERS_STATE).
    """
    require_own_state(file.parent, line="sealring proxy")
    try:
        create_exclusive(file, f"{new_key().text}\n".encode())
        key = parse_key(read_secret(file).decode("ascii", "replace").strip())
    except OSError as error:
        raise unwritable(file, error) from None
    if key is None:
        raise ConfigError(
            f"{file} does not hold the proxy's key",
            hint="remove it, so that another one is made, and run `sealring connect NAME --write` again",
            reason="BAD_API_KEY_FILE",
        )
    return key


async def serve(
    client: AsyncClient,
    listen: str,
    key_sha256: str,
    *,
    say: Callable[[str], None],
    meanwhile: Callable[[], Coroutine[None, None, None]] | None = None,
) -> None:
    """The proxy on a loopback address, until SIGTERM or SIGINT, for programs that have the key.

    `say` gets its address and the members that will see prompts. `meanwhile` runs beside it, and never ends.
    Raises ConfigError (LOOPBACK_ONLY, CANNOT_LISTEN), and at the start RosterError or Unavailable without a
    roster that the root vouches for.
    """
    metrics = Metrics()
    gate = OwnGate(key_sha256)
    edge = HttpServer(create_app(SealingBackend(client, metrics), exposition=metrics.exposition, gate=gate))
    with stop_on_signals() as stop:
        try:
            async with client:
                port = edge.listen(listen)
                rings = await client.rings()
                await edge.start()
                log.info(
                    "proxy_started", http_port=port, gateways=client.gateways.addresses, rings=len(rings)
                )
                host = listen.rpartition(":")[0]
                gateways = " or ".join(client.gateways.addresses)
                say(f"serving http://{host}:{port}/v1; {gateways} gets sealed prompts")
                say("programs need its key: sealring connect NAME --write")
                for ring in rings:
                    say(_answered_by(ring))
                await first_of(stop.wait(), *([meanwhile()] if meanwhile else []))
        finally:
            await edge.stop()
            log.info("proxy_stopped")


async def serve_member(
    folder: Path, listen: str, key_sha256: str, min_trust: int, *, say: Callable[[str], None]
) -> None:
    """As `serve`, for the programs of a member, whose certificate as a client is in `folder`.

    It waits for the certificate, which the member's node gets from the coordinator, for a gateway and for a
    roster. Raises as `serve`.
    """
    with stop_on_signals() as stop:
        channels = await _until(stop, lambda: _opened(folder))
        gateways = None if channels is None else await _until(stop, channels.find)
    if channels is None or gateways is None:
        return
    pin = channels.state.root_sha256
    client = AsyncClient(
        gateways,
        root_sha256=pin,
        min_trust=min_trust,
        state_file=default_state_file(pin),
        timeout=_SECONDS,
        channels=channels,
    )

    async def follow() -> None:
        """Looks for the gateways anew, while the one that is asked cannot be reached. Now and then otherwise:
        those of the last time are all that is known while the coordinator is away."""
        for number in itertools.count(1):
            await asyncio.sleep(_LOOK_SECONDS)
            fails = channels.fails(client.gateways.current)
            if fails or number % _LOOKS == 0:
                with contextlib.suppress(SealringError):
                    found = await channels.find()
                    if fails:
                        client.gateways.use(found)

    await serve(client, listen, key_sha256, say=say, meanwhile=follow)


async def _opened(folder: Path) -> MemberChannels:
    return MemberChannels(folder)


async def _until(stop: asyncio.Event, attempt: Callable[[], Awaitable[T]]) -> T | None:
    """The result of `attempt`, made again while what it needs is not there; None after `stop`."""
    said = ""
    while not stop.is_set():
        try:
            return await attempt()
        except (OSError, SealringError) as error:
            if str(error) != said:
                said = str(error)
                log.info("proxy_waits", why=said)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await stop.wait()
    return None


def _answered_by(ring: Ring) -> str:
    members = ", ".join(f"{one.id[:8]} of trust {described(one.level)}" for one in ring.members)
    if ring.clear_links:
        return f"{ring.deployment} is not answered by ring {ring.id}, whose links are in clear: {members}"
    return f"{ring.deployment} is answered by ring {ring.id}, trust {described(ring.min_trust)}: {members}"
