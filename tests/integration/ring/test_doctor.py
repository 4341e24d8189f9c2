"""The doctor on a real cluster: each node by its daemon, and all of them together."""

import asyncio
import json
import os
import sys
import tarfile

from capture import files_of
from ringtest import CLUSTER, chat

pytestmark = CLUSTER


async def doctor(*arguments, **environment):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sealring.cli", "doctor", "--json", *arguments),
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, said = await process.communicate()
    assert process.returncode in (0, 1), said
    return process.returncode, json.loads(printed)


def kinds(findings):
    return {one["id"]: one["severity"] for one in findings}


async def test_a_nodes_daemon_says_whom_it_reaches(ring):
    name, *_ = ring.cluster.node_names
    folder = ring.cluster.state_dir / name
    _, report = await doctor("--state-dir", str(folder))
    found = kinds(report["findings"])
    assert {"reach.coordinator", "reach.peers", "certificate.life", "models.planned"} <= set(found)
    assert found["reach.coordinator"] == found["reach.peers"] == found["models.planned"] == "ok"
    assert [one["error"] for one in report["facts"]["connections"]] == ["", ""]
    assert report["facts"]["member"] in (folder / "member.json").read_text()


async def test_the_cluster_is_looked_at_as_one(ring):
    _, report = await doctor("--cluster", "--operator", str(ring.cluster.operator_bundle))
    found = kinds(report["findings"])
    for kind in ("cluster.report", "versions.equal", "reach.pair"):
        assert found[kind] == "ok"
    assert "memory.plan" in found
    assert sorted(node["name"] for node in report["nodes"]) == sorted(ring.cluster.node_names)
    for node in report["nodes"]:
        assert abs(node["clock_offset_s"]) <= node["clock_error_s"]  # it is one machine's
        assert kinds(node["report"]["findings"])["reach.peers"] == "ok"
        assert not any(one["command"] for one in node["report"]["findings"])


async def test_a_bug_report_holds_no_secret_and_no_prompt(ring, tmp_path):
    cluster, file = ring.cluster, tmp_path / "report.tar.gz"
    await ring.reply(chat("Kanarienvogel, what is your name?"), 4)
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "sealring.cli",
            "bugreport",
            "--output",
            file,
            "--gateway",
            cluster.grpc_address,
        ),
        *("--state-dir", cluster.state_dir, "--operator", cluster.operator_bundle),
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 0
    with tarfile.open(file) as packed:
        found = {
            entry.name.partition("/")[2]: packed.extractfile(entry).read() for entry in packed.getmembers()
        }
    assert {"status.json", "doctor.json", "versions.json", "logs/gateway.log"} <= set(found)
    assert b"sealring_" in found["metrics.txt"] or ring.key
    keys = [data for path, data in files_of(cluster.state_dir) if path.suffix == ".key"]
    assert len(keys) > 2 * len(cluster.node_names)
    secrets = {line for data in keys for line in data.split(b"\n") if b"-----" not in line}
    packed = b"".join(found.values())
    assert not [one for one in secrets if len(one) > 20 and (one in packed or one.hex().encode() in packed)]
    assert b"Kanarienvogel" not in packed
