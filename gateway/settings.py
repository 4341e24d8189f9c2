"""What a gateway's owner can set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mesh.addresses import require_loopback
from mesh.certificates import check_name
from mesh.errors import SealringError
from mesh.paths import default_state_root


def _default_state_dir() -> Path:
    return default_state_root() / "gateway"


def _loopback(address: str) -> str:
    try:
        require_loopback(address)
    except SealringError as error:
        raise ValueError(str(error)) from None
    return address


def _check_name(name: str) -> str:
    try:
        return check_name(name, "gateway")
    except SealringError as error:
        raise ValueError(str(error)) from None


Loopback = Annotated[str, AfterValidator(_loopback)]


class GatewaySettings(BaseModel):
    """Settings of one gateway. Nothing authenticates clients yet, so both listeners are loopback only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state_dir: Path = Field(
        default_factory=_default_state_dir, description="identity, certificate and roster state; mode 0700"
    )
    name: Annotated[str, AfterValidator(_check_name)] = Field(
        default="gateway", description="what people call this gateway"
    )
    http_listen: Loopback = Field(
        default="127.0.0.1:8080", description="host:port of the OpenAI-compatible HTTP edge; port 0 takes any"
    )
    grpc_listen: Loopback = Field(
        default="127.0.0.1:7780", description="host:port of the Inference gRPC service; port 0 takes any"
    )
    queue_limit: int = Field(
        default=256, ge=1, le=100_000, description="requests that may wait for each ring"
    )
    drain_seconds: float = Field(
        default=5.0, ge=0, le=600, description="how long answers under way may take when the gateway stops"
    )
