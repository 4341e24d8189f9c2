"""Silence is found when what is expected has not come, and only then."""

from __future__ import annotations

import asyncio

import pytest

from sealring.mesh.rpc import Silence, silence


async def test_what_does_not_come_is_found_and_what_has_come_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "GRACE_SECONDS", 0.0)
    found: list[str] = []
    late = asyncio.Event()
    heard, again = Silence(lambda: found.append("heard")), Silence(lambda: found.append("again"))
    silent = Silence(late.set)
    for one in (heard, again, silent):
        one.expect(0.0)
    heard.heard()
    again.expect(1000.0)
    assert (heard.expecting, again.expecting, silent.expecting) == (False, True, True)
    async with asyncio.timeout(200):
        await late.wait()
    assert (found, silent.expecting) == ([], False)
    again.heard()
