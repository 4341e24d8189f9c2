"""The carrier process: one epoch's MLX group and link keys. `python -m sealring.node.carrier.main --help`.

Ends with its control socket, on the shutdown command, or at the first fault, which it reports if it can.
"""

from __future__ import annotations

import gc

from sealring.mesh.system.start import defer_asyncio, hide_rich

if __name__ == "__main__":
    hide_rich()  # before structlog
    defer_asyncio()
    gc.disable()  # imports make hardly any garbage, and its collection takes a tenth of their time

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import mlx.core as mx
import structlog

from sealring.mesh.errors import EpochEnded, SealringError
from sealring.mesh.rpc.problem import to_problem
from sealring.mesh.system.addresses import format_address, parse_address
from sealring.mesh.system.logging import configure, end_with_any_thread
from sealring.mesh.system.start import forbid_core_files
from sealring.node.carrier.neighbours import meet
from sealring.node.carrier.pump import Counters, Pump
from sealring.node.carrier.ring import RingGroup
from sealring.node.carrier.ways import Way
from sealring.node.link.keys import SessionKeys
from sealring.node.link.records import Link
from sealring.node.wire.channel import CarrierChannel
from sealring.node.wire.frames import FrameSocket
from sealring.v1 import control_pb2, engine_pb2

RECORD_DEADLINE = 60.0  # seconds that a neighbour may take to read one record, or to send all of one
_SWITCH_SECONDS = 0.00005
"""Seconds for which a thread may keep the interpreter from the thread of the other direction."""

log = structlog.get_logger()


