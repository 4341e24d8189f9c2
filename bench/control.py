"""What the gateway's token path costs: one ring, mTLS, a steady rate of lane steps.

The members are a process of their own that answers every step after a fixed time; the gateway's share of a
core is its own process's CPU time. Every row's answer is read by a client over HTTP from a third process.
Target: 0.35 of a core at 300 steps a second and 3 members, counted only where that rate was reached.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from bench.frame import Result, Table, numbers
from bench.openai_client import ask
from bench.verdict import Check
from sealring.edge.http.app import create_app
from sealring.edge.http.server import HttpServer
from sealring.edge.inference.answer import Answer
from sealring.edge.metrics import Metrics
from sealring.gateway.backend import RingBackend
from sealring.gateway.rings.epoch import ServingEpoch
from sealring.gateway.rings.members import Members, MemberTarget
from sealring.gateway.rings.ring import Ring, Shared
from sealring.gateway.scheduler import Request
from sealring.mesh.crypto import SoftwareSigner
from sealring.mesh.member import CalledProof, Connection, Credentials, HeldRoster, Purpose, by_identity
from sealring.mesh.pki import ClusterCA, LeafKey, PeerIdentity, Role, TlsMaterial, key_hash
from sealring.mesh.ring import Composition
from sealring.mesh.rpc import Server, TlsStore, peer_certificate, peer_identity, server_credentials
from sealring.v1 import control_pb2 as control
from sealring.v1 import control_pb2_grpc as control_grpc
from sealring.v1 import inference_pb2 as inference

CLUSTER, CHUNK, TARGET = "bench", 256, 0.35
_REACHED = 0.95
"""The part of the requested steps a second that has to be reached; below it the figure means nothing."""

QUICK = ("--seconds", "4")


def material(ca: ClusterCA, peer: PeerIdentity) -> TlsMaterial:
    leaf = LeafKey()
    certificate = ca.issue(leaf.csr(), peer, lifetime=3600, now=time.time())
    return TlsMaterial(leaf.private_pem(), certificate, (ca.certificate,))


class Member(control_grpc.ControlServicer):
    """Takes steps; the head answers them one by one at the given rate."""

    def __init__(self, rank: int, rows: int, rate: float) -> None:
        self._rank, self._rate = rank, rate
        self.signer = SoftwareSigner.generate()
        self._composition = Composition(epoch=1, max_rows=rows, prefill_chunk=CHUNK)

    async def Schedule(self, requests: Any, context: Any) -> AsyncIterator[control.ScheduleResponse]:  # noqa: N802
        caller, certificate = peer_identity(context), key_hash(peer_certificate(context))
        connection = Connection(Purpose.SCHEDULE, CLUSTER, caller.id, f"m{self._rank}", certificate)
        proof = CalledProof(connection, (await anext(requests)).offer, HeldRoster())
        yield control.ScheduleResponse(proof=await proof.answer(by_identity(self.signer)))
        for _ in ("proof", "attach"):
            await anext(requests)
        yield control.ScheduleResponse(
            attached=control.Attached(
                ring="bench", epoch=1, rank=self._rank, kv_bytes_per_token=1, kv_budget=1 << 40
            )
        )
        out: asyncio.Queue[control.ScheduleResponse] = asyncio.Queue()
        steps: deque[control.Step] = deque()
        tasks = [asyncio.create_task(self._read(requests, out, steps))]
        if self._rank == 0:
            tasks.append(asyncio.create_task(self._work(out, steps)))
        try:
            while True:
                yield await out.get()
        finally:
            for task in tasks:
                task.cancel()

    async def _read(self, requests: Any, out: Any, steps: deque[control.Step]) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "step" and self._rank == 0:
                steps.append(request.step)
            elif kind == "ping":
                out.put_nowait(control.ScheduleResponse(pong=control.Pong(sequence=request.ping.sequence)))
            elif kind == "open":
                opened = control.RowOpened(
                    row=request.open.row, prompt_tokens=20, params_bytes=64, max_tokens=1 << 30
                )
                out.put_nowait(control.ScheduleResponse(opened=opened))

    async def _work(self, out: Any, steps: deque[control.Step]) -> None:
        tokens: dict[int, int] = {}
        due = time.perf_counter()
        while True:
            due = max(due + 1 / self._rate, time.perf_counter() - 0.05)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if not steps:
                continue
            resolved = self._composition.apply(steps.popleft())
            done = control.StepDone(step=resolved.number)
            for row in resolved.sampled:
                tokens[row] = tokens.get(row, 0) + 1
                done.outputs.add(row=row, delta=inference.Delta(text=" word", tokens=tokens[row]))
            out.put_nowait(control.ScheduleResponse(done=done))


def run_members(folder: str, count: int, rows: int, rate: float, pipe: Pipe) -> None:
    async def serve() -> None:
        ca = ClusterCA.load(Path(folder))
        ports, servers = [], []
        for rank in range(count):
            store = TlsStore(material(ca, PeerIdentity(CLUSTER, Role.MEMBER, f"m{rank}")))
            member = Member(rank, rows, rate)
            server = Server([(control_grpc.add_ControlServicer_to_server, member, "sealring.v1.Control")])
            port = server.listen("127.0.0.1:0", server_credentials(store))
            ports.append((port, member.signer.public_key))
            await server.start()
            servers.append(server)
        pipe.send(ports)
        await asyncio.gather(*(server.wait() for server in servers))

    asyncio.run(serve())


def run_clients(port: int, count: int, _pipe: Pipe) -> None:
    body = {"model": "bench", "messages": [{"role": "user", "content": "x"}]}

    async def all_of_them() -> None:
        await asyncio.gather(*(ask(f"http://127.0.0.1:{port}", body) for _ in range(count)))

    asyncio.run(all_of_them())


class OneRing:
    """The part of gateway.rings that a backend needs, with a single ring."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.complete = asyncio.Event()
        self.complete.set()

    def deployments(self) -> list[str]:
        return ["bench"]

    def models(self) -> list[inference.Model]:
        return [inference.Model(name="bench", rings=1)]

    def aliases(self) -> dict[str, str]:
        return {}

    def loading(self, name: str) -> None:
        return None

    async def load(self, name: str, keep_alive: int | None, tenant: str) -> None: ...

    def signed_roster(self) -> inference.GetRosterResponse:
        return inference.GetRosterResponse()

    def submit(self, request: Request, answer: Answer) -> None:
        self.ring.submit(request, answer)

    def cancel(self, request_id: str) -> None:
        self.ring.cancel(request_id)


