"""The dashboard in a browser, at three widths, light and dark: what people would see to be wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from boardscene import BROKEN, LOADING, Scene, shown
from browser import CHROMIUM, Browser, browser

from sealring.mesh.errors import PermissionDenied, Unavailable

pytestmark = pytest.mark.integration
SIZES = {"phone": (390, 844), "tablet": (900, 900), "desktop": (1400, 900)}
MEASURE = Path(__file__).with_name("measure.js").read_text()
PICTURES = Path(__file__).parents[3] / "docs" / "dashboard"


async def look(scene: Scene, folder: Path, see: Callable[[Browser], None], width: str = "desktop") -> None:
    """Opens the scene's page in a browser, and has `see` look at it in a thread of its own."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: no browser has shown the dashboard")

    def watch(address: str) -> None:
        with browser(folder) as page:
            page.resize(*SIZES[width], mobile=width == "phone")
            page.open(address)
            page.wait("document.querySelectorAll('#picture svg').length")
            page.wait("document.querySelectorAll('#charts svg').length")
            page.wait("!!document.querySelector('#keys table') && !!document.querySelector('#code *')")
            page.run(MEASURE)
            see(page)

    async with shown(scene) as address:
        await asyncio.to_thread(watch, address)


def ask(page: Browser, question: str) -> None:
    page.run(f"document.querySelector('#question').value = '{question}'")
    page.run("document.querySelector('#chat').requestSubmit()")
    page.wait("!!document.querySelector('#talk > .small, #talk > .bad')")


@pytest.mark.parametrize("width", SIZES)
async def test_nothing_is_cut_covered_or_pale(tmp_path: Path, width: str) -> None:
    wrong: dict[str, Any] = {}

    def see(page: Browser) -> None:
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            wrong[scheme] = page.run("measure()")
            for part in ("#state", "#addresses", "#picture", "#question", "#send"):
                assert page.run(f"onFirstScreen('{part}')"), f"{part} is not on the first screen"
        page.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        ask(page, "What computes this?")
        wrong["open"] = page.run("measure()")
        page.run(f"document.querySelector('[data-model=\"{BROKEN}\"]').click()")
        wrong["broken"] = page.run("measure()")

    await look(Scene(), tmp_path, see, width)
    assert wrong == {"light": [], "dark": [], "open": [], "broken": []}


async def test_what_serves_is_green_and_faults_alone_are_red(tmp_path: Path) -> None:
    """A machine that is away is no fault, unless a model needs it; nor is what loads or waits."""

    def faults(page: Browser) -> None:
        told = page.run("reds()")
        assert told
        assert all(BROKEN in one or "does not serve" in one for one in told), told
        page.run(f"document.querySelector('[data-model=\"{BROKEN}\"]').click()")
        assert any("away since" in one for one in page.run("reds()"))

    def none(page: Browser) -> None:
        assert page.run("reds()") == []
        assert page.run("document.querySelector('#state').className") == "good"
        assert "loading 62 %" in page.run("document.querySelector('#shelf').textContent")
        assert "away since" in page.run("document.querySelector('#picture').textContent")

    await look(Scene(), tmp_path / "faults", faults)
    await look(Scene(broken=False), tmp_path / "none", none)


async def test_the_ring_is_drawn_with_what_is_known_of_it(tmp_path: Path) -> None:
    def see(page: Browser) -> None:
        page.wait("document.querySelector('#picture').textContent.includes('computes 61 %')")
        drawn = page.run("document.querySelector('#picture').textContent")
        for text in (
            "waits 54 %",
            "layers 24–35",
            "4.4 GiB/s",
            "0.18 ms",
            "1.0 GiB/s · 0.51 ms",
            "26 of 51 GiB",
        ):
            assert text in drawn
        titles = page.run("[...document.querySelectorAll('#picture title')].map((one) => one.textContent)")
        assert titles[:4] == ["weights: 8.0 GiB", "caches: 4.0 GiB", "other models: 14 GiB", "free: 25 GiB"]
        spoken = page.run("document.querySelector('#picture svg').getAttribute('aria-label')")
        assert spoken.startswith("mac-studio: computes 61 %, layers 0–23; mac-mini: ")
        shelf = page.run("document.querySelector('#shelf').innerText")
        for text in (
            "serves",
            "would fit now",
            "lacks about 80 GiB",
            "has 12 GiB of 27 GiB",
            "imac is offline",
        ):
            assert text in shelf
        join = page.run("document.querySelector('#code').innerText")
        assert "407-6192" in join
        assert "3 more machines and 7 minutes" in join
        used = page.run("document.querySelector('#keys').innerText")
        assert "Claude Code" in used
        assert "31,200 of 50,000" in used
        ask(page, "Who answers?")
        footer = page.run("document.querySelector('#talk > .small').textContent")
        for text in (
            "20 tokens · ",
            " tokens/s · first after ",
            "computed by mac-studio, mac-mini, macbook-air",
        ):
            assert text in footer

    await look(Scene(), tmp_path, see)


