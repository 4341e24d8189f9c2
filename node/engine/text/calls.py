"""A model's tool calls, read in processes that can be ended. `python -m sealring.node.engine.text.calls` is
such a process.

What a model writes is what a client asked it to write, and some of mlx-lm's parsers take the square or the
cube of its length: 0.65 s for 7 KB. In the thread that passes on the tokens of all rows they would hold up
every other answer.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from sealring.mesh.prompt.tools import check_tool_name, parse_json_object
from sealring.mesh.system.start import forbid_core_files
from sealring.node.engine import mlx_lm_import
from sealring.node.engine.helper import Helpers, hold_to, serve
from sealring.node.engine.text.parsers import PARSERS
from sealring.v1 import inference_pb2 as inference

SECONDS = 2
"""Processor time for each call. The costliest parser takes 0.65 s for a file of 7 KB, and most take a
millisecond. A call that takes longer is passed on as text, like one that cannot be read."""

AT_ONCE = 3
"""Calls that are read at once, each of another client: of whoever writes costly ones one is."""

ADDRESS_BYTES = 1 << 30
"""Address space, where the system holds a process to it."""

Parse = Callable[[str, Any], Any]


class CallReader:
    """The processes that read the calls of one model; none until it is used. Any thread."""

    def __init__(self, parser: str) -> None:
        module = "sealring.node.engine.text.calls"
        self._processes = Helpers(
            module, str(SECONDS), str(ADDRESS_BYTES), first={"parser": parser}, most=AT_ONCE
        )

    def prepare(self) -> None:
        """Starts a process, so that the first call does not wait for one. Raises Unavailable (NO_PROCESS)."""
        self._processes.prepare()

    def read(self, text: str, tools: Sequence[Any]) -> list[inference.ToolCall] | None:
        """The calls in what a model has written between its markers; None where it cannot be read, or costs
        too much.

        `tools` are as OpenAI's. Raises Unavailable (NO_PROCESS).
        """
        answer = self._processes.ask({"text": text, "tools": tools})
        if answer is None or answer["calls"] is None:
            return None
        return [inference.ToolCall(**call) for call in answer["calls"]]

    def close(self) -> None:
        """Ends the processes."""
        self._processes.close()


def parser_of(name: str) -> Parse:
    """The parser of this name: mlx-lm's, but for those that it lacks. Raises ImportError."""
    if name in PARSERS:
        return PARSERS[name]
    mlx_lm_import.install()
    parse: Parse = importlib.import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call
    return parse


def read_call(parse: Parse, text: str, tools: Sequence[Any]) -> list[dict[str, str]] | None:
    """What `calls_of` makes of what the parser finds in a call; None where it cannot be read."""
    try:
        return calls_of(parse(text, tools))
    except Exception:  # whatever a parser raises on what a model has made up
        return None


def calls_of(found: Any) -> list[dict[str, str]]:
    """What a parser has found, as the fields of ToolCall.

    Raises what anything but calls with a name and an object of arguments leads to.
    """
    return [_call(one) for one in (found if isinstance(found, list) else [found])]


def _call(found: Any) -> dict[str, str]:
    arguments = found["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    parse_json_object(arguments, "arguments")
    check_tool_name(found["name"], "name")
    given = found.get("id")
    call = {"id": given if isinstance(given, str) else "", "name": found["name"], "arguments": arguments}
    "".join(call.values()).encode()  # half of a surrogate pair is in no message
    return call


def main() -> None:
    """Answers until standard input ends. Arguments: as node.engine.text.template."""
    forbid_core_files()
    seconds, address = map(int, sys.argv[1:])
    hold_to(address)
    parse: Parse | None = None

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        nonlocal parse
        if parse is None:
            parse = parser_of(asked["parser"])
            return {}
        return {"calls": read_call(parse, asked["text"], asked["tools"])}

    serve(answer, seconds)


if __name__ == "__main__":
    main()
