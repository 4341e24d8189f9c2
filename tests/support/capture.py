"""What must not be seen: its forms, and where to look for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

ETH_P_ALL = 0x0003
SO_RCVBUFFORCE = 33
_READ_BYTES = 1 << 20
_NOTHING = bytes(_READ_BYTES)
_FEWEST, _MOST = 6, 24
"""Token ids that are searched for in a row."""


def forms_of(text: str, tokenizer: Any) -> dict[str, bytes]:
    """The bytes in which a text could travel or lie: as text, and as its token ids."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) >= _FEWEST, "a few small numbers are found everywhere"
    ids = ids[:_MOST]
    forms = {code: text.encode(code) for code in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le")}
    forms["longest word"] = max(text.split(), key=len).encode()
    for code in ("<I", ">I", "<H", ">H", "<Q"):
        forms[f"ids {code}"] = b"".join(struct.pack(code, token) for token in ids)
    forms["ids as text"] = ", ".join(map(str, ids)).encode()
    forms["ids as varints"] = b"".join(varint(token) for token in ids)
    return forms


def found(data: bytes, forms: Mapping[str, bytes]) -> set[str]:
    """The names of the forms that are in `data`."""
    return {name for name, form in forms.items() if form in data}


def found_in_memory(pid: int, forms: Mapping[str, bytes]) -> set[str]:
    """The names of the forms that are anywhere in what a process may read and write."""
    seen: set[str] = set()
    overlap = max(map(len, forms.values()))
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for start, end in _writable(maps):
            for offset in range(start, end, _READ_BYTES):
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    memory.seek(offset)
                    data = memory.read(min(_READ_BYTES + overlap, end - offset))
                    if not _NOTHING.startswith(data[:_READ_BYTES]):  # most of what is mapped was never used
                        seen |= found(data, forms)
    return seen


def found_in_files(folder: Path, forms: Mapping[str, bytes]) -> set[tuple[str, str]]:
    """(file, name of the form) for everything below a folder."""
    return {(str(path), name) for path, data in files_of(folder) for name in found(data, forms)}


def files_of(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Path and content of every file below a folder in which others work: one that has gone since it was
    listed is left out."""
    for path in paths_in(folder):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                yield path, path.read_bytes()


def paths_in(folder: Path) -> Iterator[Path]:
    """Everything below a folder in which others work. `rglob` fails where a folder goes that it listed."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in (*folders, *files))


def ports_of(pids: Iterable[int]) -> set[int]:
    """The TCP ports that processes and their children have at this moment: others use loopback too."""
    ports: set[int] = set()
    for pid in pids:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                ports |= {each.laddr.port for each in process.net_connections("tcp")}
    return ports


def _writable(maps: Iterable[str]) -> Iterable[tuple[int, int]]:
    for line in maps:
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
        if match and "[vsyscall]" not in line:
            yield int(match[1], 16), int(match[2], 16)


class Capture:
    """Every TCP payload on the loopback device, by (source port, destination port)."""

    def __init__(self) -> None:
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        except (AttributeError, PermissionError):
            pytest.skip("capturing loopback needs Linux and CAP_NET_RAW")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        with contextlib.suppress(PermissionError):  # without CAP_NET_ADMIN the system's limit holds
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self.streams: dict[tuple[int, int], bytearray] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Capture:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self._socket.close()

    async def caught_up(self) -> None:
        """Returns when everything that was sent before is in `streams`: something sent after it is there."""
        mark = secrets.token_bytes(16)
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as sender,
        ):
            ends = (sender.getsockname()[1], server.getsockname()[1])
            async with asyncio.timeout(120):
                while mark not in self.streams.get(ends, b""):
                    sender.sendall(mark)  # again, where a full buffer lost it
                    await asyncio.sleep(0.05)

    def own(self, pids: Iterable[int]) -> dict[tuple[int, int], bytes]:
        """The streams of these processes, which still run, and of their children: others use loopback too."""
        ports = ports_of(pids)
        return {ends: bytes(data) for ends, data in self.streams.items() if ports & set(ends)}

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                packet, address = self._socket.recvfrom(1 << 18)
                if address[2] == socket.PACKET_OUTGOING:  # of which loopback's are in the order of sending
                    self._keep(packet[14:])

    def _keep(self, ip: bytes) -> None:
        if len(ip) < 20 or ip[0] >> 4 != 4 or ip[9] != socket.IPPROTO_TCP:
            return
        tcp = ip[(ip[0] & 15) * 4 :]
        source, destination = struct.unpack(">HH", tcp[:4])
        self.streams.setdefault((source, destination), bytearray()).extend(tcp[(tcp[12] >> 4) * 4 :])


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])
