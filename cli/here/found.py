"""The cluster of this machine, which every command means where none is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sealring.cli.here.leftovers import gateway_of, running
from sealring.cli.here.settings_files import PORTS, proxy_port, read_settings, settings_file_of
from sealring.mesh.system.paths import CLIENT_FOLDER, default_state_root, is_enrolled

_USUAL_GATEWAY, _USUAL_HTTP = "127.0.0.1:7780", "127.0.0.1:8080"
SERVICES = Path("/var/db/sealring")
"""The state folder of launchd's services, which belong to another account (cli/service/launchd.py)."""

PROXY_PORT = 8081
"""The usual port of `sealring proxy`."""


@dataclass(frozen=True)
class Here:
    """The cluster with its state below `root` on this machine: the user's own, that of launchd's services, or
    a demo's."""

    root: Path
    runs: bool = False

    @property
    def own(self) -> bool:
        """Whether it is no demo's, which leaves no file behind elsewhere."""
        return self.root in (default_state_root(), SERVICES)

    @property
    def operator(self) -> Path:
        """The first machine's bundle; on a member the certificate with which its programs may look."""
        bundle, client = self.root / "coordinator" / "operator", self.root / "node" / CLIENT_FOLDER
        return client if _holds(client) and not _holds(bundle) else bundle

    @property
    def member(self) -> Path | None:
        """The folder of this machine's certificate, where it is a member without a gateway of its own."""
        folder = self.root / "node" / CLIENT_FOLDER
        return folder if _holds(folder) and not _holds(self.root / "gateway") else None

    @property
    def gateway(self) -> str:
        """host:port of its gateway here, or the usual one."""
        return (gateway_of(self.root) if self.runs else None) or _USUAL_GATEWAY

    def folder(self, section: str) -> Path:
        """The state folder of its gateway or node here; of a demo's nodes that of the first."""
        found = self.root / section
        return found if self.own or found.is_dir() else self.root / f"{section}-0"

    @property
    def http(self) -> str:
        """The URL of its gateway's HTTP edge here, or the usual one."""
        settings = read_settings(settings_file_of(self.root, "gateway"), "gateway")
        return f"http://{settings.get('http_listen', _USUAL_HTTP)}"

    @property
    def edges(self) -> list[str]:
        """URLs at which programs here may be answered: those of proxies first, then the gateway's own."""
        beside = proxy_port(default_state_root()) if self.own else None  # of a service, for this account
        ports = (proxy_port(self.root), beside, PROXY_PORT)
        return list(dict.fromkeys([*(f"http://127.0.0.1:{port}" for port in ports if port), self.http]))


def _holds(folder: Path) -> bool:
    """Whether it holds an enrolment, or may hold one that this account may not see."""
    try:
        return is_enrolled(folder)
    except PermissionError:
        return True


def require_account(folder: Path) -> None:
    """Requires that this is the account of launchd's services where `folder` has their state.

    Raises PermissionDenied (OTHERS_STATE).
    """
    from sealring.mesh.system.lock import require_own_state

    if folder.is_relative_to(SERVICES):
        require_own_state(folder)


def _holds_cluster(root: Path) -> bool:
    return any((root / component).is_dir() for component in ("coordinator", "node"))


def cluster_here(gateways: Sequence[str] = ()) -> Here:
    """The cluster of one of `gateways` (host:port), if it runs here; else the user's own or that of launchd's
    services, if it runs or no demo does; else the demo that began last."""
    own, found = default_state_root(), running()
    named = [one for one in found if gateway_of(one) in gateways]
    if not named and (own in found or not found):
        return Here(SERVICES if _holds_cluster(SERVICES) and not _holds_cluster(own) else own, own in found)
    return Here(max(named or found, key=lambda one: (one / PORTS).stat().st_mtime_ns), runs=True)
