from __future__ import annotations

import shutil
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sealring.cli.local import processes
from sealring.cli.main import app
from sealring.cli.service.launchd import (
    COMPONENTS,
    DRAIN_SECONDS,
    Service,
    newsyslog_rules,
    property_list,
    render,
    write_examples,
)
from sealring.mesh.errors import InvalidInput

EXAMPLES = Path(__file__).resolve().parents[3] / "deploy" / "launchd"
NAMES = [f"org.sealring.{component}.{kind}" for component in COMPONENTS for kind in ("plist", "conf")]


KNOWN_KEYS: dict[str, tuple[type, ...]] = {
    "Label": (str,),
    "UserName": (str,),
    "GroupName": (str,),
    "ProgramArguments": (list,),
    "WorkingDirectory": (str,),
    "EnvironmentVariables": (dict,),
    "RunAtLoad": (bool,),
    "KeepAlive": (bool, dict),
    "ThrottleInterval": (int,),
    "ExitTimeOut": (int,),
    "ProcessType": (str,),
    "Umask": (int,),
    "SoftResourceLimits": (dict,),
    "HardResourceLimits": (dict,),
    "StandardOutPath": (str,),
    "StandardErrorPath": (str,),
}
KNOWN_NESTED: dict[str, set[str]] = {
    "KeepAlive": {"SuccessfulExit", "Crashed"},
    "SoftResourceLimits": {"NumberOfFiles", "Core"},
    "HardResourceLimits": {"NumberOfFiles", "Core"},
    "EnvironmentVariables": {"HOME", "PATH", "LANG"},
}


@pytest.fixture(params=COMPONENTS)
def service(request: pytest.FixtureRequest) -> Service:
    return Service(request.param)


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_are_what_is_generated(tmp_path: Path, name: str) -> None:
    write_examples(tmp_path)
    assert (EXAMPLES / name).read_bytes() == (tmp_path / name).read_bytes()


def test_there_are_no_other_examples() -> None:
    assert {one.name for one in EXAMPLES.iterdir()} == {*NAMES, "README.md"}


def test_what_launchd_needs_is_there(service: Service) -> None:
    content = property_list(service)
    assert content["ProgramArguments"][0].startswith("/")
    words = ["proxy", "--listen"] if service.component == "proxy" else [service.component, "run"]
    assert content["ProgramArguments"][1:3] == words
    assert content["KeepAlive"] == {"SuccessfulExit": False}
    assert content["ProcessType"] == "Interactive"
    assert content["ExitTimeOut"] > DRAIN_SECONDS
    assert content["Umask"] == 63
    assert content["UserName"] == "_sealring"
    assert set(content["EnvironmentVariables"]) == {"HOME", "PATH", "LANG"}
    assert content["EnvironmentVariables"]["HOME"] == content["WorkingDirectory"] == service.folder
    assert b"<integer>63</integer>" in render(service)


def test_every_key_and_type_is_one_that_launchd_knows(service: Service) -> None:
    """launchd.plist(5). launchd and plistlib take unknown and misspelt keys in silence."""
    content = property_list(service)
    for key, value in content.items():
        assert type(value) in KNOWN_KEYS[key], key
        if isinstance(value, dict):
            assert set(value) <= KNOWN_NESTED[key]
    assert all(isinstance(argument, str) for argument in content["ProgramArguments"])


@pytest.mark.parametrize(
    "fields",
    [
        {"component": "nod"},
        {"component": "node", "user": "a b"},
        {"component": "node", "user": "root\n"},
        {"component": "node", "program": "sealring"},
        {"component": "node", "logs": "/var/log/my logs"},
        {"component": "node", "config": "relative.toml"},
    ],
)
def test_bad_services_are_refused(fields: dict[str, str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        Service(**fields)
    assert caught.value.reason == "BAD_SERVICE"


def test_rules_have_newsyslogs_columns(service: Service) -> None:
    heading, line = newsyslog_rules(service).splitlines()
    assert heading.startswith("#")
    name, owner, mode, count, size, when, flags = line.split()
    assert name == f"/var/log/sealring/{service.component}.log"
    assert owner == "_sealring:wheel"
    assert int(mode, 8) == 0o600
    assert int(count) == 7
    assert int(size) == 10240
    assert (when, flags) == ("*", "JN")


INSTALLED = Path(__file__).parent / "installed"
"""`arguments.txt` has what property lists of 62e62ae8 and 4c9b52ca hold, `settings.toml` every setting of
62e62ae8 as its installation writes them."""


@pytest.mark.parametrize("line", (INSTALLED / "arguments.txt").read_text("utf-8").splitlines())
def test_a_service_that_an_earlier_release_installed_starts_with_its_settings(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read up to the component's own program, for which a recorder stands in."""
    ran: list[Any] = []
    config = tmp_path / "settings.toml"
    shutil.copyfile(INSTALLED / "settings.toml", config)
    words = line.replace("/var/log/sealring", str(tmp_path)).replace("/var/db/sealring/config/", "").split()
    words = [str(config) if word.endswith(".toml") else word for word in words]
    monkeypatch.delenv("SEALRING_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sealring.mesh.system.lock.require_own_state", lambda *_, **how: None)
    monkeypatch.setattr(processes, "run_daemon", lambda *of, **how: ran.append((*of, how)))
    done = CliRunner().invoke(app, words)
    assert (done.exception, done.exit_code) == (None, 0)
    ((component, serve, how),) = ran
    (settings,) = (one.cell_contents for one in serve.__closure__ if hasattr(one.cell_contents, "state_dir"))
    assert component in words
    assert how["log_file"] == tmp_path / f"{component}.log"
    assert settings.state_dir == Path(f"/var/db/sealring/{component}")
    if "--config" in words:
        said = tomllib.loads(config.read_text("utf-8"))[component]
        assert {name: as_said(getattr(settings, name)) for name in said} == said


def as_said(value: Any) -> Any:
    return str(value) if isinstance(value, Path | StrEnum) else value
