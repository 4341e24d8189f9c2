"""A node daemon whose ring connections lead over an attacker: `python onpath_node.py PORT ARGUMENTS`.

It stands for a network that routes through the attacker. The daemon gets the next member's ring address
sealed, so that the attacker cannot read it; here it gets the address of the proxy instead. Nothing else
is changed.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from sealring.node.daemon import link_setup as link_setup

_PORT = int(sys.argv[1])
_genuine = link_setup.ring_addresses


def _over_the_proxy(note: bytes) -> str:
    address = _genuine(note)
    with socket.create_connection(("127.0.0.1", _PORT), timeout=100) as attacker:
        attacker.sendall(address.encode() + b"\n")
        return attacker.makefile().readline().strip()


if __name__ == "__main__":
    link_setup.ring_addresses = _over_the_proxy
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from hasty import main

    sys.argv = ["sealring", *sys.argv[2:]]
    main()
