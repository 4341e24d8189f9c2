"""Every call of every service over mTLS, by every role. One table says which roles each call lets in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import structlog
from patience import PATIENCE_SECONDS

from sealring.coordinator.init import init
from sealring.coordinator.main import Coordinator
from sealring.coordinator.settings import CoordinatorSettings
from sealring.gateway import main as gateway
from sealring.gateway.settings import GatewaySettings
from sealring.mesh.member import load_machine_state
from sealring.mesh.pki import Role, TlsMaterial, role_server_name
from sealring.mesh.rpc import channel_options, from_rpc_error, secure_channel
from sealring.mesh.system.addresses import free_port
from sealring.mesh.system.paths import CLIENT_FOLDER, is_enrolled
from sealring.node import main as node
from sealring.node.settings import NodeSettings
from sealring.v1 import (
    admin_pb2,
    control_pb2,
    diagnosis_pb2,
    inference_pb2,
    links_pb2,
    membership_pb2,
    models_pb2,
)
from tests.coordinator.conftest import Cluster

NODE, OWNER, GATEWAY, PROGRAM = Role.MEMBER, Role.OPERATOR, Role.GATEWAY, Role.CLIENT
LOOK = (
    "ListJoinTokens ListNodes ListDeployments GetRoster ListAuditLog ListOperators TraceRing PlanDeployment"
)
ACT = (
    "CreateJoinToken RevokeJoinToken CreateJoinCode ShowJoinCode RevokeJoinCode DrainNode EvictNode BanNode "
    "PullModel RemoveModel CreateDeployment DeleteDeployment DiagnoseNode AddOperator RotateOperator "
    "RevokeOperator CopyState StandDown"
)
ASK = "Generate ListModels GetRoster GetMetrics GetUsage LoadModel"
MAY: dict[str, dict[str, set[Role]]] = {
    "coordinator": {
        **{f"Admin/{one}": {OWNER, PROGRAM} for one in LOOK.split()},
        **{f"Admin/{one}": {OWNER} for one in ACT.split()},
        "Membership/Session": {NODE},
        "Certificates/Renew": {NODE, GATEWAY},
        "Scheduling/Follow": {GATEWAY},
    },
    "node": {
        "Links/Handshake": {NODE},
        "Ways/Measure": {NODE},
        "Blocks/Read": {NODE},
        "Blocks/ReadNames": {NODE},
        "Models/Describe": {NODE},
        "Models/Read": {NODE},
        "Diagnosis/Diagnose": {NODE},
        "Control/Schedule": {GATEWAY},
    },
    "gateway": {f"Inference/{one}": {PROGRAM} for one in ASK.split()},
}
"""Which roles each server lets into a call. It answers no other call."""

WITHOUT_A_CERTIFICATE = {
    "Enrolment/GetNonce",
    "Enrolment/Enrol",
    "Enrolment/JoinByCode",
    "Renewal/GetNonce",
    "Renewal/RenewByIdentity",
}
"""The joining port's, which ask for a token, a code or a signature of the identity key."""

FOR_ITS_ROLE = {"WRONG_ROLE", "MEMBERS_READ", "NOT_A_MEMBER", "NOT_A_GATEWAY", "NOT_THIS_NODE"}
DESCRIBED = (admin_pb2, control_pb2, diagnosis_pb2, inference_pb2, links_pb2, membership_pb2, models_pb2)


def methods() -> set[str]:
    """Service/Method of all that the protocol has."""
    return {
        f"{name}/{method.name}"
        for file in DESCRIBED
        for name, service in file.DESCRIPTOR.services_by_name.items()
        for method in service.methods
    }


def test_no_call_and_no_file_of_the_protocol_is_beside_the_table() -> None:
    named = [name for calls in MAY.values() for name in calls]
    assert {*named, *WITHOUT_A_CERTIFICATE} == methods()
    assert len(named) == len(set(named)), "each service has one server"
    protos = Path(__file__).parents[2] / "protos" / "sealring" / "v1"
    files = {one.name for one in protos.glob("*.proto") if "\nservice " in one.read_text()}
    assert files == {Path(one.DESCRIPTOR.name).name for one in DESCRIBED}


