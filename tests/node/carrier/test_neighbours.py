"""Connections to the port at which a member waits for the previous one."""

from __future__ import annotations

import secrets
import socket
import sys
import threading

import pytest

from sealring.node.carrier import neighbours
from sealring.node.carrier.neighbours import HALF_PASS_BYTES, PASS_BYTES, Reception
from sealring.node.link.records import CONFIRMATION_BYTES

PATIENCE = 30.0


def test_a_stranger_who_says_nothing_is_sent_away_while_the_neighbour_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neighbours, "GUEST_SECONDS", 0.0)
    listener = socket.create_server(("127.0.0.1", 0))
    link_pass, confirmation = secrets.token_bytes(PASS_BYTES), secrets.token_bytes(CONFIRMATION_BYTES)
    opened: list[bytes] = []
    met: list[socket.socket] = []
    reception = Reception(listener, link_pass, opened.append)
    until = neighbours.time.monotonic() + 2 * PATIENCE
    waiting = threading.Thread(target=lambda: met.append(reception.run(until, lambda: False)))
    waiting.start()
    address = listener.getsockname()
    with socket.create_connection(address, timeout=PATIENCE) as stranger:
        assert stranger.recv(1) == b""
    monkeypatch.setattr(neighbours, "GUEST_SECONDS", PATIENCE)
    with socket.create_connection(address, timeout=PATIENCE) as neighbour:
        neighbour.sendall(link_pass[:HALF_PASS_BYTES] + confirmation)
        assert neighbour.recv(HALF_PASS_BYTES) == link_pass[HALF_PASS_BYTES:]
        waiting.join(PATIENCE)
        assert opened == [confirmation]
        met[0].close()
    listener.close()


@pytest.mark.parametrize(("platform", "wider"), [("darwin", True), ("linux", False)])
def test_a_listener_has_room_for_long_records_where_the_system_gives_little(
    monkeypatch: pytest.MonkeyPatch, platform: str, wider: bool
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with neighbours.listen("127.0.0.1", 1) as listener, socket.socket() as plain:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sizes = [each.getsockopt(socket.SOL_SOCKET, option) for each in (listener, plain)]
            assert (sizes[0] > sizes[1]) == wider
