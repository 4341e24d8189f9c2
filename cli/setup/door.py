"""The key and port of a member's proxy, in the state folder of the account whose programs ask it.

By sudo that is the account that calls sudo. Root itself touches nothing there.

Run as a module it reads what to do from standard input, and prints what came of it.
"""

from __future__ import annotations

from sealring.mesh.system.start import collect_seldom, hide_rich

if __name__ == "__main__":
    hide_rich()  # before structlog
    collect_seldom()

import json
import os
import pwd
import sys
from pathlib import Path
from typing import Any

from sealring.cli.here.settings_files import PORTS
from sealring.cli.setup.choices import choose_proxy
from sealring.cli.setup.enrol import run_as
from sealring.cli.terminal.host import Host
from sealring.mesh.errors import ConfigError
from sealring.mesh.system.files import write_atomic
from sealring.mesh.system.paths import proxy_key_file
from sealring.mesh.system.start import forbid_core_files
from sealring.node.engine.apart import answer

_MAX_BYTES = 1 << 16


def keep_door(host: Host, wished: int | None, node: str) -> dict[str, Any]:
    """Makes the key unless it is there, and notes the `port`, chosen as `choose_proxy` does. Gives it, and
    the key's `key_sha256`. Raises ConfigError as `own_key`, or for a SUDO_UID of nobody (NO_SUCH_USER)."""
    return _as_caller(host, {"wished": wished, "node": node})


def forget_door(host: Host) -> None:
    """Removes key and note again. Raises ConfigError (NO_SUCH_USER)."""
    _as_caller(host, {})


def _as_caller(host: Host, given: dict[str, Any]) -> dict[str, Any]:
    uid = os.environ.get("SUDO_UID", "0") if os.geteuid() == 0 else "0"
    if uid == "0":
        return _do(host, given)
    try:
        account = pwd.getpwuid(int(uid))
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(
            f"SUDO_UID names no account of this machine: {uid[:20]!r}",
            hint="call sudo from the account whose programs are to ask",
            reason="NO_SUCH_USER",
        ) from None
    made: dict[str, Any] = run_as(account, "sealring.cli.setup.door", given, Path(account.pw_dir))
    return made


def _do(host: Host, given: dict[str, Any]) -> dict[str, Any]:
    from sealring.cli.proxy import digest_of, own_key

    file = proxy_key_file()
    ports = file.parent / PORTS
    if not given:
        for one in (file, ports):
            one.unlink(missing_ok=True)
        return {}
    key = own_key(file)
    port, _ = choose_proxy(host, file.parent, given["wished"], given["node"])
    write_atomic(ports, json.dumps({"proxy": port}).encode())
    return {"port": port, "key_sha256": digest_of(key.text)}


def main() -> int:
    """Reads one JSON object and prints one."""
    forbid_core_files()
    given = json.loads(sys.stdin.buffer.read(_MAX_BYTES))
    return answer(lambda: _do(Host(), given))


if __name__ == "__main__":
    sys.exit(main())
