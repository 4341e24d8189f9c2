"""The dashboard of a real cluster in a real browser."""

import asyncio
import contextlib
import dataclasses
import json
import sys
import time

import httpx
import psutil
import pytest
from browser import CHROMIUM, browser
from ringtest import CLUSTER, LIMIT_SECONDS, MODEL, on_demand

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


def look(address, folder, later, by_turns):
    """What a person does and sees. `later` is a model on demand, which `by_turns` asks for beside another."""
    with browser(folder) as page:
        page.resize(1200, 900)
        page.open(address)
        assert page.wait("document.querySelectorAll('#nodes td.good').length") == 3
        assert page.wait("document.querySelectorAll('#picture rect.box').length") == 3
        assert "one chain" in page.wait("document.querySelector('#chain').textContent", LIMIT_SECONDS)
        page.wait("document.querySelector('#seers').textContent.includes('node-')")
        seers = page.run("document.querySelector('#seers').textContent")
        refused = ask_about_a_picture(page)
        page.run("document.querySelector('#question').value = 'What is the capital of France?'")
        page.run("document.querySelector('#chat').requestSubmit()")
        page.wait("!!document.querySelector('#talk .small')", LIMIT_SECONDS)
        answer = page.run("document.querySelector('#talk p:not(.user)').textContent")
        page.wait("!!document.querySelector('#charts svg')")
        page.run("document.querySelector('#trace').click()")
        page.wait("document.querySelectorAll('#shares tbody tr').length == 3", LIMIT_SECONDS)
        assert page.run("document.querySelector('#trouble').hidden")
        told = ask_later(page, later)
        with by_turns():
            page.wait(f"{LATER}.textContent.includes('it makes room for third')", LIMIT_SECONDS)
            page.wait(f"{THIRD}.textContent.includes('later is unloaded for it')", LIMIT_SECONDS)
        assert page.run("document.querySelector('#trouble').hidden")
        page.resize(390, 800, mobile=True)
        page.wait("document.documentElement.scrollWidth == 390")
        assert "#" not in page.run("location.href")
        elsewhere = page.run("performance.getEntriesByType('resource').map((one) => new URL(one.name).host)")
        assert set(elsewhere) == {address.split("/")[2]}
        return seers, refused, answer, told


DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def ask_about_a_picture(page):
    """Drops two files, of which one is a picture, and asks about it; what the model says of it."""
    page.run(
        f"""(() => {{
          const dropped = new DataTransfer();
          const dot = Uint8Array.from(atob("{DOT}"), (one) => one.charCodeAt(0));
          dropped.items.add(new File([dot], "dot.png", {{ type: "image/png" }}));
          dropped.items.add(new File(["x"], "notes.txt", {{ type: "text/plain" }}));
          const drop = new DragEvent("drop", {{ dataTransfer: dropped, bubbles: true, cancelable: true }});
          document.querySelector("#chat").dispatchEvent(drop);
        }})()"""
    )
    page.wait("document.querySelector('#pictures img')?.naturalWidth === 1")
    page.wait("document.querySelector('#talk .bad')?.textContent.startsWith('notes.txt is no')")
    page.run("document.querySelector('#question').value = 'What is this?'")
    page.run("document.querySelector('#chat').requestSubmit()")
    page.wait("document.querySelectorAll('#talk .bad').length === 2", LIMIT_SECONDS)
    assert page.run("document.querySelector('#talk p.user img').naturalWidth") == 1
    assert page.run("document.querySelector('#pictures').children.length") == 0
    refused = page.run("[...document.querySelectorAll('#talk .bad')].at(-1).textContent")
    page.run("document.querySelector('#clear').click()")
    return refused


LATER, THIRD = (
    f"[...document.querySelectorAll('.shelf')].find((one) => one.firstChild.textContent === '{name}')"
    for name in ("later", "third")
)
ENDLESS = {str(json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"]): -100}


async def ask_by_turns(url, names):
    """Asks models that do not fit together for long answers, again and again."""

    async def ask(http, name):
        asked = {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1000}
        while True:
            (await http.post("/v1/chat/completions", json=asked | {"logit_bias": ENDLESS})).raise_for_status()

    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS) as http, asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(ask(http, name))


def ask_later(page, later):
    """Asks a model that is not loaded, looks at it while it is loaded, and has it unloaded; the answer."""
    node = later.node_of(later.deployment.plan.spec.members[0])
    before = {one.pid for one in later.parts(node, "engine.main")}
    page.wait(f"{LATER}?.textContent.includes('not loaded')")
    page.run("document.querySelector('#model').value = 'later'")
    page.run("document.querySelector('#question').value = 'What is the capital of Italy?'")
    page.run("document.querySelector('#chat').requestSubmit()")
    engines, end = [], time.monotonic() + LIMIT_SECONDS
    while not engines:
        assert time.monotonic() < end
        time.sleep(0.01)
        with contextlib.suppress(psutil.NoSuchProcess):  # other children come and go
            found = [one for one in later.parts(node, "engine.main") if one.pid not in before]
            # a child that an engine has just forked has that engine's command line still
            parents = before | {one.pid for one in found}
            started = [one for one in found if one.ppid() not in parents]
            for one in started[:1]:
                one.suspend()
            engines = started
    page.wait(f"/starting its engine/.test({LATER}.textContent)", LIMIT_SECONDS)
    engines[0].resume()
    page.wait("document.querySelectorAll('#talk > .small').length == 2", LIMIT_SECONDS)
    page.wait(f"{LATER}.textContent.includes('it is unloaded at')", LIMIT_SECONDS)
    body = {"model": "later", "keep_alive": 0}
    assert httpx.post(f"{later.cluster.http_url}/api/generate", json=body).is_success
    page.wait(f"{LATER}.textContent.includes('not loaded')", LIMIT_SECONDS)
    return page.run("[...document.querySelectorAll('#talk p:not(.user)')].at(-1).textContent")


async def test_a_browser_shows_the_cluster_and_asks_sealed_questions(ring, tmp_path):
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: no browser has shown the dashboard")
    head = ring.deployment.plan.rings[0].stages[0].member
    loop, names = asyncio.get_running_loop(), ("later", "third")
    deployments = [
        await on_demand(ring.cluster, name, stages=1, max_rows=4, members=[head]) for name in names
    ]
    later = dataclasses.replace(ring, deployment=deployments[0])

    @contextlib.contextmanager
    def by_turns():
        asking = asyncio.run_coroutine_threadsafe(ask_by_turns(ring.cluster.http_url, names), loop)
        try:
            yield
        finally:
            asking.cancel()

    try:
        async with dashboard(ring) as address:
            seers, refused, answer, told = await asyncio.to_thread(look, address, tmp_path, later, by_turns)
    finally:
        for name in names:
            await ring.cluster.admin.call("DeleteDeployment", name=name)
    assert "cannot see images" in refused
    assert answer == "The capital of France is Paris."
    assert told == "The capital of Italy is Rome."
    assert "sealed for node-" in seers
    assert "Minimum trust: software" in seers
