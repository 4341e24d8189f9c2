"""The root key that a gateway's cluster is checked against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sealring.cli.calls.operator import read_bundle
from sealring.cli.here.found import cluster_here, require_account

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
    from sealring.client.trust import own_root_sha256

    here = cluster_here(loaded.settings.gateway)
    require_account(here.operator)
    return own_root_sha256(here.root)


def roster_file(pin: bytes, gateways: Sequence[str]) -> Path | None:
    """The file that remembers the newest roster of the cluster of these gateways; none for a demo's."""
    from sealring.client.trust import default_state_file

    return default_state_file(pin) if cluster_here(gateways).own else None
