"""The other ends of `bench.comms`: a rank of an MLX ring, or the far end of a pipe or of a data channel."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.carrier.neighbours import Connections

_CONNECT_SECONDS = 20.0
_VISITOR = """
import socket, sys, time
for _ in range(4000):
    try:
        visitor = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        break
    except OSError:
        time.sleep(0.005)
sys.stdin.read()
"""


def timed(work: Callable[[], None], count: int) -> list[float]:
    """Microseconds of each of `count` calls."""
    spent = []
    for _ in range(count):
        begun = time.perf_counter()
        work()
        spent.append((time.perf_counter() - begun) * 1e6)
    return spent


def ring(rank: int, own: str, other: str, plan: list[tuple[int, int, bool]]) -> None:
    """Ping-pong with the other rank; rank 0 prints the round trips of each (length, count, spin)."""
    from node.carrier.ring import RingGroup

    group = RingGroup(_connections(own, other), _knock)

    def receive(length: int, spin: bool) -> None:
        while not spin and group.incoming.fileno() not in group.wait_readable(None):
            pass
        group.receive(length)

    for length, count, spin in plan:
        group.send_buffer(length)

        def ping(length: int = length, spin: bool = spin) -> None:
            group.send(length)
            receive(length, spin)

        def pong(length: int = length, spin: bool = spin) -> None:
            receive(length, spin)
            group.send(length)

        timed(ping if rank == 0 else pong, 10)
        cpu = time.process_time()
        spent = timed(ping if rank == 0 else pong, count)
        cpu = time.process_time() - cpu
        if rank == 0:
            found = {"bytes": length, "spin": spin, "us": spent, "cores": cpu / (sum(spent) / 1e6)}
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


def _connections(own: str, other: str) -> Connections:
    """To the other rank and from it, as `node.carrier.neighbours` makes them, unconfirmed."""
    from mesh.addresses import parse_address
    from node.carrier.neighbours import Connections

    with socket.create_server(parse_address(own)) as listener:
        until = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                outgoing = socket.create_connection(parse_address(other), timeout=_CONNECT_SECONDS)
                break
            except ConnectionRefusedError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        listener.settimeout(_CONNECT_SECONDS)
        incoming, _ = listener.accept()
    for connection in (outgoing, incoming):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connections(outgoing, incoming)


def _knock(port: int) -> None:
    """A process that connects to the port, as a carrier's daemon does, and stays until this one ends."""
    subprocess.Popen([sys.executable, "-c", _VISITOR, str(port)], stdin=subprocess.PIPE)


def pipe(far: Connection) -> None:
    """Sends back what comes until nothing comes."""
    while data := far.recv_bytes():
        far.send_bytes(data)


def shared(ends: tuple[int, int, int, int], count: int) -> None:
    """A carrier's end that hands every payload straight back."""
    from node.channel import CarrierChannel

    channel = CarrierChannel(*ends)
    for _ in range(count):
        header, data, slot = channel.next_outgoing()
        channel.next_expected()
        target, out = channel.free_slot(header.length)
        out[:] = data
        channel.sent(slot, data)
        channel.deliver(header, target, out)


if __name__ == "__main__":
    rank_, own_, other_, plan_ = sys.argv[1:]
    ring(int(rank_), own_, other_, [(int(a), int(b), bool(c)) for a, b, c in json.loads(plan_)])
