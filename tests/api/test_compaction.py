"""Summaries that only the API key opens that made them."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.api.compaction import Summaries
from sealring.mesh.errors import InvalidInput


@given(st.text(), st.text())
def test_a_summary_comes_back_and_is_another_text_each_time(key: str, summary: str) -> None:
    sealed = Summaries(key).seal(summary)
    assert Summaries(key).open(sealed, "x") == summary
    assert sealed != Summaries(key).seal(summary)


def refused(key: str, sealed: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Summaries(key).open(sealed, "input[0].encrypted_content")
    assert caught.value.reason == "COMPACTION_NOT_OPENED"
    assert caught.value.metadata["param"] == "input[0].encrypted_content"


@given(st.integers(min_value=0), st.integers(0, 7))
def test_a_flipped_bit_another_key_or_another_form_is_refused(place: int, bit: int) -> None:
    sealed = Summaries("one").seal("three plums")
    data = bytearray(base64.b64decode(sealed))
    data[place % len(data)] ^= 1 << bit
    refused("one", base64.b64encode(data).decode())
    refused("two", sealed)
    refused("", sealed)


@pytest.mark.parametrize("sealed", ["", "x", "AAAA", "é", "A" * 40, "AA==\n"])
def test_what_was_never_sealed_is_refused(sealed: str) -> None:
    refused("one", sealed)
