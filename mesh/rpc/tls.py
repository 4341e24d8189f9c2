"""mTLS for gRPC: credentials that follow rotation, channel options, and the peer's identity.

A `TlsStore` holds the current key, certificate and authorities. Servers read it at every handshake. Clients
get a new channel from `PeerChannel` after a change. Streams on the old channel go on until they end, for as
long as the caller proves each new certificate on them (`mesh/member/tenure.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from sealring.mesh.errors import Unauthenticated
from sealring.mesh.pki.certificates import PeerIdentity, Role, TlsMaterial, key_hash, role_server_name, to_pem
from sealring.mesh.rpc.connections import announce
from sealring.mesh.rpc.interceptor import Context
from sealring.mesh.rpc.server import CHANNEL_OPTIONS, REST_SECONDS
from sealring.mesh.rpc.transport import Options, transport

_UNTIL_THEY_END = 3e8
"""Grace period, in seconds, of a retired channel, whose streams end by themselves: ten years."""

MAX_CONNECTION_AGE_MILLISECONDS = 3600 * 1000
"""A server asks clients to reconnect after an hour, so that withdrawn trust ends there too."""


class TlsStore:
    """The material in use, replaced as a whole when a certificate or an authority rotates."""

    def __init__(self, material: TlsMaterial) -> None:
        self._lock = threading.Lock()
        self._material = material
        self._generation = 0
        self._replaced = asyncio.Event()

    def replace(self, material: TlsMaterial) -> None:
        """Use `material` for every handshake from now on. Call it in the event loop that awaits `newer`."""
        with self._lock:
            self._material = material
            self._generation += 1
        self._replaced.set()
        self._replaced = asyncio.Event()

    async def newer(self, generation: int) -> tuple[int, TlsMaterial]:
        """Waits until the number exceeds `generation`; returns as `current` does."""
        while self._generation <= generation:
            await self._replaced.wait()
        return self.current()

    def current(self) -> tuple[int, TlsMaterial]:
        """A number that grows with every replacement, and the material."""
        with self._lock:
            return self._generation, self._material


def server_credentials(store: TlsStore, *, require_client: bool = True) -> grpc.ServerCredentials:
    """Server credentials that use rotated material at the next handshake.

    `require_client=False` is for the joining port alone: a joining node has no certificate yet.
    """
    return transport.get().server_credentials(TlsHandshakes(store, require_client=require_client))


class TlsHandshakes:
    """`ServerHandshakes` by a store's material."""

    def __init__(self, store: TlsStore, *, require_client: bool) -> None:
        self._store, self.require_client = store, require_client
        self._generation = -1

    @property
    def material(self) -> TlsMaterial:
        return self._store.current()[1]

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        announce()
        return None if self._store.current()[0] == self._generation else self.newest()

    def newest(self) -> grpc.ServerCertificateConfiguration:
        self._generation, material = self._store.current()
        return _server_configuration(material, self.require_client)


def joining_channel(address: str, authorities: tuple[bytes, ...]) -> grpc.aio.Channel:
    """A channel to the coordinator's joining port, which trusts `authorities` and presents no certificate."""
    options = channel_options(role_server_name(Role.COORDINATOR))
    return transport.get().channel(address, options, authorities=authorities)


def secure_channel(address: str, material: TlsMaterial, options: Options) -> grpc.aio.Channel:
    """A channel that presents the material's certificate; `options` are those of `channel_options`."""
    return transport.get().channel(address, options, authorities=material.authorities, material=material)


IDLE_MILLISECONDS = 10_000
"""How long a connection without calls stays open, such as one made by a renewal beside an older stream's."""


