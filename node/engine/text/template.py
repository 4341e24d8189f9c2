"""Chat templates: Jinja in a sandbox, with what model makers' templates are written against. `python -m
node.engine.text.template` is the process that `node/engine/text/rendering.py` starts for one.

The environment is that of transformers' `apply_chat_template` (utils/chat_template_utils.py), whose import
costs two seconds and 0.2 GiB.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sealring.mesh.errors import ModelError, SealringError
from sealring.mesh.system.start import forbid_core_files
from sealring.node.engine.helper import hold_to, serve
from sealring.node.engine.text.rendering import Messages, Tools, refused

_LATER = ("jinja2.constants", "jinja2.debug", "encodings.unicode_escape", "html", "pprint", "textwrap")
"""What is imported within functions there."""


class ChatTemplate:
    """Renders messages to the text that the model was trained on.

    `variables` are the special tokens and flags that the template may name. Raises ModelError (reason
    CHAT_TEMPLATE_CORRUPT) for a template that does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], with_tools: str = "") -> None:
        """`with_tools` is the source for chats with tools, where it is another one."""
        try:
            self._template = _environment().from_string(source)
            self._with_tools = _environment().from_string(with_tools) if with_tools else self._template
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(
                f"the chat template cannot be compiled ({type(error).__name__})",
                reason="CHAT_TEMPLATE_CORRUPT",
                hint="download or convert the model again",
            ) from None
        self._variables = dict(variables)

    def render(
        self, messages: Messages, tools: Tools = (), arguments: Mapping[str, Any] | None = None
    ) -> str:
        """`arguments` are more variables.

        Raises InvalidInput (CHAT_TEMPLATE_REFUSED) without the template's own words, which may quote.
        """
        try:
            return (self._with_tools if tools else self._template).render(
                messages=[dict(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=True,
                **{**self._variables, **(arguments or {})},
            )
        except Exception:
            raise refused() from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's words for training, means nothing here."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _import_all() -> None:
    """Reads what Jinja and a template would read later, when this process is confined."""
    for name in _LATER:
        importlib.import_module(name)
    # glibc reads the zone again at each look at it, but for one that TZ names
    os.environ.setdefault("TZ", ":/etc/localtime")
    time.tzset()
    datetime.datetime.now().astimezone()


def _rendered(template: ChatTemplate, chat: Mapping[str, Any]) -> str | None:
    try:
        return template.render(**chat)
    except SealringError:
        return None


def main() -> None:
    """Answers until standard input ends; a signal ends the process where one answer takes too long.

    Arguments: seconds of a processor for each answer, and bytes of address space. The first question
    describes the template, each further one the messages of a chat.
    """
    forbid_core_files()
    seconds, address = map(int, sys.argv[1:])
    _import_all()
    hold_to(address)
    template: ChatTemplate | None = None

    def answer(told: dict[str, Any]) -> dict[str, Any]:
        nonlocal template
        try:
            if template is None:
                template = ChatTemplate(**told)
                return {}
            if "chats" in told:
                return {"data": json.dumps([_rendered(template, chat) for chat in told["chats"]]).encode()}
            return {"data": template.render(**told).encode("utf-8", "surrogatepass")}
        except ModelError as error:
            return {"corrupt": error.message}
        except SealringError:
            return {"refused": True}

    serve(answer, seconds, confined_first=True)


if __name__ == "__main__":
    main()