class Carrier:
    """The main thread serves the control socket. One thread works in each direction, one is the watchdog."""

    def __init__(
        self,
        control: FrameSocket,
        channel: CarrierChannel,
        listener: socket.socket,
        pump: Pump | None = None,
    ) -> None:
        """`pump` is None until the group is formed."""
        self._control, self._channel, self._listener = control, channel, listener
        self._pump = pump
        self.start: engine_pb2.StartCarrier | None = None
        self._fault_lock = threading.Lock()

    def run(self) -> None:
        self._control.send(engine_pb2.CarrierEvent(ready=engine_pb2.CarrierReady()))
        while (command := self._control.receive(engine_pb2.CarrierCommand)) is not None:
            kind = command.WhichOneof("command")
            if kind == "start":
                self._take_start(command.start)
            elif kind == "form":
                self._guarded("form", self.form)
            elif kind == "install":
                self._install(command.install)
            elif kind == "ping":
                self._pong(command.ping)
            elif kind == "trace":
                self._trace(command.trace)
            elif kind == "shutdown":
                return

    def _take_start(self, start: engine_pb2.StartCarrier) -> None:
        """Merges a later start into the first: it renews the link of a repeated handshake."""
        if self.start is None:
            self.start = start
        else:
            self.start.MergeFrom(start)

    def form(self) -> None:
        """Connects to both neighbours, forms the MLX group and starts the loops. Raises EpochEnded."""
        start = self.start
        if start is None:
            raise EpochEnded("the carrier got the command to form a group before it was started")
        timeout = start.form_timeout_ms / 1000
        # MLX forms the group without a time limit and without letting go of the interpreter lock, so no
        # thread of ours can watch it: the kernel's timer ends the process.
        signal.setitimer(signal.ITIMER_REAL, timeout + 1.0)
        outgoing = Link(SessionKeys.from_carrier(start.outgoing_keys))
        incoming = Link(SessionKeys.from_carrier(start.incoming_keys))
        self.start = None
        connections = meet(
            self._listener,
            [Way(parse_address(one.address), one.source) for one in start.ways]
            or [Way(parse_address(start.next_address))],
            confirmation=outgoing.sealer.seal_confirmation(),
            outgoing_pass=start.outgoing_pass,
            incoming_pass=start.incoming_pass,
            open_confirmation=incoming.opener.open_confirmation,
            seconds=timeout,
        )
        self._pump = pump = Pump(RingGroup(connections, self._knock), self._channel, outgoing, incoming)
        signal.setitimer(signal.ITIMER_REAL, 0)
        up, taken = engine_pb2.CarrierUp(), connections.way
        if taken is not None:
            up.way.address, up.way.source = format_address(*taken.way.address), taken.way.source
            up.round_trip_us, up.bytes_per_second = round(taken.round_trip * 1e6), round(taken.rate)
        self._control.send(engine_pb2.CarrierEvent(up=up))
        self._guarded("send", pump.send_loop)
        self._guarded("receive", pump.receive_loop)
        self._guarded("watch", lambda: self.watch(pump))

    def _knock(self, port: int) -> None:
        """Asks the daemon to connect to a loopback port. MLX waits for that and blocks all threads here."""
        self._control.send(engine_pb2.CarrierEvent(knock=engine_pb2.Knock(port=port)))

    def _guarded(self, name: str, loop: Callable[[], None]) -> None:
        def body() -> None:
            try:
                loop()
            except BaseException as error:
                self.fault(error)

        threading.Thread(target=body, name=name, daemon=True).start()

    def watch(self, pump: Pump) -> None:
        """Checks progress and asks for new keys, every second. Raises EpochEnded (PEER_FROZEN)."""
        asked = {True: False, False: False}
        while True:
            time.sleep(1)
            pump.note_progress()
            check_progress(pump.counters)
            for outgoing in asked:
                wanted = pump.needs_rekey(outgoing=outgoing)
                if wanted and not asked[outgoing]:
                    rekey = engine_pb2.RekeyWanted(outgoing=outgoing)
                    self._control.send(engine_pb2.CarrierEvent(rekey=rekey))
                asked[outgoing] = wanted

    def fault(self, error: BaseException) -> None:
        """Reports the first fault and ends the process: threads inside MLX cannot be stopped otherwise."""
        with self._fault_lock:
            if not isinstance(error, SealringError):
                log.error("carrier_fault", kind=type(error).__name__, exc_info=error)
            try:
                fault = engine_pb2.CarrierFault(problem=to_problem(error))
                self._control.send(engine_pb2.CarrierEvent(fault=fault))
            except OSError:
                pass
            os._exit(1)

    def _install(self, install: engine_pb2.InstallKeys) -> None:
        if self._pump is not None:
            keys = SessionKeys.from_carrier(install.keys)
            self._pump.install(keys, outgoing=install.outgoing, at_step=install.at_step)

    def _pong(self, ping: control_pb2.Ping) -> None:
        counters = self._pump.counters if self._pump else None
        pong = engine_pb2.CarrierPong(sequence=ping.sequence)
        if counters:
            pong.records_sealed, pong.records_opened = counters.sealed, counters.opened
            pong.waiting_ms = int(counters.waiting_seconds() * 1000)
        self._control.send(engine_pb2.CarrierEvent(pong=pong))

    def _trace(self, command: engine_pb2.TakeTrace) -> None:
        taken = engine_pb2.TraceTaken(id=command.id)
        if self._pump is not None:
            taken.trace.CopyFrom(self._pump.trace(command.since))
        self._control.send(engine_pb2.CarrierEvent(trace=taken))


def check_progress(counters: Counters) -> None:
    """Raises EpochEnded (PEER_FROZEN) when a record has been under way for too long."""
    begun = time.monotonic() - RECORD_DEADLINE
    if 0 < counters.sending_since < begun:
        raise EpochEnded("the next member does not read its link", reason="PEER_FROZEN")
    if 0 < counters.receiving_since < begun:
        raise EpochEnded("the previous member holds back the rest of a record", reason="PEER_FROZEN")


def main() -> None:
    forbid_core_files()
    gc.freeze()
    gc.enable()
    mx.set_default_device(mx.cpu)  # before any thread: the GPU is the engine's
    parser = argparse.ArgumentParser(prog="sealring carrier", description=__doc__)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--channel-fds", required=True, help="four descriptors, comma-separated")
    parser.add_argument(
        "--listen-fd", type=int, required=True, help="a socket that listens for the neighbour"
    )
    arguments = parser.parse_args()
    configure("carrier")
    end_with_any_thread()
    sys.setswitchinterval(_SWITCH_SECONDS)
    descriptors = [int(part) for part in arguments.channel_fds.split(",")]
    channel = CarrierChannel(*descriptors)
    control = FrameSocket(socket.socket(fileno=arguments.control_fd))
    listener = socket.socket(fileno=arguments.listen_fd)
    carrier = Carrier(control, channel, listener)
    try:
        carrier.run()
    except Exception as error:
        carrier.fault(error)
    os._exit(0)


if __name__ == "__main__":
    main()
