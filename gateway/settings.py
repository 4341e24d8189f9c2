"""What a gateway's owner can set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from sealring.mesh.errors import ConfigError
from sealring.mesh.settings.types import Address, Name, Seconds
from sealring.mesh.system.addresses import format_address, is_loopback, parse_address
from sealring.mesh.system.networks import ANY_HOST, own_addresses
from sealring.mesh.system.paths import default_state_root

Origin = Annotated[str, StringConstraints(pattern=r"^https?://[A-Za-z0-9.:\[\]-]+$", max_length=256)]
"""Scheme, host and port: exactly what a browser sends, and no wildcard."""


LOOPBACK = "127.0.0.1"
_MOST_ADDRESSES = 4


def _default_state_dir() -> Path:
    return default_state_root() / "gateway"


class GatewaySettings(BaseModel):
    """Settings of one gateway. Beyond loopback it listens only with TLS and at least one API key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state_dir: Path = Field(
        default_factory=_default_state_dir, description="identity, certificate and roster state; mode 0700"
    )
    name: Name = Field(default="gateway", description="what people call this gateway")
    http_listen: Address = Field(
        default="127.0.0.1:8080", description="where the OpenAI-compatible HTTP API is; port 0 takes any"
    )
    grpc_listen: Address = Field(
        default="127.0.0.1:7780", description="where the Inference gRPC service is; port 0 takes any"
    )
    members_listen: Address | None = Field(
        default=None,
        description="where programs on members ask, by certificates of the cluster; none by default",
    )
    lan_listen: Address | None = Field(
        default=None,
        description="where phones and laptops ask by HTTPS, with keys of its own; none by default",
    )
    http_tls_certificate: Path | None = Field(
        default=None, description="PEM file with the HTTP edge's certificate and its chain; turns TLS on"
    )
    http_tls_key: Path | None = Field(
        default=None, description="PEM file with the HTTP edge's private key, mode 0600"
    )
    grpc_tls_certificate: Path | None = Field(
        default=None, description="PEM file with the gRPC service's certificate and chain; turns TLS on"
    )
    grpc_tls_key: Path | None = Field(
        default=None, description="PEM file with the gRPC service's private key, mode 0600"
    )
    key_requests_per_second: float = Field(
        default=100.0, gt=0, le=1e6, description="requests per second that each API key may make"
    )
    key_requests_at_once: int = Field(
        default=512, ge=1, le=100_000, description="requests that each API key may have under way"
    )
    peer_requests_per_second: float = Field(
        default=200.0,
        gt=0,
        le=1e6,
        description="requests per second without need of a key that each network address may make",
    )
    cors_origins: list[Origin] = Field(
        default=[], max_length=64, description="pages of a browser that may use the HTTP API, as https://host"
    )
    queue_limit: int = Field(
        default=256, ge=1, le=100_000, description="requests that may wait for each ring"
    )
    idle_prefill: bool = Field(
        default=True,
        description="compute what a conversation begins with next while its ring is idle and on mains power",
    )
    drain_timeout: Seconds = Field(
        default=30.0, ge=0, le=600, description="how long answers under way may take when the gateway stops"
    )

    @model_validator(mode="after")
    def _need_tls(self) -> GatewaySettings:
        """Raises ConfigError (TLS_INCOMPLETE, LOOPBACK_ONLY)."""
        for edge, listen, certificate, key in (
            ("http", self.http_listen, self.http_tls_certificate, self.http_tls_key),
            ("grpc", self.grpc_listen, self.grpc_tls_certificate, self.grpc_tls_key),
        ):
            if (certificate is None) != (key is None):
                raise ConfigError(
                    f"{edge}_tls_certificate and {edge}_tls_key go together",
                    hint="set both or neither",
                    reason="TLS_INCOMPLETE",
                )
            if certificate is None and not is_loopback(parse_address(listen)[0]):
                raise ConfigError(
                    f"{edge}_listen {listen} is not a loopback address and has no TLS",
                    hint=f"listen on 127.0.0.1, or set {edge}_tls_certificate and {edge}_tls_key",
                    reason="LOOPBACK_ONLY",
                )
        return self

    def members_addresses(self, port: int) -> tuple[str, ...]:
        """At most four host:port at which members reach the gateway now."""
        if self.members_listen is None:
            return ()
        host, wanted = parse_address(self.members_listen)
        found = [one.host for one in own_addresses()] or [LOOPBACK] if host == ANY_HOST else [host]
        return tuple(format_address(one, wanted or port) for one in found[:_MOST_ADDRESSES])

    def members_hosts(self) -> tuple[str, ...]:
        """The hosts of `members_addresses`."""
        return tuple(parse_address(one)[0] for one in self.members_addresses(1))

    @property
    def listens_beyond_loopback(self) -> bool:
        """Whether other machines can connect."""
        return not all(is_loopback(parse_address(one)[0]) for one in (self.http_listen, self.grpc_listen))
