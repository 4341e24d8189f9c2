from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sealring.node.engine.text import StopStrings
from sealring.node.engine.text.detokenizer import ApartDetokenizer, BytesDetokenizer, WindowDetokenizer
from sealring.node.engine.text.notations.notation import CLOSE, OPEN
from sealring.node.engine.text.sections import SpeltDetokenizer

texts = st.text(alphabet=st.sampled_from("ab \n<>|é漢🙂\u200d🏽"), max_size=20)
stop_lists = st.lists(st.text(alphabet="ab<>é", min_size=1, max_size=5), max_size=4)


def split(content: bytes, borders: list[int]) -> list[bytes]:
    edges = [0, *sorted({border % (len(content) + 1) for border in borders}), len(content)]
    return [content[start:end] for start, end in itertools.pairwise(edges)]


def by_bytes(pieces: list[bytes], *, strip_space: bool = False) -> list[str]:
    detokenizer = BytesDetokenizer(pieces.__getitem__, strip_space=strip_space)
    return [*(detokenizer.add(token) for token in range(len(pieces))), detokenizer.flush()]


@given(texts, st.lists(st.integers(0, 100), max_size=8))
def test_bytes_come_back_whatever_the_borders(text: str, borders: list[int]) -> None:
    told = by_bytes(split(text.encode(), borders))
    assert "".join(told) == text


@given(texts)
def test_every_border_within_a_character_is_held_back(text: str) -> None:
    content = text.encode()
    told = by_bytes([bytes([byte]) for byte in content])
    assert "".join(told) == text
    assert all("�" not in piece for piece in told)
    for length in range(len(content) + 1):
        assert text.startswith("".join(told[:length]))


@given(st.binary(max_size=30), st.lists(st.integers(0, 100), max_size=8))
def test_broken_bytes_become_replacements_and_text_stays_valid(content: bytes, borders: list[int]) -> None:
    told = "".join(by_bytes(split(content, borders)))
    assert content.decode("utf-8", "replace").startswith(told)
    assert told.encode().decode() == told


def test_an_unfinished_character_at_the_end_is_dropped() -> None:
    assert "".join(by_bytes([b"ok", "漢".encode()[:2]])) == "ok"


def test_one_leading_space_is_stripped() -> None:
    assert by_bytes([b" ", b" a", b" b"], strip_space=True)[:3] == ["", " a", " b"]
    assert by_bytes([b"", b" a"], strip_space=True)[:2] == ["", "a"]


@given(texts, st.lists(st.integers(0, 100), max_size=8))
def test_the_window_tells_what_the_whole_decodes_to(text: str, borders: list[int]) -> None:
    pieces = split(text.encode(), borders)
    detokenizer = WindowDetokenizer(
        lambda tokens: b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")
    )
    told = [*(detokenizer.add(token) for token in range(len(pieces))), detokenizer.flush()]
    assert "".join(told) == text
    assert all("�" not in piece for piece in told)


@given(st.lists(st.sampled_from(["un", "##break", "##able", "word", ",", "it"]), max_size=30))
def test_the_window_joins_pieces_that_depend_on_their_neighbours(pieces: list[str]) -> None:
    def decode(tokens: object) -> str:
        assert isinstance(tokens, list)
        return " ".join(pieces[token] for token in tokens).replace(" ##", "").replace(" ,", ",")

    detokenizer = WindowDetokenizer(decode)
    told = [*(detokenizer.add(token) for token in range(len(pieces))), detokenizer.flush()]
    assert "".join(told) == decode(list(range(len(pieces))))


@pytest.mark.parametrize("said", ["half a character", "nothing"])
def test_the_window_stays_small_whatever_is_sampled(said: str) -> None:
    decoded: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return "a" * (0 in tokens) + (
            "\N{REPLACEMENT CHARACTER}" * sum(map(bool, tokens)) if said != "nothing" else ""
        )

    detokenizer = WindowDetokenizer(decode)
    told = [detokenizer.add(token) for token in (0, *range(1, 2000))]
    assert max(decoded) < 20
    assert "".join(told)[:1] == "a"
    assert len("".join(told)) > 1900 or said == "nothing"


