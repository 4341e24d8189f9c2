"""Default places, on either system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sealring.mesh.system.paths import default_config_file, default_state_root, state_root_of

_XDG = {"XDG_STATE_HOME": "/s", "XDG_CONFIG_HOME": "/c"}
_EMPTY = dict.fromkeys(_XDG, "")
_LIBRARY = "/home/ada/Library/Application Support/sealring"


@pytest.mark.parametrize(
    ("platform", "environment", "state", "settings"),
    [
        ("linux", {}, "/home/ada/.local/state/sealring", "/home/ada/.config/sealring/sealring.toml"),
        ("linux", _EMPTY, "/home/ada/.local/state/sealring", "/home/ada/.config/sealring/sealring.toml"),
        ("linux", _XDG, "/s/sealring", "/c/sealring/sealring.toml"),
        ("darwin", {}, _LIBRARY, f"{_LIBRARY}/sealring.toml"),
        ("darwin", _XDG, _LIBRARY, f"{_LIBRARY}/sealring.toml"),
    ],
)
def test_the_systems_folders_are_used(
    platform: str, environment: dict[str, str], state: str, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _XDG:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/ada", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert (str(default_state_root()), str(default_config_file())) == (state, settings)
    others = state_root_of(Path("/home/eve"))
    monkeypatch.setenv("HOME", "/home/eve")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert default_state_root() == others, "another user's, whatever this one's environment says"
