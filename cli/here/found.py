"""The cluster of this machine, which every command means where none is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sealring.cli.here.leftovers import gateway_of, running
from sealring.cli.here.settings_files import PORTS, proxy_port, read_settings, settings_file_of
from sealring.mesh.system.paths import CLIENT_FOLDER, default_state_root, is_enrolled

_USUAL_GATEWAY, _USUAL_HTTP = "127.0.0.1:7780", "127.0.0.1:8080"
PROXY_PORT = 8081
"""The usual port of `sealring proxy`."""


@dataclass(frozen=True)
class Here:
    """The cluster with its state below `root` on this machine: the user's own, or a demo's."""

    root: Path

    @property
    def own(self) -> bool:
        """Whether it is the user's own: a demo's leaves no file behind elsewhere."""
        return self.root == default_state_root()

    @property
    def operator(self) -> Path:
        """The first machine's bundle; on a member the certificate with which its programs may look."""
        bundle, client = self.root / "coordinator" / "operator", self.root / "node" / CLIENT_FOLDER
        return client if is_enrolled(client) and not is_enrolled(bundle) else bundle

    @property
    def member(self) -> Path | None:
        """The folder of this machine's certificate, where it is a member without a gateway of its own."""
        folder = self.root / "node" / CLIENT_FOLDER
        return folder if is_enrolled(folder) and not is_enrolled(self.root / "gateway") else None

    @property
    def gateway(self) -> str:
        """host:port of its gateway here, or the usual one."""
        return (gateway_of(self.root) if self.root in running() else None) or _USUAL_GATEWAY

    @property
    def http(self) -> str:
        """The URL of its gateway's HTTP edge here, or the usual one."""
        settings = read_settings(settings_file_of(self.root, "gateway"), "gateway")
        return f"http://{settings.get('http_listen', _USUAL_HTTP)}"

    @property
    def edges(self) -> list[str]:
        """URLs at which programs here may be answered: those of proxies first, then the gateway's own."""
        ports = (proxy_port(self.root), PROXY_PORT)
        return list(dict.fromkeys([*(f"http://127.0.0.1:{port}" for port in ports if port), self.http]))


def cluster_here(gateways: Sequence[str] = ()) -> Here:
    """The cluster of one of `gateways` (host:port), if it runs here; else the user's own, if it runs or no
    demo does; else the demo that began last."""
    own, found = default_state_root(), running()
    named = [one for one in found if gateway_of(one) in gateways]
    if not named and (own in found or not found):
        return Here(own)
    return Here(max(named or found, key=lambda one: (one / PORTS).stat().st_mtime_ns))