def character_by_character(text: str, stops: list[str]) -> tuple[str, str]:
    """What an answer is cut to, by definition."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, ""


@st.composite
def made_of_stops(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text of stop strings and parts of them, so that many begin, overlap and do not go on; and these."""
    stops = draw(stop_lists)
    ends = [(stop, begin, end) for stop in stops for end in range(len(stop) + 1) for begin in range(end)]
    parts = sorted({stop[begin:end] for stop, begin, end in ends} | set("ab<>é"))
    return "".join(draw(st.lists(st.sampled_from(parts), max_size=12))), stops


@given(made=made_of_stops(), borders=st.lists(st.integers(0, 100)))
@example(made=("abcd", ["abcde", "bc"]), borders=[2, 3])
def test_stops_do_not_depend_on_borders(made: tuple[str, list[str]], borders: list[int]) -> None:
    text, stops = made
    matcher, told = StopStrings(stops), ""
    edges = [0, *sorted({border % (len(text) + 1) for border in borders}), len(text)]
    for start, end in itertools.pairwise(edges):
        told += matcher.add(text[start:end])
        assert text.startswith(told)
        if matcher.stopped:
            break
    if not matcher.stopped:
        told += matcher.flush()
    assert (told, matcher.matched) == character_by_character(text, stops)


@given(made=made_of_stops())
def test_no_more_is_withheld_than_might_be_a_stop(made: tuple[str, list[str]]) -> None:
    text, stops = made
    matcher, told = StopStrings(stops), ""
    for end, character in enumerate(text, start=1):
        told += matcher.add(character)
        if matcher.stopped:
            return
        held = text[len(told) : end]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize("stops", [[], [""], ["", ""]])
def test_without_stops_nothing_is_withheld(stops: list[str]) -> None:
    matcher = StopStrings(stops)
    assert matcher.add("a<") == "a<"
    assert not matcher.stopped


TOKENS = {10: b"analysis", 11: b"so", 12: b"assistant", 13: b"final", 14: b"Paris\n", 15: b"\xc3", 16: b"!"}
SPECIAL = frozenset({1, 2, 3, 4})


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([1, 10, 2, 11, 3, 4, 12, 1, 13, 2, 14, 3, 16, 3], "analysis\nso\nassistant\nfinal\nParis\n!"),
        ([11, 16], "so!"),
        ([1, 2, 11, 3], "so"),
        ([11, 15, 3, 16], "so\n!"),
        ([11, 15], "so"),
    ],
)
def test_texts_between_special_tokens_do_not_run_together(tokens: list[int], text: str) -> None:
    inner = BytesDetokenizer(lambda token: TOKENS.get(token, b""), strip_space=False)
    detokenizer = ApartDetokenizer(inner, SPECIAL)
    assert "".join([*map(detokenizer.add, tokens), detokenizer.flush()]) == text


def test_a_window_drops_an_unfinished_character_too() -> None:
    detokenizer = WindowDetokenizer(lambda tokens: bytes(tokens).decode("utf-8", "replace"))
    assert "".join([detokenizer.add(0x41), detokenizer.add(0xC3), detokenizer.flush()]) == "A"


MARK = 256


@pytest.mark.parametrize("kind", ["bytes", "window"])
@example(parts=[("", 0), ("", 0), ("", 0), ("\u20ac", 2)])
@given(parts=st.lists(st.tuples(texts, st.integers(0, 100)), max_size=4))
def test_a_special_token_stands_behind_all_text_before_it(kind: str, parts: list[tuple[str, int]]) -> None:
    """Each part is cut off at some byte, and special tokens follow it."""

    def plain(tokens: Sequence[int]) -> bytes:
        return bytes(token for token in tokens if token != MARK)

    def inner() -> BytesDetokenizer | WindowDetokenizer:
        if kind == "bytes":
            return BytesDetokenizer(lambda token: plain([token]), strip_space=False)
        return WindowDetokenizer(lambda tokens: plain(tokens).decode("utf-8", "replace"))

    cut = [text.encode()[: size % (len(text.encode()) + 1)] for text, size in parts]
    tokens = [token for part in cut for token in (*part, MARK, MARK)]
    whole = [part.decode("utf-8", "ignore") for part in cut]
    spelt = SpeltDetokenizer(inner(), {MARK: "mark"})
    assert "".join(map(spelt.add, tokens)) == "".join(part + 2 * f"{OPEN}mark{CLOSE}" for part in whole)
    apart = ApartDetokenizer(inner(), {MARK})
    told = "".join([*map(apart.add, tokens), apart.flush()])
    assert told.replace("\n", "") == "".join(whole).replace("\n", "")
