from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput
from sealring.node.wire.frames import MAX_FRAME, FrameSocket, encode_frame, socket_pair
from sealring.v1.membership_pb2 import Goodbye

Pair = tuple[FrameSocket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    frames = FrameSocket(left)
    yield frames, right
    frames.close()
    right.close()


@given(st.lists(st.text(max_size=300), max_size=8))
def test_frames_come_out_as_they_went_in(reasons: list[str]) -> None:
    left, right = socket.socketpair()
    frames = FrameSocket(left)
    right.sendall(b"".join(encode_frame(Goodbye(reason=reason)) for reason in reasons))
    right.close()
    for reason in reasons:
        assert frames.receive(Goodbye) == Goodbye(reason=reason)
    assert frames.receive(Goodbye) is None
    frames.close()


@given(st.binary(max_size=64), st.integers(0, 80))
def test_a_cut_frame_is_broken_or_a_clean_end(body: bytes, cut: int) -> None:
    whole = encode_frame(Goodbye(reason=body.hex()))
    data = whole[: min(cut, len(whole) - 1)]
    left, right = socket.socketpair()
    frames = FrameSocket(left)
    right.sendall(data)
    right.close()
    if not data:
        assert frames.receive(Goodbye) is None
    else:
        with pytest.raises(InvalidInput) as caught:
            frames.receive(Goodbye)
        assert caught.value.reason == "BROKEN_FRAME"
    frames.close()


@pytest.mark.parametrize("head", [struct.pack(">I", MAX_FRAME + 1), b"\xff\xff\xff\xff"])
def test_an_absurd_length_is_refused_before_its_body(pair: Pair, head: bytes) -> None:
    frames, peer = pair
    peer.sendall(head)
    with pytest.raises(InvalidInput) as caught:
        frames.receive(Goodbye)
    assert caught.value.reason == "FRAME_TOO_LARGE"


def test_a_body_that_is_no_message(pair: Pair) -> None:
    frames, peer = pair
    peer.sendall(struct.pack(">I", 2) + b"\xff\xff")
    with pytest.raises(InvalidInput) as caught:
        frames.receive(Goodbye)
    assert caught.value.reason == "BROKEN_FRAME"


def test_a_message_above_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sealring.node.wire.frames.MAX_FRAME", 8)
    with pytest.raises(InvalidInput) as caught:
        encode_frame(Goodbye(reason="123456789"))
    assert caught.value.reason == "FRAME_TOO_LARGE"


def test_sends_of_several_threads_do_not_mix(pair: Pair) -> None:
    frames, peer = pair
    reader = FrameSocket(peer)
    threads = [
        threading.Thread(target=lambda n=n: [frames.send(Goodbye(reason=str(n) * 2000)) for _ in range(20)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    seen = [reader.receive(Goodbye) for _ in range(80)]
    for thread in threads:
        thread.join()
    assert all(one is not None and len(set(one.reason)) == 1 and len(one.reason) == 2000 for one in seen)
    reader.close()


def test_a_closed_peer_is_an_oserror(pair: Pair) -> None:
    frames, peer = pair
    peer.close()
    with pytest.raises(OSError):
        for _ in range(3):
            frames.send(Goodbye(reason="x"))


def test_both_ends_have_room_as_far_as_the_system_gives_it() -> None:
    options = socket.SO_SNDBUF, socket.SO_RCVBUF
    plain, wide = (
        [end.getsockopt(socket.SOL_SOCKET, option) for end in closing(pair) for option in options]
        for pair in (socket.socketpair(), socket_pair())
    )
    assert min(wide) > max(plain)


def closing(pair: tuple[socket.socket, socket.socket]) -> Iterator[socket.socket]:
    for end in pair:
        with end:
            yield end


def test_a_system_that_gives_no_more_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socketpair", lambda: (Small(), Small()))
    left, right = socket_pair()
    assert left.asked == right.asked == 2


class Small:
    def __init__(self) -> None:
        self.asked = 0

    def setsockopt(self, *_: int) -> None:
        self.asked += 1
        raise OSError(55, "No buffer space available")
