"""What holds for every command: no option without a reader, an example, help that fits, JSON for data."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from commands import commands, commands_said, help_of, lines_shown, parse
from pydantic import BaseModel, Field
from readers import fields_read
from typer._click.exceptions import UsageError
from typer.testing import CliRunner

from sealring.cli.terminal import command as command_module
from sealring.cli.terminal.command import (
    command,
    config_file,
    load_settings,
    same_settings,
    settings_model,
)
from sealring.cli.terminal.host import Host
from sealring.mesh.errors import ConfigError
from sealring.mesh.system.paths import default_config_file

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = commands()
WITH_SETTINGS = {name: one for name, one in COMMANDS.items() if one.section}
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()


@functools.cache
def read_by(name: str) -> set[str]:
    """The settings that the code behind a command reads."""
    declared = WITH_SETTINGS[name]
    model = settings_model(declared.section)
    start = declared.callback
    if name.endswith(" run"):
        start = importlib.import_module(f"sealring.{declared.section}.main").run
    read = fields_read(start, model, stop=Host)
    if name in ("node join", "gateway join"):  # which reach it through the host
        read |= fields_read(
            importlib.import_module(f"sealring.{declared.section}.join").join, model, stop=Host
        )
    return read


@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_a_command_reads_the_settings_that_are_its_options(name: str) -> None:
    """And no others, unless it takes all by `--set`."""
    declared = WITH_SETTINGS[name]
    assert set(declared.fields) == read_by(name) & (set(declared.fields) if declared.every else read_by(name))


@pytest.mark.parametrize("section", command_module.MODELS)
def test_each_setting_is_read_by_a_command(section: str) -> None:
    names = [name for name, one in WITH_SETTINGS.items() if one.section == section]
    assert set[str]().union(*map(read_by, names)) == settings_model(section).model_fields.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_uses_each_of_its_own_options(name: str) -> None:
    function = COMMANDS[name].callback
    parameters = set(inspect.signature(function).parameters)
    used = _names(inspect.unwrap(function))
    if "spec" in used:
        used |= _names(importlib.import_module("sealring.cli.commands.deployment").make_spec)
    assert parameters - used == set()


def _names(function: Any) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_works_and_fits_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = help_of(name)
    assert shown.startswith(f"Usage: sealring {name}")
    example = COMMANDS[name].epilog
    assert example.startswith(f"sealring {name}")
    assert f"Example:\n  {example}\n" in shown
    parse(example.removeprefix("sealring "))
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert shown.index("\nOptions:") < (shown + "\nSettings").index("\nSettings")
    described = [
        one.help
        for one in COMMANDS[name].get_params(SimpleNamespace(help_option_names=["--help"]))
        if not getattr(one, "hidden", False)
    ]
    assert all(described), "every option says what it is for"


NO_COMMANDS = {"carrier", "does not"}
"""A process's title and a sentence."""
PACKAGES = ("cli", "coordinator", "doctor", "edge", "gateway", "mesh", "node", "sealring")
LINES_OF_A_LOG = "logs"


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("root init", ["--key FILE where the new key goes, mode 0600 [required]"]),
        (
            "token create",
            ["--ttl TIME how long it is good for [default: 10m]", "--json print JSON on standard output"],
        ),
        (
            "deploy",
            [
                "--[no-]wait wait until it serves [default: wait]",
                "MODEL name in the nodes' model folders, path, or hub id",
            ],
        ),
        ("logs", ["-n, --lines N last lines of each [default: 20]"]),
    ],
)
def test_the_help_of_a_command_says_all_that_it_takes(
    name: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = [" ".join(line.split()) for line in help_of(name).splitlines()]
    assert [line for line in lines if line not in shown] == [], shown
    assert "--die-with-parent-fd" not in help_of("node run"), "which is nobody's to type"


class Fields(BaseModel):
    """One field of each kind that settings have."""

    name: str = Field(description="a word")
    folder: Path = Field(default_factory=lambda: Path.home() / "x" / "y", description="below home")
    other: Path | None = Field(default=Path("/x"), description="elsewhere")
    files: list[Path] = Field(default=[Path("/a"), Path("/b")], description="some")
    count: int = Field(default=7, description="how many")
    share: float | None = Field(default=0.5, description="how much")
    nothing: str = Field(default="", description="nothing")
    on: bool = Field(default=True, description="whether")


def test_a_setting_is_an_option_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command_module.MODELS, "fields", (__name__, "Fields"))
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Fields=Fields))  # type: ignore[arg-type]
    monkeypatch.setenv("COLUMNS", "80")
    own = typer.Typer(rich_markup_mode=None)

    @command(own, example="x", section="fields", fields=tuple(Fields.model_fields))
    def do(context: typer.Context) -> None: ...

    shown = CliRunner().invoke(own, ["--help"]).output
    lines = [line.split(maxsplit=2) for line in shown.partition("Settings")[2].splitlines()[1:]]
    assert [" ".join(line) for line in lines if line] == [
        "--name TEXT a word",
        "--folder PATH below home [default: ~/x/y]",
        "--other PATH elsewhere [default: /x]",
        "--files PATH some [default: /a, /b]",
        "--count N how many [default: 7]",
        "--share N how much [default: 0.5]",
        "--nothing TEXT nothing",
        "--[no-]on whether",
    ]


