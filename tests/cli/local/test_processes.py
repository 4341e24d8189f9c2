"""How long-running commands run."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealring.cli.local.cluster import LocalCluster
from sealring.cli.local.processes import die_with_parent
from sealring.mesh.errors import InvalidInput

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


CHILD = """
import signal, sys, time
from sealring.cli.local.processes import die_with_parent
signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), sys.exit(0)))
die_with_parent(int(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys
read_end, write_end = os.pipe()
command = [sys.executable, "-c", {child!r}, str(read_end)]
child = subprocess.Popen(command, pass_fds=[read_end], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_ends_when_its_parent_is_killed() -> None:
    code = textwrap.dedent(PARENT).format(child=CHILD)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
    assert "up" in lines
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == "told\n"
    parent.stdout.close()
    pid = int(next(line for line in lines if line != "up"))
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_only_a_pipe_will_do(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(InvalidInput) as caught:
        die_with_parent(file.fileno())
    assert caught.value.reason == "BAD_DESCRIPTOR"
    with pytest.raises(InvalidInput):
        die_with_parent(987)


def test_the_descriptor_goes_to_no_grandchild() -> None:
    code = textwrap.dedent(
        """
        import os, sys
        from sealring.cli.local.processes import die_with_parent
        die_with_parent(int(sys.argv[1]))
        print(os.get_inheritable(int(sys.argv[1])))
        """
    )
    read_end, write_end = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", code, str(read_end)],
        pass_fds=[read_end],
        capture_output=True,
        text=True,
        check=False,
    )
    os.close(read_end)
    os.close(write_end)
    assert done.stdout == "False\n"
    assert done.returncode in (0, -signal.SIGTERM)


ENDS = """
import pathlib, sys
from sealring.cli.local.processes import run_daemon
from sealring.mesh.errors import ConfigError

async def work():
    raise ConfigError("x")

log = pathlib.Path(sys.argv[1]) if sys.argv[1:] else None
run_daemon("node", work, log_level="info", log_file=log, parent_pipe=None)
"""


def test_an_error_of_ours_is_logged_where_a_file_is_all_that_is_seen(tmp_path: Path) -> None:
    """Elsewhere the command prints it as one line."""
    log = tmp_path / "node.log"
    for arguments in ([], [str(log)]):
        command = [sys.executable, "-c", ENDS, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "ended_by_error" not in done.stderr
    assert log.read_text().count("ended_by_error") == 1