@contextlib.asynccontextmanager
async def other_process(work: Callable[..., None], *arguments: object) -> AsyncIterator[Pipe]:
    """Runs `work(*arguments, pipe)` in a process of its own, which ends with this block.

    Only that process holds the other end of the pipe, so a reader gets EOFError once it has ended.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


async def measure(options: argparse.Namespace, rows: int) -> Result:
    """Steps and tokens per second with `rows` rows, and the cores that the gateway needs for them."""
    with tempfile.TemporaryDirectory() as folder:
        ca = ClusterCA.create(Path(folder), CLUSTER, now=time.time())
        async with other_process(run_members, folder, options.members, rows, options.rate) as pipe:
            ports = await asyncio.to_thread(pipe.recv)
            return await measure_gateway(options, rows, ca, ports)


async def measure_gateway(
    options: argparse.Namespace, rows: int, ca: ClusterCA, ports: list[tuple[int, bytes]]
) -> Result:
    store = TlsStore(material(ca, PeerIdentity(CLUSTER, Role.GATEWAY, "gateway")))
    metrics = Metrics()
    identity = Credentials(CLUSTER, "gateway", by_identity(SoftwareSigner.generate()), HeldRoster)
    members = Members(CLUSTER, store, identity)
    shared = Shared(members, metrics, queue_limit=1000)
    ring = Ring("bench", "bench", shared, on_lost=lambda ring: None)
    targets = tuple(
        MemberTarget(f"m{rank}", key, (f"127.0.0.1:{port}",)) for rank, (port, key) in enumerate(ports)
    )
    serving = ServingEpoch(
        ring="bench",
        epoch=1,
        deployment="bench",
        members=targets,
        max_rows=rows,
        prefill_chunk=CHUNK,
        context=1 << 20,
        share_prefixes=False,
        min_trust=10,
        roster_version=1,
        speculate=False,
        clear_links=False,
    )
    ring.serve(serving)
    while not ring.attached:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    edge = HttpServer(create_app(RingBackend(OneRing(ring), metrics), exposition=metrics.exposition))
    port = edge.listen("127.0.0.1:0")
    await edge.start()
    async with other_process(run_clients, port, rows):
        while ring.own.scheduler.load().running < rows:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(2.0)
        before = used(metrics)
        await asyncio.sleep(options.seconds)
        wall, cpu, steps, tokens = (after - begun for after, begun in zip(used(metrics), before, strict=True))
    await edge.stop()
    await ring.close()
    await members.close()
    return {
        "members": options.members,
        "rows": rows,
        "steps_per_second": round(steps / wall, 1),
        "tokens_per_second": round(tokens / wall, 1),
        "cores": round(cpu / wall, 3),
        "microseconds_per_step": round(cpu / max(1, steps) * 1e6, 1),
    }


def used(metrics: Metrics) -> tuple[float, float, float, float]:
    """So far: seconds, seconds of this process's CPU time, steps, tokens."""
    names = ("sealring_steps_total", "sealring_generation_tokens_total")
    values = [metrics.registry.get_sample_value(name, {"model_name": "bench"}) or 0.0 for name in names]
    return (time.perf_counter(), time.process_time(), values[0], values[1])


async def run(options: argparse.Namespace) -> Result:
    runs = [await measure(options, rows) for rows in options.rows]
    return {"steps_per_second": options.rate, "runs": runs}


def checks(result: Result) -> list[Check]:
    """What fewer steps cost says nothing of what as many as were asked for would."""
    runs, wanted = result["runs"], _REACHED * result["steps_per_second"]
    reached = all(one["steps_per_second"] >= wanted for one in runs)
    worst = max(one["cores"] for one in runs) if reached else None
    return [
        Check("gateway cores at 300 lane steps/s, 3 members", [worst], TARGET),
        Check("lane steps/s", [min(one["steps_per_second"] for one in runs)], wanted, True),
    ]


def tables(result: Result) -> list[Table]:
    runs = result["runs"]
    return [Table("gateway", list(runs[0]), [list(one.values()) for one in runs])]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--rows", type=numbers, default=[3, 24])
    parser.add_argument("--rate", type=float, default=300.0)
    parser.add_argument("--seconds", type=float, default=10.0)