@pytest.mark.parametrize(
    ("named", "variable", "there", "found"),
    [
        ("a.toml", "b.toml", True, "a.toml"),
        (None, "b.toml", True, "b.toml"),
        (None, "", True, "own"),
        (None, None, True, "own"),
        (None, None, False, None),
    ],
)
def test_which_settings_file_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: str | None,
    variable: str | None,
    there: bool,
    found: str | None,
) -> None:
    monkeypatch.delenv("SEALRING_CONFIG", raising=False)
    if variable is not None:
        monkeypatch.setenv("SEALRING_CONFIG", variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    own = default_config_file()
    if there:
        own.parent.mkdir(parents=True)
        own.touch()
    expected = own if found == "own" else found and Path(found)
    assert config_file(named and Path(named)) == expected  # type: ignore[arg-type]


def test_a_settings_file_that_cannot_be_looked_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SEALRING_CONFIG", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / ("x" * 300)))  # too long a name, which is not a missing file
    with pytest.raises(ConfigError, match=r"^cannot read .*: File name too long"):
        config_file(None)


def test_every_command_that_prints_data_has_json() -> None:
    missing = []
    for name, one in COMMANDS.items():
        function = inspect.unwrap(one.callback)
        prints = any(said.lstrip("_").startswith("print") for said in _names(function))
        if prints and "as_json" not in inspect.signature(function).parameters:
            missing.append(name)
    assert sorted(missing) == [LINES_OF_A_LOG]


@pytest.mark.parametrize("file", [one for one in TRACKED if one.endswith(".md")])
def test_documents_show_commands_that_exist(file: str) -> None:
    for line in lines_shown(ROOT / file):
        try:
            parse(line.replace("COMPONENT", "node"))
        except UsageError as error:
            pytest.fail(f"{file}: sealring {line}: {error.format_message()}")


def test_messages_name_commands_that_exist() -> None:
    known = {*COMMANDS, *(name.split()[0] for name in COMMANDS), *NO_COMMANDS}
    for file in TRACKED:
        if not file.endswith(".py") or file.split("/")[0] not in PACKAGES:
            continue
        for said in commands_said(ROOT / file):
            assert said in known or said.split()[0] in COMMANDS, f"{file}: sealring {said}"


def test_a_line_that_follows_has_the_same_settings() -> None:
    flags = {"state_dir": "/a b", "models": ["/x", "/y"], "allow_downloads": False, "name": "n"}
    flags["set"] = ["measure_links=true"]
    context: Any = SimpleNamespace(
        meta={"sealring.flags": flags}, find_root=lambda: SimpleNamespace(params={"config": Path("c.toml")})
    )
    line = same_settings(context, "node run", ("state_dir", "models", "allow_downloads"))
    assert line == (
        "sealring --config c.toml node run --state-dir '/a b' --models /x --models /y --no-allow-downloads"
        " --set measure_links=true"
    )


def test_a_setting_from_an_option_is_told_from_a_default(capsys: pytest.CaptureFixture[str]) -> None:
    own = typer.Typer()
    found: list[Any] = []

    @own.callback()
    def root(config: Path | None = None) -> None: ...

    @command(own, example="x", section="cli", fields=("gateway", "timeout"))
    def shown(context: typer.Context) -> None:
        found.append(load_settings(context))

    CliRunner().invoke(own, ["shown", "--timeout", "2m"])
    assert (found[0].settings.timeout, found[0].origin["timeout"]) == (120, "flag --timeout")
    assert found[0].origin["gateway"] == "default"
    assert "with its unit" in str(CliRunner().invoke(own, ["shown", "--timeout", "120"]).exception)


GIVEN = [
    ("node run", ["prefix_disk=20GB"], {"prefix_disk": 20 * 10**9}),
    ("node run", ["measure_links=yes", "prefix_disk=0B"], {"measure_links": True, "prefix_disk": 0}),
    ("node join", ["enclave_helper=~/helper"], {"enclave_helper": Path.home() / "helper"}),
    ("node run", ['models=["/a,b"]'], {"models": [Path("/a,b")]}),
    ("coordinator run", ["heartbeat_timeout=2s", "heartbeat_timeout=3s"], {"heartbeat_timeout": 3}),
    ("gateway run", ["cors_origins=https://a,https://b"], {"cors_origins": ["https://a", "https://b"]}),
]
REFUSED = [
    ("heartbeat_timout=3s", "UNKNOWN_SETTING", "did you mean heartbeat_timeout?"),
    ("heartbeat-timeout=3s", "UNKNOWN_SETTING", "did you mean heartbeat_timeout?"),
    ("heartbeat_timeout=3", "BAD_SETTING", "with its unit"),
    ("heartbeat_timeout=2h", "BAD_SETTING", "from flag --set heartbeat_timeout, is refused: input should be"),
    ("heartbeat_timeout", "BAD_SETTING", "--set KEY=VALUE"),
    ("roster_key_files=", "", ""),
    ("roster_key_files=[", "BAD_SETTING", "flag --set roster_key_files is not JSON"),
    ("state_dir=", "BAD_SETTING", "it is empty"),
    ("=3", "UNKNOWN_SETTING", "known are"),
]


def settings_of(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> Any:
    """What the command's code gets."""
    found: list[Any] = []
    group, _, leaf = name.partition(" ")
    own = typer.Typer()
    declared = WITH_SETTINGS[name]

    @own.callback()
    def root(config: Path | None = None) -> None: ...

    @command(own, leaf, example="x", section=group, fields=declared.fields, every=declared.every)
    def shown(context: typer.Context) -> None:
        found.append(load_settings(context))

    monkeypatch.delenv("SEALRING_CONFIG", raising=False)
    done = CliRunner().invoke(own, [leaf, *words])
    if done.exception is not None:
        raise done.exception
    return found[0]


@pytest.mark.parametrize(("name", "said", "expected"), GIVEN)
def test_any_setting_of_a_component_is_set_by_its_name(
    name: str, said: list[str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for one in said for word in ("--set", one)]
    loaded = settings_of(monkeypatch, name, *words)
    assert {one: getattr(loaded.settings, one) for one in expected} == expected
    assert {loaded.origin[one] for one in expected} == {f"flag --set {one}" for one in expected}


@pytest.mark.parametrize(("said", "reason", "words"), REFUSED)
def test_what_is_set_by_name_is_checked_as_the_file_is(
    said: str, reason: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reason:
        assert settings_of(monkeypatch, "coordinator run", "--set", said).settings.roster_key_files == []
        return
    with pytest.raises(ConfigError) as caught:
        settings_of(monkeypatch, "coordinator run", "--set", said)
    assert caught.value.reason == reason
    assert words in f"{caught.value}"


def test_an_option_is_stronger_than_what_is_set_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALRING_NODE_LISTEN", "127.0.0.1:1")
    said = ["--set", "listen=127.0.0.1:2"]
    assert settings_of(monkeypatch, "node run", *said).settings.listen == "127.0.0.1:2"
    both = [*said, "--listen", "127.0.0.1:3"]
    assert settings_of(monkeypatch, "node run", *both).settings.listen == "127.0.0.1:3"
