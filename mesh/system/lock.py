"""One process, and one account, per state folder."""

from __future__ import annotations

import fcntl
import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sealring.mesh.errors import Conflict, PermissionDenied
from sealring.mesh.system.files import unwritable


@contextmanager
def lock_state(folder: Path) -> Iterator[None]:
    """Holds the folder until the end of the block; the lock also ends with the process.

    Makes the folder with mode 0700. Raises Conflict (STATE_IN_USE), ConfigError (STATE_UNWRITABLE),
    PermissionDenied (OTHERS_STATE).
    """
    require_own_state(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise unwritable(folder, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise state_in_use(folder) from None
    try:
        yield
    finally:
        os.close(descriptor)


def require_own_state(folder: Path, *, line: str = "sealring") -> None:
    """Require that a state folder, or the nearest existing folder above it, belongs to this account or root.

    Files have mode 0600: a service could not read one that root makes in its folder. Root may use the folder
    of a number without an account, as containers mount them. `line` is the command in the hint. Raises
    PermissionDenied (OTHERS_STATE).
    """
    for place in (folder, *folder.absolute().parents):
        try:
            owner = place.stat().st_uid
        except OSError:  # it is missing, or may not be read: then it cannot be written either
            continue
        if owner in (0, os.geteuid()):
            return
        name = _account(owner)
        if name is None and os.geteuid() == 0:
            return
        name = name or f"#{owner}"
        raise PermissionDenied(
            f"{place} belongs to the account {name}, which could not read what another one puts there",
            hint=f"run it as that account: sudo -H -u {name} {line} ...",
            reason="OTHERS_STATE",
        )


def _account(number: int) -> str | None:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return None


def state_in_use(folder: Path) -> Conflict:
    """The error for a folder that another process holds."""
    return Conflict(
        f"another process uses the state folder {folder}",
        hint="it runs here already, in another terminal or as a service: stop that first",
        reason="STATE_IN_USE",
    )
