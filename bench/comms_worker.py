"""The other ends of `bench.comms`: a rank of an MLX ring, or the far end of a pipe or of a data channel."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from sealring.mesh.system.addresses import parse_address
from sealring.node.carrier.neighbours import Connections


def timed(work: Callable[[], None], count: int) -> list[float]:
    """Microseconds of each of `count` calls."""
    spent = []
    for _ in range(count):
        begun = time.perf_counter()
        work()
        spent.append((time.perf_counter() - begun) * 1e6)
    return spent


def ring(rank: int, own: str, other: str, plan: list[tuple[int, int, bool]]) -> None:
    """Ping-pong with the other rank; rank 0 prints the round trips of each (length, count, by MLX or not)."""
    from sealring.node.carrier import ring as carrier_ring

    group = carrier_ring.RingGroup(connect(parse_address(own), parse_address(other)), knock)
    short = carrier_ring.SHORT_BYTES

    def receive(length: int) -> None:
        while group.incoming.fileno() not in group.wait_readable(None):
            pass
        group.receive(length)

    for length, count, by_mlx in plan:
        carrier_ring.SHORT_BYTES = 0 if by_mlx else short
        group.send_buffer(length)

        def ping(length: int = length) -> None:
            group.send(length)
            receive(length)

        def pong(length: int = length) -> None:
            receive(length)
            group.send(length)

        timed(ping if rank == 0 else pong, 10)
        cpu = time.process_time()
        spent = timed(ping if rank == 0 else pong, count)
        cpu = time.process_time() - cpu
        if rank == 0:
            found = {"bytes": length, "mlx": by_mlx, "us": spent, "cores": cpu / (sum(spent) / 1e6)}
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


def connect(own: tuple[str, int], other: tuple[str, int]) -> Connections:
    """To the other rank and from it."""
    with socket.create_server(own) as listener:
        outgoing = reach(other)
        incoming, _ = listener.accept()
    for connection in (outgoing, incoming):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connections(outgoing, incoming)


def reach(address: tuple[str, int]) -> socket.socket:
    until = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def knock(port: int) -> None:
    """What a daemon does for its carrier: MLX, which lets nobody else in this process work, is called."""
    if os.fork() == 0:
        try:
            reach(("127.0.0.1", port))
            time.sleep(5)
        finally:
            os._exit(0)


def pipe(far: Connection) -> None:
    """Sends back what comes until nothing comes."""
    while data := far.recv_bytes():
        far.send_bytes(data)


def shared(ends: tuple[int, int, int, int], count: int) -> None:
    """A carrier's end that hands every payload straight back."""
    from sealring.node.ipc.channel import CarrierChannel

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
