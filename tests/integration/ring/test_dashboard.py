"""The dashboard of a real cluster in a real browser."""

import asyncio
import contextlib
import sys

import pytest
from browser import CHROMIUM, browser
from ringtest import CLUSTER, LIMIT_SECONDS

pytestmark = CLUSTER


@contextlib.asynccontextmanager
async def dashboard(ring):
    """A running dashboard: its address, with the token."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sealring.cli", "dashboard", "--gateway", ring.cluster.grpc_address),
        *("--operator", str(ring.cluster.operator_bundle)),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            address = (await process.stderr.readline()).decode().strip()
        yield address
    finally:
        process.terminate()
        async with asyncio.timeout(LIMIT_SECONDS):
            assert await process.wait() == 0


def look(address, folder):
    """What a person does and sees."""
    with browser(folder) as page:
        page.resize(1200, 900)
        page.open(address)
        assert page.wait("document.querySelectorAll('#nodes td.online').length") == 3
        assert page.wait("document.querySelectorAll('.stage').length") == 3
        assert "one chain" in page.wait("document.querySelector('#chain').textContent", LIMIT_SECONDS)
        page.wait("document.querySelector('#seers').textContent.includes('node-')")
        seers = page.run("document.querySelector('#seers').textContent")
        page.run("document.querySelector('#question').value = 'What is the capital of France?'")
        page.run("document.querySelector('#chat').requestSubmit()")
        page.wait("!!document.querySelector('#talk .small')", LIMIT_SECONDS)
        answer = page.run("document.querySelector('#talk p:not(.user)').textContent")
        page.wait("document.querySelector('#load').textContent.includes('demo')")
        page.run("document.querySelector('#trace').click()")
        page.wait("document.querySelectorAll('#shares tbody tr').length == 3", LIMIT_SECONDS)
        assert page.run("document.querySelector('#trouble').hidden")
        page.resize(390, 800, mobile=True)
        assert page.run("document.documentElement.scrollWidth") == 390
        assert "#" not in page.run("location.href")
        elsewhere = page.run("performance.getEntriesByType('resource').map((one) => new URL(one.name).host)")
        assert set(elsewhere) == {address.split("/")[2]}
        return seers, answer


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
async def test_a_browser_shows_the_cluster_and_asks_sealed_questions(ring, tmp_path):
    async with dashboard(ring) as address:
        seers, answer = await asyncio.to_thread(look, address, tmp_path)
    assert answer == "The capital of France is Paris."
    assert "sealed for node-" in seers
    assert "Minimum trust: software" in seers
