"""The settings of the coordinator."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from sealring.mesh.clock import SKEW_SECONDS
from sealring.mesh.names import is_label
from sealring.mesh.settings.types import Address, ClusterName, Seconds, TrustFloor, WholeSeconds
from sealring.mesh.system.addresses import format_address, parse_address
from sealring.mesh.system.networks import ANY_HOST, own_addresses
from sealring.mesh.system.paths import default_state_root
from sealring.mesh.trust.levels import TrustLevel

_DAY = 24 * 3600
_LOOPBACK = "127.0.0.1"
MOST_ADDRESSES = 4
"""The addresses that others learn: Thunderbolt, Ethernet, Wi-Fi and one more. A join token has room for
them."""

MIN_CERTIFICATE_LIFETIME = 5 * SKEW_SECONDS
"""At half life, when it is renewed, a certificate has 2.5 times left what clocks may differ by: enough to try
again two or three times even where the clock is ahead by all of that."""


def _default_state_dir() -> Path:
    return default_state_root() / "coordinator"


def _check_host(host: str) -> str:
    try:
        usable = not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        usable = len(host) <= 253 and all(is_label(label) for label in host.split("."))
    if not usable:
        raise ValueError(f"{host[:64]!r} is neither a host name nor the IP address of one host")
    return host


Host = Annotated[str, AfterValidator(_check_host)]
ManifestHash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
SerialNumber = Annotated[str, StringConstraints(pattern=r"^[A-Z0-9]{8,20}$")]


class CoordinatorSettings(BaseModel):
    """Addresses, the state folder, and how long things live."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state_dir: Path = Field(
        default_factory=_default_state_dir, description="folder of keys, certificates and database"
    )
    cluster: ClusterName = Field(default="", description="name of the cluster [default: one is made up]")
    roster_key_files: list[Path] = Field(
        default_factory=list,
        max_length=15,
        description="further roster keys, for rosters that need several signatures; mode 0600",
    )
    listen: Address = Field(
        default="127.0.0.1:7700",
        description="host:port of the main address (mTLS); 0.0.0.0 is every address of this machine",
    )
    join_listen: Address = Field(default="127.0.0.1:7701", description="host:port for joining (TLS)")
    advertise: list[Host] = Field(
        default_factory=list,
        max_length=16,
        description="names and addresses of this machine, the first four for members "
        "[default: as in listen; with 0.0.0.0 all that it has]",
    )
    hidden: bool = Field(
        default=False, description="do not announce the cluster on its network while a join code is good"
    )
    standby: Address | None = Field(
        default=None, description="host:port of the other coordinator, for members to look there too"
    )
    trust_floor: TrustFloor = Field(
        default=TrustLevel.SOFTWARE, description="no member of a lower trust level joins or serves"
    )
    software_identity_allowed: bool = Field(
        default=False, description="let nodes of trust level software join: their key is in a file"
    )
    allowed_manifests: list[ManifestHash] = Field(
        default_factory=list,
        max_length=256,
        description="software that nodes may run: manifests, as in: sealring node list --json [default: any]",
    )
    allowed_serials: list[SerialNumber] = Field(
        default_factory=list,
        max_length=1024,
        description="serial numbers of the Macs that Apple's attestation may vouch for [default: any]",
    )
    roster_lifetime: WholeSeconds = Field(
        default=720, ge=2, le=900, description="life of a signed roster; it is renewed at half of it"
    )
    certificate_lifetime: WholeSeconds = Field(
        default=_DAY,
        ge=MIN_CERTIFICATE_LIFETIME,
        le=30 * _DAY,
        description="life of mTLS certificates; they are renewed at half of it",
    )
    heartbeat_timeout: Seconds = Field(
        default=6.0, ge=0.2, le=60, description="a node silent for longer is offline"
    )
    challenge_interval: Seconds = Field(
        default=300.0, ge=1, le=300, description="time between two challenges of a node"
    )
    challenge_timeout: Seconds = Field(
        default=30.0,
        ge=0.5,
        le=30,
        description="time for the answer to a challenge; three failures in a row evict",
    )
    prepare_timeout: Seconds = Field(
        default=120.0, ge=1, le=3600, description="longest preparation without progress"
    )
    commit_timeout: Seconds = Field(default=60.0, ge=1, le=600, description="longest commit of an epoch")
    profile_timeout: Seconds = Field(default=60.0, ge=1, le=600, description="longest profiling of a model")
    drain_timeout: Seconds = Field(
        default=60.0, ge=0, le=3600, description="how long a draining node's ring goes on"
    )

    replace_after: Seconds = Field(
        default=30.0, ge=1, le=30 * _DAY, description="a node that is away for longer is replaced in its ring"
    )

    @model_validator(mode="after")
    def _reachable(self) -> CoordinatorSettings:
        host = parse_address(self.listen)[0]
        if not self.advertise and host == "::":
            raise ValueError("advertise has to name an address when listen is on every interface of IPv6")
        return self

    def hosts(self) -> tuple[str, ...]:
        """The hosts at which others reach the coordinator now, best first."""
        named = self.advertise or [parse_address(self.listen)[0]]
        if named == [ANY_HOST]:
            named = [one.host for one in own_addresses()][:MOST_ADDRESSES] or [_LOOPBACK]
        return tuple(dict.fromkeys(named))

    def addresses(self, port: int | None = None) -> tuple[str, ...]:
        """The main addresses for members now, best first; `port` replaces a port 0 in `listen`."""
        port = port or parse_address(self.listen)[1]
        return tuple(format_address(host, port) for host in self.hosts()[:MOST_ADDRESSES])

    def main_address(self, port: int | None = None) -> str:
        """The first of `addresses`."""
        return self.addresses(port)[0]
