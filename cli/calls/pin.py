"""The root key that a gateway's cluster is checked against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sealring.cli.calls.operator import read_bundle
from sealring.cli.here.found import cluster_here
from sealring.mesh.errors import ConfigError

if TYPE_CHECKING:
    from sealring.cli.settings import CliSettings
    from sealring.mesh.settings.config import Loaded


def root_pin(named: str | None, loaded: Loaded[CliSettings]) -> bytes:
    """The hash of the cluster's root key: `named` in hex; else that of the operator bundle in the settings;
    else that of an enrolment in the cluster of this machine.

    Raises InvalidInput (BAD_ROOT_HASH), ConfigError (NO_ROOT_HASH, NO_OPERATOR_BUNDLE, MEMBER_STATE_CORRUPT,
    SECRET_FILE_UNSAFE), RosterError (ROOT_*).
    """
    if named is not None:
        from sealring.client.trust import parse_root_sha256

        return parse_root_sha256(named)
    if loaded.origin["operator"] != "default":
        return read_bundle(loaded.settings.operator).root_sha256
    from sealring.mesh.member.state import load_machine_state

    root = cluster_here(loaded.settings.gateway).root
    for folder in (root / "coordinator" / "operator", root / "node", root / "gateway"):
        try:
            return load_machine_state(folder).root_sha256
        except PermissionError:
            continue
        except ConfigError as error:
            if error.reason != "NOT_ENROLLED":
                raise
    raise ConfigError(
        "this machine is in no cluster, so the root key to check the gateway against is unknown",
        hint="make one with `sealring up`, or join one with `sealring join`; for another cluster's gateway "
        "give the hash of its root key with --root-sha256: `sealring roster show` prints it there",
        reason="NO_ROOT_HASH",
    )


def roster_file(pin: bytes, gateways: Sequence[str]) -> Path | None:
    """The file that remembers the newest roster of the cluster of these gateways; none for a demo's."""
    from sealring.client.trust import default_state_file

    return default_state_file(pin) if cluster_here(gateways).own else None
