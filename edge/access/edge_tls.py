"""Certificates of the gateway's edges: from the owner's files, taken up again when those change."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import grpc
import structlog

from sealring.mesh.errors import ConfigError
from sealring.mesh.rpc.connections import announce
from sealring.mesh.system.files import read_bounded, read_secret

log = structlog.get_logger()

LOOK_SECONDS = 60.0
_MAX_BYTES = 1 << 18

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Cipher suites of TLS 1.2, AEAD only (RFC 9325 section 4.2); all suites of TLS 1.3 are AEAD."""


class EdgeTls:
    """One pair of certificate (with its chain) and key, for HTTP or for gRPC."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises ConfigError (BAD_TLS_FILES, SECRET_FILE_UNSAFE)."""
        self._certificate = certificate
        self._key = key
        self._read = self._files()
        self._context = self._check()

    @property
    def context(self) -> ssl.SSLContext:
        """A context for asyncio servers; handshakes use the newest certificate."""
        return self._context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials for gRPC servers; handshakes use the newest certificate."""
        served = [self._read]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            announce()
            if self._read == served[0]:
                return None
            served[0] = self._read
            return _configuration(*served[0])

        return grpc.dynamic_ssl_server_credentials(
            _configuration(*served[0]),
            fetch,  # type: ignore[arg-type]  # None means unchanged, which the stubs leave out
        )

    async def run(self) -> None:
        """Looks once a minute whether the files have changed, for ever. Bad ones change nothing."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Takes up changed files."""
        try:
            found = await asyncio.to_thread(self._files)
            if found != self._read:
                self._check()
                self._context.load_cert_chain(self._certificate, self._key, _no_password)
                self._read = found
                log.info("edge_certificate_renewed", file=self._certificate)
        except (OSError, ConfigError) as error:
            log.error("edge_certificate_not_renewed", file=self._certificate, error=error)

    def _files(self) -> tuple[bytes, bytes]:
        try:
            chain = read_bounded(self._certificate, max_bytes=_MAX_BYTES)
            return chain, read_secret(self._key, max_bytes=_MAX_BYTES)
        except OSError as error:
            raise self._bad(error.strerror or "cannot be read") from None

    def _check(self) -> ssl.SSLContext:
        """A context of these files, which belong together."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        context.set_ciphers(_CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION  # which OpenSSL 3 leaves out by itself
        try:
            context.load_cert_chain(self._certificate, self._key, _no_password)
        except (OSError, ValueError):  # ssl.SSLError is an OSError
            raise self._bad("do not belong together or are not PEM without a password") from None
        return context

    def _bad(self, why: str) -> ConfigError:
        return ConfigError(
            f"the TLS files {self._certificate} and {self._key} cannot be used: {why}",
            hint="name a PEM file with the certificate and its chain, and one with its key",
            reason="BAD_TLS_FILES",
        )


def _no_password() -> str:
    """Instead of asking on the terminal."""
    return ""


def _configuration(chain: bytes, key: bytes) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key, chain)])
