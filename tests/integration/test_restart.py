"""A local cluster that is started again in its folder, after so long that nothing it had signed is valid."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import psutil
from expired import expire_all, found
from ringtest import CLUSTER, MODEL, chat, started

from sealring.cli.local.cluster import LocalCluster
from sealring.gateway.access.keyfile import KeyFile
from sealring.gateway.access.keys import Scope
from sealring.mesh.member.state import load_machine_state
from sealring.mesh.pki.certificates import expires_at
from sealring.node.models.kept import note_of
from sealring.node.models.manifest import Manifest

pytestmark = CLUSTER

QUESTION = chat("What is the capital of France?")


def ends(folder: Path) -> float:
    return expires_at(load_machine_state(folder).tls.certificate)


async def test_a_cluster_that_was_off_for_three_certificate_lifetimes_serves(tmp_path: Path) -> None:
    """It is the same cluster, with the same answers; `pytest -s` shows how long they took.

    One of its nodes has the model, the other gets its stage's part from there, and starts with it again.
    Its gateway has keys by now: whoever starts it has none, and is told all the same that it serves.
    """
    state = tmp_path / "state"
    shutil.copytree(MODEL, state / "node-0" / "models" / "shared")
    fetching = {"node": {"allow_downloads": True}}
    async with LocalCluster(state, "shared", nodes=2, settings=fetching) as cluster:
        found(cluster)
        async with started(cluster, stages=2) as first:
            before = await first.ask(QUESTION, 20)
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
    cluster = LocalCluster(state, "shared", nodes=2, say=lambda text: said.setdefault(text, time.monotonic()))
    async with cluster, started(cluster) as again:
        again.key = key
        assert await again.ask(QUESTION, 20) == before
        seconds = time.monotonic() - said["starting the nodes and the gateway"]
        print(f"first answer {seconds:.1f} s after nodes and gateway were started")  # noqa: T201
        assert again.deployment.plan == first.deployment.plan
    assert [path.read_text() for path in sorted(state.rglob("member.json"))] == enrolments
    assert min(ends(member) for member in members) > time.time()
