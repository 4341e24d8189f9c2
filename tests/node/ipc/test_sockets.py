from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from sealring.node.ipc import sockets


def test_both_ends_have_room_as_far_as_the_system_gives_it() -> None:
    options = socket.SO_SNDBUF, socket.SO_RCVBUF
    plain, wide = (
        [end.getsockopt(socket.SOL_SOCKET, option) for end in closing(pair) for option in options]
        for pair in (socket.socketpair(), sockets.socket_pair())
    )
    assert min(wide) > max(plain)


def closing(pair: tuple[socket.socket, socket.socket]) -> Iterator[socket.socket]:
    for end in pair:
        with end:
            yield end


def test_a_system_that_gives_no_more_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socketpair", lambda: (Small(), Small()))
    left, right = sockets.socket_pair()
    assert left.asked == right.asked == 2


class Small:
    def __init__(self) -> None:
        self.asked = 0

    def setsockopt(self, *_: int) -> None:
        self.asked += 1
        raise OSError(55, "No buffer space available")
