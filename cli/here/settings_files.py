"""The TOML file with a component's settings, which is written at its start and read at the next."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sealring.mesh.errors import SealringError
from sealring.mesh.system.files import read_bounded

PORTS = "ports.json"
"""The file below a state folder with the ports of what runs there."""


def settings_file_of(root: Path, name: str) -> Path:
    """The file of a component below the folder `root` that its state is in as well."""
    return root / "config" / f"{name}.toml"


def as_toml(section: str, settings: Mapping[str, Any]) -> bytes:
    """One section of a settings file."""
    lines = [f"{key} = {_toml(value)}" for key, value in settings.items()]
    return ("\n".join([f"[{section}]", *lines]) + "\n").encode()


def read_settings(file: Path, section: str) -> dict[str, Any]:
    """One section of a file; nothing where there is none, or a damaged one. Not validated."""
    try:
        table = tomllib.loads(read_bounded(file).decode("utf-8")).get(section, {})
    except (OSError, ValueError, SealringError):
        return {}
    return dict(table) if isinstance(table, dict) else {}


def proxy_port(root: Path) -> int:
    """The port of the proxy that `sealring join` runs on a member, on loopback; 0 where it runs none."""
    try:
        return int(json.loads(read_bounded(root / PORTS))["proxy"])
    except (OSError, ValueError, LookupError, TypeError, SealringError):
        return 0


def _toml(value: Any) -> str:
    """A setting as TOML, which has JSON's literals, but neither its surrogate pairs nor a bare DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
