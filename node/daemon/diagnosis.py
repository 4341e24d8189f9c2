"""Diagnosis of a daemon for its owner or the cluster's operator: the members it reaches, and its machine.

Only addresses of the roster are tried, few at once, and not again within some seconds, so that no caller can
make a scanner of a node. A separate process examines the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import psutil  # type: ignore[import-untyped]

from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import DeadlineExceeded, PermissionDenied, SealringError, Unavailable
from sealring.mesh.pki.certificates import PeerIdentity
from sealring.mesh.roster.model import Roster
from sealring.mesh.rpc.tls import peer_identity
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.system.processes import signal_group
from sealring.mesh.system.starting import starting
from sealring.node.daemon.supervisor import child_environment
from sealring.node.settings import NodeSettings
from sealring.v1 import diagnosis_pb2, diagnosis_pb2_grpc

SERVICE = diagnosis_pb2.DESCRIPTOR.services_by_name["Diagnosis"].full_name
MODULE = "sealring.doctor"
MAX_REPORT_BYTES = 128 << 10
KEPT_SECONDS = 10.0
"""An answer is repeated for this long before the daemon looks again."""

_MAX_ADDRESSES = 128
_AT_ONCE = 16
_CONNECT_SECONDS = 3.0
_REPORT_SECONDS = 90.0


class Diagnosis:
    """Answers for one daemon. Use it from one event loop."""

    def __init__(
        self,
        settings: NodeSettings,
        own_id: str,
        roster: Callable[[], Roster | None],
        session: Callable[[], bool],
        *,
        clock: Clock = monotonic_clock,
        reach: Callable[[str], Awaitable[str]] | None = None,
        examine: Callable[[bytes], Awaitable[bytes]] | None = None,
    ) -> None:
        """`roster` returns the roster in use; `session` says whether the coordinator answers.

        By default `reach` is `try_address` and `examine` is `ask_child`.
        """
        self._settings = settings
        self._own_id = own_id
        self._roster = roster
        self._session = session
        self._clock = clock
        self._reach = reach or try_address
        self._examine = examine or ask_child
        self._connecting = asyncio.Lock()
        self._reporting = asyncio.Lock()
        self._newest: tuple[float, diagnosis_pb2.DiagnoseResponse] | None = None
        self._newest_report: tuple[float, bytes] | None = None

    async def connect(self) -> diagnosis_pb2.DiagnoseResponse:
        """Tries a TCP connection to each address of the roster's other members."""
        async with self._connecting:
            if self._newest is None or self._clock() - self._newest[0] >= KEPT_SECONDS:
                found = await self._connect()
                self._newest = self._clock(), found
            return self._newest[1]

    async def report(self) -> bytes:
        """The findings of `sealring doctor` on this machine, as JSON.

        Raises Unavailable (NO_REPORT), DeadlineExceeded (REPORT_TIMEOUT).
        """
        async with self._reporting:
            if self._newest_report is None or self._clock() - self._newest_report[0] >= KEPT_SECONDS:
                connected = await self.connect()
                asked = {
                    "settings": self._settings.model_dump(mode="json"),
                    "daemon": connected.SerializeToString().hex(),
                }
                report = await self._examine(json.dumps(asked).encode())
                self._newest_report = self._clock(), report
            return self._newest_report[1]

    async def _connect(self) -> diagnosis_pb2.DiagnoseResponse:
        roster = self._roster()
        peers = [one for one in roster.members if one.id != self._own_id] if roster is not None else []
        addresses = [(peer.id, address) for peer in peers for address in peer.addresses]
        few = asyncio.Semaphore(_AT_ONCE)

        async def one(member: str, address: str) -> diagnosis_pb2.PeerConnection:
            async with few:
                started = self._clock()
                error = await self._reach(address)
                took = int((self._clock() - started) * 1000)
            return diagnosis_pb2.PeerConnection(
                member=member, address=address, error=error, milliseconds=took
            )

        tried = addresses[:_MAX_ADDRESSES]
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return diagnosis_pb2.DiagnoseResponse(
            connections=await asyncio.gather(*(one(*peer) for peer in tried)),
            left_out=len(addresses) - len(tried),
            session=self._session(),
            launchd=sys.platform == "darwin" and os.getppid() == 1,
            executable=_executable(),
            file_limit=limit if limit >= 0 else 1 << 32,
        )


class DiagnosisService(diagnosis_pb2_grpc.DiagnosisServicer):
    """Answers the owner of this machine."""

    def __init__(self, diagnosis: Diagnosis, own: PeerIdentity) -> None:
        self._diagnosis = diagnosis
        self._own = own

    async def Diagnose(  # noqa: N802
        self, request: diagnosis_pb2.DiagnoseRequest, context: Any
    ) -> diagnosis_pb2.DiagnoseResponse:
        """Raises Unauthenticated (NO_CLIENT_CERTIFICATE), PermissionDenied (NOT_THIS_NODE)."""
        if peer_identity(context) != self._own:
            raise PermissionDenied(
                "only this node itself may ask for its diagnosis",
                hint="run sealring doctor on the node, or sealring doctor --cluster",
                reason="NOT_THIS_NODE",
            )
        return await self._diagnosis.connect()


async def try_address(address: str) -> str:
    """The reason why the connection failed; empty if it succeeded."""
    try:
        host, port = parse_address(address)
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
        writer.transport.abort()
    except TimeoutError:
        return "TIMEOUT"
    except SealringError:
        return "BAD_ADDRESS"
    except socket.gaierror:
        return "UNKNOWN_HOST"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "UNREACHABLE")
    return ""


def _executable() -> str:
    """The path of the running image. On macOS `sys.executable` names another file."""
    with contextlib.suppress(psutil.Error, OSError):
        return str(psutil.Process().exe())
    return os.path.realpath(sys.executable)


async def ask_child(
    asked: bytes,
    module: str = MODULE,
    environment: Mapping[str, str] | None = None,
    max_bytes: int = MAX_REPORT_BYTES,
) -> bytes:
    """The report of a process that examines the machine. Raises Unavailable, DeadlineExceeded."""
    with starting():
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=child_environment(environment or {}),
            process_group=0,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_REPORT_SECONDS):
            with contextlib.suppress(OSError):
                process.stdin.write(asked)
                await process.stdin.drain()
                process.stdin.write_eof()
            report = b""
            while len(report) <= max_bytes and (part := await process.stdout.read(1 << 16)):
                report += part
    except TimeoutError:
        raise DeadlineExceeded("examining the machine took too long", reason="REPORT_TIMEOUT") from None
    finally:
        if process.returncode is None:
            signal_group(process.pid, signal.SIGKILL)
        process.stdin.close()
        await process.wait()
    if not report or len(report) > max_bytes:
        raise Unavailable(
            "the machine could not be examined",
            hint="run sealring doctor on it",
            reason="NO_REPORT",
        )
    return report
