"""The `sealring` command. Only what is asked for is imported: each start would pay for all other commands."""

from __future__ import annotations

import errno
import functools
import importlib
import io
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group_from_info
from typer.models import TyperInfo

from sealring.cli.terminal import exit_codes
from sealring.cli.terminal.host import Host
from sealring.cli.terminal.output import say
from sealring.mesh.errors import ConfigError, InvalidInput, SealringError
from sealring.mesh.system.start import collect_seldom, hide_rich

_NAMES = (
    *("demo", "up", "join", "deploy", "chat", "proxy", "connect"),
    *("status", "dashboard", "doctor", "logs", "bugreport", "trace", "usage"),
    *("coordinator", "node", "gateway", "deployment", "model", "import", "cache"),
    *("token", "key", "operator", "roster", "root", "receipt"),
    *("audit", "service", "config"),
)
"""Commands and groups of them in the order of the help; each has the module of its name, and `deploy` is
`deployment.short`."""
_PLACES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS), "the disk"),
    errno.ENOENT: "the working folder",
}
"""What errors mean that name no file: a write, and a path relative to a folder that was removed."""

_OTHERS_WORDS = {
    "ls": ("model", "list"),
    "ps": ("deployment", "list"),
    "pull": ("model", "pull"),
    "rm": ("model", "remove"),
    "show": ("model", "fits"),
}
"""Commands of ollama that do here what these do."""

_OTHERS_STEPS = {
    "run": "sealring deploy MODEL, then sealring chat",
    "stop": "sealring deployment delete NAME; or deploy it with --on-demand, which unloads it by itself",
    "serve": "sealring up",
}
"""Commands of ollama that take other steps here."""

_PARTS = "Parts of a cluster"
_COMMAND_WIDTH = 26


class Commands(Mapping[str, Any]):
    """Commands and groups by name; each is made when it is first asked for."""

    def __getitem__(self, name: str) -> Any:
        if name not in _NAMES:
            raise KeyError(name)
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


@functools.cache
def _command(name: str) -> Any:
    if name == "deploy":
        one = importlib.import_module("sealring.cli.commands.deployment").short
    else:
        one = importlib.import_module(f"sealring.cli.commands.{name}").app
    group = get_group_from_info(
        TyperInfo(one), pretty_exceptions_short=False, rich_markup_mode=None, suggest_commands=True
    )
    return group if group.name else group.commands[name]


class Sections(TyperGroup):
    """Lists its commands in sections, by their help panels."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        commands: Any = Commands()  # to which nobody adds
        self.commands = commands

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command for the first of `args`, also in ollama's words."""
        word = args[0] if args else ""
        if word in _OTHERS_STEPS:
            raise InvalidInput(
                f"there is no command {word}", hint=_OTHERS_STEPS[word], reason="COMMAND_UNKNOWN"
            )
        found: tuple[str | None, Any, list[str]] = super().resolve_command(
            ctx, [*_OTHERS_WORDS.get(word, args[:1]), *args[1:]]
        )
        return found

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes a section per help panel, in the order in which they come first."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            found: Any = self.get_command(ctx, name)
            text = found.get_short_help_str(formatter.width)
            sections.setdefault(found.rich_help_panel or _PARTS, []).append((name, text))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    name="sealring",
    cls=Sections,
    help="One language model over several machines: sealed activations, signed membership.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("sealring"))
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            help="settings file, TOML [default: SEALRING_CONFIG, then the user's own]", metavar="FILE"
        ),
    ] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Options before the command. Without one it says where things stand and what to type next."""
    if context.invoked_subcommand is None:
        from sealring.cli.local.standing import standing
        from sealring.cli.terminal.command import config_file
        from sealring.cli.terminal.host import host_of
        from sealring.cli.terminal.output import print_data

        for what, does in standing(host_of(context), config_file(config)):
            print_data(f"  {what:<{_COMMAND_WIDTH}}  {does}" if does else what)
        print_data(f"  {'sealring --help':<{_COMMAND_WIDTH}}  all commands")


def main(arguments: Sequence[str] | None = None, host: Host | None = None) -> None:
    """Runs the command line on `host` and turns what it raises into one line and an exit status.

    `arguments` are by default those of this process, `host` this machine.
    """
    collect_seldom()
    hide_rich()
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"  # looking for any reads each installed package
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core would write to standard error as it likes
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack a character of an answer or a path
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _require_text(sys.argv[1:] if arguments is None else arguments)
        app(arguments, prog_name="sealring", standalone_mode=True, obj=host)
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)
    except Exception as error:
        _debug()
        known = _known(error)
        if known is None:
            kind = type(error).__name__
            say(f"error: a fault of sealring: {kind} (hint: set SEALRING_DEBUG=1 for its trace) [FAULT]")
            sys.exit(exit_codes.FAULT)
        say(f"error: {known} [{known.reason}]")
        sys.exit(exit_codes.exit_code(known))


def _require_text(arguments: Sequence[str]) -> None:
    """Raises InvalidInput (BAD_UTF8) for arguments that no message could hold."""
    for number, one in enumerate(arguments, 1):
        try:
            one.encode()
        except UnicodeEncodeError:
            raise InvalidInput(
                f"argument {number} is not text in UTF-8",
                hint="check the character set of the terminal (LANG) or of the script",
                reason="BAD_UTF8",
            ) from None


def _known(error: Exception) -> SealringError | None:
    """The error that the user is shown; None for a fault of the program.

    A disk that is full, or a file that may not be read, is the system's fault wherever it is met.
    """
    if isinstance(error, SealringError):
        return error
    if not isinstance(error, OSError):
        return None
    named = error.filename is not None
    place = os.fsdecode(error.filename)[:256] if named else _PLACES.get(error.errno or 0, "")
    if place:
        return ConfigError(
            f"{place} cannot be used: {error.strerror}",
            hint="check its permissions, the free space, and how it is spelled",
            reason="FILE_UNUSABLE",
        )
    return None


def _debug() -> None:
    if os.environ.get("SEALRING_DEBUG"):
        traceback.print_exc()
