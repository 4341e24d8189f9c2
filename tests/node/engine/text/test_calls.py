"""Calls are read as mlx-lm's parsers read them, whatever one of them costs."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from sealring.node.engine import mlx_lm_import
from sealring.node.engine.text.calls import AT_ONCE, CallReader, parser_of, read_call
from sealring.node.engine.text.parsers import PARSERS
from sealring.v1 import inference_pb2 as inference

mlx_lm_import.install()
_parsers = importlib.import_module(
    "mlx_lm.tool_parsers"
)  # pytest would ask a global `mlx_lm` for names of the whole
NAMES = [*PARSERS, *(module.name for module in pkgutil.iter_modules(_parsers.__path__))]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
]
TEXTS = [
    '\n{"name": "look", "arguments": {"at": "漢 \\"🙂\\"", "n": 1}}\n',
    '[{"name": "look", "arguments": {"n": [1, null, 2.5]}}, {"name": "look", "arguments": {}}]',
    'look{"at": "x"}',
    'look[ARGS]{"at": "x"}',
    "look<arg_key>at</arg_key><arg_value>1</arg_value><arg_key>n</arg_key><arg_value>2</arg_value>",
    'call:look{at:<|"|>a{b}<|"|>,n:2}',
    "call:look{at:<escape>x<escape>,n:2}",
    "[look(at='x', n=2), look(n={'a': (1, 2)})]",
    "\n<function=look>\n<parameter=at>\nx\ny\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>\n",
    '<invoke name="look"><parameter name="at">x</parameter><parameter name="n">2</parameter></invoke>',
    '<function name="look"><param name="at">x</param><param name="n">2</param></function>',
    '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": "x"}<|tool_call_end|>',
    '<atem:invoke name="look"><atem:parameter name="at">x</atem:parameter></atem:invoke>',
    "look\n<longcat_arg_key>at</longcat_arg_key>\n<longcat_arg_value>x</longcat_arg_value>",
    '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "x"}<｜tool▁call▁end｜>',
    '<｜DSML｜invoke name="look"><｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>'
    "</｜DSML｜invoke>",
    '{"name": "look", "arguments": {"at": "\\ud800"}}',
    '<|open|>call tool="look" index="1"<|sep|><|open|>argument key="at" type="string"<|sep|>x'
    "<|close|>argument<|sep|><|close|>call<|sep|>",
    "[look(at={1, 2})]",
    '{"name": "lo ok", "arguments": {}}',
    "[" * 3000,
    "nothing \ud800\x00",
    "",
]
HOSTILE = "<arg_key>" * 1500 + "</arg_key><arg_value>" * 1500
CALL = "look<arg_key>at</arg_key><arg_value>x</arg_value>"


@pytest.fixture
def glm47() -> Iterator[CallReader]:
    with contextlib.closing(CallReader("glm47")) as reader:
        yield reader


def read_here(parser: str, text: str) -> list[inference.ToolCall] | None:
    found = read_call(parser_of(parser), text, TOOLS)
    return None if found is None else [inference.ToolCall(**call) for call in found]


@pytest.mark.parametrize("parser", NAMES)
def test_every_parser_finds_what_it_finds_when_it_is_called(parser: str) -> None:
    with contextlib.closing(CallReader(parser)) as reader:
        found = [reader.read(text, TOOLS) for text in TEXTS]
    assert found == [read_here(parser, text) for text in TEXTS]
    assert any(found), "no text is of this parser"


def test_a_call_that_costs_too_much_cannot_be_read_and_the_next_one_can(glm47: CallReader) -> None:
    assert glm47.read(HOSTILE, TOOLS) is None
    assert glm47.read(CALL, TOOLS) == read_here("glm47", CALL)


def test_a_call_cannot_be_read_whose_process_is_ended_meanwhile(glm47: CallReader) -> None:
    before = set(psutil.Process().children())
    glm47.prepare()
    (child,) = set(psutil.Process().children()) - before
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(glm47.read(HOSTILE, TOOLS)))
    spent = child.cpu_times().user
    asking.start()
    with contextlib.suppress(psutil.NoSuchProcess):  # its limit was faster
        while child.cpu_times().user < spent + 0.1:
            pass
        child.kill()
    asking.join(200)
    assert found == [None]
    assert glm47.read(CALL, TOOLS) == read_here("glm47", CALL)


def test_who_prepares_waits_for_no_call_that_is_read() -> None:
    with contextlib.closing(CallReader("glm47")) as reader, ThreadPoolExecutor(AT_ONCE) as threads:
        before = set(psutil.Process().children())
        asked = [threads.submit(reader.read, CALL, TOOLS) for _ in range(AT_ONCE)]
        for one in asked:
            one.result(200)
        children = set(psutil.Process().children()) - before
        for child in children:
            child.suspend()
        asked = [threads.submit(reader.read, CALL, TOOLS) for _ in children]
        reader.prepare()
        assert not any(one.done() for one in asked)
        for child in children:
            child.resume()
        assert [one.result(200) for one in asked] == [read_here("glm47", CALL)] * len(children)
