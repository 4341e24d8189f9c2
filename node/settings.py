"""Settings of a node."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from sealring.mesh.settings.types import Address, Name, Size
from sealring.mesh.system.addresses import format_address, is_loopback, parse_address
from sealring.mesh.system.networks import ANY_HOST, hosts_with
from sealring.mesh.system.paths import default_state_root

MAX_ADDRESSES = 8
_MOST_OWN = 4
"""The machine's own addresses that others learn: Thunderbolt, Ethernet, Wi-Fi and one more. A roster has 650
bytes for each node, and an address takes 20 of them."""

MAX_RDMA_DEVICES = 8
_RDMA_DEVICE = re.compile(r"([a-z2-7]{16})[a-z2-7]{0,40}=(rdma_[a-z0-9]{1,15})")


def _default_state_dir() -> Path:
    return default_state_root() / "node"


def default_name() -> str:
    """This machine's host name, as far as it fits a node's name."""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().split(".")[0].lower()).strip("-")[:63].strip("-")
    return host or "node"


def _check_ring_host(host: str) -> str:
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        raise ValueError(f"{host[:64]!r} is not an IPv4 address") from None
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"{host} is not the address of one interface")
    return host


def _check_rdma_devices(lines: list[str]) -> list[str]:
    found = [_RDMA_DEVICE.fullmatch(line) for line in lines]
    for line, one in zip(lines, found, strict=True):
        if one is None:
            raise ValueError(f"{line[:80]!r} is not NODE=rdma_DEVICE, with the id that `node list` shows")
    for what, group in (("node", 1), ("device", 2)):
        if len({one[group] for one in found if one}) < len(lines):
            raise ValueError(f"it names one {what} twice: each cable has its own device")
    return lines


def _check_folder(folder: Path) -> Path:
    if not folder.is_absolute():
        raise ValueError(f"{folder} is not an absolute path")
    return folder


class NodeSettings(BaseModel):
    """Settings of one node daemon. Folders are absolute."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state_dir: Path = Field(
        default_factory=_default_state_dir, description="identity, certificate and roster state; mode 0700"
    )
    name: Name = Field(default_factory=default_name, description="what people call this node")
    listen: Address = Field(
        default="127.0.0.1:7710", description="where the daemon's gRPC server listens; port 0 takes any"
    )
    advertise: list[Address] = Field(
        default_factory=list,
        max_length=MAX_ADDRESSES,
        description="where other nodes and gateways reach the daemon [default: where it listens]",
    )
    ring_host: Annotated[str, AfterValidator(_check_ring_host)] = Field(
        default="127.0.0.1", description="IPv4 address of the interface that carries the ring"
    )
    measure_links: bool = Field(
        default=False,
        description="let the other machines use this one's other addresses too, whichever is fastest",
    )
    rdma_devices: Annotated[list[str], AfterValidator(_check_rdma_devices)] = Field(
        default_factory=list,
        max_length=MAX_RDMA_DEVICES,
        description="for tensor rings over jaccl: NODE=DEVICE for each node, by its id, to which a "
        "Thunderbolt cable leads, such as mfmgs3gai5xlngct=rdma_en3 (sealring doctor --cluster prints them)",
    )
    models: list[Annotated[Path, AfterValidator(_check_folder)]] = Field(
        default_factory=list, max_length=32, description="folders with one model folder each inside"
    )
    memory_limit: Size | None = Field(
        default=None,
        ge=64 << 20,
        description="memory for weights and KV caches [default: three quarters of all]",
    )
    compute_on_cpu: bool = Field(default=False, description="leave a GPU alone: engines compute on the CPU")
    prefix_disk: Size | None = Field(
        default=None,
        description="disk for the beginnings of prompts, sealed; 0 turns it off "
        "[default: the lesser of 20GiB and a tenth of the free disk]",
    )
    allow_downloads: bool = Field(
        default=False, description="fetch a model that is not here from the Hugging Face hub"
    )
    software_identity_allowed: bool = Field(
        default=False, description="allow an identity key in a file, which is trust level software"
    )

    hybrid_sealing_key: bool = Field(
        default=False,
        description="have prompts sealed under ML-KEM-768 with X25519; a roster grows by 1.6 KiB",
    )
    enclave_helper: Annotated[Path, AfterValidator(_check_folder)] | None = Field(
        default=None, description="the Secure Enclave helper (deploy/enclave) [default: a key in a file]"
    )
    device_attestation: Annotated[Path, AfterValidator(_check_folder)] | None = Field(
        default=None, description="PEM file with Apple's attestation of this Mac"
    )

    @model_validator(mode="after")
    def _reachable(self) -> NodeSettings:
        host = parse_address(self.listen)[0]
        if not self.advertise and host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            raise ValueError("advertise has to name an address when listen is on every interface")
        return self

    @property
    def bound(self) -> str:
        """The host:port that the daemon binds: that of `listen`, or its port on every interface."""
        host, port = parse_address(self.listen)
        return format_address(ANY_HOST, port) if self._everywhere(host) else self.listen

    def advertised(self, port: int | None = None) -> tuple[str, ...]:
        """The addresses of the daemon for others, as they are now; `port` is the bound one, for a `listen`
        without a port.

        Nothing before the port is known.
        """
        if self.advertise:
            return tuple(self.advertise)
        host, wanted = parse_address(self.listen)
        port = wanted or port
        if not port:
            return ()
        hosts = hosts_with(host, _MOST_OWN) if self._everywhere(host) else (host,)
        return tuple(format_address(one, port) for one in hosts)

    def _everywhere(self, host: str) -> bool:
        """Whether the daemon listens on every interface, though `listen` names the address of one."""
        if not self.measure_links or self.advertise or is_loopback(host):
            return False
        try:
            return bool(ipaddress.IPv4Address(host))
        except ValueError:
            return False
