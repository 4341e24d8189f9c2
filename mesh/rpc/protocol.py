"""The protocols that a machine of a cluster speaks, and the error for machines that have none in common.

Every stream between two machines begins with a `Release` of either end (`mesh/member/proof.py`,
`LinkHello`). It is compared before anything else is checked: what a proof looks like may differ from one
protocol to the next. The members of a ring and its gateways speak what the coordinator has found that all of
them do, for as long as an epoch lasts (`PrepareEpoch`, `RingState`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata

from sealring.mesh.errors import ConfigError, FailedPrecondition
from sealring.v1 import proof_pb2

PROTOCOL_VERSION = 7
"""The newest that this release speaks: one more whenever something is said in another way."""

OLDEST_PROTOCOL = 7
"""The oldest: that of the release before, so that machines can be updated one after the other. Protocol 7 is
the first release's. A tail of 6 ends an epoch at a row with `min_tokens`."""

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
    return proof_pb2.Release(software=software, protocol=PROTOCOL_VERSION, oldest=OLDEST_PROTOCOL)


def check_release(theirs: proof_pb2.Release, who: str, own: str) -> None:
    """Raises FailedPrecondition (INCOMPATIBLE_VERSION), which names both versions and who is to be updated.

    `who` and `own` name the two machines for whoever reads the error at either end.
    """
    agree({who: theirs, own: own_release()})


def agree(releases: Mapping[str, proof_pb2.Release]) -> int:
    """The newest protocol that all of these machines speak; they are named for whoever reads the error.

    Raises FailedPrecondition (INCOMPATIBLE_VERSION).
    """
    behind = min(releases, key=lambda name: releases[name].protocol)
    ahead = max(releases, key=lambda name: _oldest(releases[name]))
    newest = releases[behind].protocol
    if newest >= _oldest(releases[ahead]):
        return newest
    one, other = (f"{name} runs {_told(releases[name])}" for name in releases if name in (behind, ahead))
    raise FailedPrecondition(
        f"{one} and {other}: they cannot work together",
        hint=f"update {behind}; machines of a cluster may be one release apart",
        reason="INCOMPATIBLE_VERSION",
    )


def speaks(protocol: int, release: proof_pb2.Release | None = None) -> bool:
    """Whether a release does; without one this machine's."""
    release = release or own_release()
    return _oldest(release) <= protocol <= release.protocol


def check_speaks(protocol: int, who: str) -> None:
    """That this machine speaks what a ring does. Raises FailedPrecondition (INCOMPATIBLE_VERSION)."""
    if not speaks(protocol):
        raise FailedPrecondition(
            f"{who} speaks protocol {protocol} and this machine runs {_told(own_release())}",
            hint="update the machine with the older release",
            reason="INCOMPATIBLE_VERSION",
        )


def _oldest(release: proof_pb2.Release) -> int:
    return min(release.oldest or release.protocol, release.protocol)


def _told(release: proof_pb2.Release) -> str:
    named = _VERSION.fullmatch(release.software)
    oldest, newest = _oldest(release), release.protocol
    spoken = f"protocol {newest}" if oldest == newest else f"protocols {oldest} to {newest}"
    return f"sealring {release.software if named else 'of no known version'} ({spoken})"