class Servers:
    """A coordinator, a node and a gateway as they run, and a certificate of each role of the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folders = {NODE: cluster.folder / "one", GATEWAY: cluster.folder / "edge"}
        self.at: dict[str, tuple[str, str]] = {}
        self.tls: dict[Role, TlsMaterial] = {}
        self.stop = asyncio.Event()
        self.working: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.cluster.join("one")
        await self.cluster.join("edge", role=GATEWAY)
        states = {role: load_machine_state(folder) for role, folder in self.folders.items()}
        ports = {name: f"127.0.0.1:{free_port()}" for name in ("node", "gateway")}
        nodes = NodeSettings(
            state_dir=self.folders[NODE], listen=ports["node"], software_identity_allowed=True, prefix_disk=0
        )
        gateways = GatewaySettings(
            state_dir=self.folders[GATEWAY],
            http_listen=f"127.0.0.1:{free_port()}",
            grpc_listen=f"127.0.0.1:{free_port()}",
            members_listen=ports["gateway"],
        )
        self.working = [
            asyncio.create_task(node.serve(nodes, self.stop)),
            asyncio.create_task(gateway.serve(gateways, self.stop)),
        ]
        self.at = {
            "coordinator": (self.cluster.coordinator.main_address(), role_server_name(Role.COORDINATOR)),
            "node": (ports["node"], states[NODE].peer.server_name),
            "gateway": (ports["gateway"], role_server_name(GATEWAY)),
        }
        self.tls = {role: state.tls for role, state in states.items()}
        self.tls[OWNER] = load_machine_state(self.cluster.settings.state_dir / "operator").tls
        self.tls[Role.COORDINATOR] = self.cluster.coordinator.tls.current()[1]
        programs = self.folders[NODE] / CLIENT_FOLDER
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not is_enrolled(programs):  # until the node has got it
                await asyncio.sleep(0.05)
        self.tls[PROGRAM] = load_machine_state(programs).tls

    def channel(self, server: str, role: Role) -> grpc.aio.Channel:
        address, name = self.at[server]
        return secure_channel(address, self.tls[role], channel_options(name))

    async def ready(self) -> None:
        """Returns when node and gateway have the roster that names both."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            for server, role, name in (
                ("node", NODE, "Models/Describe"),
                ("node", GATEWAY, "Control/Schedule"),
                ("gateway", PROGRAM, "Inference/ListModels"),
            ):
                while await self.refused(server, role, name) in {
                    *FOR_ITS_ROLE,
                    "UNAVAILABLE",
                    "NOT_ENROLLED",
                }:
                    await asyncio.sleep(0.05)

    async def refused(self, server: str, role: Role, name: str, channel: Any = None) -> str:
        """Why an empty call by a role ended; "" after an answer. A handshake's reason is in the log alone."""
        if channel is None:
            async with self.channel(server, role) as own:
                return await self.refused(server, role, name, own)
        message = [b""] if name in MAY[server] else []  # a call that nobody has would end while it is written
        call = channel.stream_stream(f"/sealring.v1.{name}")(iter(message), timeout=PATIENCE_SECONDS)
        with structlog.testing.capture_logs() as logs:
            try:
                await call.read()
                if not call.done():
                    call.cancel()
                    return ""
                return str((await call.code()).name).replace("OK", "")
            except grpc.aio.AioRpcError as error:
                reason = (
                    "UNIMPLEMENTED" if error.code().name == "UNIMPLEMENTED" else from_rpc_error(error).reason
                )
        said = [one["reason"] for one in logs if one["event"] == "handshake_refused"]
        return said[0] if said else reason


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    settings = CoordinatorSettings(
        state_dir=tmp_path / "coordinator",
        cluster="test",
        listen="127.0.0.1:0",
        join_listen="127.0.0.1:0",
        software_identity_allowed=True,
    )
    init(settings)
    coordinator = Coordinator(settings)
    await coordinator.start()
    cluster = Cluster(settings, tmp_path, coordinator)
    cluster.connect_operator()
    made = Servers(cluster)
    try:
        await made.start()
        yield made
    finally:
        made.stop.set()
        await asyncio.gather(*made.working, return_exceptions=True)
        await cluster.close()


async def test_every_call_by_every_role(servers: Servers) -> None:
    await servers.ready()
    for server, calls in MAY.items():
        for role in Role:
            async with servers.channel(server, role) as channel:
                for name in sorted(methods()):
                    found = await servers.refused(server, role, name, channel)
                    if name not in calls:
                        assert found == "UNIMPLEMENTED", (server, role, name)
                    else:
                        assert (found not in FOR_ITS_ROLE) == (role in calls[name]), (
                            server,
                            role,
                            name,
                            found,
                        )
