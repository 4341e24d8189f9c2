"""The settings files of a local cluster."""

from __future__ import annotations

import tomllib

import pytest

from sealring.cli.cluster import _toml


@pytest.mark.parametrize("value", ["/tmp/\N{ROCKET} launch/ä", 'a "b" \\ c', "\x7f\t\n\x01", True, 1 << 40])
def test_every_setting_is_read_back_from_toml(value: object) -> None:
    assert tomllib.loads(f"key = {_toml(value)}\n") == {"key": value}
