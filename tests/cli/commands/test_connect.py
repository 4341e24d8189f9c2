"""`sealring connect` on a machine that has joined: its proxy is no gateway that reads prompts."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from bundles import SigningCluster

from sealring.cli.here import found
from sealring.mesh.pki import Role
from sealring.mesh.system.paths import CLIENT_FOLDER, state_root_of


class Edge(BaseHTTPRequestHandler):
    """Lists one model, as a proxy does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "demo", "context_length": 4096}]}).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.parametrize("joined", [True, False])
def test_a_members_proxy_at_the_gateways_usual_port_seals(
    here: Any, home: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    root = state_root_of(home)
    if joined:
        SigningCluster(home).save(root / "node" / CLIENT_FOLDER, Role.OPERATOR)
    with HTTPServer(("127.0.0.1", 0), Edge) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            usual = f"127.0.0.1:{server.server_port}"
            monkeypatch.setattr(found, "_USUAL_HTTP", usual)
            done = here("connect", "curl", "--url", f"http://{usual}")
        finally:
            server.shutdown()
            thread.join()
    assert f"http://{usual}/v1/chat" in done.out
    assert ("can read prompts" in done.err) is not joined
