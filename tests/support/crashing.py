"""Kills a process with a coordinator's state at every point of what it does, and looks at what is left.

`python crashing.py changes|migrated|made|restored|full FOLDER`: a process of its own, without threads,
because it forks. It writes how many points there were, and fails where the state of one was neither that
before nor that after what was being done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import storekit

from sealring.coordinator.backup import backup, restore
from sealring.coordinator.init import init
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.main import Coordinator
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import (
    Store,
    StoredDeployment,
    revocation_of,
)
from sealring.coordinator.store.integrity import check_stored
from sealring.mesh.crypto import SoftwareSigner
from sealring.mesh.errors import SealringError
from sealring.mesh.pki import Role
from sealring.v1 import admin_pb2

NOW = 1_800_000_000
FILES = ("open", "os.rename", "os.mkdir", "os.link", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")
Dump = list[tuple[object, ...]]


def settings(folder: Path) -> CoordinatorSettings:
    return CoordinatorSettings(
        state_dir=folder, cluster="demo", listen="127.0.0.1:7443", join_listen="127.0.0.1:0"
    )


def changes(store: Store, publisher: RosterPublisher, key: bytes) -> list[Callable[[], object]]:
    """What a coordinator writes in its life, one thing after the other."""
    member = storekit.gateway(key)
    spec = admin_pb2.DeploymentSpec(name="demo", model="m")
    deployment = StoredDeployment(
        name="demo", asked=spec, plan=admin_pb2.DeploymentPlan(spec=spec, plan_hash="ab"), created=NOW
    )

    def join() -> None:
        with publisher.change():
            assert store.tokens.spend("t", b"secret", Role.GATEWAY, now=NOW)
            store.members.enrol(member)
            store.audit.append(NOW, "t", "enrol", member.id, {})

    def deploy() -> None:
        with publisher.change():
            store.deployments.add(deployment)
            store.audit.append(NOW, "operator", "deploy", "demo", {})

    def ban() -> None:
        with publisher.change():
            store.members.revoke(revocation_of(member, NOW, banned=True))

    return [
        lambda: store.tokens.add(storekit.token("t", Role.GATEWAY), b"secret"),
        publisher.publish,
        join,
        deploy,
        lambda: store.deployments.next_epoch("demo-0"),
        lambda: store.deployments.next_epoch("demo-0"),
        ban,
        lambda: store.deployments.remove("demo"),
    ]


def opened(folder: Path) -> tuple[Store, RosterPublisher]:
    store = Store.open(folder)
    keys = ClusterKeys.load(settings(folder), now=NOW)
    return store, RosterPublisher(store, keys, settings(folder), clock=lambda: NOW)


def dump(folder: Path) -> Dump:
    """All rows of all tables."""
    with contextlib.closing(sqlite3.connect(folder / "coordinator.db")) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [(name, *row) for name in names for row in connection.execute(f"SELECT * FROM {name}")]


def killed(work: Callable[[Callable[[], None]], None]) -> bool:
    """Run `work` in a process of its own; whether it killed itself."""
    child = os.fork()
    if not child:
        try:
            work(lambda: os.kill(os.getpid(), signal.SIGKILL))
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "see above"
    return os.WIFSIGNALED(status)


def after(point: int, act: Callable[[], None]) -> Callable[[], None]:
    """What to call at every point, of which the one with this number acts."""
    left = iter(range(point, -1, -1))

    def at() -> None:
        if next(left, -1) == 0:
            act()

    return at


def between_writes(folder: Path) -> int:
    """Before every statement of every change."""
    key = SoftwareSigner.generate().public_key
    first, whole = folder / "first", folder / "whole"
    init(settings(first), clock=lambda: NOW)
    shutil.copytree(first, whole)
    store, publisher = opened(whole)
    states = [dump(whole)]
    for change in changes(store, publisher, key):
        change()
        states.append(dump(whole))
    store.close()
    point = 0
    while True:
        copy = folder / f"at-{point}"
        shutil.copytree(first, copy)

        def work(kill: Callable[[], None], copy: Path = copy, point: int = point) -> None:
            connections: list[sqlite3.Connection] = []
            connect = sqlite3.connect
            sqlite3.connect = lambda *of, **how: connections.append(connect(*of, **how)) or connections[-1]
            store, publisher = opened(copy)
            at = after(point, kill)
            connections[0].set_trace_callback(lambda _: at())
            for number, change in enumerate(changes(store, publisher, key), 1):
                change()
                (copy / "done").write_text(str(number))

        again = killed(work)
        done = int((copy / "done").read_text()) if (copy / "done").exists() else 0
        store, publisher = opened(copy)
        check_stored(store)
        assert dump(copy) in states[done : done + 2], f"at statement {point}, after {done} changes"
        publisher.publish()  # and it goes on
        store.close()
        shutil.rmtree(copy)
        if not again:
            return point
        point += 1


def between_migrations(folder: Path) -> int:
    """Before every statement that takes a database of an earlier release over."""
    first, whole = folder / "first", folder / "whole"
    first.mkdir()
    schemas = Path(__file__).parents[1] / "coordinator/store/schemas"
    with contextlib.closing(sqlite3.connect(first / "coordinator.db")) as made:
        made.executescript((schemas / "8.sql").read_text("utf-8"))
    shutil.copytree(first, whole)
    Store.open(whole).close()
    states = [dump(first), dump(whole)]
    point = 0
    while True:
        copy = folder / f"at-{point}"
        shutil.copytree(first, copy)

        def work(kill: Callable[[], None], copy: Path = copy, point: int = point) -> None:
            connect, at = sqlite3.connect, after(point, kill)

            def traced(*of: Any, **how: Any) -> sqlite3.Connection:
                made = connect(*of, **how)
                made.set_trace_callback(lambda _: at())
                return made

            sqlite3.connect = traced
            Store.open(copy)

        again = killed(work)
        assert dump(copy) in states, f"at statement {point}"
        store = Store.open(copy)
        check_stored(store)
        store.close()
        assert dump(copy) == states[1]
        shutil.rmtree(copy)
        if not again:
            return point
        point += 1


def reason(call: Callable[[], object]) -> str:
    """Why this is refused; empty if it is done."""
    try:
        call()
    except SealringError as error:
        return error.reason if error.hint else "no hint"
    return ""


def start(folder: Path) -> None:
    """As a coordinator that starts does."""
    store, _ = opened(folder)
    try:
        check_stored(store)
        assert store.operators.find("operator") is not None
    finally:
        store.close()


def between_files(folder: Path, make: Callable[[Path], object]) -> int:
    """Before every file is opened, renamed, removed: all is there afterwards, or it is refused."""
    point = 0
    while True:
        state = folder / f"at-{point}"

        def work(kill: Callable[[], None], state: Path = state, point: int = point) -> None:
            at = after(point, kill)

            def look(event: str, values: tuple[object, ...]) -> None:
                if event in FILES and str(state) in str(values[0]):
                    at()

            sys.addaudithook(look)
            make(state)

        again = killed(work)
        why = reason(lambda state=state: start(state))  # type: ignore[misc]
        assert why in ("", "STATE_MISSING", "STATE_CORRUPT"), why
        assert again or not why
        assert why or (state / "operator" / "tls.key").is_file()
        why = reason(lambda state=state: make(state))  # type: ignore[misc]
        assert why in ("", "STATE_EXISTS"), why  # all of it now, or to be moved aside
        if not why:
            start(state)
        shutil.rmtree(state)
        if not again:
            return point
        point += 1


def full(folder: Path) -> int:
    """On a disk of its own that has no more room."""
    state, filler = folder / "state", folder / "filler"
    init(settings(state), clock=lambda: NOW)
    store, publisher = opened(state)
    publisher.publish()
    before = dump(state)

    def fill() -> None:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def publish_on() -> None:
        for _ in range(1000):
            publisher.publish()

    async def run() -> None:
        coordinator = Coordinator(settings(state), clock=lambda: NOW)
        try:
            await coordinator.start()
        finally:
            await coordinator.stop()

    fill()
    assert reason(publish_on) == "STATE_UNWRITABLE"
    assert len(dump(state)) >= len(before)
    last = store.rosters.latest()
    assert last is not None
    store.close()
    fill()
    assert reason(lambda: asyncio.run(run())) == "STATE_UNWRITABLE"
    filler.unlink()
    store, publisher = opened(state)
    publisher.publish()
    assert publisher.current.version == last.version + 1
    store.close()
    return 1


def main(what: str, folder: Path) -> int:
    if what == "full":
        return full(folder)
    if what == "migrated":
        return between_migrations(folder)
    if what == "changes":
        return between_writes(folder)
    if what == "made":
        return between_files(folder, lambda state: init(settings(state), clock=lambda: NOW))
    init(settings(folder / "first"), clock=lambda: NOW)
    store, publisher = opened(folder / "first")
    publisher.publish()
    store.close()
    backup(settings(folder / "first"), folder / "file", clock=lambda: NOW)
    return between_files(folder, lambda state: restore(settings(state), folder / "file", clock=lambda: NOW))


if __name__ == "__main__":
    sys.stdout.write(f"{main(sys.argv[1], Path(sys.argv[2]))}\n")
