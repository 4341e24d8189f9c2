"""host:port strings from outside: parsed and bounded, and only loopback without credentials."""

from __future__ import annotations

import atexit
import errno
import ipaddress
import itertools
import os
import re
import socket
import threading
from collections import deque
from collections.abc import Iterator

from sealring.mesh.errors import ConfigError, InvalidInput

_HOST = re.compile(r"^[A-Za-z0-9._-]{1,253}\Z")
_SCOPE = re.compile(r"^[A-Za-z0-9._-]{1,32}\Z")  # an interface; ipaddress takes anything
_PORT = re.compile(r"^[0-9]{1,5}\Z")

_LOWEST, _BLOCKS, _BLOCK = 15000, 1000, 17
_APART = 617  # the golden section keeps near process ids far apart
_HELD = 4

_turn = threading.Lock()
_blocks = itertools.count(os.getpid() * _APART)
_held: deque[socket.socket] = deque()
_left: Iterator[int] = iter(())


def parse_address(address: str) -> tuple[str, int]:
    """Splits "host:port" or "[v6]:port". Raises InvalidInput with reason BAD_ADDRESS."""
    host, _, port = address.rpartition(":")
    literal = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if literal else host
    if not _PORT.match(port) or int(port) > 65535:
        raise _bad(address)
    if literal:
        try:
            scope = ipaddress.IPv6Address(host).scope_id
        except ValueError:
            raise _bad(address) from None
        if scope is not None and not _SCOPE.match(scope):
            raise _bad(address)
    elif not _HOST.match(host):
        raise _bad(address)
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The "host:port" or "[v6]:port" that `parse_address` splits."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether the host is this machine's own loopback, by its name or its number."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_loopback(address: str) -> None:
    """Raises ConfigError unless the address is loopback: nothing unauthenticated listens elsewhere."""
    if not is_loopback(parse_address(address)[0]):
        raise ConfigError(
            f"{address} is not a loopback address and nothing authenticates its callers",
            hint="listen on 127.0.0.1, or set up TLS and keys",
            reason="LOOPBACK_ONLY",
        )


def listen_error(address: str) -> ConfigError:
    """The error for an address that cannot be bound."""
    return ConfigError(
        f"cannot listen on {address}: the port is in use or the address is not of this machine",
        hint="see which program listens there and stop it: lsof -nP -iTCP -sTCP:LISTEN; or name another port "
        "in the settings file: sealring config show",
        reason="CANNOT_LISTEN",
        address=address,
    )


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, below those that systems give to outgoing connections.

    The caller may bind it only seconds later. So a process does not choose a port twice in a row, and it
    chooses from blocks of ports that it holds: other processes that choose by this function leave these out.
    Raises OSError if no port is free or the host is not of this machine.
    """
    for _ in range(_BLOCKS * _BLOCK):
        with _turn:
            port = _next_port()
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(errno.EADDRINUSE, f"no port of {host} is free")


def _next_port() -> int:
    """The next port of a block that this process holds. Raises OSError where others hold all blocks."""
    global _left
    for _ in range(_BLOCKS + 1):
        if (port := next(_left, 0)) != 0:
            return port
        first = _LOWEST + next(_blocks) % _BLOCKS * _BLOCK
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            holder.bind(("127.0.0.1", first))  # and does not listen
        except OSError as error:
            holder.close()
            if error.errno == errno.EADDRINUSE:
                continue
        else:
            _held.append(holder)
        if len(_held) > _HELD:
            _held.popleft().close()
        _left = iter(range(first + 1, first + _BLOCK))
    raise OSError(errno.EADDRINUSE, "other processes hold all ports")


@atexit.register
def _give_back() -> None:
    while _held:
        _held.popleft().close()


def is_free(host: str, port: int) -> bool:
    """Whether this process could listen there now and no other does.

    BSD lets a process bind 127.0.0.1:8080 beside another of the same user that listens on *:8080, and would
    then pass it the other's local callers.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return not listens(host, port)


def listens(host: str, port: int) -> bool:
    """Whether a process listens there."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def _bad(address: str) -> InvalidInput:
    shown = address[:80]
    return InvalidInput(
        f"{shown!r} is not host:port", hint="for example 127.0.0.1:7700", reason="BAD_ADDRESS"
    )
