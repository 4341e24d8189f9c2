"""Enrols this machine's node with what `sealring join` chooses, as this user or as a service's account.

Run as a module it reads what to do from standard input, secrets included, and prints what came of it.
"""

from __future__ import annotations

from sealring.mesh.system.start import collect_seldom, hide_rich

if __name__ == "__main__":
    hide_rich()  # before structlog
    collect_seldom()

import contextlib
import json
import pwd
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sealring.cli.setup.choices import Wishes, choose_other
from sealring.cli.terminal.host import Host
from sealring.cli.terminal.output import progress
from sealring.mesh.errors import ConfigError
from sealring.mesh.system.start import forbid_core_files
from sealring.mesh.system.starting import starting
from sealring.node.engine.apart import answer, result_of

_MAX_BYTES = 1 << 20


def enrol(host: Host, root: Path, said: Mapping[str, Any], wishes: Wishes, token: str) -> dict[str, Any]:
    """Joins with the state in `root`/node: the node's settings, a line about each choice, and who it is now.

    Raises as `choose_other` and `node.join.join`.
    """
    from sealring.mesh.member.bootstrap import JoinToken
    from sealring.node.settings import NodeSettings, default_name

    choices = choose_other(host, root, said, wishes, JoinToken.parse(token).addresses)
    with progress("joining the cluster"):
        enrolled = host.run(host.join("node", NodeSettings(**choices.settings["node"]), token))
    peer, wanted = enrolled.state.peer, choices.settings["node"].get("name", default_name())
    if enrolled.state.name != wanted:
        choices.said.append(
            f"name: {enrolled.state.name}, because another machine is called {wanted} (or --name)"
        )
    return {
        "settings": choices.settings["node"],
        "said": choices.said,
        "member_id": peer.id,
        "cluster": peer.cluster,
        "name": enrolled.state.name,
        "members": len(enrolled.roster.members),
        "level": str(enrolled.roster.member(peer.id).level),
    }


def enrol_as(
    user: str | None, root: Path, said: Mapping[str, Any], wishes: Wishes, token: str
) -> dict[str, Any]:
    """As `enrol`, in a process of the account `user` (None: this one's); raises the same."""
    wished = asdict(wishes) | {"models": [str(folder) for folder in wishes.models]}
    given = {"root": str(root), "said": dict(said), "wishes": wished, "token": token}
    account = None if user is None else pwd.getpwnam(user)
    joined: dict[str, Any] = run_as(account, "sealring.cli.setup.enrol", given, root / "node")
    return joined


def run_as(account: pwd.struct_passwd | None, module: str, given: Mapping[str, Any], home: Path) -> Any:
    """What `module` makes of `given`, in a process of the account (None: this one's).

    Raises ConfigError (NO_PROGRAM), and what the process prints.
    """
    try:
        said_back = _run(account, module, json.dumps(given).encode(), home)
    except OSError as error:
        name = "of this process" if account is None else account.pw_name
        raise ConfigError(
            f"the account {name} cannot run {sys.executable}: {error.strerror}",
            hint="install sealring where that account can read it, see deploy/launchd/README.md",
            reason="NO_PROGRAM",
        ) from None
    return result_of(said_back, f"{module} said nothing of use in its process")


def _run(account: pwd.struct_passwd | None, module: str, given: bytes, home: Path) -> bytes:
    """The output of the child, at most _MAX_BYTES of it."""
    with starting():
        child = subprocess.Popen(  # noqa: S603 - a module of ours
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            user=None if account is None else account.pw_uid,
            group=None if account is None else account.pw_gid,
            extra_groups=None if account is None else [],
            umask=0o077,
            env={"HOME": str(home), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "en_US.UTF-8"},
        )
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(given)
        said = child.stdout.read(_MAX_BYTES)
        child.kill()  # it has nothing more to say
    return said


def main() -> int:
    """Reads one JSON object and prints one."""
    forbid_core_files()
    given = json.loads(sys.stdin.buffer.read(_MAX_BYTES))
    wishes = Wishes(**given["wishes"] | {"models": [Path(folder) for folder in given["wishes"]["models"]]})
    return answer(lambda: enrol(Host(), Path(given["root"]), given["said"], wishes, given["token"]))


if __name__ == "__main__":
    sys.exit(main())
