"""The daemon's limit on open files and connections: 256 if a terminal of macOS starts it."""

from __future__ import annotations

from collections.abc import Iterator

from sealring.doctor.report import Finding, ok, warning
from sealring.doctor.system import System
from sealring.doctor.view import View

_ENOUGH = 2048


def check(system: System, view: View) -> Iterator[Finding]:
    """The daemon's limit, or else that of this process."""
    limit = view.file_limit or system.file_limit()
    if limit < 0:
        yield ok("files.limit", "any number of files may be open")
    elif limit >= _ENOUGH:
        yield ok("files.limit", f"up to {limit} files may be open")
    else:
        yield warning(
            "files.limit",
            f"only {limit} files may be open",
            "connections count as files; beyond the limit they are refused at random",
            "raise it in the shell that starts the daemon; launchd's property list of sealring does so",
            "ulimit -n 8192",
        )
