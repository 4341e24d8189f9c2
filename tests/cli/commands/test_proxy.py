"""`sealring proxy`: for which cluster and gateway it seals, and where it listens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from bundles import SigningCluster

from sealring import client
from sealring.cli import proxy as program
from sealring.cli.commands import proxy


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is made and served instead of a proxy."""
    made: list[Any] = []

    def make(gateway: Any, **how: Any) -> str:
        made.append((gateway, how))
        return "client"

    async def serve(*of: Any, **_: Any) -> None:
        made.append(of)

    def run_daemon(component: str, work: Any, **how: Any) -> None:
        made.append((component, how))
        asyncio.run(work())

    monkeypatch.setattr(client, "AsyncClient", make)
    monkeypatch.setattr(program, "serve", serve)
    monkeypatch.setattr(proxy, "run_daemon", run_daemon)
    return made


def test_it_seals_for_the_cluster_of_the_operator_by_default(here: Any, home: Path, started: Any) -> None:
    signed = SigningCluster(home)
    done = here("proxy", "--operator", str(signed.bundle))
    assert done.status == 0, done.err
    (component, how), (gateway, asked), served = started
    assert (component, how) == ("proxy", {"log_level": "info", "log_file": None, "parent_pipe": None})
    assert served[:2] == ("client", "127.0.0.1:8081")
    assert served[2].is_relative_to(home)
    assert (asked["root_sha256"], asked["min_trust"], asked["timeout"]) == (
        signed.root.fingerprint,
        0,
        3600.0,
    )
    assert (asked["credentials"], asked["api_key"]) == (None, None)
    assert asked["state_file"].is_relative_to(home)
    assert gateway == ["127.0.0.1:7780"]


def test_it_seals_for_the_cluster_that_is_named(here: Any, home: Path, started: Any) -> None:
    done = here(
        *("proxy", "--root-sha256", "ab" * 32, "--min-trust", "hardware", "--listen", "[::1]:0"),
        *("--state-file", "kept", "--gateway", "127.0.0.1:9", "--log-level", "error", "--log-file", "log"),
    )
    assert done.status == 0, done.err
    (_, how), (gateway, asked), served = started
    assert (how["log_level"], how["log_file"]) == ("error", Path("log"))
    assert (asked["root_sha256"], asked["min_trust"]) == (b"\xab" * 32, 30)
    assert (asked["state_file"], gateway, served[1]) == (Path("kept"), ["127.0.0.1:9"], "[::1]:0")


@pytest.mark.parametrize(
    ("options", "reason"),
    [(("--listen", "0.0.0.0:1"), "LOOPBACK_ONLY"), (("--root-sha256", "ab"), "BAD_ROOT_HASH")],
)
def test_nothing_begins_where_others_could_ask_or_a_hash_is_none(
    here: Any, started: Any, options: tuple[str, ...], reason: str
) -> None:
    assert f"[{reason}]" in here("proxy", *options).err
    assert started == []
