"""A household's cluster as the dashboard sees it: models that serve, load and cannot, a machine away."""

from __future__ import annotations

import asyncio
import datetime
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from commands import Coordinator

from sealring.cli.calls.gateway import inference as gateway_calls
from sealring.cli.dashboard import app
from sealring.client.sealing import SealingBackend
from sealring.coordinator.init import init
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store
from sealring.edge.http.app import create_app
from sealring.edge.http.server import HttpServer
from sealring.edge.metrics import Metrics, ModelLoad
from sealring.mesh.trust.levels import TrustLevel
from sealring.testing import ManualClock, PaperCluster, ScriptedGateway, saying
from sealring.v1 import admin_pb2, inference_pb2, membership_pb2, trace_pb2

GIB = 1 << 30
NAMES = ("mac-studio", "mac-mini", "macbook-air")
SERVED, LOADING, BROKEN = "qwen3-30b", "gpt-oss-20b", "llama-3.3-70b"
ANSWER = (
    "A ring of three Macs computes this answer. Each holds a third of the layers, and what travels is sealed."
)


class Scene:
    """The doubles behind a dashboard. `names` are those of the three machines that serve."""

    def __init__(self, names: Sequence[str] = NAMES, *, broken: bool = True, answer: str = ANSWER) -> None:
        self.paper = PaperCluster({f"{SERVED}-0": TrustLevel.SOFTWARE}, size=3, name="home")
        self.ids = [one.id for one in self.paper.roster.ring(f"{SERVED}-0").members]
        self.gateway = ScriptedGateway(self.paper)
        self.gateway.script = saying(self._write)
        self.doors = ["http://127.0.0.1:8080"]
        self.clock, self.metrics = ManualClock(1000.0), Metrics()
        self._answer, self._names, self._broken = answer, names, broken
        self.metrics.watch(lambda: {SERVED: ModelLoad(1, 3, 0.4, 9000, GIB), LOADING: ModelLoad(2, 0)})
        self._entries = _audit_log()
        self.nodes = admin_pb2.ListNodesResponse(
            nodes=self._nodes(),
            links=self._links(),
            gateways=[admin_pb2.Gateway(id="gw", name="mac-studio-gateway", watching=True, enrolled=1)],
        )
        self.coordinator = Coordinator(
            GetRoster=admin_pb2.GetAdminRosterResponse(
                root_metadata=self.paper.root_chain, roster=self.paper.envelope
            ),
            ListNodes=self.nodes,
            ListDeployments=admin_pb2.ListDeploymentsResponse(deployments=self._deployments()),
            TraceRing=self._trace,
            ListAuditLog=self._log,
            ShowJoinCode=admin_pb2.ShowJoinCodeResponse(
                code="4076192", expires=int(time.time()) + 7 * 60 - 5, uses=3
            ),
        )
        self.gateway.usage = self._usage()

    async def _write(self, asked: Any) -> AsyncIterator[inference_pb2.SealedDelta]:
        words = self._answer.split(" ")
        for number, word in enumerate(words, 1):
            await asyncio.sleep(0.02)
            last = number == len(words)
            yield inference_pb2.SealedDelta(
                text=word if last else f"{word} ",
                tokens=number,
                prompt_tokens=12,
                token=number,
                finish=inference_pb2.FINISH_REASON_STOP if last else inference_pb2.FINISH_REASON_UNSPECIFIED,
            )

    def _nodes(self) -> list[admin_pb2.Node]:
        now = int(time.time())
        usable = (51 * GIB, 19 * GIB, 19 * GIB)
        held = {
            0: [
                ("mlx-community/gemma-3-4b-it-4bit", 3.4, 3.4),
                ("mlx-community/Qwen3-235B-A22B-4bit", 132, 132),
            ],
            2: [("mlx-community/Kimi-Linear-48B-4bit", 27, 11.5)],
        }
        nodes = []
        for at, (name, node_id) in enumerate(zip(self._names, self.ids, strict=True)):
            node = admin_pb2.Node(
                id=node_id,
                name=name,
                state=admin_pb2.NODE_STATE_ONLINE,
                trust=20,
                level="hardware",
                software_version="0.1.0",
                manifest="3f" * 32,
                last_seen=now,
                rings=[admin_pb2.NodeRing(ring=f"{SERVED}-0", rank=at, memory=(12, 7, 7)[at] * GIB)],
            )
            if at == 0:
                node.rings.add(ring=f"{LOADING}-0", rank=0, memory=14 * GIB)
            beat = node.heartbeat
            beat.memory_total, beat.memory_usable, beat.memory_used = usable[at] * 4 // 3, usable[at], 9 * GIB
            for model, whole, done in held.get(at, ()):
                beat.models.add(name=model, size=int(whole * GIB), done=int(done * GIB), fetched=True)
            nodes.append(node)
        away = admin_pb2.Node(
            id="cd" * 32, name="imac", state=admin_pb2.NODE_STATE_OFFLINE, trust=20, last_seen=now - 5400
        )
        away.heartbeat.SetInParent()
        return [*nodes, away]

    def _links(self) -> list[admin_pb2.NodeLink]:
        measured = [(0, 1, 4_700_000_000, 180), (1, 2, 1_180_000_000, 420), (2, 0, 1_090_000_000, 510)]
        return [
            admin_pb2.NodeLink(
                caller=self.ids[one],
                called=self.ids[other],
                host="10.0.0.2",
                bytes_per_second=rate,
                round_trip_us=trip,
                measured=1,
            )
            for one, other, rate, trip in measured
        ]

    def _deployments(self) -> list[admin_pb2.Deployment]:
        layers = ((0, 24, 12, 4), (24, 36, 7, 2), (36, 48, 7, 2))
        served = self._deployment(SERVED, list(enumerate(layers)))
        ring = served.rings.add(ring=f"{SERVED}-0", epoch=7, phase=membership_pb2.RING_PHASE_SERVING)
        ring.drafted, ring.accepted = 5210, 3877
        for rank in range(3):
            ring.links.add(from_rank=rank, to_rank=(rank + 1) % 3, suite="aes-256-gcm")
        loading = self._deployment(LOADING, [(0, (0, 24, 13, 1))])
        ring = loading.rings.add(ring=f"{LOADING}-0", epoch=1, phase=membership_pb2.RING_PHASE_FORMING)
        ring.progress.add(ring=ring.ring, epoch=1, what="loading", fraction=0.62)
        ring.slowest.MergeFrom(ring.progress[0])
        ring.slowest.done, ring.slowest.total, ring.slowest.rate = 8 * GIB, 13 * GIB, GIB // 2
        ring.slowest.seconds_left = 10
        loading.load.phase = membership_pb2.LOAD_PHASE_LOADING
        loading.load.waiting = 2
        if not self._broken:
            return [served, loading]
        broken = self._deployment(BROKEN, [(0, (0, 60, 30, 4))])
        broken.plan.rings[0].stages.add(
            member="cd" * 32, member_name="imac", rank=1, first_layer=60, end_layer=80, weight_bytes=9 * GIB
        )
        broken.rings.add(
            ring=f"{BROKEN}-0", epoch=3, phase=membership_pb2.RING_PHASE_DOWN, reason="imac is offline"
        )
        return [served, loading, broken]

    def _deployment(self, name: str, stages: Sequence[Any]) -> admin_pb2.Deployment:
        made = admin_pb2.Deployment(created=1)
        made.plan.spec.name, made.plan.spec.model = name, f"mlx-community/{name}-4bit"
        ring = made.plan.rings.add(ring=f"{name}-0", min_trust=20)
        for rank, (first, end, weights, caches) in stages:
            ring.stages.add(
                member=self.ids[rank],
                member_name=self._names[rank],
                rank=rank,
                first_layer=first,
                end_layer=end,
                weight_bytes=(weights - caches) * GIB,
                kv_budget=caches * GIB,
                trust=20,
            )
        return made

    def _log(self, asked: Any) -> admin_pb2.ListAuditLogResponse:
        entries = [one for one in self._entries if one.sequence > asked.after]
        return admin_pb2.ListAuditLogResponse(entries=entries[: asked.limit])

    def _trace(self, asked: Any) -> admin_pb2.TraceRingResponse:
        answer = admin_pb2.TraceRingResponse(ring=asked.ring, start=0, duration=1000)
        kinds = (
            ((trace_pb2.ACTIVITY_COMPUTE, 610), (trace_pb2.ACTIVITY_SEND, 90)),
            ((trace_pb2.ACTIVITY_WAIT, 540), (trace_pb2.ACTIVITY_COMPUTE, 380)),
            ((trace_pb2.ACTIVITY_COMPUTE, 520), (trace_pb2.ACTIVITY_WAIT, 300)),
        )
        for rank, name in enumerate(self._names):
            member = answer.members.add(rank=rank, name=name)
            start = 0
            for activity, length in kinds[rank]:
                member.spans.add(activity=activity, step=1, start=start, duration=length)
                start += length
        return answer

    def _usage(self) -> inference_pb2.GetUsageResponse:
        today = datetime.date.fromtimestamp(time.time())
        told = inference_pb2.GetUsageResponse(today=today.isoformat())
        for ago in range(26, -1, -1):
            day = (today - datetime.timedelta(days=ago)).isoformat()
            for at, key in enumerate(("laptop1", "kids222", "")):
                tokens = (3 + (ago * (7 + at)) % 11) * (41_000, 5_200, 900)[at]
                told.usage.add(
                    day=day,
                    key=key,
                    model=SERVED,
                    requests=3 + tokens // 2000,
                    prompt_tokens=tokens,
                    cached_tokens=tokens // 2,
                    answered_tokens=tokens // 9,
                    ring_ms=tokens * 2,
                )
        told.keys.add(key="laptop1", label="Claude Code")
        told.keys.add(key="kids222", label="kids", tokens_a_day=50_000, tokens_today=31_200)
        return told

    async def quarter_of_an_hour(self, history: Any) -> None:
        """Load as it was: a long answer, a pause, several clients."""
        first = self.metrics.first_token.labels(SERVED)
        for at in range(180):
            self.clock.now += 5
            busy = 20 < at < 80 or at > 115
            self.metrics.generation_tokens.labels(SERVED).inc((150 + 37 * (at % 5)) * busy)
            if busy and at % 4 == 0:
                first.observe(0.3 + (at % 3) * 0.4)
            self.metrics.generation_tokens.labels(LOADING).inc(45 * (60 < at < 100))
            self.gateway.exposition = self.metrics.exposition()
            await history.sample()


def _audit_log() -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        init(CoordinatorSettings(state_dir=Path(folder), cluster="home"))
        with closing(Store.open(Path(folder))) as store:
            for number in range(12):
                store.audit.append(
                    1_790_000_000 + number, "operator", "create_deployment", SERVED, {"rows": "8"}
                )
            return list(store.audit.entries(after=0, limit=50))


@asynccontextmanager
async def shown(scene: Scene) -> AsyncIterator[str]:
    """The dashboard of a scene, over HTTP: its address with the token."""
    async with (
        scene.gateway,
        scene.gateway.client() as client,
        gateway_calls(scene.gateway.address) as calls,
    ):
        edge = create_app(SealingBackend(client, Metrics()), exposition=lambda: b"")
        coordinator: Any = scene.coordinator
        pin = bytes.fromhex(scene.paper.pin)
        made, history = app.create_dashboard(
            coordinator,
            pin,
            [calls],
            client,
            edge,
            "secret",
            clock=scene.clock,
            doors=lambda: scene.doors,
        )
        await scene.quarter_of_an_hour(history)
        server = HttpServer(made)
        port = server.listen("127.0.0.1:0")
        await server.start()
        try:
            yield f"http://127.0.0.1:{port}/#secret"
        finally:
            await server.stop()
