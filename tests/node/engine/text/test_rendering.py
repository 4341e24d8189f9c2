"""A chat template may run or grow without end: the front goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from sealring.mesh.errors import InvalidInput, ModelError
from sealring.node.engine.text import ChatTemplate, RenderingProcess, rendering

LOOP = (
    "{% set many = range(99999) | list %}{% for one in many %}{% for two in many %}{% endfor %}{% endfor %}"
)
ECHO = "{{ start }}{{ messages[0].content }}"
ON_DEMAND = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}" + ECHO


@pytest.fixture
def start() -> Iterator[Callable[[str], RenderingProcess]]:
    made: list[RenderingProcess] = []

    def starting(source: str) -> RenderingProcess:
        made.append(RenderingProcess(source, {"start": "<"}))
        return made[-1]

    yield starting
    for process in made:
        process.close()


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def chat(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_a_template_that_does_not_end_is_ended_and_the_next_chat_is_answered(
    start: Callable[[str], RenderingProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = start(ON_DEMAND)
    assert template.render(chat("漢\n🙂")) == "<漢\n🙂"
    template.close()  # so that the next one has less time
    monkeypatch.setattr(rendering, "SECONDS", 1)
    with pytest.raises(InvalidInput) as caught:
        template.render(chat("loop"))
    assert caught.value.reason == "CHAT_TEMPLATE_REFUSED"
    assert "1 s" in caught.value.hint
    monkeypatch.undo()
    assert template.render(chat("x")) == "<x"


def test_a_chat_that_no_pipe_holds_goes_through(start: Callable[[str], RenderingProcess]) -> None:
    long = "x" * 300_000
    assert start(ECHO).render(chat(long)) == f"<{long}"


def test_a_chat_is_rendered_without_another_thread(
    start: Callable[[str], RenderingProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python waits for ever for a thread that had no memory to begin."""
    template = start(ECHO)
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
    assert template.render(chat("x")) == "<x"


def test_a_template_that_never_ends_is_refused_before_anything_serves(
    start: Callable[[str], RenderingProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "SECONDS", 1)
    with pytest.raises(ModelError) as caught:
        start(LOOP)
    assert caught.value.reason == "CHAT_TEMPLATE_ENDLESS"


def test_a_template_that_refuses_the_shortest_chat_is_a_template(
    start: Callable[[str], RenderingProcess],
) -> None:
    template = start("{{ raise_exception('only in pairs') if messages | length < 2 }}ok")
    with pytest.raises(InvalidInput):
        template.render(chat("x"))
    assert template.render(chat("x") * 2) == "ok"


@pytest.mark.parametrize("address", [rendering.ADDRESS_BYTES, 1 << 45], ids=["held to it", "not held to it"])
def test_a_template_takes_no_more_memory_than_it_may(
    start: Callable[[str], RenderingProcess], monkeypatch: pytest.MonkeyPatch, address: int
) -> None:
    """Also where the system holds no process to its address space, as macOS does not."""
    monkeypatch.setattr(rendering, "ADDRESS_BYTES", address)
    template = start(
        "{% set said = messages[0].content %}{{ (said * 500000000) | length if said == 'grow' }}" + ECHO
    )
    with pytest.raises(InvalidInput):
        template.render(chat("grow"))
    assert template.render(chat("x")) == "<x"


def test_chats_are_rendered_at_once(start: Callable[[str], RenderingProcess]) -> None:
    """A chat waits for no other: one that is stopped holds up itself alone."""
    before = children()
    template = start(ECHO)
    (child,) = children() - before
    child.suspend()
    taken = threading.Event()

    class Message(dict[str, str]):
        def items(self) -> Any:
            taken.set()
            return super().items()

    with ThreadPoolExecutor(1) as other:
        held = other.submit(template.render, [Message(role="user", content="held")])
        assert taken.wait(200)
        assert template.render(chat("free")) == "<free"
        assert not held.done()
        child.resume()
        assert held.result(200) == "<held"


def test_a_template_that_does_not_compile_is_told(start: Callable[[str], RenderingProcess]) -> None:
    with pytest.raises(ModelError) as caught:
        start("{% if %}")
    assert caught.value.reason == "CHAT_TEMPLATE_CORRUPT"


@pytest.mark.parametrize(
    "source",
    [
        *(
            "{{ 'a\\n\\u00e9' ~ \"b\" }}",
            "{{ lipsum(1) | length > 9 }}",
            "{{ messages | pprint }}",
            "{{ '<b>&amp;' | striptags }}",
        ),
        *(
            "{{ 'a b c' | wordwrap(3) }}",
            "{{ 'ä b' | urlencode }}",
            "{{ {'a': '<'} | xmlattr }}",
            "{{ [3, 1] | sort | tojson }}",
        ),
        *(
            "{{ strftime_now('%Y %z') }}",
            "{{ 'x'.encode('ascii') }}",
            "{{ '%.2f' | format(1.5) }}",
            "{{ nothing.at.all }}",
        ),
        *(
            "{{ raise_exception('no') }}",
            "{{ 1 // 0 }}",
            "{{ messages | groupby('role') | list }}",
            "{{ 'ß' | upper | title }}",
        ),
        *(
            "{% for one in messages recursive %}{{ loop.index }}{% endfor %}",
            "{% macro m(x) %}{{ x }}{% endmacro %}{{ m(1) }}",
        ),
    ],
)
def test_a_confined_template_renders_as_it_does_elsewhere(
    start: Callable[[str], RenderingProcess], source: str
) -> None:
    """It reads no file and imports nothing once it is confined."""
    found: list[str] = []
    for render in (ChatTemplate(source, {"start": "<"}).render, start(source).render):
        try:
            found.append(render(chat("x")))
        except InvalidInput as error:
            found.append(error.reason)
    assert found[0] == found[1]


def test_several_chats_are_rendered_in_the_time_of_one(start: Callable[[str], RenderingProcess]) -> None:
    """One that is refused costs the others nothing; one without end costs all."""
    template = start(ON_DEMAND)
    chats: list[dict[str, Any]] = [{"messages": chat("a")}, {"messages": []}, {"messages": chat("b")}]
    assert template.render_all(chats) == ["<a", None, "<b"]
    assert template.render_all([chats[0], {"messages": chat("loop")}]) == [None, None]
