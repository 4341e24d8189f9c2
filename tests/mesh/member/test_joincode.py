"""Join codes: how they are typed, and the token that an exchange's key seals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from sealring.mesh.errors import HandshakeError, InvalidInput
from sealring.mesh.member import JoinToken, make_code, open_token, parse_code, seal_token, show_code

KEY = bytes(range(32))
TOKEN = JoinToken.generate(bytes(range(32)), ["10.0.0.1:7701"])


def test_a_code_is_read_as_people_write_it() -> None:
    for _ in range(20):
        code = make_code()
        assert parse_code(code) == parse_code(show_code(code)) == parse_code(f" {show_code(code)} \n") == code
    assert parse_code("012 3456") == "0123456"


@given(st.text(max_size=80).filter(lambda text: sum(map(str.isdigit, text)) != 7))
def test_what_has_not_seven_digits_is_no_code(text: str) -> None:
    with refused("BAD_CODE", InvalidInput):
        parse_code(text)


@pytest.mark.parametrize("text", ["١٢٣٤٥٦٧", "123456７", "1234567\x00", "1,234,567", "+1234567", "1" * 99])
def test_only_the_digits_0_to_9_count(text: str) -> None:
    with refused("BAD_CODE", InvalidInput):
        parse_code(text)


def test_a_token_opens_under_its_key_only_and_whole() -> None:
    sealed = seal_token(KEY, TOKEN.format())
    assert open_token(KEY, sealed) == TOKEN
    assert TOKEN.format().encode() not in sealed
    spoilt = [sealed[:-1], sealed + b"\x00", b"", bytes([sealed[0] ^ 1]) + sealed[1:], bytes(1 << 16)]
    for one, key in [*((one, KEY) for one in spoilt), (sealed, bytes(32))]:
        with refused("BAD_ANSWER", HandshakeError):
            open_token(key, one)
    with refused("BAD_TOKEN", InvalidInput):
        open_token(KEY, seal_token(KEY, "sr2.x"))
