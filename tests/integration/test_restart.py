"""A local cluster that is started again in its folder, after so long that nothing it had signed is valid.

Its engines are slow at first. Afterwards its nodes are challenged all the time, also when a model changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import sys
import time
from pathlib import Path

import psutil
from expired import expire_all, found
from ringtest import CLUSTER, LIMIT_SECONDS, MODEL, Reply, Ring, chat, started
from slow_engine import SLOW_SECONDS, markers

from sealring.cli.local.cluster import LocalCluster
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.gateway.rings.control import LOST_SECONDS, PONG_SECONDS
from sealring.mesh.member.state import load_machine_state
from sealring.mesh.pki.certificates import expires_at
from sealring.node.models.kept import note_of
from sealring.node.models.manifest import Manifest

pytestmark = CLUSTER

QUESTION = chat("What is the capital of France?")
SLOW_NODE = Path(__file__).parents[1] / "support" / "slow_node.py"
UNHURRIED = {"replace_after": "24h"}
"""A node that a busy machine is long in starting is not replaced: the plan stays."""

CHALLENGED = {"coordinator": {**UNHURRIED, "challenge_interval": 1.0, "challenge_timeout": 30.0}}


def ends(folder: Path) -> float:
    return expires_at(load_machine_state(folder).tls.certificate)


async def test_a_cluster_that_was_off_for_three_certificate_lifetimes_serves(tmp_path: Path) -> None:
    """It is the same cluster, with the same answers; `pytest -s` shows how long they took.

    One of its nodes has the model, the other gets its stage's part from there, and starts with it again.
    Its gateway has keys by now: its user has none, and learns all the same that it serves.
    """
    state = tmp_path / "state"
    model = state / "node-0" / "models" / "shared"
    shutil.copytree(MODEL, model)
    fetching = {"node": {"allow_downloads": True}, "coordinator": UNHURRIED}
    async with LocalCluster(state, "shared", nodes=2, settings=fetching) as cluster:
        found(cluster)
        cluster.children.command = (sys.executable, str(SLOW_NODE))
        async with started(cluster, stages=2) as first:
            before = await slow_engines_are_waited_for(first)
        note = note_of(state / "node-1" / "models" / "shared")
        assert note is not None
        assert note.manifest.digest == Manifest.of(MODEL).digest
        pids = cluster.processes.values()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    enrolments = [path.read_text() for path in sorted(state.rglob("member.json"))]
    members = [state / name for name in ("node-0", "node-1", "gateway")]
    expire_all(state / "coordinator", members)
    assert max(ends(member) for member in members) < time.time()
    key, _ = KeyFile(state / "gateway").create([Scope.INFERENCE])
    said: dict[str, float] = {}
    cluster = LocalCluster(
        state,
        "shared",
        nodes=2,
        settings=CHALLENGED,
        say=lambda text: said.setdefault(text, time.monotonic()),
    )
    async with cluster, started(cluster) as again:
        again.key = key
        assert await again.ask(QUESTION, 20) == before
        seconds = time.monotonic() - said["starting the nodes and the gateway"]
        print(f"first answer {seconds:.1f} s after nodes and gateway were started")  # noqa: T201
        assert again.deployment.plan == first.deployment.plan
        await serving_nodes_answer_and_a_changed_model_is_found(cluster, model)
    assert [path.read_text() for path in sorted(state.rglob("member.json"))] == enrolments
    assert min(ends(member) for member in members) > time.time()


async def slow_engines_are_waited_for(ring: Ring) -> Reply:
    """Also when a step takes longer than silence and lost records are waited for. Returns the answer."""
    assert max(PONG_SECONDS, LOST_SECONDS) < SLOW_SECONDS
    answer = await ring.ask(QUESTION, 20)
    assert answer.completion_tokens > 5
    assert (await ring.status()).epoch == 1
    assert all(marker.exists() for marker in markers(ring.cluster.state_dir / "tmp")), "none was slow"
    return answer


async def serving_nodes_answer_and_a_changed_model_is_found(cluster: LocalCluster, model: Path) -> None:
    """Honest nodes go on when they are challenged, those whose model changes do not."""
    serving_since = max(challenged_at(cluster))
    async with asyncio.timeout(LIMIT_SECONDS):
        while min(challenged_at(cluster)) < serving_since + 2:
            await asyncio.sleep(0.2)
    assert not await log_of(cluster, "challenge_failed")
    assert not await log_of(cluster, "member_failed_challenge")
    answer = await cluster.admin.call("ListNodes")
    assert {(node.level, node.trust) for node in answer.nodes} == {("software", 10)}

    config = model / "config.json"
    config.write_text(config.read_text() + "\n")
    async with asyncio.timeout(LIMIT_SECONDS):
        while all(node.trust for node in answer.nodes):
            await asyncio.sleep(0.2)
            answer = await cluster.admin.call("ListNodes")
    assert await log_of(cluster, "member_changed")
    changed = next(node for node in answer.nodes if not node.trust)
    assert changed.level == "none"
    assert "changed while it ran" in changed.trouble


async def log_of(cluster: LocalCluster, event: str) -> list[str]:
    text = await asyncio.to_thread(cluster.logs["coordinator"].read_text)
    return [line for line in text.splitlines() if f'"{event}"' in line]


def challenged_at(cluster: LocalCluster) -> list[int]:
    """When each node answered a challenge well for the last time."""
    file = cluster.state_dir / "coordinator" / "coordinator.db"
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT challenged_at FROM members WHERE role = 'member'").fetchall()
    return [at for (at,) in rows]
