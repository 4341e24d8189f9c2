"""What clients cost a gateway that hold connections and do nothing: idle ones, slow readers, vanished ones.

The gateway's HTTP and gRPC servers are a process of their own, without TLS, over a backend whose answers do
not end. Idle clients have each had one answer; above a limit connections are cut. Slow readers ask for a
stream and read nothing of it; then they vanish, all at once. What socket buffers hold is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import resource
import socket
import struct
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
import httpx
import psutil  # type: ignore[import-untyped]

from bench.frame import Result, Table, progress
from bench.verdict import Check
from sealring.edge.http import server
from sealring.edge.http.app import create_app
from sealring.edge.http.server import HttpServer
from sealring.edge.inference import timers
from sealring.edge.inference.service import SERVICE, InferenceService
from sealring.mesh.rpc import INFERENCE, Server
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc

MODEL = "bench"
PIECE = "x" * 10_000
MIB_OF_ALL = 256.0
QUICK = ("--idle", "300", "--slow", "20")
_AT_ONCE = 200
_BODY = json.dumps({"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()
_ASK = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
LOOK = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Endless:
    """A backend that writes as long as it is read."""

    def __init__(self) -> None:
        self.running = 0

    async def generate(
        self, request: inference.GenerateRequest, *, key: str = "", tenant: str = ""
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        self.running += 1
        try:
            yield inference.GenerateResponse(started=inference.Started(model=MODEL, ring="ring-0"))
            tokens = 0
            while True:
                tokens += 1
                await asyncio.sleep(0)
                yield inference.GenerateResponse(delta=inference.Delta(text=PIECE, tokens=tokens))
        finally:
            self.running -= 1

    async def list_models(self) -> list[inference.Model]:
        return [inference.Model(name=MODEL, rings=1, rows=1)]

    async def get_roster(self) -> inference.GetRosterResponse:
        return inference.GetRosterResponse()


def serve(ports: Connection) -> None:
    """The gateway's process; tells its ports, and serves until it is ended."""
    allow_files()
    logging.disable()  # that clients have vanished
    timers.SEND_SECONDS, server.KEEP_ALIVE_SECONDS = 600.0, 600  # they are to hold what they can
    asyncio.run(_serve(ports))


async def _serve(ports: Connection) -> None:
    backend = Endless()

    def exposition() -> bytes:
        return b"%d" % backend.running

    async def usage(asked: inference.GetUsageRequest) -> inference.GetUsageResponse:
        return inference.GetUsageResponse()

    edge = HttpServer(create_app(backend, exposition=exposition))
    add = inference_grpc.add_InferenceServicer_to_server
    grpc_server = Server([(add, InferenceService(backend, exposition, usage), SERVICE)], port=INFERENCE)
    ports.send((edge.listen("127.0.0.1:0"), grpc_server.listen("127.0.0.1:0", None)))
    await edge.start()
    await grpc_server.start()
    await grpc_server.wait()


def allow_files() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Gateway:
    """How the process is, from outside."""

    def __init__(self, process: psutil.Process, http_port: int, grpc_port: int) -> None:
        self._process = process
        self.http, self.grpc = http_port, grpc_port

    def mib(self) -> float:
        return float(self._process.memory_info().rss) / 2**20

    async def running(self) -> int:
        async with httpx.AsyncClient(timeout=60) as client:
            return int((await client.get(f"http://127.0.0.1:{self.http}/metrics")).text)

    async def until_running(self, count: int) -> None:
        while await self.running() != count:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def connected(port: int, first: bytes, count: int, *, answered: bool) -> list[socket.socket]:
    """Connections that have each said `first`, and had an answer where they are to; without those refused."""
    gate = asyncio.Semaphore(_AT_ONCE)
    loop = asyncio.get_running_loop()

    async def one() -> socket.socket | None:
        async with gate:
            made = socket.socket()
            made.setblocking(False)
            made.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )  # vanishes at its end
            try:
                await loop.sock_connect(made, ("127.0.0.1", port))
                await loop.sock_sendall(made, first)
                if not answered or await loop.sock_recv(made, 4096):
                    return made
            except OSError:
                pass
            made.close()
            return None

    return [made for made in await asyncio.gather(*(one() for _ in range(count))) if made]


def is_open(one: socket.socket) -> bool:
    try:
        return bool(one.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


async def idle(gateway: Gateway, count: int) -> Result:
    before = gateway.mib()
    held = await connected(gateway.http, LOOK, count, answered=True)
    held = [one for one in held if is_open(one)]  # the others made room
    result = {
        "idle": len(held),
        "mib_idle": gateway.mib(),
        "kib_each": 1024 * (gateway.mib() - before) / len(held),
    }
    for one in held:
        one.close()
    return result


async def slow(gateway: Gateway, count: int) -> Result:
    """Opens `count` streams on each edge and does not read them for a while."""
    before = gateway.mib()
    held = await connected(gateway.http, _ASK, count, answered=False)
    await gateway.until_running(len(held))
    await asyncio.sleep(2)
    http_kib = 1024 * (gateway.mib() - before) / count
    before = gateway.mib()
    address, own = f"127.0.0.1:{gateway.grpc}", [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=own) for _ in range(count)]
    prompt = inference.Envelope(clear=inference.Prompt(text="x"))
    asked = inference.GenerateRequest(model=MODEL, envelope=prompt)
    calls = [inference_grpc.InferenceStub(channel).Generate(asked) for channel in channels]
    await gateway.until_running(len(held) + count)
    await asyncio.sleep(2)
    result = {
        "readers": count,
        "http_kib_each": http_kib,
        "grpc_kib_each": 1024 * (gateway.mib() - before) / count,
    }
    for one in held:
        one.close()
    for call in calls:
        call.cancel()
    await asyncio.gather(*(channel.close() for channel in channels))
    await gateway.until_running(0)
    return result


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--idle", type=int, default=10_000, help="connections that do nothing")
    parser.add_argument("--slow", type=int, default=50, help="readers of each kind that do not read")


async def run(options: argparse.Namespace) -> Result:
    allow_files()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    serving = context.Process(target=serve, args=(theirs,))
    serving.start()
    try:
        gateway = Gateway(psutil.Process(serving.pid), *await asyncio.to_thread(ours.recv))
        async with asyncio.timeout(540):
            await gateway.until_running(0)
            result: dict[str, Any] = {"asked": options.idle, "mib_before": gateway.mib()}
            result |= await idle(gateway, options.idle)
            progress(f"{result['idle']} connections were idle")
            result |= await slow(gateway, options.slow)
            result["mib_after"] = gateway.mib()
    finally:
        serving.terminate()
        serving.join(60)
    return {name: round(value, 1) for name, value in result.items()}


def tables(result: Result) -> list[Table]:
    names = {
        "asked": "asked for",
        "idle": "idle",
        "mib_before": "MiB before",
        "mib_idle": "MiB with them",
        "kib_each": "KiB each",
        "http_kib_each": "KiB per HTTP reader",
        "grpc_kib_each": "KiB per gRPC reader",
        "mib_after": "MiB after",
    }
    row = [result[name] for name in names]
    return [Table("A gateway under clients that do nothing", list(names.values()), [row])]


def checks(result: Result) -> list[Check]:
    return [Check("idle clients, gateway's MiB", [result["mib_idle"]], MIB_OF_ALL)]
