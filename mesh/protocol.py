"""The version of what the machines of a cluster say to each other: one more when old and new do not mix."""

from __future__ import annotations

from mesh.errors import FailedPrecondition

PROTOCOL_VERSION = 1


def check_protocol(theirs: int, who: str, software_version: str) -> None:
    """Raises FailedPrecondition (INCOMPATIBLE_VERSION), with the names of both versions."""
    if theirs != PROTOCOL_VERSION:
        raise FailedPrecondition(
            f"{who} runs sealring {software_version}, which speaks version {theirs} of the protocol, and "
            f"version {PROTOCOL_VERSION} is spoken here",
            hint="run the same release on every machine of the cluster",
            reason="INCOMPATIBLE_VERSION",
        )
