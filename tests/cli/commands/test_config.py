"""`sealring config show`: every setting, and who set it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:]}


def test_all_settings_are_shown_with_their_sources(here: Any, home: Path) -> None:
    (home / "s.toml").write_text('[cli]\ntimeout = 5\ngateway = ["a:1", "b:2"]\n')
    done = here("--config", "s.toml", "config", "show", SEALRING_NODE_NAME="two")
    shown = rows(done.out)
    assert (done.status, done.err) == (0, "")
    assert shown["cli.timeout"] == ["5.0", "file:s.toml"]
    assert shown["cli.gateway"] == ["a:1,", "b:2", "file:s.toml"]
    assert shown["node.name"] == ["two", "env:SEALRING_NODE_NAME"]
    assert shown["cli.coordinator"] == ["-", "default"]
    assert {name.partition(".")[0] for name in shown} == {"coordinator", "node", "gateway", "cli"}


def test_of_one_section_only_that_is_shown_and_no_file_is_told(here: Any) -> None:
    done = here("config", "show", "cli")
    assert {name.partition(".")[0] for name in rows(done.out)} == {"cli"}
    assert done.err == "no config file is read\n"
    assert set(here("config", "show", "cli", "gateway", "--json").data) == {"cli", "gateway"}
    done = here("config", "show", "x" * 50)
    assert (done.status, f"'{'x' * 40}'" in done.err) == (7, True)
