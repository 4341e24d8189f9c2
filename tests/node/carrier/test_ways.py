"""The fastest of several ways to a neighbour: on loopback, and over real networks of different speeds."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from namespaces import ip

from sealring.node.carrier.neighbours import HALF_PASS_BYTES, PASS_BYTES, Reception, meet
from sealring.node.carrier.ways import Measured, Way, measure, probe_tag
from sealring.node.link.records import CONFIRMATION_BYTES

PATIENCE = 100.0
PROGRAM = Path(__file__).parents[2] / "support" / "ringways.py"


@pytest.fixture
def link_pass() -> bytes:
    return secrets.token_bytes(PASS_BYTES)


@contextmanager
def reception(link_pass: bytes, opened: list[bytes]) -> Iterator[tuple[str, int]]:
    """Awaits a neighbour; its address."""
    going = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    until = time.monotonic() + PATIENCE
    awaiting = Reception(listener, link_pass, opened.append)
    met: list[socket.socket] = []

    def run() -> None:
        met.append(awaiting.run(until, lambda: not going.is_set()))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        going.set()
        with socket.create_connection(listener.getsockname(), timeout=PATIENCE) as neighbour:
            neighbour.sendall(link_pass[:HALF_PASS_BYTES] + bytes(CONFIRMATION_BYTES))
            thread.join()
        listener.close()
        for one in met:
            one.close()


def later() -> float:
    return time.monotonic() + PATIENCE


def test_a_dead_way_is_left_out_and_holds_up_no_other(link_pass: bytes) -> None:
    with reception(link_pass, []) as address, socket.create_server(("127.0.0.1", 0)) as silent:
        dead = [Way(silent.getsockname()), Way(("127.0.0.1", 9)), Way(address, "203.0.113.1")]
        found = measure([*dead, Way(address)], probe_tag(link_pass), later)
    assert [one.way for one in found] == [Way(address)]
    assert found[0].rate > 0
    assert found[0].round_trip > 0


def test_who_does_not_have_the_pass_measures_nothing(link_pass: bytes) -> None:
    with reception(link_pass, []) as address:
        until = time.monotonic() + 1.0
        assert measure([Way(address)], probe_tag(secrets.token_bytes(PASS_BYTES)), lambda: until) == []


@pytest.mark.parametrize("header", [b"\xff\xff\xff\xff", b"\x02\x00\x00\x01"])
def test_who_measures_without_end_is_sent_away(link_pass: bytes, header: bytes) -> None:
    with reception(link_pass, []) as address, socket.create_connection(address, PATIENCE) as guest:
        guest.sendall(probe_tag(link_pass))
        assert guest.recv(1) == b"\x06"
        guest.sendall(header)
        assert guest.recv(1) == b""


def test_a_neighbour_is_met_over_the_way_that_answers(link_pass: bytes) -> None:
    """Each end is the other's neighbour, as in a ring of two; who measures is no neighbour."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [one.getsockname() for one in listeners]
    confirmations = [secrets.token_bytes(CONFIRMATION_BYTES) for _ in listeners]
    opened: list[list[bytes]] = [[], []]
    met: list[Measured] = []

    def run(own: int) -> None:
        found = meet(
            listeners[own],
            [Way(("127.0.0.1", 9)), Way(addresses[1 - own]), Way(addresses[1 - own], "127.0.0.1")],
            confirmation=confirmations[own],
            outgoing_pass=link_pass,
            incoming_pass=link_pass,
            open_confirmation=opened[own].append,
            seconds=PATIENCE,
        )
        assert found.way is not None
        met.append(found.way)
        found.incoming.close()
        found.outgoing.close()

    threads = [threading.Thread(target=run, args=(own,)) for own in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert opened == [[confirmations[1]], [confirmations[0]]]
    assert {one.way.address for one in met} == set(addresses)
    assert all(one.rate > 0 for one in met)


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac's loopback has 127.0.0.1 alone")
def test_a_way_with_a_source_is_called_from_there(link_pass: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        calling = Way(server.getsockname(), "127.0.0.2").connect(PATIENCE)
        guest, (host, _) = server.accept()
        guest.close()
        calling.close()
    assert host == "127.0.0.2"


SPEEDS = [5, 12, 30, 75, 190, 450]
"""Mbit/s, as of Wi-Fi in bad places and of cables. Kernels without netem cannot delay."""


@pytest.fixture
def two() -> Iterator[tuple[str, str]]:
    """Two namespaces."""
    tools = ("ip", "tc")
    if os.geteuid() != 0 or not all(map(shutil.which, tools)):
        pytest.skip(f"network namespaces need root and {', '.join(tools)}")
    spaces = (f"sealring-{os.getpid()}-one", f"sealring-{os.getpid()}-two")
    with ExitStack() as stack:
        for space in spaces:
            ip("netns", "add", space)
            stack.callback(ip, "netns", "delete", space)
        yield spaces


def cables(spaces: tuple[str, str], speeds: list[int]) -> list[str]:
    """Cables of these speeds between the namespaces, in place of the ones before; the hosts of the second."""
    hosts = []
    for number, rate in enumerate(speeds):
        name = f"en{number}"
        subprocess.run(["ip", "-n", spaces[0], "link", "delete", name], check=False, capture_output=True)
        ip("link", "add", name, "type", "veth", "peer", "name", name, "netns", spaces[1], space=spaces[0])
        for end, space in enumerate(spaces, 1):
            ip("address", "add", f"10.78.{number}.{end}/24", "dev", name, space=space)
            ip("link", "set", name, "up", space=space)
            shape = f"tc -n {space} qdisc add dev {name} root tbf rate {rate}mbit burst 256kb latency 200ms"
            subprocess.run(shape.split(), check=True)
        hosts.append(f"10.78.{number}.2")
    return hosts


@pytest.mark.sweep
def test_in_twenty_random_topologies_the_fastest_of_three_networks_is_taken(two: tuple[str, str]) -> None:
    """And with the fastest one's cable out, the next."""
    draw = random.Random(33)
    for _ in range(20):
        speeds = draw.sample(SPEEDS, 3)
        hosts = cables(two, speeds)
        ranked = sorted(hosts, key=lambda host: -speeds[hosts.index(host)])
        assert ask(two, hosts, lambda: None)[0] == ranked[0], speeds
        dead = f"en{hosts.index(ranked[0])}"
        pulled = lambda name=dead: ip("link", "set", name, "down", space=two[1])  # noqa: E731
        assert ask(two, hosts, pulled)[0] == ranked[1], speeds


def ask(spaces: tuple[str, str], hosts: list[str], before: Callable[[], None]) -> list[str]:
    """The hosts in the order in which the first namespace takes them."""
    before()
    inside = [["ip", "netns", "exec", space, sys.executable, str(PROGRAM)] for space in spaces]
    listening = subprocess.Popen(
        [*inside[1], "listen"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with listening:
        assert listening.stdout is not None
        port = listening.stdout.readline().strip()
        ways = [word for host in hosts for word in (host, host[:-1] + "1")]
        asked = subprocess.run([*inside[0], "call", port, *ways], capture_output=True, text=True, check=True)
        listening.communicate()
    return [line.split()[0] for line in asked.stdout.splitlines()]
