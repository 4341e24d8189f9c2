"""kill -9 at every point, a full disk, and whatever comes in whatever order: all of a change or nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import crashing
import pytest
import storekit
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from sealring.coordinator.backup import recover
from sealring.coordinator.init import init
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.store import Store
from sealring.coordinator.store.integrity import check_stored
from sealring.mesh.pki import Role
from sealring.mesh.roster import Equivocation, RosterMemory, RosterReader

NOW = crashing.NOW
MEMORY = Path("/dev/shm")  # syncing costs nothing there, and kill -9 loses no page
SCRIPT = [sys.executable, crashing.__file__]


def quick_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))


def points(*command: str) -> int:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return int(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("what", "least"), [("changes", 80), ("migrated", 40), ("made", 20), ("restored", 20)]
)
@pytest.mark.timeout(300)
def test_what_is_killed_leaves_all_or_nothing(what: str, least: int) -> None:
    folder = quick_folder()
    try:
        assert points(*SCRIPT, what, str(folder)) > least
    finally:
        shutil.rmtree(folder)


@pytest.mark.timeout(300)
def test_a_full_disk_is_named_and_nothing_of_a_change_stays(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("a disk of its own needs root and unshare")
    mounted = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" "$3" full "$1"'
    points("unshare", "--mount", "sh", "-c", mounted, "sh", str(tmp_path), *SCRIPT)


class Coordinators(RuleBasedStateMachine):
    """One cluster's coordinator: it is killed, goes on, and is put back to older copies; somebody reads."""

    @initialize()
    def make(self) -> None:
        self.folder = quick_folder()
        self.state = self.folder / "0"
        self.now = float(NOW)
        self.number = 0
        self.copies: list[Path] = []
        self.epochs: set[int] = set()
        self.spent: set[str] = set()
        self.tokens: list[str] = []
        self.alarms: list[Equivocation] = []
        init(crashing.settings(self.state), clock=lambda: self.now)
        self.keys = ClusterKeys.load(crashing.settings(self.state), now=NOW)
        root = self.keys.root
        self.reader = RosterReader(
            root, RosterMemory(root.cluster), clock=lambda: self.now, on_equivocation=self.alarms.append
        )
        self.open()

    def open(self) -> None:
        self.store = Store.open(self.state)
        check_stored(self.store)
        self.publisher = RosterPublisher(
            self.store, self.keys, crashing.settings(self.state), clock=lambda: self.now
        )

    def copy(self) -> Path:
        self.number += 1
        made = self.folder / str(self.number)
        shutil.copytree(self.state, made, ignore=shutil.ignore_patterns("*.lock", "*-shm"))
        return made

    @rule()
    def publish(self) -> None:
        self.publisher.publish()
        self.reader.accept(self.publisher.current.envelope)
        assert not self.alarms

    @rule()
    def begin_epoch(self) -> None:
        number = self.store.deployments.next_epoch("demo-0")
        assert number not in self.epochs
        self.epochs.add(number)

    @rule()
    def make_token(self) -> None:
        self.tokens.append(f"t{len(self.tokens)}")
        self.store.tokens.add(storekit.token(self.tokens[-1], seconds=NOW), b"secret")

    @rule(which=st.integers(0, 9))
    def spend(self, which: int) -> None:
        token = self.tokens[which] if which < len(self.tokens) else "none"
        if self.store.tokens.spend(token, b"secret", Role.MEMBER, now=self.now):
            assert token not in self.spent
            self.spent.add(token)

    @rule(point=st.integers(0, 20), what=st.sampled_from(["publish", "begin_epoch", "make_token", "spend"]))
    def killed(self, point: int, what: str) -> None:
        """At one of a change's statements, or after the change if it has fewer."""
        left: list[Path] = []
        at = crashing.after(point, lambda: left.append(self.copy()))
        with self.store.transaction() as connection:
            pass
        connection.set_trace_callback(lambda _: at())
        act = {"publish": self.publisher.publish, "begin_epoch": self._epoch, "make_token": self._token}
        act.get(what, self._spend)()
        left = left or [self.copy()]
        self.store.close()
        self.state = left[0]
        self.open()

    def _epoch(self) -> None:
        self.store.deployments.next_epoch("demo-0")

    def _token(self) -> None:
        name = f"untold{self.number}"  # one that was killed in between may have left its own
        self.store.tokens.add(storekit.token(name, seconds=NOW), os.urandom(8))
        self.store.tokens.revoke(name)

    def _spend(self) -> None:
        self.store.tokens.spend("none", b"secret", Role.MEMBER, now=self.now)

    @rule()
    def back_up(self) -> None:
        self.copies.append(self.copy())

    @rule(which=st.integers(0, 9), hours=st.integers(0, 100))
    def put_back(self, which: int, hours: int) -> None:
        """An older copy; what came after it is skipped, and open tokens are worth nothing."""
        if which >= len(self.copies):
            return
        self.store.close()
        self.state = self.copies[which]
        self.state = self.copy()
        self.now += 3600 * hours
        recover(crashing.settings(self.state), clock=lambda: self.now)
        self.open()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)


Coordinators.TestCase.settings = settings(
    max_examples=10, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
test_no_number_is_given_out_twice_and_no_alarm_raised = Coordinators.TestCase
