"""How long-running commands run."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from sealring.cli.local import processes
from sealring.cli.local.cluster import LocalCluster
from sealring.cli.local.processes import Level, run_daemon, starting
from sealring.mesh.errors import ConfigError

DAEMON = """
import os, pathlib, sys
from sealring.cli.local.processes import run_daemon
os.umask(0)
folder = pathlib.Path(sys.argv[1])

async def work():
    (folder / "file").write_text("x")
    (folder / "folder").mkdir()

run_daemon("node", work, log_level="info", log_file=None, parent_pipe=None)
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_a_daemon_makes_is_its_accounts_alone_whatever_the_umask(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DAEMON, str(tmp_path)], timeout=200, check=True)
    assert (mode(tmp_path / "file"), mode(tmp_path / "folder")) == (0o600, 0o700)


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
async def test_the_settings_of_a_local_cluster_are_its_owners_alone(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path / "state", "model", nodes=1) as cluster:
        cluster.write_configs()
    files = [tmp_path / "state" / "ports.json", *(tmp_path / "state" / "config").iterdir()]
    assert len(files) == 4
    assert {mode(file) for file in files} == {0o600}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, umask: None) -> list[Any]:
    """What a daemon does to its process, which here is the tests'."""
    did: list[Any] = []

    def note(name: str) -> Any:
        return lambda *told, **more: did.append((name, *told, *more.values()))

    monkeypatch.setattr("sealring.mesh.system.logging.configure", note("log"))
    monkeypatch.setattr("sealring.mesh.system.processes.allow_open_files", note("files"))
    monkeypatch.setattr(processes, "die_with_parent", note("lifeline"))
    logger = SimpleNamespace(error=lambda event, exc_info: did.append((event, exc_info)))
    monkeypatch.setattr(structlog, "get_logger", lambda: logger)
    return did


@pytest.mark.parametrize("error", [ConfigError("x"), ValueError("x"), None])
@pytest.mark.parametrize("log_file", [None, Path("node.log")])
@pytest.mark.parametrize("pipe", [None, 0, 7])
def test_how_a_daemon_ends_is_logged_where_its_command_does_not_say_it(
    process: list[Any], error: Exception | None, log_file: Path | None, pipe: int | None
) -> None:
    """An error that is ours is a line on standard error; where a log is a file nobody sees that."""

    async def work() -> None:
        process.append("works")
        if error is not None:
            raise error

    with pytest.raises(type(error)) if error is not None else nullcontext():
        run_daemon("node", work, log_level=Level.WARNING, log_file=log_file, parent_pipe=pipe)
    begun = [("log", "node", "warning", log_file), ("files",)]
    begun += [("lifeline", pipe)] if pipe is not None else []
    logged = error is not None and (log_file is not None or not isinstance(error, ConfigError))
    assert process == [*begun, "works", *([("ended_by_error", error)] if logged else [])]


def test_a_component_is_run_with_its_settings_as_it_was_said(
    here: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []

    async def run(settings: Any) -> None:
        ran.append(settings.state_dir)

    def run_daemon(component: str, work: Any, **how: Any) -> None:
        ran.append((component, how))
        asyncio.run(work())

    modules = {"sealring.gateway.main": SimpleNamespace(run=run)}
    load = importlib.import_module
    monkeypatch.setattr(processes.importlib, "import_module", lambda name: modules.get(name) or load(name))
    monkeypatch.setattr(processes, "run_daemon", run_daemon)
    command = ("gateway", "run", "--state-dir", str(home), "--die-with-parent-fd")
    assert here(*command, "3", "--log-level", "debug", "--log-file", "x.log").status == 0
    how = {"log_level": Level.DEBUG, "log_file": Path("x.log"), "parent_pipe": 3}
    assert ran == [("gateway", how), home]
    assert here(*command, "2").status == 2, "which is standard error"
    assert len(ran) == 2


def test_nothing_is_collected_while_a_process_starts_and_what_it_has_then_is_not_looked_at_again() -> None:
    gc.unfreeze()
    with pytest.raises(ValueError, match="x"), starting():
        assert not gc.isenabled()
        raise ValueError("x")
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
