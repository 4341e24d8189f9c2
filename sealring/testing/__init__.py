"""Doubles for the tests of programs that use sealring or embed parts of it (docs/testing.md).

    async with ScriptedGateway() as gateway:  # on loopback, over real gRPC
        async with gateway.client() as client:
            async for delta in client.chat([{"role": "user", "content": "What is the capital?"}]):
                print(delta.text, end="")

Provisional: names may change in every release. No other package of sealring imports this one.
"""

from sealring.testing.backend import ScriptedBackend, serve_edge
from sealring.testing.clock import ManualClock
from sealring.testing.cluster import PaperCluster
from sealring.testing.gateway import Script, ScriptedGateway, saying, serve_inference

__all__ = [
    "ManualClock",
    "PaperCluster",
    "Script",
    "ScriptedBackend",
    "ScriptedGateway",
    "saying",
    "serve_edge",
    "serve_inference",
]
