"""What carries gRPC: TLS over TCP, or a network in memory, on which tests run.

A task, and every task and callback that it starts, uses the transport of its context.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio

from sealring.mesh.pki.certificates import TlsMaterial, to_pem

Options: TypeAlias = Sequence[tuple[str, Any]]


class ServerHandshakes(Protocol):
    """The configuration of a server's handshakes; gRPC calls it before each, from a thread of its own."""

    require_client: bool

    @property
    def material(self) -> TlsMaterial:
        """The newest certificate, its key and authorities."""

    def newest(self) -> grpc.ServerCertificateConfiguration: ...

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """As `newest`; None if that has not changed since the last call of either."""


class Transport(Protocol):
    """Makes channels and servers that speak as those of `grpc.aio`."""

    watches: bool
    """Whether connections have descriptors, which a server counts."""

    def channel(
        self,
        address: str,
        options: Options,
        *,
        authorities: Sequence[bytes] = (),
        material: TlsMaterial | None = None,
    ) -> grpc.aio.Channel:
        """A channel with TLS that trusts `authorities` (DER), and shows the certificate of `material` if
        there is any. The peer's name is an option of gRPC's. Without authorities it is in clear."""

    def server(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options
    ) -> grpc.aio.Server: ...

    def server_credentials(self, handshakes: ServerHandshakes) -> grpc.ServerCredentials:
        """Credentials of a server that shows the newest certificate at each of its handshakes."""

    @property
    def leaf(self) -> Callable[[str, int], Awaitable[bytes | None]] | None:
        """Gives the certificate (DER) of whatever answers at a host and port, not verified; raises OSError.
        Without it `mesh/member/bootstrap.py` reads the certificate over TCP."""


class _Tcp:
    watches = True
    leaf = None

    def channel(
        self,
        address: str,
        options: Options,
        *,
        authorities: Sequence[bytes] = (),
        material: TlsMaterial | None = None,
    ) -> grpc.aio.Channel:
        if not authorities:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=to_pem(*authorities),
            private_key=material.private_key if material else None,
            certificate_chain=to_pem(material.certificate) if material else None,
        )
        return grpc.aio.secure_channel(address, credentials, options=options)

    def server(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options) -> grpc.aio.Server:
        return grpc.aio.server(interceptors=interceptors, options=options)

    def server_credentials(self, handshakes: ServerHandshakes) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            handshakes.newest(),
            handshakes,  # type: ignore[arg-type]  # None means unchanged, which the stubs leave out
            require_client_authentication=handshakes.require_client,
        )


transport: ContextVar[Transport] = ContextVar("transport", default=_Tcp())  # noqa: B039 - it has no state
