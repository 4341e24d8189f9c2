"""The settings files that are written for components."""

from __future__ import annotations

from pathlib import Path

import pytest

from sealring.cli.here.settings_files import as_toml, read_settings


@pytest.mark.parametrize("value", ["/tmp/\N{ROCKET} launch/ä", 'a "b" \\ c', "\x7f\t\n\x01", True, 1 << 40])
def test_every_setting_is_read_back(tmp_path: Path, value: object) -> None:
    file = tmp_path / "node.toml"
    file.write_bytes(as_toml("node", {"key": value}))
    assert read_settings(file, "node") == {"key": value}
    assert read_settings(file, "gateway") == {}


@pytest.mark.parametrize("content", [None, b"\xff", b"key = ", b"node = 1"])
def test_what_is_no_settings_file_holds_nothing(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "node.toml"
    if content is not None:
        file.write_bytes(content)
    assert read_settings(file, "node") == {}
