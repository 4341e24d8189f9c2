"""Lets requests in: the API key first, then its scope, then the limits of the key.

Without any key ever made, loopback is open. After the first key, every call but those for liveness needs one,
until the gateway starts again without the file. A right key is remembered until `REMEMBER_SECONDS` after its
last use, by a MAC under a key of this process, and is hashed again only after that. Every request looks the
key up in the file's records, so a revocation counts at once.

A refused key is charged to its address if its id is unknown, else to this id at this address. Hashes take
turns by id. So a flood of bad keys refuses no right one behind the same proxy, unless it guesses that very
key while the right one is not remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import structlog

from sealring.edge.access.keyfile import KeyFile, KeyRecord
from sealring.edge.access.keys import ApiKey, Scope, matches, parse_key
from sealring.edge.access.known import KnownKeys
from sealring.edge.access.turns import Turns
from sealring.mesh.clock import Clock, monotonic_clock, wall_clock
from sealring.mesh.errors import (
    ConfigError,
    InvalidInput,
    PermissionDenied,
    ResourceExhausted,
    SealringError,
    Unauthenticated,
)
from sealring.mesh.rpc.limits import Buckets

log = structlog.get_logger()

REMEMBER_SECONDS = 300.0
ATTEMPTS_PER_SECOND = 1.0
ATTEMPTS_AT_ONCE = 20
BURST_SECONDS = 4.0
"""How many seconds' worth of requests may come at once."""

STRANGERS_AT_ONCE = 64
"""Calls that need no key, of one address, while others need one."""

USE_SECONDS = 60.0

_REMEMBERED = 4096
HASHES_AT_ONCE = 2
HASHES_OF_ID = 8
"""Keys of one id that are hashed or wait for it, one after the other."""

ANY = frozenset(Scope)
USE = frozenset({Scope.INFERENCE})
LOOK = frozenset({Scope.INFERENCE, Scope.READ})
WATCH = frozenset({Scope.READ})


@dataclass(frozen=True, slots=True)
class Limits:
    """Requests per second and at once. A peer is a network address, for requests that need no key."""

    key_per_second: float = 100.0
    key_at_once: int = 512
    peer_per_second: float = 200.0


def _unlimited(answers: int) -> None:
    """The claim of a caller without a key."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request: the id of its API key, or empty. `known` is whether it may see what strangers
    may not.

    `claim` counts a request, once it has been read, as one for each answer that it asks for: each is a row of
    a ring. It raises ResourceExhausted (RATE_LIMITED, TOO_MANY_AT_ONCE), InvalidInput (TOO_MANY_ANSWERS).
    """

    key_id: str = ""
    known: bool = True
    name: str = ""
    """What it is charged to where its key has no id; empty: its address."""
    claim: Callable[[int], None] = field(default=_unlimited, compare=False)


@dataclass(frozen=True, slots=True)
class _Remembered:
    key_id: str
    hash: str
    used: float


class Door(Protocol):
    """What lets requests into the HTTP edge: a Gate, or what needs less."""

    @property
    def required(self) -> bool:
        """Whether a key is needed."""

    def admit(
        self, peer: str, authorization: str | None, scopes: Collection[Scope] | None
    ) -> AbstractAsyncContextManager[Caller]:
        """Lets one request in for the length of the block, or not; see Gate."""


