"""What a carrier does with commands, and when its watchdog speaks, without another process."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.mesh.errors import EpochEnded
from sealring.node.carrier import main as module
from sealring.node.carrier.main import RECORD_DEADLINE, Carrier
from sealring.v1 import control_pb2, engine_pb2, trace_pb2

Command = engine_pb2.CarrierCommand


class Control:
    """Gives these commands, then the end; keeps what is sent."""

    def __init__(self, *commands: engine_pb2.CarrierCommand) -> None:
        self.commands = list(commands)
        self.sent: list[engine_pb2.CarrierEvent] = []

    def receive(self, kind: Any) -> Any:
        return self.commands.pop(0) if self.commands else None

    def send(self, event: engine_pb2.CarrierEvent) -> None:
        self.sent.append(event)


class Broken(Control):
    """Its reader is gone."""

    def send(self, event: engine_pb2.CarrierEvent) -> None:
        raise BrokenPipeError


class Pump:
    """Wants new keys as `wanted` says, one pair (outgoing, incoming) after the other."""

    def __init__(self, *wanted: tuple[bool, bool]) -> None:
        self.wanted = list(wanted)
        self.noted = 0
        self.installed: list[tuple[bool, int]] = []
        self.counters = SimpleNamespace(
            sealed=1, opened=2, sending_since=0.0, receiving_since=0.0,
            waiting_seconds=lambda: 1.5,
        )  # fmt: skip

    def note_progress(self) -> None:
        self.noted += 1

    def needs_rekey(self, *, outgoing: bool) -> bool:
        return self.wanted[self.noted - 1][not outgoing]

    def install(self, keys: Any, *, outgoing: bool, at_step: int) -> None:
        self.installed.append((outgoing, at_step))

    def trace(self, since: int) -> trace_pb2.ProcessTrace:
        return trace_pb2.ProcessTrace(since=since)


def carrier_of(control: Control, pump: Pump | None = None) -> Carrier:
    return Carrier(control, None, None, pump=pump)  # type: ignore[arg-type]


def test_a_carrier_leaves_the_gpu_alone_before_it_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(module.mx, "set_default_device", done.append)
    with pytest.raises(SystemExit):  # it has no arguments
        module.main()
    assert done == [module.mx.cpu]


COMMANDS = (
    Command(ping=control_pb2.Ping(sequence=9)),
    Command(trace=engine_pb2.TakeTrace(id=5, since=77)),
    Command(install=engine_pb2.InstallKeys(outgoing=True, at_step=8)),
    Command(shutdown=engine_pb2.Shutdown()),
    Command(ping=control_pb2.Ping(sequence=10)),
)


def test_commands_are_answered_until_it_is_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.SessionKeys, "from_carrier", lambda keys: keys)
    control, pump = Control(*COMMANDS), Pump()
    carrier_of(control, pump).run()
    ready, pong, trace = control.sent
    assert ready.HasField("ready")
    assert pong.pong == engine_pb2.CarrierPong(
        sequence=9, records_sealed=1, records_opened=2, waiting_ms=1500
    )
    assert (trace.trace.id, trace.trace.trace.since) == (5, 77)
    assert pump.installed == [(True, 8)]
    assert len(control.commands) == 1


def test_before_there_are_links_there_is_nothing_to_tell() -> None:
    control = Control(*COMMANDS[:3])
    carrier_of(control).run()
    _, pong, trace = control.sent
    assert pong.pong == engine_pb2.CarrierPong(sequence=9)
    assert not trace.trace.HasField("trace")


def test_what_a_later_start_leaves_out_stays() -> None:
    starts = [
        engine_pb2.StartCarrier(next_address="a:1", form_timeout_ms=5),
        engine_pb2.StartCarrier(form_timeout_ms=6),
    ]
    carrier = carrier_of(Control(*(Command(start=start) for start in starts)))
    with pytest.raises(EpochEnded):
        carrier.form()
    carrier.run()
    assert carrier.start == engine_pb2.StartCarrier(next_address="a:1", form_timeout_ms=6)


def test_the_watchdog_asks_for_keys_once_and_ends_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    pump = Pump((False, True), (True, True), (True, False), (True, True), (True, True))
    pump.counters.sending_since = time.monotonic() - RECORD_DEADLINE + 1000
    rests: list[float] = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 5:
            pump.counters.sending_since = time.monotonic() - RECORD_DEADLINE - 1

    monkeypatch.setattr(module.time, "sleep", rest)
    control = Control()
    with pytest.raises(EpochEnded) as caught:
        carrier_of(control).watch(pump)  # type: ignore[arg-type]
    assert caught.value.reason == "PEER_FROZEN"
    assert [event.rekey.outgoing for event in control.sent] == [False, True, False]
    assert (rests, pump.noted) == ([1] * 5, 5)


@pytest.mark.parametrize("broken", [False, True])
def test_a_fault_is_told_and_ends_the_process(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module.os, "_exit", ended.append)
    control = Broken() if broken else Control()
    carrier_of(control).fault(EpochEnded("no", reason="PEER_LOST"))
    assert ended == [1]
    assert [event.fault.problem.reason for event in control.sent] == ["PEER_LOST"] * (not broken)
