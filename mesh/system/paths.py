"""Default places of state, settings and logs. Commands and clients import this module at their start, so it
imports nothing of ours."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAUNCH_DAEMONS = Path("/Library/LaunchDaemons")
"""The folder of the property lists of launchd's system services (launchd.plist(5))."""


def default_state_root() -> Path:
    """The user's own state folder; each component's state is in a folder of its name below it."""
    if sys.platform != "darwin" and (base := os.environ.get("XDG_STATE_HOME")):
        return Path(base) / "sealring"
    return state_root_of(Path.home())


def state_root_of(home: Path) -> Path:
    """The state folder of the user with this home folder, unless that user's environment names another."""
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "sealring"
    else:
        return home / ".local" / "state" / "sealring"


MEMBER_FILE = "member.json"
"""The file of a machine's state folder that a join writes last."""


CLIENT_FOLDER = "client"
"""The folder in a node's state folder with the certificate of its machine's programs."""


def is_enrolled(folder: Path) -> bool:
    """Whether a join was finished in this state folder."""
    return (folder / MEMBER_FILE).exists()


def proxy_key_file() -> Path:
    """The file with the key of the user's own `sealring proxy`, for the user's programs."""
    return default_state_root() / "proxy.key"


def gateway_key_file() -> Path:
    """The file with the key of this machine's own commands at its gateway, once that asks for keys."""
    return default_state_root() / "gateway.key"


def default_config_file() -> Path:
    """The settings file that is read when it exists and no other is named."""
    if sys.platform == "darwin":
        return default_state_root() / "sealring.toml"
    else:
        base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
        return Path(base) / "sealring" / "sealring.toml"


def launchd_label(component: str) -> str:
    """The name in launchd of a component's service; its property list has the same name and `.plist`."""
    return f"org.sealring.{component}"
