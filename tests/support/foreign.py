"""`sealring` of a release that shares no protocol with this one: `python foreign.py ARGUMENTS`."""

from __future__ import annotations

import hasty

from sealring.mesh.rpc import protocol

if __name__ == "__main__":
    protocol.PROTOCOL_VERSION = protocol.OLDEST_PROTOCOL = protocol.PROTOCOL_VERSION + 2
    hasty.main()
