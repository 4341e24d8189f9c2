"""The form of API keys and what is stored of them."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from sealring.edge.access.keys import hash_key, is_hash, matches, new_key, parse_key

_ALPHABET = string.ascii_lowercase + "234567"


def spelt(size: int) -> st.SearchStrategy[str]:
    """Any text of the alphabet of this length; drawn as bytes, which is far quicker."""
    drawn = st.binary(min_size=size, max_size=size)
    return drawn.map(lambda data: "".join(_ALPHABET[one % len(_ALPHABET)] for one in data))


@given(spelt(16), spelt(52), st.data())
def test_a_key_is_parsed_and_nothing_like_it(key_id: str, secret: str, data: st.DataObject) -> None:
    text = f"srk_{key_id}_{secret}"
    found = parse_key(text)
    assert found is not None
    assert (found.id, found.text) == (key_id, text)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("AZ189-_ \n\x00é").filter(lambda char: char != text[at]))
    assert parse_key(text[:at] + other + text[at + 1 :]) is None
    assert parse_key(text[:at] + text[at + 1 :]) is None
    assert parse_key(text + data.draw(st.text(min_size=1, max_size=3))) is None


@given(st.text(max_size=200))
def test_other_text_is_no_key(text: str) -> None:
    assert parse_key(text) is None


def test_new_keys_differ_and_hide_themselves() -> None:
    made = [new_key() for _ in range(50)]
    assert len({key.id for key in made}) == len({key.text for key in made}) == 50
    assert all(parse_key(key.text) == key for key in made)
    assert made[0].text not in repr(made[0])


def test_a_hash_fits_its_own_key_only() -> None:
    key, other = new_key(), new_key()
    stored = hash_key(key)
    assert stored.startswith("$argon2id$v=19$m=65536,t=2,p=1$")
    assert is_hash(stored)
    assert key.text.rpartition("_")[2] not in stored
    assert hash_key(key) != stored
    assert matches(key, stored)
    assert not matches(other, stored)


def test_hashes_of_other_kinds_and_costs_are_none() -> None:
    tail = "$" + "a" * 22 + "$" + "b" * 43
    for memory, times in ((65536, 2), (1, 1), (262144, 16)):
        assert is_hash(f"$argon2id$v=19$m={memory},t={times},p=1" + tail)
    for head in (
        "$argon2i$v=19$m=65536,t=2,p=1",
        "$argon2id$v=16$m=65536,t=2,p=1",
        "$argon2id$v=19$m=262145,t=2,p=1",
        "$argon2id$v=19$m=65536,t=17,p=1",
        "$argon2id$v=19$m=65536,t=0,p=1",
        "$argon2id$v=19$m=0,t=2,p=1",
        "$argon2id$v=19$m=65536,t=2,p=4",
        "",
    ):
        assert not is_hash(head + tail)
