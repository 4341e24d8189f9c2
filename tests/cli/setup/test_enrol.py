"""The input of the process that joins for a service, and the bounds of its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.setup.choices import Wishes
from sealring.cli.setup.enrol import enrol_as
from sealring.mesh.errors import ConfigError, Internal, Unavailable
from sealring.mesh.member import JoinToken

NOWHERE = JoinToken.generate(bytes(32), ["127.0.0.1:1"]).format()
SHOWS = """#!/bin/sh
umask > "$0.told"; pwd >> "$0.told"; env >> "$0.told"; echo "$*" >> "$0.told"; cat > "$0.given"
echo '{"result": {"name": "mac"}}'
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a program the Python that runs the process."""

    def use(script: str | None) -> Path:
        program = tmp_path / "python"
        if script is not None:
            program.write_text(script)
            program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return program

    return use


def test_it_gets_the_secrets_on_standard_input_and_nothing_else_of_ours(tmp_path: Path, python: Any) -> None:
    """It may run as another account."""
    program = python(SHOWS)
    found = enrol_as(None, tmp_path, {"a": 1}, Wishes(name="two", models=[Path("/m")]), "sr2.x")
    assert found == {"name": "mac"}
    umask, folder, *variables, command = Path(f"{program}.told").read_text().splitlines()
    assert (umask, folder, command) == ("0077", "/", "-P -m sealring.cli.setup.enrol")
    names = {one.partition("=")[0] for one in variables} - {"PWD", "OLDPWD", "SHLVL", "_"}
    assert names == {"HOME", "PATH", "LANG"}
    assert f"HOME={tmp_path / 'node'}" in variables
    given = json.loads(Path(f"{program}.given").read_text())
    assert (given["token"], given["wishes"]["models"], given["said"]) == ("sr2.x", ["/m"], {"a": 1})


@pytest.mark.parametrize("script", ["#!/bin/sh\nexec yes\n", "#!/bin/sh\nexit 1\n"])
def test_no_more_is_read_of_it_than_anybody_needs(tmp_path: Path, python: Any, script: str) -> None:
    """It runs as another account, which its owner need not trust."""
    python(script)
    with pytest.raises(Internal):
        enrol_as(None, tmp_path, {}, Wishes(), "a token")


def test_an_account_that_cannot_run_python_is_named(tmp_path: Path, python: Any) -> None:
    python(None)
    with pytest.raises(ConfigError) as raised:
        enrol_as(None, tmp_path, {}, Wishes(), "a token")
    assert raised.value.reason == "NO_PROGRAM"
    assert raised.value.message.startswith("the account of this process cannot run ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as another account")
def test_the_process_is_the_accounts(python: Any) -> None:
    folder = Path("/tmp")  # nobody may enter those of a test
    python(None)
    program = folder / f"sealring-test-{os.getpid()}"
    program.write_text("""#!/bin/sh\necho "{\\"result\\": {\\"ids\\": \\"$(id -u) $(id -G)\\"}}"\n""")
    program.chmod(0o755)
    try:
        sys.executable = str(program)
        user, group = (
            subprocess.check_output(["id", "-u", "nobody"]),
            subprocess.check_output(["id", "-g", "nobody"]),
        )
        expected = f"{int(user)} {int(group)}"
        assert enrol_as("nobody", folder, {}, Wishes(), "a token") == {"ids": expected}
    finally:
        program.unlink()


def test_an_error_of_the_real_process_comes_over_whole(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as raised:
        enrol_as(None, tmp_path, {"software_identity_allowed": True}, Wishes(), NOWHERE)
    assert "127.0.0.1:1" in raised.value.message
    given = b" " * ((1 << 20) + 1) + b"{}"
    command = [sys.executable, "-P", "-m", "sealring.cli.setup.enrol"]
    assert subprocess.run(command, input=given, capture_output=True, check=False).returncode == 1
