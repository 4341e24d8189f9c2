"""Access to a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from edgecert import write_edge_certificate

from sealring.cli.calls.gateway import gateway_access, inference, named
from sealring.cli.settings import CliSettings
from sealring.client import AsyncClient
from sealring.edge.access.edge_tls import EdgeTls
from sealring.edge.access.gate import Gate
from sealring.edge.access.interceptor import GateInterceptor, by_key
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.mesh.errors import ConfigError, SealringError, Unavailable
from sealring.mesh.rpc import Server
from sealring.mesh.settings.config import Loaded
from sealring.v1 import inference_pb2, inference_pb2_grpc


class Counted(inference_pb2_grpc.InferenceServicer):
    async def GetMetrics(self, request: Any, context: Any) -> Any:
        return inference_pb2.GetMetricsResponse(exposition=b"rows 3")


def loaded(settings: CliSettings) -> Loaded[CliSettings]:
    return Loaded(settings, {"gateway": "flag --gateway"})


async def test_an_api_key_goes_with_every_call_over_tls(tmp_path: Path) -> None:
    certificate, key = write_edge_certificate(tmp_path)
    keys = KeyFile(tmp_path / "state")
    text, _ = keys.create([Scope.READ])
    key_file = tmp_path / "api.key"
    key_file.write_text(text + "\n")
    key_file.chmod(0o600)
    add = inference_pb2_grpc.add_InferenceServicer_to_server
    server = Server(
        [(add, Counted(), "sealring.v1.Inference")], interceptors=[GateInterceptor(by_key(Gate(keys)))]
    )
    port = server.listen("127.0.0.1:0", EdgeTls(certificate, key).grpc_credentials())
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        settings = CliSettings(gateway=address, gateway_ca=certificate, api_key_file=key_file)
        async with inference(address, **gateway_access(loaded(settings))) as client:
            assert await client.metrics() == "rows 3"
        settings = CliSettings(gateway=address, gateway_ca=certificate)
        async with inference(address, **gateway_access(loaded(settings))) as client:
            with pytest.raises(SealringError) as caught:
                await client.metrics()
        assert caught.value.reason == "INVALID_API_KEY"
    finally:
        await server.stop(0)


async def test_an_api_key_never_leaves_the_machine_in_clear(tmp_path: Path) -> None:
    key_file = tmp_path / "api.key"
    key_file.write_text("srk_x")
    with pytest.raises(ConfigError) as wide:
        gateway_access(loaded(CliSettings(api_key_file=key_file)))
    assert wide.value.reason == "SECRET_FILE_UNSAFE"
    key_file.chmod(0o600)
    access = gateway_access(loaded(CliSettings(api_key_file=key_file)))
    with pytest.raises(ConfigError) as caught:
        async with inference("192.0.2.1:1", **access):
            pass
    assert caught.value.reason == "LOOPBACK_ONLY"
    with pytest.raises(ConfigError) as clear:
        AsyncClient("192.0.2.1:1", root_sha256="0" * 64, **access)
    assert clear.value.reason == "LOOPBACK_ONLY"
    async with inference("192.0.2.1:1") as client:
        assert client.api_key is None, "without a key it may go anywhere"
    for wrong in (b"\xff", b" \n", b"a\x07b"):
        key_file.write_bytes(wrong)
        with pytest.raises(ConfigError) as bad:
            gateway_access(loaded(CliSettings(api_key_file=key_file)))
        assert bad.value.reason == "BAD_API_KEY_FILE"
    with pytest.raises(ConfigError) as missing:
        gateway_access(loaded(CliSettings(gateway_ca=tmp_path / "none")))
    assert missing.value.reason == "NO_SUCH_FILE"


def test_only_a_peer_that_was_not_reached_at_all_is_named() -> None:
    down = Unavailable("the ring is gone", reason="RING_DOWN")
    assert named(down, "the gateway", "h:1") is down
    nobody = named(Unavailable("x"), "the gateway", "h:1")
    assert (nobody.message, nobody.reason) == ("the gateway at h:1 cannot be reached", "UNREACHABLE")
