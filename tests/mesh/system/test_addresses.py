from __future__ import annotations

import ast
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sealring.mesh.errors import ConfigError, InvalidInput
from sealring.mesh.system.addresses import (
    format_address,
    free_port,
    is_free,
    is_loopback,
    listen_error,
    listens,
    parse_address,
    require_loopback,
)


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("127.0.0.1:7700", ("127.0.0.1", 7700)),
        ("studio-2.local:0", ("studio-2.local", 0)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_addresses_are_split(address: str, parsed: tuple[str, int]) -> None:
    assert parse_address(address) == parsed
    assert format_address(*parsed) == address


@pytest.mark.parametrize(
    "address",
    [
        *("", ":", "host", "host:", ":80", "host:65536", "host:-1", "host:8e1", "host:٣", "::1:80"),
        *(
            "8080",
            "x::1]:80",
            "[::1:80",
            "[host]:80",
            "[]:80",
            "a b:80",
            "http://host:80",
            "host:000080",
            "h" * 254 + ":1",
        ),
        *("host\n:80", "host:80\n"),
    ],
)
def test_anything_else_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_address(address)
    assert caught.value.reason == "BAD_ADDRESS"
    assert len(caught.value.message) < 400


@given(st.text(max_size=300))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        host, port = parse_address(text)
    except InvalidInput:
        return
    assert host
    assert 0 <= port <= 65535


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
    ],
)
def test_loopback_is_known(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_only_loopback_may_go_unguarded() -> None:
    require_loopback("127.0.0.1:1")
    with refused("LOOPBACK_ONLY", ConfigError):
        require_loopback("0.0.0.0:1")


def test_a_listen_error_names_the_address() -> None:
    assert listen_error("127.0.0.1:1").metadata == {"address": "127.0.0.1:1"}


def test_no_port_is_chosen_twice_by_one_process_or_soon_by_the_next() -> None:
    """Ports are bound seconds after they were chosen, by several clusters that start beside each other."""
    choose = "from sealring.mesh.system.addresses import free_port; print([free_port() for _ in range(50)])"
    processes = [
        subprocess.Popen([sys.executable, "-c", choose], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    chosen = [port for process in processes for port in ast.literal_eval(process.communicate()[0])]
    assert len(set(chosen)) == len(chosen) == 200
    assert all(15000 <= port < 32000 for port in chosen)


def test_a_process_leaves_ports_alone_that_another_has_chosen_and_not_bound() -> None:
    """Several clusters start beside each other, and each binds seconds later what it has chosen."""
    choose = (
        "import itertools, os; os.getpid = lambda: 7\n"
        "from sealring.mesh.system.addresses import free_port\n"
        "print([free_port() for _ in range(40)], flush=True); input()"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", choose], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    chosen = [port for process in processes for port in ast.literal_eval(process.stdout.readline())]
    for process in processes:
        process.communicate("\n")
    assert len(set(chosen)) == len(chosen) == 120


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))
    with pytest.raises(OSError, match="assign"):  # and no endless search where there is none
        free_port("192.0.2.1")


@pytest.mark.parametrize("scope", ["e\nn0", "\x1b[2J", "x" * 33, "x" * 100_000, "a b", "é"])
def test_an_interface_is_a_short_word(scope: str) -> None:
    assert parse_address("[fe80::1%en0]:7") == ("fe80::1%en0", 7)
    with pytest.raises(InvalidInput):
        parse_address(f"[fe80::1%{scope}]:7")


def test_who_listens_is_found_and_takes_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
        assert listens(*address)
        assert not is_free(*address)
    assert not listens(*address)
    assert is_free(*address)
    assert not is_free("192.0.2.1", 0)


def test_a_port_is_taken_on_loopback_by_who_listens_on_every_address() -> None:
    """On BSD it could be bound all the same (tests/test_darwin.py runs this so)."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)


def test_a_port_is_free_though_connections_to_it_have_ended_just_now() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    assert is_free(*address)
