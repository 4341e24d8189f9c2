"""What options take, at their edges."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from sealring.cli.terminal.options import Seconds, public_keys, read_file, read_token, write_file
from sealring.mesh.errors import ConfigError, InvalidInput
from sealring.mesh.member import MAX_TOKEN_CHARACTERS

KEY = "ab" * 32


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1.0),
        ("10m", 600.0),
        ("600s", 600.0),
        ("0.9s", None),
        ("601s", None),
        ("soon", None),
        ("", None),
    ],
)
def test_a_duration_lies_between_its_bounds(text: str, seconds: float | None) -> None:
    parse: Any = Seconds.option("x", least=1, most=600).parser
    if seconds is not None:
        assert parse(text) == seconds
        return
    with pytest.raises(typer.BadParameter):
        parse(text)


@pytest.mark.parametrize(
    ("given", "typed", "token"),
    [
        ("sr1.x", "", "sr1.x"),
        ("sealring join sr1.x", "", "sr1.x"),
        ("-", "sealring join sr1.x\nmore\n", "sr1.x"),
        ("-", "  sr1.x  ", "sr1.x"),
        ("x" * MAX_TOKEN_CHARACTERS, "", "x" * MAX_TOKEN_CHARACTERS),
        ("x" * (MAX_TOKEN_CHARACTERS + 1), "", None),
        ("-", "x" * 3 * MAX_TOKEN_CHARACTERS, None),
        ("-", "x" * (2 * MAX_TOKEN_CHARACTERS) + " sr1.x", None),
        ("", "", None),
        ("-", "", None),
        ("sr1.☃", "", None),
    ],
)
def test_a_token_is_the_end_of_what_was_copied(
    monkeypatch: pytest.MonkeyPatch, given: str, typed: str, token: str | None
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    if token is not None:
        assert read_token(given) == token
        return
    with pytest.raises(InvalidInput) as refused:
        read_token(given)
    assert refused.value.reason == "BAD_TOKEN"


def test_public_keys_are_64_hex_digits() -> None:
    assert public_keys([]) == ()
    assert public_keys([KEY, KEY.upper()]) == (bytes.fromhex(KEY),) * 2
    for wrong in ([KEY[:-2]], [KEY + "00"], ["g" * 64], [KEY, ""]):
        with pytest.raises(InvalidInput) as refused:
            public_keys(wrong)
        assert refused.value.reason == "BAD_KEY"


def test_files_of_the_user_are_read_up_to_a_size_and_written_for_all_to_read(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"12345")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644
    assert read_file(tmp_path / "a", max_bytes=5) == b"12345"
    with pytest.raises(ConfigError) as large:
        read_file(tmp_path / "a", max_bytes=4)
    assert large.value.reason == "FILE_TOO_LARGE"
    refusals = [
        lambda: read_file(tmp_path / "none", max_bytes=4),
        lambda: write_file(tmp_path / "a" / "b", b""),
    ]
    for refusal in refusals:
        with pytest.raises(InvalidInput) as refused:
            refusal()
        assert (refused.value.reason, str(tmp_path) in str(refused.value)) == ("BAD_FILE", True)
