import asyncio
import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from closed import make_sick
from structlog.testing import capture_logs

from sealring.mesh.errors import ConfigError, NotFound, RosterError
from sealring.mesh.member.state import load_machine_state
from sealring.node.daemon.daemon import Daemon
from sealring.node.daemon.doing import DOING, Doing, read_doing
from sealring.node.daemon.epoch import Phase
from sealring.node.daemon.seat import Seat
from sealring.node.settings import NodeSettings
from sealring.v1 import membership_pb2


@pytest.fixture
async def make_daemon(cluster: Any, tmp_path: Path) -> Callable[[Any], Any]:
    """A daemon of a party, by itself: nothing runs, and what it says stays in its outbox."""

    def make(party: Any) -> Any:
        envelope, _ = cluster.roster(members=[party])
        cluster.enrol(party, tmp_path, "127.0.0.1:1", envelope)
        chosen = NodeSettings(state_dir=tmp_path, name="n", listen="127.0.0.1:1")
        return Daemon(chosen, load_machine_state(tmp_path), party.signer)

    return make


def roster_message(envelope: bytes) -> membership_pb2.CoordinatorMessage:
    return membership_pb2.CoordinatorMessage(roster=membership_pb2.RosterUpdate(envelope=envelope))


def full_disk(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_roster_waits_for_room_on_the_disk_and_says_so(
    cluster: Any, make_daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Used before it is remembered, it could be rolled back; so the node serves nothing new until then."""
    party = cluster.party()
    daemon = make_daemon(party)
    envelope, roster = cluster.roster(members=[party])
    prepare = membership_pb2.CoordinatorMessage(
        prepare=membership_pb2.PrepareEpoch(ring="demo-0", epoch=3, roster_version=roster.version)
    )
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(RosterError):
            await daemon.from_coordinator(roster_message(envelope))
        await daemon._take_unsaved()
        await daemon.from_coordinator(prepare)
    problem = daemon._session._outbox[-1].fault.problem
    assert problem.reason == "ROSTER_STATE_UNWRITABLE"
    assert f"{tmp_path}/" in problem.message
    assert "No space left on device" in problem.message
    assert "free space" in problem.hint

    await daemon._take_unsaved()
    assert daemon._session._outbox[-1].roster_seen.version == roster.version
    await daemon.from_coordinator(prepare)
    assert daemon._session._outbox[-1].fault.problem.reason != "ROSTER_STATE_UNWRITABLE"


async def test_a_folder_that_takes_no_files_is_named(make_daemon: Any, cluster: Any, tmp_path: Path) -> None:
    seat = Seat("demo-0", make_daemon(cluster.party())._around)
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(ConfigError) as caught:
        await seat.carrier(None, (), print)  # type: ignore[arg-type]
    assert caught.value.reason == "STATE_UNWRITABLE"
    assert str(tmp_path / "run") in str(caught.value)


async def test_a_task_that_fails_is_told_of(cluster: Any, make_daemon: Any) -> None:
    """Nobody waits for what the coordinator's messages begin."""
    daemon = make_daemon(cluster.party())

    async def fails(challenge: membership_pb2.Challenge) -> None:
        raise ValueError("a fault")

    daemon._prover.answer = fails
    with capture_logs() as logs:
        await daemon.from_coordinator(
            membership_pb2.CoordinatorMessage(challenge=membership_pb2.Challenge(nonce=b"n"))
        )
        async with asyncio.timeout(200):
            while daemon._tasks:
                await asyncio.sleep(0)
    assert [(one["event"], type(one["exc_info"])) for one in logs] == [("daemon_task_failed", ValueError)]


async def test_the_model_of_every_ring_is_stated(cluster: Any, make_daemon: Any) -> None:
    """Also where two are alike: the files of one may have become those of the other."""
    daemon = make_daemon(cluster.party())
    files = {"a": "11" * 32, "copy of a": "11" * 32, "b": "00" * 32, "loading": "22" * 32}

    async def profile(path: str) -> Any:
        return SimpleNamespace(digest=files[path])

    daemon._engines.profile = profile
    daemon._seats = {
        path: SimpleNamespace(
            phase=Phase.PREPARING if path == "loading" else Phase.UP, stage=SimpleNamespace(path=path)
        )
        for path in files
    }
    assert await daemon._served_models() == (bytes(32), b"\x11" * 32, b"\x11" * 32)


async def test_a_served_model_whose_volume_is_sick_is_not_stated_as_gone(
    cluster: Any, make_daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros would make it a changed one, and the node distrusted until it starts again."""
    daemon = make_daemon(cluster.party())
    daemon._seats = {
        name: SimpleNamespace(phase=Phase.UP, stage=SimpleNamespace(path=str(tmp_path / name)))
        for name in ("sick", "gone")
    }
    (tmp_path / "sick").mkdir()
    with monkeypatch.context() as volume:
        make_sick(volume, tmp_path / "sick")
        assert await daemon._served_models() == (bytes(32),)


async def test_a_node_holds_off_sleep_while_it_is_in_a_ring(cluster: Any, make_daemon: Any) -> None:
    party = cluster.party()
    daemon = make_daemon(party)
    held: list[bool] = []

    async def hold(wanted: bool) -> None:
        held.append(wanted)

    daemon._awake.hold = hold
    for ring in ((), (party,), ()):
        envelope, _ = cluster.roster(ring, members=[party])
        await daemon.from_coordinator(roster_message(envelope))
    assert held == [False, True, False]
    await daemon.from_coordinator(roster_message(cluster.roster((party,))[0]))
    await daemon._stop("stopping")
    assert held == [False, True, False, True, False], "nor after its end"


@pytest.mark.parametrize("unload", [False, True])
async def test_an_epoch_ends_when_the_coordinator_says_so(
    cluster: Any, make_daemon: Any, unload: bool
) -> None:
    daemon, told = make_daemon(cluster.party()), []
    epoch = SimpleNamespace(end=lambda reason: told.append(("end", reason)))
    daemon._seats = {
        "demo-0": SimpleNamespace(
            ring="demo-0", phase=Phase.UP, named=lambda number: epoch if number == 3 else None
        )
    }

    async def vacate(seat: Any, given: Any) -> None:
        told.append(("vacate", given))

    daemon._vacate = vacate
    for ring, number in (("demo-1", 3), ("demo-0", 2), ("demo-0", 3)):
        end = membership_pb2.EndEpoch(ring=ring, epoch=number, reason="r" * 81, unload=unload)
        await daemon.from_coordinator(membership_pb2.CoordinatorMessage(end=end))
        await asyncio.gather(*daemon._tasks)
    assert told == [("end", "r" * 80), *([("vacate", epoch)] if unload else [])]


async def test_a_question_about_the_machine_is_answered(cluster: Any, make_daemon: Any) -> None:
    """Also where there is no answer; the clock is told both times."""
    daemon = make_daemon(cluster.party())
    question = membership_pb2.CoordinatorMessage(diagnose=membership_pb2.DiagnosisQuestion(id=5))
    answers: list[Any] = [b"a report", NotFound("no", reason="NO_REPORT"), ValueError("a fault")]

    async def report() -> bytes:
        told = answers.pop(0)
        if isinstance(told, Exception):
            raise told
        return bytes(told)

    daemon.diagnosis.report = report
    for _ in range(3):
        await daemon.from_coordinator(question)
        async with asyncio.timeout(200):
            while daemon._tasks:
                await asyncio.sleep(0)
    told = [message.diagnosis for message in daemon._session._outbox]
    assert [(one.id, one.report, one.problem.reason) for one in told] == [
        (5, b"a report", ""),
        (5, b"", "NO_REPORT"),
        (5, b"", "INTERNAL"),
    ]
    assert all(0 < one.asked <= one.answered for one in told)


async def test_the_previous_member_is_awaited_at_one_port_of_each_epoch(
    cluster: Any, make_daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat: Any = Seat("demo-0", make_daemon(cluster.party())._around)
    first, second = object(), object()
    listener, address = seat._listener(first)
    assert seat._listener(first) == (listener, address)
    assert address == f"127.0.0.1:{listener.getsockname()[1]}"
    other, elsewhere = seat._listener(second)
    assert elsewhere != address
    for plan, held in ((first, listener), (second, other)):
        seat.release(plan)
        assert held.fileno() == -1
    seat.release(first)
    monkeypatch.setattr("sealring.node.daemon.seat.socket.create_server", full_disk)
    with pytest.raises(ConfigError) as raised:
        seat._listener(first)
    assert raised.value.reason == "CANNOT_LISTEN"
    assert seat._listeners == {}


async def test_who_looks_on_is_told_what_the_daemon_does(
    cluster: Any, make_daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealring.node.daemon.daemon._LOOK_SECONDS", 0)
    daemon = make_daemon(cluster.party())
    assert read_doing(tmp_path) is None
    looking = asyncio.create_task(daemon._look())

    async def told(doing: Doing) -> None:
        async with asyncio.timeout(200):
            while read_doing(tmp_path) != doing:
                await asyncio.sleep(0)

    await told(Doing(coordinator=False, phases={}))
    daemon._session.connected = True
    for ring in ("a", "b"):
        daemon._seats[ring] = Seat(ring, daemon._around)
    daemon._seats["a"].epoch = SimpleNamespace(phase=Phase.UP, fault=lambda problem: None)
    await told(Doing(coordinator=True, phases={"a": "up", "b": "ended"}))
    daemon._seats["a"].epoch.phase = Phase.ENDED
    daemon._session.connected = False
    await told(Doing(coordinator=False, phases={"a": "ended", "b": "ended"}))
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking


@pytest.mark.parametrize("junk", ["", "[]", "{}", '{"coordinator": 1, "phase": "", "more": 2}', "x" * 2000])
def test_a_file_that_says_nothing_tells_nothing(tmp_path: Path, junk: str) -> None:
    (tmp_path / DOING).write_text(junk)
    assert read_doing(tmp_path) is None