def channel_options(server_name: str) -> list[tuple[str, int | str]]:
    """Client options for a peer that has to prove `server_name` at any address."""
    return [
        *(dict(CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": int(REST_SECONDS * 1000)}).items(),
        ("grpc.ssl_target_name_override", server_name),
        ("grpc.default_authority", server_name),
        ("grpc.enable_retries", 0),
        ("grpc.client_idle_timeout_ms", IDLE_MILLISECONDS),
    ]


TURN_SECONDS = 15.0
"""A shorter stream was refused or met no server: the next attempt may go to another address."""


class PeerChannel:
    """A client channel to one peer that is replaced when the certificate rotates.

    Call `get` for every RPC and do not store the result. Use it from one event loop only.
    """

    def __init__(
        self, address: str, store: TlsStore, server_name: str, options: Sequence[tuple[str, int]] = ()
    ) -> None:
        """`options` are gRPC's, beside those of `channel_options`."""
        self._options = options
        self.address = address
        self._store = store
        self._server_name = server_name
        self._generation = -1
        self._channel: grpc.aio.Channel | None = None
        self.key_hash = b""
        """The hash of the channel's own TLS key (`sealring.mesh.pki.certificates.key_hash`), after the first
        `get`."""
        self.retiring: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        """Replaced channels by the tasks that close them, for as long as they have streams."""

    def get(self) -> grpc.aio.Channel:
        """The channel to use now."""
        generation, material = self._store.current()
        if self._channel is None or generation != self._generation:
            self._retire()
            self._generation = generation
            self.key_hash = key_hash(material.certificate)
            self._channel = secure_channel(
                self.address, material, [*channel_options(self._server_name), *self._options]
            )
        return self._channel

    def adopt(self, other: PeerChannel) -> None:
        """Goes on over the connection of `other`, and at its address. `other` is not to be used any more."""
        self._retire()
        self.address, self._generation, self.key_hash = other.address, other._generation, other.key_hash
        self._channel, other._channel = other._channel, None

    def renewed(self) -> AsyncIterator[bytes]:
        """Every certificate (DER) newer than that of the last `get`."""
        return self._renewed_after(self._generation)

    async def _renewed_after(self, generation: int) -> AsyncIterator[bytes]:
        while True:
            generation, material = await self._store.newer(generation)
            yield material.certificate

    async def pause(self, seconds: float) -> None:
        """Waits `seconds` before another attempt, or until a newer certificate is stored."""
        # Newer than now: attempts are made over other channels, and this one may have seen none.
        generation, _ = self._store.current()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._store.newer(generation)

    async def close(self, grace: float | None = None) -> None:
        """Closes this and every retired channel, giving streams `grace` seconds to end."""
        channel, self._channel = self._channel, None
        retired = self.retiring.copy()
        for task in retired:
            task.cancel()
        await asyncio.gather(*retired, return_exceptions=True)
        for one in retired.values():  # a task cancelled before its first step has closed nothing
            await one.close(None)
        if channel is not None:
            await channel.close(grace)

    def _retire(self) -> None:
        if self._channel is not None:
            task = asyncio.get_running_loop().create_task(_close(self._channel, _UNTIL_THEY_END))
            self.retiring[task] = self._channel
            task.add_done_callback(self.retiring.pop)


def is_own_cancellation() -> bool:
    """Whether a caught CancelledError cancels the running task, and not only its gRPC call.

    Closing a channel cancels its calls.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def peer_identity(context: Context) -> PeerIdentity:
    """The caller's identity, from the URI SAN of the verified client certificate.

    Raises Unauthenticated (NO_CLIENT_CERTIFICATE), CertificateError (BAD_PEER_URI).
    """
    properties = context.auth_context()
    uris = list(properties.get("peer_uri", []))
    if list(properties.get("transport_security_type", [])) != [b"ssl"] or len(uris) != 1:
        raise Unauthenticated(
            "caller presented no certificate of this cluster",
            reason="NO_CLIENT_CERTIFICATE",
            hint="connect with mTLS",
        )
    return PeerIdentity.parse(uris[0].decode("ascii", errors="replace"))


def peer_certificate(context: Context) -> bytes:
    """The caller's verified client certificate, DER.

    Raises Unauthenticated (NO_CLIENT_CERTIFICATE).
    """
    found = list(context.auth_context().get("x509_pem_cert", []))
    try:
        (pem,) = found
        certificate = x509.load_pem_x509_certificate(pem)
    except (ValueError, x509.InvalidVersion):
        raise Unauthenticated(
            "caller presented no certificate of this cluster", reason="NO_CLIENT_CERTIFICATE"
        ) from None
    return certificate.public_bytes(Encoding.DER)


async def _close(channel: grpc.aio.Channel, grace: float) -> None:
    try:
        await channel.close(grace)
    except asyncio.CancelledError:
        # The last steps of `close`, by grpc.aio's private names: a second call of it does nothing once the
        # first has begun.
        for call in list(channel._active_calls):  # type: ignore[attr-defined]
            call.cancel()
        channel._channel.close()  # type: ignore[attr-defined]
        raise


def _server_configuration(material: TlsMaterial, require_client: bool) -> grpc.ServerCertificateConfiguration:
    pair = (material.private_key, to_pem(material.certificate))
    roots = to_pem(*material.authorities) if require_client else None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)