class UnderWay:
    """How much each name has under way, never more than `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def more(self, name: str, count: int = 1) -> Iterator[None]:
        """Counts the block as `count`.

        Raises ResourceExhausted (TOO_MANY_AT_ONCE), or InvalidInput (TOO_MANY_ANSWERS) where it would be too
        much with nothing else under way.
        """
        if count >= max(2, self._limit):
            raise InvalidInput(
                f"the request asks for more answers than the {self._limit} that its key may have at once",
                hint="send fewer prompts, or a lower n",
                reason="TOO_MANY_ANSWERS",
                param="n",
                limit=self._limit,
            )
        if self.counts[name] + count > self._limit:
            raise ResourceExhausted(
                f"more than {self._limit} requests would be under way",
                hint="wait until some have ended",
                reason="TOO_MANY_AT_ONCE",
                retry_after=1,
            )
        self.counts[name] += count
        try:
            yield
        finally:
            self.counts[name] -= count
            if not self.counts[name]:
                del self.counts[name]


class Shares:
    """Requests per second and under way, for each caller that was let in."""

    def __init__(
        self,
        limits: Limits,
        on_refused: Callable[[str], None],
        clock: Clock = monotonic_clock,
    ) -> None:
        self._on_refused = on_refused
        self._rates = _buckets(limits.key_per_second, clock)
        self._under_way = UnderWay(limits.key_at_once)

    @contextlib.contextmanager
    def one(self, name: str) -> Iterator[Caller]:
        """Counts the block as one request of `name`. Raises ResourceExhausted (RATE_LIMITED,
        TOO_MANY_AT_ONCE)."""
        with contextlib.ExitStack() as under_way:
            self._take(name, under_way, 1)
            yield Caller(name, claim=partial(self._claim, name, under_way))

    def _claim(self, name: str, under_way: contextlib.ExitStack, answers: int) -> None:
        try:
            if answers > 1:
                self._take(name, under_way, answers - 1)
        except SealringError as error:
            self._on_refused(error.reason)
            raise

    def _take(self, name: str, under_way: contextlib.ExitStack, count: int) -> None:
        under_way.enter_context(self._under_way.more(name, count))
        self._rates.check(name, count)


class Gate:
    """The way into HTTP and gRPC edges. Use it from one event loop only.

    Without a key file (`keys` None, as in a process on the user's own machine) only the limits hold.
    """

    def __init__(
        self,
        keys: KeyFile | None = None,
        limits: Limits | None = None,
        *,
        required: bool = False,
        on_refused: Callable[[str], None] = lambda reason: None,
        clock: Clock = monotonic_clock,
        wall: Clock = wall_clock,
    ) -> None:
        """With `required` every call needs a key, whatever the file holds. Raises as KnownKeys."""
        limits = limits or Limits()
        self.known = KnownKeys(keys, always=required)
        self._on_refused = on_refused
        self._clock = clock
        self._wall = wall
        self._mac_key = secrets.token_bytes(32)
        self.remembered: OrderedDict[bytes, _Remembered] = OrderedDict()
        self.checks: dict[bytes, asyncio.Task[None]] = {}
        self._turns = Turns(HASHES_AT_ONCE)
        self._hashes = UnderWay(HASHES_OF_ID)
        self.used: dict[str, int] = {}
        self._peers = _buckets(limits.peer_per_second, clock)
        self._shares = Shares(limits, on_refused, clock)
        self._unknown, self._guesses = (
            Buckets(ATTEMPTS_PER_SECOND, ATTEMPTS_AT_ONCE, clock=clock) for _ in range(2)
        )
        self._strangers = UnderWay(STRANGERS_AT_ONCE)

    @property
    def required(self) -> bool:
        """Whether a key is needed."""
        return self.known.required

    @property
    def usable_keys(self) -> int:
        """How many keys would be let in now."""
        return self.known.usable(self._wall())

    @contextlib.asynccontextmanager
    async def admit(
        self, peer: str, authorization: str | None, scopes: Collection[Scope] | None
    ) -> AsyncIterator[Caller]:
        """Lets one request in for the length of the block, or not. `scopes` None: open to everybody.

        `peer` is a `peer_name`, `authorization` what `presented` makes of the headers. Raises Unauthenticated
        (INVALID_API_KEY, SEVERAL_API_KEYS), PermissionDenied (SCOPE_DENIED), ResourceExhausted (RATE_LIMITED,
        TOO_MANY_AT_ONCE).
        """
        try:
            caller = await self._caller(peer, authorization, scopes)
            under_way = contextlib.ExitStack()
            if caller.key_id:
                caller = under_way.enter_context(self._shares.one(caller.key_id))
            elif not caller.known:
                under_way.enter_context(self._strangers.more(peer))
        except SealringError as error:
            self._on_refused(error.reason)
            raise
        with under_way:
            yield caller

    def quota(self, key_id: str) -> int:
        """The tokens that a key may use a day; 0: any number."""
        record = self.known.records.get(key_id)
        return record.tokens_a_day if record is not None else 0

    async def run(self) -> None:
        """Writes down once a minute which keys were used, for ever."""
        while True:
            await asyncio.sleep(USE_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Writes down which keys were used since the last time."""
        used, self.used = self.used, {}
        if used and self.known.file is not None:
            try:
                await asyncio.to_thread(self.known.file.note_use, used)
            except (OSError, ConfigError) as error:
                log.warning("key_use_not_recorded", error=error)

    async def _caller(self, peer: str, authorization: str | None, scopes: Collection[Scope] | None) -> Caller:
        required = self.known.required
        if not required or (scopes is None and not self.known.always):
            self._peers.check(peer)
            return Caller(known=not required)
        record = await self._authenticate(peer, authorization or "")
        if not record.allows(ANY if scopes is None else scopes):
            raise PermissionDenied(
                "this API key may not do that",
                hint=f"use one with scope {' or '.join(sorted(scopes or ANY))}",
                reason="SCOPE_DENIED",
            )
        self.used[record.id] = int(self._wall())
        return Caller(record.id)

    async def _authenticate(self, peer: str, authorization: str) -> KeyRecord:
        """The record of the key that a header presents. Raises Unauthenticated, ResourceExhausted."""
        tag = hashlib.blake2b(authorization.encode(), key=self._mac_key, digest_size=32).digest()
        record = self._recall(tag)
        if record is not None:
            return record
        check = self.checks.get(tag)
        if check is None:
            key = parse_key(_bearer(authorization))
            if (
                key is None
                or (record := self.known.records.get(key.id)) is None
                or not record.usable(self._wall())
            ):
                self._unknown.check(peer)
                raise self._refuse(peer, several="," in authorization)
            # Before it is hashed, which is slow on purpose: guesses must not make the gateway do it without
            # bound.
            guess = f"{key.id} {peer}"
            self._guesses.check(guess)
            waiting = contextlib.ExitStack()
            waiting.enter_context(self._hashes.more(key.id))
            check = asyncio.ensure_future(self._check(key, record, tag, guess))
            self.checks[tag] = check
            check.add_done_callback(lambda _: waiting.close())
            check.add_done_callback(lambda _: self.checks.pop(tag))
        # Shielded: requests with the same key wait for one check, and whoever leaves must not cancel it for
        # the others.
        await asyncio.shield(check)
        # The key may have been revoked while its hash was made.
        self.known.refresh()
        record = self._recall(tag)
        if record is None:
            raise self._refuse(peer)
        return record

    async def _check(self, key: ApiKey, record: KeyRecord, tag: bytes, guess: str) -> None:
        """Makes the hash, which takes long, beside the event loop. A key that is right is remembered."""
        async with self._turns.turn(key.id):
            right = await asyncio.to_thread(matches, key, record.hash)
        if right:
            self._guesses.give_back(guess)
            self.remembered[tag] = _Remembered(record.id, record.hash, self._clock())
            if len(self.remembered) > _REMEMBERED:
                self.remembered.popitem(last=False)

    def _recall(self, tag: bytes) -> KeyRecord | None:
        """The record of a key that was used not long ago, if it still stands as it did."""
        known = self.remembered.get(tag)
        if known is None:
            return None
        record = self.known.records.get(known.key_id)
        if (
            record is None
            or not record.usable(self._wall())
            or not hmac.compare_digest(record.hash, known.hash)
            or self._clock() >= known.used + REMEMBER_SECONDS
        ):
            del self.remembered[tag]
            return None
        self.remembered[tag] = replace(known, used=self._clock())
        self.remembered.move_to_end(tag)
        return record

    def _refuse(self, peer: str, *, several: bool = False) -> Unauthenticated:
        """Does not tell which check failed; `several` is what the caller can see for itself."""
        log.warning("api_key_refused", peer=peer)
        if several:
            return Unauthenticated(
                "the request has several API keys that differ",
                hint="send one, in authorization or in x-api-key (clients take them from their variables, as "
                "ANTHROPIC_AUTH_TOKEN and ANTHROPIC_API_KEY)",
                reason="SEVERAL_API_KEYS",
            )
        return Unauthenticated(
            "the API key is missing or not valid",
            hint="send the header authorization: Bearer KEY (sealring's own commands: --api-key-file FILE); "
            f"the gateway's owner makes keys: sealring key create{' --lan' * self.known.always}",
            reason="INVALID_API_KEY",
        )


def _buckets(rate: float, clock: Clock) -> Buckets:
    return Buckets(rate, max(1, round(rate * BURST_SECONDS)), clock=clock)


def presented(headers: Iterable[str]) -> str | None:
    """The credentials of a request's headers as one header; equal ones count once. Different ones are joined
    by a comma (RFC 9110 section 5.3), which no credential holds."""
    return ", ".join({_bearer(header) or header: header for header in headers}.values()) or None


def _bearer(header: str) -> str:
    """The credential of RFC 6750, section 2.1."""
    scheme, _, credential = header.partition(" ")
    return credential.strip() if scheme.lower() == "bearer" else ""
