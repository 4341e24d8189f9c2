"""The gateway that a command talks to: its address and its credentials."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from sealring.cli.here.found import cluster_here
from sealring.mesh.errors import ConfigError, SealringError, Unavailable
from sealring.mesh.system.addresses import require_loopback
from sealring.mesh.system.files import read_bounded, read_secret
from sealring.mesh.system.paths import gateway_key_file

if TYPE_CHECKING:
    import grpc

    from sealring.cli.settings import CliSettings
    from sealring.client.asynchronous import Channels
    from sealring.mesh.settings.config import Loaded
    from sealring.v1.inference_pb2 import GetUsageResponse


CALL_SECONDS = 10.0


class GatewayAccess(TypedDict):
    """TLS credentials and API key for a gateway; None where it has no TLS or asks for no key."""

    credentials: grpc.ChannelCredentials | None
    api_key: str | None
    channels: NotRequired[Channels | None]
    """Connections that are used instead of such with these."""


NO_ACCESS: GatewayAccess = {"credentials": None, "api_key": None}


@dataclass(frozen=True)
class GatewayCalls:
    """The Inference service of the gateway at `address` (host:port), without sealing."""

    stub: Any
    address: str
    api_key: str | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """The API key as the metadata of a call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key is not None else None

    async def metrics(self, *, seconds: float = CALL_SECONDS) -> str:
        """The gateway's metrics in Prometheus text format. Raises the error that it answers with."""
        from sealring.v1 import inference_pb2

        found = await self._call("GetMetrics", inference_pb2.GetMetricsRequest(), seconds)
        return str(found.exposition, "utf-8")

    async def usage(self, since: str, *, seconds: float = CALL_SECONDS) -> GetUsageResponse:
        """What was used since a day, as 2026-11-30. Raises the error that the gateway answers with."""
        from sealring.v1 import inference_pb2

        found: GetUsageResponse = await self._call(
            "GetUsage", inference_pb2.GetUsageRequest(since=since), seconds
        )
        return found

    async def models(self) -> Sequence[Any]:
        """The models that it offers. Raises the error that the gateway answers with."""
        from sealring.v1.inference_pb2 import ListModelsRequest

        return (await self._call("ListModels", ListModelsRequest(), CALL_SECONDS)).models  # type: ignore[no-any-return]

    async def _call(self, method: str, request: Any, seconds: float) -> Any:
        import grpc

        from sealring.mesh.rpc.status import from_rpc_error

        try:
            return await getattr(self.stub, method)(request, timeout=seconds, metadata=self.metadata)
        except grpc.RpcError as error:
            raise named(from_rpc_error(error), "the gateway", self.address) from None


@asynccontextmanager
async def inference(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    api_key: str | None = None,
    channels: Channels | None = None,
) -> AsyncIterator[GatewayCalls]:
    """A channel to a gateway, of `channels` where they are given, which the caller closes.

    Raises ConfigError (LOOPBACK_ONLY): a key goes over TLS or loopback only.
    """
    import grpc.aio

    from sealring.mesh.rpc.server import CHANNEL_OPTIONS
    from sealring.v1 import inference_pb2_grpc

    if channels is not None:
        yield GatewayCalls(inference_pb2_grpc.InferenceStub(channels.get(address)), address)
        return
    if credentials is not None:
        opened = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
    else:
        if api_key is not None:
            require_loopback(address)
        opened = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    async with opened as channel:
        yield GatewayCalls(inference_pb2_grpc.InferenceStub(channel), address, api_key)


def gateway_access(loaded: Loaded[CliSettings]) -> GatewayAccess:
    """TLS credentials and API key from the files that the settings name; a demo that was found needs none.

    Raises ConfigError (NO_SUCH_FILE, BAD_API_KEY_FILE, SECRET_FILE_UNSAFE).
    """
    import grpc

    settings = loaded.settings
    if loaded.origin["gateway"] == "default" and not cluster_here().own:
        return NO_ACCESS
    key_file = settings.api_key_file
    if key_file is None and loaded.origin["gateway"] == "default" and gateway_key_file().exists():
        key_file = gateway_key_file()
    access: GatewayAccess = {"credentials": None, "api_key": read_api_key(key_file)}
    if settings.gateway_ca is not None:
        with _needed_file():
            access["credentials"] = grpc.ssl_channel_credentials(read_bounded(settings.gateway_ca))
    return access


def read_api_key(file: Path | None) -> str | None:
    """The API key in a file that only its owner can read; None without a file.

    Raises ConfigError (NO_SUCH_FILE, BAD_API_KEY_FILE, SECRET_FILE_UNSAFE).
    """
    if file is None:
        return None
    with _needed_file():
        key = read_secret(file).decode("ascii", "replace").strip()
    if not key or not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{file} does not hold an API key",
            hint="put into it what `sealring key create` printed",
            reason="BAD_API_KEY_FILE",
        )
    return key


@contextmanager
def _needed_file() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no file {error.filename}",
            hint="see where its path is set: sealring config show",
            reason="NO_SUCH_FILE",
        ) from None


def named(error: SealringError, peer: str, address: str) -> SealringError:
    """The error; if no connection was made, one that names the peer and its address."""
    if not isinstance(error, Unavailable) or error.reason != Unavailable.code:
        return error
    return Unavailable(
        f"{peer} at {address} cannot be reached",
        hint="check that it runs (`sealring up` on the first machine) and the address",
        reason="UNREACHABLE",
    )
