"""The daemon's own report of the peers that it reaches, asked for with the node's certificate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sealring.doctor.report import TriedConnection
from sealring.doctor.view import View
from sealring.mesh.system.addresses import format_address, parse_address

if TYPE_CHECKING:
    from sealring.v1 import diagnosis_pb2

_SECONDS = 45.0
_MAX_ADDRESSES = 3
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound


def with_daemon(view: View, told: diagnosis_pb2.DiagnoseResponse) -> View:
    """The view with the daemon's report."""
    return replace(
        view,
        connections=tuple(
            TriedConnection(
                member=one.member, address=one.address, error=one.error, milliseconds=one.milliseconds
            )
            for one in told.connections
        ),
        left_out=told.left_out,
        session=told.session,
        launchd=told.launchd,
        executable=told.executable,
        file_limit=told.file_limit,
    )


async def ask_daemon(view: View) -> View:
    """The view with the daemon's report; unchanged if no daemon answers at the node's addresses."""
    import grpc
    import grpc.aio

    from sealring.mesh.rpc.tls import channel_options, secure_channel
    from sealring.v1 import diagnosis_pb2, diagnosis_pb2_grpc

    if view.state is None:
        return view
    options = channel_options(view.state.peer.server_name)
    for address in addresses_to_ask(view):
        async with secure_channel(address, view.state.tls, options) as channel:
            try:
                stub = diagnosis_pb2_grpc.DiagnosisStub(channel)
                told = await stub.Diagnose(diagnosis_pb2.DiagnoseRequest(), timeout=_SECONDS)
            except grpc.RpcError:
                continue
            return with_daemon(view, told)
    return view


def addresses_to_ask(view: View) -> list[str]:
    """The addresses to try: the configured one first; the roster's alone if the settings name no port."""
    host, port = parse_address(view.settings.listen)
    own = format_address(_EVERYWHERE.get(host, host), port)
    return list(dict.fromkeys([own, *view.addresses] if port else view.addresses))[:_MAX_ADDRESSES]
