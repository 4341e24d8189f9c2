"""The commands of `sealring`, and the command lines that texts show."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer._click.exceptions import BadOptionUsage, MissingParameter, NoArgsIsHelpError
from typer.main import get_command

from sealring.cli.main import app

_SHOWN = re.compile(r"(?:^ *|[`&|;>] *|\$ ?|bin/)sealring ((?:[^`#\n\\&|]|\\\n)+)", re.MULTILINE)
_SAID = re.compile(r"(?:^|[`:;,(]|\b(?:see|run|then|type)) ?sealring ([a-z][a-z-]*(?: [a-z][a-z-]*)?)")


ROOT: Any = get_command(app)


def commands() -> dict[str, Any]:
    """Every command by its words, for example "node join"."""
    return dict(_commands(ROOT, ()))


def _commands(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from _commands(one, (*words, name))
        else:
            yield " ".join((*words, name)), one


def help_of(name: str) -> str:
    """What `sealring NAME --help` prints."""
    command = ROOT
    context = command.make_context("sealring", [], resilient_parsing=True)
    for word in name.split():
        command = command.commands[word]
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
    text: str = command.get_help(context)
    return text


def parse(line: str) -> None:
    """Has the command line `sealring LINE` parsed and not run; arguments may be missing.

    Raises typer's UsageError for a command, an option or a value that there is not.
    """
    words = shlex.split(line)
    command = ROOT
    context = None
    try:
        while True:
            context = command.make_context("sealring", words, parent=context)
            if not hasattr(command, "commands"):
                return
            _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    except (MissingParameter, NoArgsIsHelpError):
        return
    except BadOptionUsage as error:
        if "requires an argument" not in error.message:
            raise


def lines_shown(file: Path) -> list[str]:
    """What stands behind `sealring` at the start of a line or of a piece of code."""
    lines = [" ".join(found.replace("\\\n", " ").split()) for found in _SHOWN.findall(file.read_text())]
    return [line.partition(" > ")[0] for line in lines]


def commands_said(file: Path) -> set[str]:
    """The one or two words behind `sealring` in the strings of a source file that are no docstrings."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    docstrings = {id(one.value) for one in nodes if isinstance(one, ast.Expr)}
    strings = [
        one.value
        for one in nodes
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in docstrings
    ]
    return {found for text in strings for found in _SAID.findall(text)}
