"""The openai package's clients, with every prompt sealed in this process for a ring that it has verified.

    from sealring.openai import OpenAI

    client = OpenAI(gateway="10.0.0.1:7780", root_sha256="...", min_trust="self_signed")
    client.chat.completions.create(model="demo", messages=[...])

Whatever the proxy serves works (docs/clients.md); anything else is refused: nothing leaves this process but
sealed prompts, for a ring of the roster that the pinned root vouches for. Needs the extra `sealring[openai]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import httpx2
import openai

from sealring.client import AsyncClient
from sealring.client.transport import AsyncSealingTransport, SealingTransport
from sealring.client.trust import default_state_file, parse_root_sha256
from sealring.mesh.errors import InvalidInput

_NOWHERE = "http://sealring.invalid/v1"
"""An address that nothing has (RFC 2606 section 2): whatever went round the transport would end there."""

_OURS = ("min_trust", "state_file", "credentials", "user")
_REFUSED = (
    "admin_api_key",
    "base_url",
    "data_residency",
    "http_client",
    "provider",
    "websocket_base_url",
    "workload_identity",
)
"""Options of openai's that would send prompts elsewhere, or in another way."""


class _Connection(httpx2.Client):
    """Asks no proxy that the environment names."""

    def __init__(self, client: Callable[[], AsyncClient]) -> None:
        super().__init__(transport=SealingTransport(client), trust_env=False)


class _AsyncConnection(httpx2.AsyncClient):
    def __init__(self, client: Callable[[], AsyncClient]) -> None:
        super().__init__(transport=AsyncSealingTransport(client()), trust_env=False)


def _options(kind: type[_Connection] | type[_AsyncConnection], options: dict[str, Any]) -> dict[str, Any]:
    """The options for openai's constructor. openai's `copy` passes options that were made here before."""
    copied = isinstance(options.get("http_client"), kind)
    if copied and str(options.get("base_url")).rstrip("/") == _NOWHERE:
        options = {
            name: value for name, value in options.items() if name not in ("base_url", "admin_api_key")
        }
    for name in _REFUSED:
        if options.get(name) is not None and not (copied and name == "http_client"):
            _refuse(name)
    if copied:
        return {**options, "base_url": _NOWHERE}
    options = {name: value for name, value in options.items() if name not in _REFUSED}
    gateway, root_sha256 = options.pop("gateway", None), options.pop("root_sha256", None)
    if gateway is None or root_sha256 is None:
        raise InvalidInput(
            "gateway and root_sha256 are needed",
            hint="give the gateway's gRPC address and the hash of the cluster's root key, from its operator",
            reason="MISSING_FIELD",
            param="root_sha256" if gateway else "gateway",
        )
    pin = parse_root_sha256(root_sha256)
    ours = {name: options.pop(name) for name in _OURS if name in options}
    ours = {"state_file": default_state_file(pin), "api_key": options.pop("api_key", None), **ours}

    def client() -> AsyncClient:
        return AsyncClient(gateway, root_sha256=pin, timeout=3600.0, **ours)

    return {**options, "api_key": "none", "base_url": _NOWHERE, "http_client": kind(client)}


def _refuse(name: str) -> NoReturn:
    raise InvalidInput(
        f"{name} is not supported", hint=f"leave {name} out", reason="UNSUPPORTED_FIELD", param=name
    )


class OpenAI(openai.OpenAI):
    """`openai.OpenAI`, sealed."""

    def __init__(self, **options: Any) -> None:
        """`gateway`, `root_sha256`, `min_trust`, `state_file`, `credentials`, `user` and `api_key` are those
        of `sealring.client.Client`; by default the newest roster is remembered in the user's state folder.
        The others are openai's: `timeout`, `max_retries`, `default_headers`...

        Raises InvalidInput (MISSING_FIELD, UNSUPPORTED_FIELD, and what `Client` raises), ConfigError.
        """
        super().__init__(**_options(_Connection, options))

    @property
    def realtime(self) -> NoReturn:
        _refuse("realtime")

    @property
    def live(self) -> NoReturn:
        _refuse("live")


class AsyncOpenAI(openai.AsyncOpenAI):
    """`openai.AsyncOpenAI`, sealed. For one event loop."""

    def __init__(self, **options: Any) -> None:
        """As `OpenAI`."""
        super().__init__(**_options(_AsyncConnection, options))

    @property
    def realtime(self) -> NoReturn:
        _refuse("realtime")

    @property
    def live(self) -> NoReturn:
        _refuse("live")
