"""The proxy of a machine whose node is a service: another service of the same account."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sealring.cli.here.settings_files import read_settings, settings_file_of
from sealring.cli.service.install import Installation, require_enrolled
from sealring.cli.service.launchd import Service
from sealring.cli.setup.door import keep_door
from sealring.cli.terminal.host import Host
from sealring.mesh.system.addresses import format_address

_LOOPBACK = "127.0.0.1"


class DoorInstallation(Installation):
    """Its key is for the account that calls sudo, and for nobody else: the proxy itself has a digest alone.

    The proxy waits by itself for the node's certificate and for a gateway, so nobody waits until it listens.
    """

    started = "start {}"

    def __init__(self, host: Host, service: Service, root: Path, *, port: int | None = None) -> None:
        super().__init__(host, service, root, chosen={})
        self._port = port

    def check(self, *, start: bool) -> None:
        """Raises ConfigError (NOT_ENROLLED)."""
        require_enrolled(replace(self.service, component="node"), self._root)

    def run(self, say: Callable[[str], None], *, start: bool, dry_run: bool) -> None:
        """Raises as `Installation.run` and `keep_door`."""
        self.check(start=start)
        if not dry_run:
            node = read_settings(settings_file_of(self.state.parent, "node"), "node")
            kept = keep_door(self._host, self._port, str(node.get("listen", f"{_LOOPBACK}:0")))
            listen = format_address(_LOOPBACK, kept["port"])
            self.service = replace(self.service, listen=listen, key_sha256=kept["key_sha256"])
        super().run(say, start=start, dry_run=dry_run)
        if start and not dry_run:
            say(f"on this machine, programs ask at http://{self.service.listen}/v1: sealring connect NAME")

    def _start(self) -> None:
        self._control.bootstrap(self.service.label, self.plist)
