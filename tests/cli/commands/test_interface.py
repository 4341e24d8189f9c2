"""What scripts type: every command with its arguments and options, their bounds and their defaults."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commands import ROOT, commands

from sealring.cli.main import Commands

KNOWN = Path(__file__).with_name("interface.txt")


def interface() -> Iterator[str]:
    """A line for each command, and one for each of its parameters but its settings."""
    for name, command in sorted(commands().items()):
        yield name
        for one in command.params:
            yield f"    {', '.join(_described(one))}"


def _described(one: Any) -> Iterator[str]:
    argument = one.param_type_name == "argument"
    yield one.metavar if argument else " ".join([*one.opts, *one.secondary_opts])
    if one.required:
        yield "required"
    if one.multiple or one.nargs != 1:
        yield "repeated"
    if one.hidden:
        yield "hidden"
    parser = one.type_descriptor.parameter_info.parser
    ends = inspect.getclosurevars(parser).nonlocals if parser else {"least": one.min, "most": one.max}
    least, most = (ends.get(name) for name in ("least", "most"))
    if least is not None or most is not None:
        yield "from {} to {}".format(*("any" if end is None else end for end in (least, most)))
    if one.default not in (None, "", []):
        yield f"default {one.default}"


def test_commands_take_what_they_took() -> None:
    """A change is one for everybody who wrote a script; where it is meant, it belongs in interface.txt."""
    assert list(interface()) == KNOWN.read_text().splitlines()


def test_each_module_is_a_command_or_a_group_that_shows_its_commands() -> None:
    folder = Path(__file__).parents[3] / "cli" / "commands"
    modules = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert set(Commands()) == modules | {"deploy"}
    groups = {name: one for name, one in ROOT.commands.items() if hasattr(one, "commands")}
    assert {name for name, one in groups.items() if not one.no_args_is_help} == set()
