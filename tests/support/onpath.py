"""Somebody on the path: TCP proxies that delay, reorder, alter, replay, inject, swallow or cut."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

Attack = Callable[["Flow", bytes], "bytes | None"]
"""What becomes of the next bytes; None closes the connection."""


class Flow:
    """One direction of one connection, and what an attack remembers of it."""

    def __init__(self, outward: bool) -> None:
        self.outward = outward
        self.previous = b""


class Proxy:
    """Listens on loopback and passes everything on to `target`, through the attack if there is one.

    An attack is used for one chunk of bytes and then taken away.
    """

    def __init__(self, target: tuple[str, int], listen: socket.socket | None = None) -> None:
        self.target = target
        self.attack: Attack | None = None
        self._inward = False
        self._skip = 0
        self.used = threading.Event()
        self._listener = listen or socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, attack: Attack, *, inward: bool = False, skip: int = 0) -> None:
        """Uses `attack` once: on the next bytes to the target, or from it, after `skip` chunks of them."""
        self.used.clear()
        self._inward, self._skip = inward, skip
        self.attack = attack

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            _shut(one)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                guest, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(guest,), daemon=True).start()

    def _serve(self, guest: socket.socket) -> None:
        try:
            host = socket.create_connection(self.target, timeout=100)
        except OSError:  # nobody listens there yet: the caller tries again, as it would without a proxy
            guest.close()
            return
        host.settimeout(None)
        for one in (guest, host):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open += [guest, host]
        threading.Thread(target=self._pass, args=(guest, host, True), daemon=True).start()
        self._pass(host, guest, False)

    def _pass(self, source: socket.socket, sink: socket.socket, outward: bool) -> None:
        flow = Flow(outward)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                passed = self._attacked(flow, data)
                if passed is None:
                    break
                sink.sendall(passed)
                flow.previous = data
        _shut(source)
        _shut(sink)

    def _attacked(self, flow: Flow, data: bytes) -> bytes | None:
        with self._lock:
            attack = self.attack
            if attack is None or flow.outward is self._inward:
                return data
            if self._skip:
                self._skip -= 1
                return data
            self.attack = None
            self.used.set()
            return attack(flow, data)


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def delay(flow: Flow, data: bytes) -> bytes:
    time.sleep(1.0)
    return data


def reorder(flow: Flow, data: bytes) -> bytes:
    middle = len(data) // 2
    return data[middle:] + data[:middle]


def alter(flow: Flow, data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def replay(flow: Flow, data: bytes) -> bytes:
    return (flow.previous or data) + data


def inject(flow: Flow, data: bytes) -> bytes:
    return os.urandom(48) + data


def truncate(flow: Flow, data: bytes) -> None:
    return None


def swallow(flow: Flow, data: bytes) -> bytes:
    return b""


ATTACKS: dict[str, Attack] = {
    "alter": alter,
    "replay": replay,
    "inject": inject,
    "truncate": truncate,
    "swallow": swallow,
    "reorder": reorder,
    "delay": delay,
}
