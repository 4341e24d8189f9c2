"""The process of a chat template, in this one: a line for each line, limits around each answer."""

from __future__ import annotations

import io
import itertools
import json
import resource
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.mesh.errors import InvalidInput, ModelError
from sealring.node.engine import helper
from sealring.node.engine.text import ChatTemplate, template

CHAT = [{"role": "user", "content": "h\u00e9 <&>"}]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    done: list[Any] = []

    def running(*lines: Any) -> tuple[list[Any], list[Any]]:
        done.clear()
        out = io.BytesIO()
        given = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        monkeypatch.setattr(sys, "argv", ["template", "5", "1000"])
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given)))
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=out))
        monkeypatch.setattr(template, "forbid_core_files", lambda: done.append("no core files"))
        monkeypatch.setattr(resource, "setrlimit", lambda *args: done.append(args))
        monkeypatch.setattr(signal, "setitimer", lambda *args: done.append(args))
        monkeypatch.setattr(helper, "confine", lambda **forks: done.append(forks))
        template.main()
        out.seek(0)
        return list(map(_answer, iter(out.readline, b""), itertools.repeat(out))), list(done)

    return running


def _answer(line: bytes, out: io.BytesIO) -> Any:
    """An answer's text, which follows it, or the answer itself."""
    said = json.loads(line)
    return out.read(said["data"]).decode() if "data" in said else said


def test_each_line_is_answered_within_its_limits(run: Any) -> None:
    first = {"source": "{{ start }}{{ messages[0].content }}", "variables": {"start": "<"}}
    answers, done = run(first, {"messages": CHAT}, {"messages": CHAT})
    assert answers == [{}, "<" + CHAT[0]["content"], "<" + CHAT[0]["content"]]
    timer = signal.ITIMER_PROF
    assert done == [
        "no core files",
        (resource.RLIMIT_AS, (1000, 1000)),
        (timer, 5),
        {"forks": False},  # before anything of the template is read
        (timer, 0),
        *[(timer, 5), (timer, 0)] * 2,
    ]


def test_a_template_that_is_none_or_refuses_is_told(run: Any) -> None:
    (answer,), _ = run({"source": "{% if %}", "variables": {}})
    assert "cannot be compiled" in answer["corrupt"]
    answers, _ = run({"source": "{{ raise_exception('secret') }}", "variables": {}}, {"messages": CHAT})
    assert answers == [{}, {"refused": True}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "h\u00e9 <&>"}'),
        ("{{ messages[0] | tojson(sort_keys=True) }}", '{"content": "h\u00e9 <&>", "role": "user"}'),
        ("{{ messages[0].content | tojson(ensure_ascii=True) }}", '"h\\u00e9 <&>"'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{{ add_generation_prompt }}{{ tools }}{{ documents }}", "TrueNoneNone"),
        ("  {% if true %}\nx{% endif %}\ny", "xy"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% for one in [1, 2, 3] %}{% if one == 2 %}{% break %}{% endif %}{{ one }}{% endfor %}", "1"),
    ],
)
def test_templates_are_rendered_as_models_makers_mean_them(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render(CHAT) == text


def test_a_template_knows_the_day() -> None:
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render(CHAT)) == 10


def test_a_template_reaches_nothing_beside_its_messages() -> None:
    for source in ("{{ messages.__class__.__mro__ }}", "{{ messages[0].update(role='x') }}", "{{ 1 / 0 }}"):
        with pytest.raises(InvalidInput) as raised:
            ChatTemplate(source, {}).render(CHAT)
        assert raised.value.reason == "CHAT_TEMPLATE_REFUSED"
    with pytest.raises(ModelError) as corrupt:
        ChatTemplate("{{", {})
    assert corrupt.value.reason == "CHAT_TEMPLATE_CORRUPT"
    assert CHAT[0]["role"] == "user"
