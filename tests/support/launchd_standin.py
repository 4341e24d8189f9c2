#!/usr/bin/env python3
"""launchctl with a launchd behind it: it starts what a property list says, as this user, below a prefix.

Called as `launchctl VERB ...` by a script that sets PREFIX and FOLDER (where it keeps process ids).
"""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
from pathlib import Path

import psutil

PREFIX, FOLDER = os.environ["PREFIX"], Path(os.environ["FOLDER"])
_PLACES = ("/var/db/sealring", "/var/log/sealring")


def below(argument: str) -> str:
    return PREFIX + argument if argument.startswith(_PLACES) else argument


def bootstrap(plist: str) -> None:
    content = plistlib.loads(Path(plist).read_bytes())
    environment = {name: below(value) for name, value in content["EnvironmentVariables"].items()}
    with Path(below(content["StandardErrorPath"])).open("ab") as crash:
        process = subprocess.Popen(
            [below(argument) for argument in content["ProgramArguments"]],
            stdin=subprocess.DEVNULL,
            stdout=crash,
            stderr=crash,
            cwd=below(content["WorkingDirectory"]),
            env=environment,
            start_new_session=True,
        )
    (FOLDER / content["Label"]).write_text(str(process.pid))
    os._exit(0)  # it is launchd's, not ours


def show(file: Path) -> None:
    if not file.exists():
        sys.exit(113)
    pid = int(file.read_text())
    alive = psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    sys.stdout.write("\tstate = running\n" if alive else "\tstate = not running\n")
    sys.stdout.write(
        f"\tpid = {pid}\n\tlast exit code = (never exited)\n" if alive else "\tlast exit code = 1\n"
    )


def bootout(file: Path) -> None:
    process = psutil.Process(int(file.read_text()))
    process.terminate()
    psutil.wait_procs([process])
    file.unlink()


def main() -> None:
    verb, *rest = sys.argv[1:]
    file = FOLDER / rest[0].split("/")[-1]
    if verb == "bootstrap":
        bootstrap(rest[1])
    elif verb == "print":
        show(file)
    elif verb == "bootout":
        bootout(file)
    elif verb not in ("enable", "kickstart"):  # what is loaded has been started
        sys.exit(64)


if __name__ == "__main__":
    main()
