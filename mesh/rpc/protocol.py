"""The version of the protocol between the machines of a cluster, and the error for machines that differ.

Every stream between two machines begins with a `Release` of either end (`mesh/member/proof.py`,
`LinkHello`). It is compared before anything else is checked: what a proof looks like may differ from one
protocol to the next.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata

from sealring.mesh.errors import ConfigError, FailedPrecondition
from sealring.v1 import proof_pb2

PROTOCOL_VERSION = 3
"""One more whenever old and new do not mix."""

_VERSION = re.compile(r"[0-9A-Za-z.+!_-]{1,64}")


@cache
def software_version() -> str:
    """The version of the installed package. Raises ConfigError (BROKEN_INSTALLATION)."""
    try:
        return metadata.version("sealring")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            "the installed package of sealring has no version",
            hint="install it again",
            reason="BROKEN_INSTALLATION",
        ) from None


def own_release() -> proof_pb2.Release:
    """What this machine says of itself at the start of a stream."""
    try:
        software = software_version()
    except ConfigError:  # whoever needs to know is told by `software_version` itself
        software = ""
    return proof_pb2.Release(software=software, protocol=PROTOCOL_VERSION)


def check_release(theirs: proof_pb2.Release, who: str, own: str) -> None:
    """Raises FailedPrecondition (INCOMPATIBLE_VERSION), which names both versions and who is to be updated.

    `who` and `own` name the two machines for whoever reads the error at either end.
    """
    if theirs.protocol == PROTOCOL_VERSION:
        return
    older = who if theirs.protocol < PROTOCOL_VERSION else own
    raise FailedPrecondition(
        f"{who} runs {_told(theirs)} and {own} runs {_told(own_release())}: they cannot work together",
        hint=f"update {older}; all machines of a cluster run the same release",
        reason="INCOMPATIBLE_VERSION",
    )


def _told(release: proof_pb2.Release) -> str:
    named = _VERSION.fullmatch(release.software)
    return f"sealring {release.software if named else 'of no known version'} (protocol {release.protocol})"
