"""What scripts type: every command with its arguments and options, their bounds and their defaults."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commands import ROOT, commands

from sealring.cli.main import Commands
from sealring.cli.setup.choices import PROXY_PORT
from sealring.cli.terminal.command import MODELS, settings_model
from sealring.coordinator.planning.specs import KEEP_ALIVE_SECONDS
from sealring.mesh.units import show_duration, show_size
from sealring.node.daemon.engines import USABLE_SHARE
from sealring.node.engine import DEFAULT_CONTEXT_SIZE, RowParameters
from sealring.node.stored import policy
from sealring.v1 import inference_pb2

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


def stated() -> Iterator[tuple[str, str]]:
    """The places at which a help text states a default with a number by hand, and these defaults.

    `Command` adds other defaults to help texts from the code itself.
    """
    texts = [
        (f"{name} {one.opts[0]}", one.help or "") for name, each in commands().items() for one in each.params
    ]
    for section in MODELS:
        fields = settings_model(section).model_fields.items()
        texts += [(f"[{section}] {name}", field.description or "") for name, field in fields]
    for where, text in texts:
        for default in re.findall(r"\[default: ([^]]*)\]", text):
            if re.search(r"(?<![\d.])\d+(?![\d.])|quarter|tenth", default):
                yield where, default


def test_a_default_that_a_help_text_states_by_hand_is_the_one_in_effect() -> None:
    """Each from the code that chooses it; a default of words says how it is chosen."""
    in_effect = {
        "chat --temperature": f"{inference_pb2.Sampling().temperature:g}",
        "chat --repetition-penalty": f"{RowParameters().repetition_penalty:g}",
        "chat --repetition-context-size": f"{DEFAULT_CONTEXT_SIZE}",
        **dict.fromkeys(
            (f"{each} --keep-alive" for each in ("deploy", "deployment create", "deployment plan")),
            show_duration(KEEP_ALIVE_SECONDS),
        ),
        "join --port": f"{PROXY_PORT} if free",
        "[node] memory_limit": {0.75: "three quarters of all"}[USABLE_SHARE],
        "[node] prefix_disk": f"the lesser of {show_size(policy.MOST)} and a "
        f"{({10: 'tenth'})[policy.SHARE]} of the free disk",
    }
    assert dict(stated()) == in_effect
