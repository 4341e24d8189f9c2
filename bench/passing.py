"""Cost of a model from another member: CPU time and rate against one plain TLS stream.

Two processes on loopback take turns within each round. One way is the Models service, hashed and written part
by part. The other is one TLS stream (mTLS, Python's ssl) from file to file, unchecked or checked by SHA-256.
CPU time is that of both ends, including hashing and writing.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import os
import shutil
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.frame import Result, Table, progress
from bench.verdict import Check
from sealring.mesh.crypto import SoftwareSigner, member_id
from sealring.mesh.pki import ClusterCA, LeafKey, PeerIdentity, Role, TlsMaterial, to_pem
from sealring.mesh.rpc import Server, TlsStore, server_credentials
from sealring.node.models.asking import ModelAsker
from sealring.node.models.giving import SERVICE, ModelGiver
from sealring.node.models.partial_model import PartialModel
from sealring.v1 import models_pb2_grpc

CLUSTER, MODEL, WEIGHTS = "bench", "model", "model.safetensors"
_BLOCK = 1 << 20
TARGET = 1.0
QUICK = ("--megabytes", "64", "--rounds", "1")


class Party:
    """One end: its id, and its TLS key and certificate."""

    def __init__(self, ca: ClusterCA) -> None:
        self.id = member_id(SoftwareSigner.generate().public_key)
        leaf, peer = LeafKey(), PeerIdentity(CLUSTER, Role.MEMBER, self.id)
        certificate = ca.issue(leaf.csr(), peer, lifetime=3600, now=time.time())
        self.material = TlsMaterial(leaf.private_pem(), certificate, (ca.certificate,))

    def context(self, folder: Path, *, server: bool) -> ssl.SSLContext:
        """The TLS context of the plain stream, with the same certificates."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        made.check_hostname, made.verify_mode = False, ssl.CERT_REQUIRED
        made.load_verify_locations(cadata=to_pem(*self.material.authorities).decode())
        pem = folder / f"{self.id}.pem"
        pem.write_bytes(self.material.private_key + to_pem(self.material.certificate))
        made.load_cert_chain(pem)
        return made


def give(pipe: Pipe, folder: Path, own: Party, other: str) -> None:
    """The process that has the model. It answers every message with its CPU time so far."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(
        target=_give_plain, args=(listener, own.context(folder, server=True), folder), daemon=True
    ).start()

    async def serve() -> None:
        roster: Any = SimpleNamespace(members=[SimpleNamespace(id=own.id), SimpleNamespace(id=other)])
        giver = ModelGiver(CLUSTER, [folder], folder / "notes", lambda: roster)
        await giver.manifest(folder / MODEL)  # which a member makes once
        server = Server([(models_pb2_grpc.add_ModelsServicer_to_server, giver, SERVICE)])
        port = server.listen("127.0.0.1:0", server_credentials(TlsStore(own.material)))
        await server.start()
        pipe.send((port, listener.getsockname()[1]))
        while await asyncio.to_thread(pipe.recv):
            pipe.send(time.process_time())
        await server.stop(0)

    asyncio.run(serve())


def _give_plain(listener: socket.socket, context: ssl.SSLContext, folder: Path) -> None:
    while True:
        raw, _ = listener.accept()
        with (
            context.wrap_socket(raw, server_side=True) as connected,
            (folder / MODEL / WEIGHTS).open("rb") as file,
        ):
            while block := file.read(_BLOCK):
                connected.sendall(block)


def _take_plain(port: int, context: ssl.SSLContext, into: Path, *, checked: bool) -> None:
    total = hashlib.sha256()
    with (
        context.wrap_socket(socket.create_connection(("127.0.0.1", port))) as connected,
        into.open("wb") as file,
    ):
        while block := connected.recv(_BLOCK):
            if checked:
                total.update(block)
            file.write(block)


async def run(options: argparse.Namespace) -> Result:
    """Seconds of CPU time of both ends, and of the clock, for each way and round."""
    folder = Path(tempfile.mkdtemp(prefix="passing-", dir=options.folder))
    try:
        return await _run(options, folder)
    finally:
        shutil.rmtree(folder)


async def _run(options: argparse.Namespace, folder: Path) -> Result:
    progress(f"writing {options.megabytes} MiB")
    (folder / MODEL).mkdir()
    (folder / MODEL / "config.json").write_text("{}")
    with (folder / MODEL / WEIGHTS).open("wb") as file:
        block = os.urandom(_BLOCK)
        for number in range(options.megabytes):
            file.write(block[number:] + block[:number])  # no two parts alike
    ca = ClusterCA.create(folder / "ca", CLUSTER, now=time.time())
    giver, taker = Party(ca), Party(ca)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=give, args=(theirs, folder, giver, taker.id)
    )
    process.start()
    theirs.close()  # so that the end of the process ends what waits for it
    try:
        port, plain_port = await asyncio.to_thread(ours.recv)
        member = SimpleNamespace(id=giver.id, addresses=(f"127.0.0.1:{port}",))
        roster: Any = SimpleNamespace(members=[member])
        asker = ModelAsker(CLUSTER, taker.id, TlsStore(taker.material), lambda: roster)
        context = taker.context(folder, server=False)

        async def by_service() -> None:
            partial = PartialModel(folder / "service", MODEL)
            if not await asker.fetch(MODEL, partial, lambda done, size: None):
                raise AssertionError("the model was not received")

        ways: dict[str, Callable[[], Any]] = {
            "service": by_service,
            "tls": lambda: asyncio.to_thread(
                _take_plain, plain_port, context, folder / "plain", checked=False
            ),
            "tls_checked": lambda: asyncio.to_thread(
                _take_plain, plain_port, context, folder / "plain", checked=True
            ),
        }
        rounds: list[dict[str, Any]] = []
        for number in range(options.rounds):
            for way, take in ways.items():
                progress(f"round {number + 1}: {way}")
                before = await _cpu(ours), time.perf_counter()
                await take()
                after = await _cpu(ours), time.perf_counter()
                seconds = {"cpu_s": after[0] - before[0], "wall_s": after[1] - before[1]}
                rounds.append(
                    {"round": number, "way": way, **{key: round(value, 3) for key, value in seconds.items()}}
                )
                for left in ("service", "plain"):
                    path = folder / left
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        ours.send(False)
    finally:
        process.join(60)
        process.kill()
    return {"megabytes": options.megabytes, "rounds": rounds}


async def _cpu(pipe: Pipe) -> float:
    """CPU seconds of both ends."""
    pipe.send(True)
    return float(await asyncio.to_thread(pipe.recv)) + time.process_time()


def _ratios(result: Result, other: str, field: str) -> list[float]:
    """The plain stream's time over the service's, a round each: 1.0 is as fast."""
    times = {(one["round"], one["way"]): one[field] for one in result["rounds"]}
    numbers = sorted({number for number, _ in times})
    return [round(times[number, other] / times[number, "service"], 3) for number in numbers]


def checks(result: Result) -> list[Check]:
    return [Check("model from a member over TLS stream", _ratios(result, "tls", "wall_s"), TARGET, True)]


def tables(result: Result) -> list[Table]:
    rounds = result["rounds"]
    return [
        Table(
            f"{result['megabytes']} MiB on loopback", list(rounds[0]), [list(one.values()) for one in rounds]
        )
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on a disk with room for twice as much")
