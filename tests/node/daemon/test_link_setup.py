"""The address that a neighbour claims to have."""

from __future__ import annotations

import pytest

from sealring.mesh.errors import HandshakeError
from sealring.node.daemon.link_setup import ring_address


@pytest.mark.parametrize(
    "note", [b"10.0.0.1", b"10.0.0.1:0", b"host:1", b"[::1]:1", b"10.0.0.1:70000", b"\xff", b""]
)
def test_a_neighbour_is_found_at_an_address_of_one_interface_and_port(note: bytes) -> None:
    assert ring_address(b"10.0.0.1:1") == "10.0.0.1:1"
    with pytest.raises(HandshakeError) as caught:
        ring_address(note)
    assert caught.value.reason == "BAD_RING_ADDRESS"
