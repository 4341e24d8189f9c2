"""What the `sealring` command itself can be set to: whom it talks to."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from sealring.mesh.settings.types import Address, Addresses, Seconds
from sealring.mesh.system.paths import CLIENT_FOLDER, default_state_root, is_enrolled


def _default_operator() -> Path:
    """The first machine's bundle; on a member the certificate with which its programs may look."""
    root = default_state_root()
    bundle, client = root / "coordinator" / "operator", root / "node" / CLIENT_FOLDER
    return client if is_enrolled(client) and not is_enrolled(bundle) else bundle


class CliSettings(BaseModel):
    """Settings of the commands that talk to a running cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    operator: Path = Field(
        default_factory=_default_operator,
        description="folder of the operator bundle that `coordinator init` made; a member has its own",
    )
    coordinator: Address | None = Field(
        None, description="main address of the coordinator [default: as the operator bundle says]"
    )
    gateway: Addresses = Field(
        ["127.0.0.1:7780"],
        description="address of a gateway's gRPC service; of several, the first that is there",
    )
    gateway_ca: Path | None = Field(
        None, description="PEM file of whoever signed the gateway's certificate; turns TLS on"
    )
    api_key_file: Path | None = Field(
        None, description="file with the API key, where the gateway asks for one; mode 0600"
    )
    timeout: Seconds = Field(30.0, gt=0, le=3600, description="how long one call of the coordinator may take")
