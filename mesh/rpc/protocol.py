"""The protocols that a machine of a cluster speaks, and the error for machines that have none in common.

Every stream between two machines begins with the `Release` of both ends (`mesh/member/proof.py`,
`LinkHello`). It is compared before any other check, since the form of a proof may differ from one protocol to
the next. For each epoch the coordinator chooses a protocol that all members of the ring and its gateways
speak (`PrepareEpoch`, `RingState`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata

from sealring.mesh.errors import ConfigError, FailedPrecondition
from sealring.v1 import proof_pb2

PROTOCOL_VERSION = 13
"""The newest that this release speaks. Raised with every change that old and new machines cannot share."""

OLDEST_PROTOCOL = 12
"""The oldest that it speaks, which the previous release spoke: machines can be updated one after the other.
`mesh/rpc/protocol12.py` has what 12 says otherwise than 13. Steps of 11 name no source of drafts, and rosters
of 10 do not say when a member has joined."""

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
    """This machine's release, as it is sent at the start of a stream."""
    try:
        software = software_version()
    except ConfigError:  # the version is for people; streams work without it
        software = ""
    return proof_pb2.Release(software=software, protocol=PROTOCOL_VERSION, oldest=OLDEST_PROTOCOL)


def check_release(theirs: proof_pb2.Release, peer: str, own: str) -> None:
    """Raises FailedPrecondition (INCOMPATIBLE_VERSION), which names both versions and the machine to update.

    `peer` and `own` are the names of the two machines in this error, which both ends read.
    """
    agree({peer: theirs, own: own_release()})


def agree(releases: Mapping[str, proof_pb2.Release]) -> int:
    """The newest protocol that all of these machines speak; the keys name them in the error.

    Raises FailedPrecondition (INCOMPATIBLE_VERSION).
    """
    behind = min(releases, key=lambda name: releases[name].protocol)
    ahead = max(releases, key=lambda name: _oldest(releases[name]))
    newest = releases[behind].protocol
    if newest >= _oldest(releases[ahead]):
        return newest
    one, other = (f"{name} runs {_described(releases[name])}" for name in releases if name in (behind, ahead))
    raise FailedPrecondition(
        f"{one} and {other}: they cannot work together",
        hint=f"update {behind}; machines of a cluster may be one release apart",
        reason="INCOMPATIBLE_VERSION",
    )


def speaks(protocol: int, release: proof_pb2.Release | None = None) -> bool:
    """Whether a release, by default this machine's own, speaks the protocol."""
    release = release or own_release()
    return _oldest(release) <= protocol <= release.protocol


def check_speaks(protocol: int, ring: str) -> None:
    """Requires that this machine speaks the protocol of `ring`. Raises FailedPrecondition
    (INCOMPATIBLE_VERSION)."""
    if not speaks(protocol):
        raise FailedPrecondition(
            f"{ring} speaks protocol {protocol} and this machine runs {_described(own_release())}",
            hint="update the machine with the older release",
            reason="INCOMPATIBLE_VERSION",
        )


def _oldest(release: proof_pb2.Release) -> int:
    return min(release.oldest or release.protocol, release.protocol)


def _described(release: proof_pb2.Release) -> str:
    named = _VERSION.fullmatch(release.software)
    oldest, newest = _oldest(release), release.protocol
    spoken = f"protocol {newest}" if oldest == newest else f"protocols {oldest} to {newest}"
    return f"sealring {release.software if named else 'of no known version'} ({spoken})"
