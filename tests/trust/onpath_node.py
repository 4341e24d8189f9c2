"""A node daemon whose ring connections lead over an attacker: `python onpath_node.py PORT ARGUMENTS`.

Stands for a network that routes through the attacker: where the daemon is told the next member's ring address
(sealed, which the attacker cannot read), it is given the proxy's address for it. Nothing else is changed.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from sealring.node.daemon import link_setup as link_setup

_PORT = int(sys.argv[1])
_genuine = link_setup.ring_address


def _over_the_proxy(note: bytes) -> str:
    address = _genuine(note)
    with socket.create_connection(("127.0.0.1", _PORT), timeout=100) as attacker:
        attacker.sendall(address.encode() + b"\n")
        return attacker.makefile().readline().strip()


if __name__ == "__main__":
    link_setup.ring_address = _over_the_proxy
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from hasty import main

    sys.argv = ["sealring", *sys.argv[2:]]
    main()
