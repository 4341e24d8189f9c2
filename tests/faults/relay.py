"""A machine's network cable led through this process, which delays, loses, alters or stops its frames.

Linux has `netem` for most of that, and many kernels are without it. The other end of the cable leaves the
switch for the time, and a cable of the relay's own takes its place there.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator

from namespaces import ip

_PROTOCOL_ALL = 3
_OUTGOING = 4
_SIOCETHTOOL = 0x8946
_CLONE_NEWNET = 0x40000000
_OFFLOADS = (0x17, 0x1F, 0x24)
"""ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO: frames without a sum, or larger than any."""

_RECORD = 100
"""Bytes of payload that no bare acknowledgement has."""


class Relay:
    """What is done to the frames `in` to the machine and `out` of it; all may be changed at any time."""

    def __init__(self, cable: str, side: str, seed: int) -> None:
        self.blocked: set[str] = set()
        self.loss = 0.0
        self.delay = 0.0
        """Seconds, each way."""
        self.rate = float("inf")
        """Bytes per second, each way."""
        self.flips = 0
        """Bits to flip, each in a frame of its own that is sent to the machine, not at a spared port."""
        self.spared: set[int] = set()
        self._chance = random.Random(seed)
        self._ends = {"out": _opened(cable), "in": _opened(side)}
        self._open = True
        self._threads = [
            threading.Thread(target=work, args=arguments)
            for way, other in (("out", "in"), ("in", "out"))
            for queue in [deque[tuple[float, bytes]]()]
            for work, arguments in ((self._read, (way, queue)), (self._write, (other, queue)))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._open = False
        for thread in self._threads:
            thread.join()
        for end in self._ends.values():
            end.close()

    def _read(self, way: str, queue: deque[tuple[float, bytes]]) -> None:
        free = 0.0
        while self._open:
            with contextlib.suppress(TimeoutError):
                frame, sender = self._ends[way].recvfrom(1 << 17)
                if sender[2] == _OUTGOING or way in self.blocked or self._chance.random() < self.loss:
                    continue
                if way == "in" and self.flips:
                    frame = self.flipped(frame)
                free = max(free, time.monotonic()) + len(frame) / self.rate
                queue.append((free + self.delay, frame))

    def _write(self, end: str, queue: deque[tuple[float, bytes]]) -> None:
        while self._open:
            if not queue or queue[0][0] > time.monotonic():
                time.sleep(0.0005)
                continue
            with contextlib.suppress(OSError):
                self._ends[end].send(queue.popleft()[1])

    def flipped(self, frame: bytes) -> bytes:
        """The frame with its payload's last whole word changed, and TCP's sum (RFC 1624) as it has to be."""
        start = 14 + (frame[14] & 15) * 4
        if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
            return frame
        payload = start + (frame[start + 12] >> 4) * 4
        ports = struct.unpack_from(">HH", frame, start)
        if len(frame) - payload < _RECORD or self.spared & set(ports):
            return frame
        self.flips -= 1
        changed = bytearray(frame)
        at = start + (len(frame) - start) // 2 * 2 - 2
        (word,) = struct.unpack_from(">H", frame, at)
        (total,) = struct.unpack_from(">H", frame, start + 16)
        summed = (~total & 0xFFFF) + (~word & 0xFFFF) + (word ^ 1)
        summed = (summed & 0xFFFF) + (summed >> 16)
        summed = (summed & 0xFFFF) + (summed >> 16)
        struct.pack_into(">H", changed, at, word ^ 1)
        struct.pack_into(">H", changed, start + 16, ~summed & 0xFFFF)
        return bytes(changed)


@contextlib.contextmanager
def led_through(port: str, space: str, seed: int = 1) -> Iterator[Relay]:
    """A relay in the place of the switch's port, which is in this process's network namespace.

    The machine's end of the cable is `net0` in the namespace `space`.
    """
    thread = threading.Thread(target=_in_space, args=(space, "net0"))
    thread.start()
    thread.join()
    ip("link", "add", "relay0", "type", "veth", "peer", "name", "relay1")
    try:
        for device in ("relay0", "relay1", port):
            _without_offloads(device)
            ip("link", "set", device, "up")
        ip("link", "set", port, "nomaster")
        relay = Relay(port, "relay0", seed)
        ip("link", "set", "relay1", "master", "net0")
        try:
            yield relay
        finally:
            ip("link", "set", port, "master", "net0")
            relay.close()
    finally:
        ip("link", "delete", "relay0")


def _in_space(space: str, device: str) -> None:
    """For a thread of its own, which is in that namespace from then on."""
    with open(f"/run/netns/{space}") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    _without_offloads(device)


def _opened(device: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_PROTOCOL_ALL))
    opened.bind((device, 0))
    opened.settimeout(0.1)
    return opened


def _without_offloads(device: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for command in _OFFLOADS:
            value = array.array("B", struct.pack("II", command, 0))
            fcntl.ioctl(asking, _SIOCETHTOOL, struct.pack("16sP", device.encode(), value.buffer_info()[0]))