HOSTILE = "<img src=x onerror=window.hacked=1>"


@pytest.mark.parametrize("width", ["phone", "desktop"])
async def test_names_and_answers_are_texts_however_long(tmp_path: Path, width: str) -> None:
    names = (HOSTILE, "W" * 63, "\u202eevil" + "ü" * 40)
    scene = Scene(names, answer=f"{HOSTILE}<script>window.hacked=2</script> {'long' * 200}")
    for one in scene.coordinator.answers["ListDeployments"].deployments:
        one.plan.spec.model = f"{HOSTILE}/{'m' * 100}"
        for ring in one.rings:
            ring.reason = f"{HOSTILE} {'r' * 300}"
    scene.gateway.usage.keys[0].label = HOSTILE

    def see(page: Browser) -> None:
        ask(page, "<b>bold</b>")
        page.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        page.wait("!!document.querySelector('#attested table')")
        assert page.run("window.hacked") is None
        assert page.run("document.querySelectorAll('img, b, script:not([src])').length") == 0
        assert HOSTILE in page.run("document.querySelector('#talk').textContent")
        wrong = [one for one in page.run("measure()") if not one.startswith("shortened")]
        assert not wrong, "\n".join(wrong)

    await look(scene, tmp_path, see, width)


async def test_all_is_reached_by_keyboard(tmp_path: Path) -> None:
    def see(page: Browser) -> None:
        reached = []
        for _ in range(40):
            page.press("Tab")
            one = page.run(
                "(() => { const one = document.activeElement; const style = getComputedStyle(one);"
                " return [one.id || one.dataset.model || one.dataset.copies || one.textContent.slice(0, 20),"
                " style.outlineStyle !== 'none'] })()"
            )
            reached.append(one)
        unseen = [name for name, outlined in reached if not outlined]
        assert len(unseen) < 3, unseen  # the page itself, before its first element and behind its last
        names = [name for name, _ in reached]
        for wanted in ("http://127.0.0.1:8080/v1", LOADING, "question", "send", "clear", "sealring join"):
            assert wanted in names

    await look(Scene(), tmp_path, see)


async def test_what_cannot_be_had_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    scene = Scene()
    scene.coordinator.answers["ShowJoinCode"] = PermissionDenied("for admins")
    scene.coordinator.answers["TraceRing"] = Unavailable("no trace")
    scene.doors = []

    def see(page: Browser) -> None:
        assert "seen on the first machine" in page.run("document.querySelector('#code').textContent")
        page.run("document.querySelector('#addresses').open = true")
        assert "No door is open" in page.run("document.querySelector('#doors').textContent")
        assert page.run("measure()") == []
        scene.coordinator.answers["ListNodes"] = Unavailable("the coordinator rests")
        page.wait("document.querySelector('#trouble').textContent.includes('the coordinator rests')")
        assert page.run("document.querySelectorAll('#picture svg').length")
        scene.coordinator.answers["ListNodes"] = scene.nodes
        page.wait("document.querySelector('#trouble').hidden")

    await look(scene, tmp_path, see, "phone")


async def test_the_pictures_of_the_docs(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Made anew with --update."""
    update = request.config.getoption("--update")

    def picture(name: str, scheme: str) -> Callable[[Browser], None]:
        def see(page: Browser) -> None:
            page.prefer(scheme)
            page.wait("document.querySelector('#picture').textContent.includes('computes 61 %')")
            ask(page, "What is a ring of Macs?")
            file = (PICTURES if update else tmp_path) / f"{name}.webp"
            page.picture(file, first_screen=True)
            assert file.stat().st_size < 120_000

        return see

    await look(Scene(broken=False), tmp_path / "a", picture("desktop", "light"))
    await look(Scene(broken=False), tmp_path / "b", picture("phone", "dark"), "phone")
    assert all((PICTURES / f"{name}.webp").exists() for name in ("desktop", "phone"))
