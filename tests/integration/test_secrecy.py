"""A marked prompt is searched for in a capture of every socket and in every log."""

import asyncio
import contextlib
import socket
import struct
import threading

import pytest
from ringtest import chat

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.xdist_group("integration"),
    pytest.mark.asyncio(loop_scope="module"),
]
MARK = "zyxwvut marmalade 9274"
ETH_P_ALL = 0x0003


class Capture:
    """Every TCP payload on the loopback device, by (source port, destination port)."""

    def __init__(self) -> None:
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        except (AttributeError, PermissionError):
            pytest.skip("capturing loopback needs Linux and CAP_NET_RAW")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self.streams: dict[tuple[int, int], bytearray] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Capture":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self._socket.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                packet, address = self._socket.recvfrom(1 << 18)
                if address[2] != socket.PACKET_OUTGOING:
                    self._keep(packet[14:])

    def _keep(self, ip: bytes) -> None:
        if len(ip) < 20 or ip[0] >> 4 != 4 or ip[9] != socket.IPPROTO_TCP:
            return
        tcp = ip[(ip[0] & 15) * 4 :]
        source, destination = struct.unpack(">HH", tcp[:4])
        self.streams.setdefault((source, destination), bytearray()).extend(tcp[(tcp[12] >> 4) * 4 :])


def needles(reference, messages) -> dict[str, bytes]:
    """What must not be seen: the words, and the token ids in the forms in which they could travel."""
    marked = reference.tokenizer.encode(MARK, add_special_tokens=False)
    assert len(marked) >= 6
    forms = {"words": MARK.encode(), "word": b"marmalade"}
    for code in ("<I", ">I", "<H", ">H", "<Q", "<i"):
        forms[f"ids {code}"] = b"".join(struct.pack(code, token) for token in marked[:6])
    forms["ids as text"] = ", ".join(map(str, marked[:6])).encode()
    forms["ids as varints"] = b"".join(varint(token) for token in marked[:6])
    return forms


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


async def test_a_marked_prompt_is_seen_on_the_clients_own_connection_only(ring, reference):
    messages = [{"role": "user", "content": f"Please repeat: {MARK}"}]
    forms = needles(reference, messages)
    own_port = int(ring.cluster.grpc_address.rsplit(":", 1)[1])
    with Capture() as capture:
        reply = await ring.ask(chat(messages[0]["content"]), 30)
        await asyncio.sleep(0.5)
    assert reply.completion_tokens > 0
    own = [bytes(data) for ports, data in capture.streams.items() if own_port in ports]
    others = {ports: bytes(data) for ports, data in capture.streams.items() if own_port not in ports}
    assert any(forms["words"] in data for data in own), "the capture does not work"
    assert sum(len(data) for data in others.values()) > 5000, "the ring's own traffic was not captured"
    seen = [(name, ports) for ports, data in others.items() for name, form in forms.items() if form in data]
    assert seen == []


async def test_the_reply_is_not_seen_either(ring, reference):
    question = "List the planets in order."
    expected = reference.reply([{"role": "user", "content": question}], 40)
    own_port = int(ring.cluster.grpc_address.rsplit(":", 1)[1])
    with Capture() as capture:
        await ring.ask(chat(question), 40)
        await asyncio.sleep(0.5)
    words = {word.encode() for word in expected.text.split() if len(word) > 6}
    assert words
    others = [bytes(data) for ports, data in capture.streams.items() if own_port not in ports]
    assert [word for word in words for data in others if word in data] == []


async def test_no_log_and_no_file_holds_the_prompt(ring, reference):
    messages = [{"role": "user", "content": f"Please repeat: {MARK}"}]
    forms = needles(reference, messages)
    await ring.ask(chat(messages[0]["content"]), 30)
    files = [path for path in ring.cluster.state_dir.rglob("*") if path.is_file()]
    assert any("logs" in path.parts for path in files)
    assert [
        (str(path), name) for path in files for name, form in forms.items() if form in path.read_bytes()
    ] == []
