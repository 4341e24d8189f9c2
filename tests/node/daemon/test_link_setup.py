"""The addresses that a neighbour claims to have."""

from __future__ import annotations

import pytest

from sealring.mesh.errors import HandshakeError
from sealring.node.daemon.link_setup import ring_addresses


@pytest.mark.parametrize(
    "note",
    [
        *(b"10.0.0.1", b"10.0.0.1:0", b"host:1", b"[::1]:1", b"10.0.0.1:70000", b"\xff", b""),
        *(b"10.0.0.1:1,", b",".join([b"10.0.0.1:1"] * 9), b"10.0.0.1:1,host:1"),
    ],
)
def test_a_neighbour_is_found_at_addresses_of_interfaces_and_ports(note: bytes) -> None:
    assert ring_addresses(b"10.0.0.1:1,10.0.1.1:1") == "10.0.0.1:1,10.0.1.1:1"
    assert ring_addresses(b"10.0.0.1:1") == "10.0.0.1:1"
    with pytest.raises(HandshakeError) as caught:
        ring_addresses(note)
    assert caught.value.reason == "BAD_RING_ADDRESS"
