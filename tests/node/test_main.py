import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from sealring.mesh.crypto import SoftwareSigner
from sealring.mesh.errors import PermissionDenied, SealringError
from sealring.mesh.member import IDENTITY_KEY, removed
from sealring.mesh.system.addresses import free_port
from sealring.node import main
from sealring.node.main import serve
from sealring.node.settings import NodeSettings


def enrolled(cluster: Any, folder: Path, coordinator: str = "127.0.0.1:1") -> Any:
    party = cluster.party()
    envelope, _ = cluster.roster(members=[party])
    cluster.enrol(party, folder, coordinator, envelope)
    return party


def settings(folder: Path, **fields: Any) -> NodeSettings:
    return NodeSettings(
        **{
            "state_dir": folder,
            "name": "n",
            "listen": f"127.0.0.1:{free_port()}",
            "software_identity_allowed": True,
            **fields,
        }
    )


async def reason(chosen: NodeSettings) -> str:
    with pytest.raises(SealringError) as raised:
        async with asyncio.timeout(200):
            await serve(chosen, asyncio.Event())
    return raised.value.reason


async def test_what_keeps_a_node_from_starting(cluster, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    assert await reason(settings(folder)) == "NOT_ENROLLED"
    enrolled(cluster, folder)
    assert await reason(settings(folder, software_identity_allowed=False)) == "SOFTWARE_IDENTITY"
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await reason(settings(folder, listen=f"127.0.0.1:{port}")) == "CANNOT_LISTEN"
    server.close()
    (folder / "roster-state.json").unlink()
    assert await reason(settings(folder)) == "ROSTER_STATE_MISSING"


async def test_another_identity_is_refused(cluster, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    enrolled(cluster, folder)
    (folder / IDENTITY_KEY).unlink()
    SoftwareSigner.load_or_create(folder / IDENTITY_KEY)
    assert await reason(settings(folder)) == "MEMBER_STATE_CORRUPT"
    (folder / IDENTITY_KEY).unlink()
    assert await reason(settings(folder)) == "MEMBER_STATE_CORRUPT"


async def test_a_node_that_is_thrown_out_ends_cleanly(tmp_path: Path, monkeypatch: Any) -> None:
    """Else a supervisor would start it again and again."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # `run` sets it: no later test shall compile there

    async def ends_with(error: SealringError) -> None:
        async def serve(chosen: Any, stop: Any) -> None:
            raise error

        monkeypatch.setattr(main, "serve", serve)
        await main.run(settings(tmp_path / "node"))

    with capture_logs() as logs:
        await ends_with(removed())
    assert [one["event"] for one in logs] == ["removed_from_cluster"]
    assert "sealring token code" in logs[0]["hint"]
    with pytest.raises(PermissionDenied):
        await ends_with(PermissionDenied("something else"))


PROGRAM = """
import asyncio, json, sys
from sealring.mesh.system.logging import configure
from sealring.node.main import run
from sealring.node.settings import NodeSettings
configure("node")
asyncio.run(run(NodeSettings.model_validate(json.loads(sys.argv[1]))))
"""


@pytest.fixture
def process(cluster, tmp_path: Path):
    folder = tmp_path / "node"
    enrolled(cluster, folder)
    chosen = settings(folder).model_dump_json()
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, chosen], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    yield started
    started.kill()
    started.wait()
    started.stderr.close()


def wait_for_event(process: Any, event: str) -> None:
    for line in process.stderr:
        if json.loads(line)["event"] == event:
            return
    raise AssertionError(f"{event} did not come")


@pytest.mark.integration
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_without_a_coordinator_runs_stays_small_and_stops(process: Any, sign: int) -> None:
    wait_for_event(process, "node_started")
    daemon = psutil.Process(process.pid)
    assert daemon.memory_info().rss < 150 << 20
    if sys.platform == "linux":
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert not [name for name in ("libmlx", "numpy", "tokenizers") if name in mapped]
    os.kill(process.pid, sign)
    assert process.wait(200) == 0


@pytest.mark.integration
def test_a_second_daemon_on_one_state_is_refused(process: Any, tmp_path: Path) -> None:
    wait_for_event(process, "node_started")
    chosen = settings(tmp_path / "node").model_dump_json()
    second = subprocess.run(
        [sys.executable, "-c", PROGRAM, chosen], stderr=subprocess.PIPE, timeout=200, check=False
    )
    assert second.returncode != 0
    assert b"STATE_IN_USE" in second.stderr or b"another process uses" in second.stderr


@pytest.mark.parametrize("private", [False, True])
def test_children_get_a_folder_for_temporary_files_that_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    state, given = tmp_path / "state", tmp_path / "given"
    for folder in (state, given):
        folder.mkdir()
    given.chmod(0o700 if private else 0o1777)
    monkeypatch.setenv("TMPDIR", str(given))
    monkeypatch.setattr(tempfile, "tempdir", str(given))
    for _ in range(2):
        main.keep_temporary_files(state)
        assert os.environ["TMPDIR"] == str(given if private else state / "tmp")
    assert Path(os.environ["TMPDIR"]).stat().st_mode & 0o777 == 0o700
