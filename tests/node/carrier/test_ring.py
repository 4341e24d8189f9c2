"""What a ring group does without another process."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from sealring.mesh.errors import EpochEnded
from sealring.node.carrier import ring
from sealring.node.carrier.neighbours import Connections
from sealring.node.carrier.ring import RingGroup, bytes_received
from sealring.node.wire.arena import SLOT_BYTES

DARWIN_INFO = struct.Struct("<BBBx13I7Q")
"""struct tcp_connection_info of XNU (bsd/netinet/tcp.h), in this order.

State and window scales; options, flags, rto, maxseg, ssthresh, cwnd, send window, bytes to send, receive
window, three times, fast open. Then packets and bytes sent, bytes sent again, packets and bytes received,
bytes out of order, packets sent again.
"""


@pytest.fixture
def connected():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    yield near, far
    near.close()
    far.close()


@pytest.fixture
def unformed(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX forms no group."""
    monkeypatch.setattr(ring, "_form", lambda connections, knock: None)


class Mac:
    """A connection as macOS describes it."""

    def __init__(self, received: int, known: bool = True) -> None:
        self.info = DARWIN_INFO.pack(4, 6, 6, *range(13), 11, 22, 33, 44, received, 55, 66)
        self.known = known

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, 0x106)
        if not self.known:
            raise OSError(42, "Protocol not available")
        return self.info[:size]


@pytest.mark.parametrize("received", [0, 1, (1 << 40) + 7])
def test_bytes_received_on_a_mac(monkeypatch: pytest.MonkeyPatch, received: int) -> None:
    assert DARWIN_INFO.size == 112
    monkeypatch.delattr(socket, "TCP_INFO", raising=False)
    assert bytes_received(Mac(received)) == received  # type: ignore[arg-type]


def test_a_system_that_does_not_tell_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_INFO", raising=False)
    assert bytes_received(Mac(1, known=False)) is None  # type: ignore[arg-type]


def test_bytes_received_here(connected: tuple[socket.socket, socket.socket]) -> None:
    near, far = connected
    for total in (0, 5, 10):
        assert bytes_received(far) == total
        near.sendall(bytes(5))
        far.recv(5, socket.MSG_WAITALL)


@pytest.mark.usefixtures("unformed")
def test_no_record_takes_memory_of_mlx(connected: tuple[socket.socket, socket.socket]) -> None:
    """On a Mac such memory is the GPU's, and MLX keeps what is freed of it: nobody plans with either."""
    limit = mx.set_cache_limit(100 << 30)
    try:
        before = mx.get_active_memory(), mx.get_cache_memory()
        near, far = connected
        group = RingGroup(Connections(near, far), print)
        for number, length in enumerate((1, 4096, 3, *range(1 << 20, 3 << 20, 99_991), SLOT_BYTES, 5)):
            payload = bytes([number + 1]) * length
            group.send_buffer(length)[:] = payload
            with ThreadPoolExecutor(1) as sender:
                sent = sender.submit(group.send, length)
                assert group.receive(length) == payload
                sent.result(200)
        assert (mx.get_active_memory(), mx.get_cache_memory()) == before
    finally:
        mx.set_cache_limit(limit)


def test_a_descriptor_that_is_no_socket_is_left_alone(tmp_path) -> None:
    with (tmp_path / "file").open("w") as file, socket.socket() as made:
        assert not ring.is_socket(file.fileno())
        assert ring.is_socket(made.fileno())
        closed = made.fileno()
    assert not ring.is_socket(closed)


@pytest.mark.usefixtures("unformed")
@pytest.mark.parametrize(
    ("how", "what"),
    [("closed", "read"), ("closed", "wait"), ("reset", "read"), ("reset", "wait"), ("reset", "write")],
)
def test_a_neighbour_that_is_gone_ends_what_waits_for_it(
    connected: tuple[socket.socket, socket.socket], how: str, what: str
) -> None:
    near, far = connected
    group = RingGroup(Connections(far, far), print)
    with socket.socket() as other:
        assert group.wait_readable(0, other.fileno()) <= {other.fileno()}
    near.sendall(b"x")
    assert group.wait_readable(None) == {far.fileno()}
    assert group.receive(1) == b"x"
    assert group.wait_readable(0) == set()
    if how == "reset":
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    near.close()
    done = {
        "read": lambda: group.receive(1),
        "wait": lambda: group.wait_readable(None),
        "write": lambda: group.send(1),
    }
    with pytest.raises(EpochEnded) as caught:
        done[what]()
    assert caught.value.reason == "PEER_LOST"
