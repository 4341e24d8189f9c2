"""What the `sealring` command itself can be set to: whom it talks to."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from sealring.cli.here.found import cluster_here
from sealring.mesh.settings.types import Address, Addresses, Seconds


class CliSettings(BaseModel):
    """Settings of the commands that talk to a running cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    operator: Path = Field(
        default_factory=lambda: cluster_here().operator,
        description="folder of the operator bundle that `coordinator init` made; a member has its own",
    )
    coordinator: Address | None = Field(
        None, description="main address of the coordinator [default: as the operator bundle says]"
    )
    gateway: Addresses = Field(
        default_factory=lambda: [cluster_here().gateway],
        description="address of a gateway's gRPC service; of several, the first that is there",
    )
    gateway_ca: Path | None = Field(
        None, description="PEM file of whoever signed the gateway's certificate; turns TLS on"
    )
    api_key_file: Path | None = Field(
        None, description="file with the API key, where the gateway asks for one; mode 0600"
    )
    timeout: Seconds = Field(30.0, gt=0, le=3600, description="how long one call of the coordinator may take")
