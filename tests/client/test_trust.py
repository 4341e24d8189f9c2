"""Which root is pinned, and what is believed after it."""

from __future__ import annotations

import pytest

from sealring.client.trust import parse_root_sha256
from sealring.mesh.crypto.encoding import encode_base32
from sealring.mesh.errors import InvalidInput

PIN = bytes(range(32))


@pytest.mark.parametrize("value", [PIN, PIN.hex(), PIN.hex().upper(), encode_base32(PIN)])
def test_a_root_is_pinned_in_any_of_three_forms(value: str | bytes) -> None:
    assert parse_root_sha256(value) == PIN


@pytest.mark.parametrize(
    "value",
    [b"", PIN[:-1], PIN + b"x", PIN.hex()[:-1], PIN.hex() + "0", "g" * 64, encode_base32(PIN)[:-1], ""],
)
def test_anything_else_is_refused(value: str | bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_root_sha256(value)
    assert (caught.value.reason, caught.value.metadata["param"]) == ("BAD_ROOT_HASH", "root_sha256")
