from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from guarded import modules

from sealring.cli.main import Commands
from sealring.cli.terminal import exit_codes
from sealring.mesh import errors
from sealring.mesh.errors import ConfigError, SealringError

UNUSABLE = "(hint: check its permissions, the free space, and how it is spelled) [FILE_UNUSABLE]"
HEAVY = sorted(
    modules(
        "grpc",
        "pydantic",
        "cryptography",
        "structlog",
        "rich",
        "mlx",
        "numpy",
        "starlette",
        "google.protobuf",
    )
)


def test_help_imports_nothing_heavy_and_looks_for_no_garbage() -> None:
    code = (
        "import gc, sys; sys.argv = ['sealring', '--help']\n"
        "try:\n    from sealring.cli.main import main; main()\nexcept SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if sys.modules.get(name)], gc.get_stats()[2], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    assert "Usage: sealring" in done.stdout
    assert done.stderr.startswith("[] {'collections': 0,")


def test_keys_are_listed_without_cryptography(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.argv = ['sealring', 'key', 'list', '--state-dir', {str(tmp_path)!r}]\n"
        "try:\n    from sealring.cli.main import main; main()\nexcept SystemExit: pass\n"
        f"print([name for name in {sorted(modules('cryptography', 'grpc'))} if name in sys.modules], "
        "file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.startswith("id ")
    assert done.stderr.endswith("[]\n")


def test_ctrl_c_while_it_is_imported_ends_it_without_a_word() -> None:
    code = (
        "import os, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # who starts the tests may ignore it
        "class Interrupting:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting)\n"
        "runpy.run_module('sealring.cli', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_the_version_is_that_of_the_package(here: Any) -> None:
    done = here("--version")
    assert (done.status, done.out) == (0, f"{version('sealring')}\n")


def test_only_what_there_is_is_a_command() -> None:
    assert len(Commands()) == len(list(Commands())) == len(set(Commands()))
    with pytest.raises(KeyError):
        Commands()["nonsense"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (ConfigError("x", hint="y", reason="Z"), 7, "error: x (hint: y) [Z]\n"),
        (OSError(errno.ENOSPC, "No space"), 7, f"error: the disk cannot be used: No space {UNUSABLE}\n"),
        (
            FileNotFoundError(errno.ENOENT, "No"),
            7,
            f"error: the working folder cannot be used: No {UNUSABLE}\n",
        ),
        (PermissionError(errno.EACCES, "No", "/a b"), 7, f"error: /a b cannot be used: No {UNUSABLE}\n"),
        (
            ValueError("SECRET"),
            1,
            "error: a fault of sealring: ValueError (hint: set SEALRING_DEBUG=1 for its trace) [FAULT]\n",
        ),
    ],
)
def test_whatever_a_command_raises_is_one_line(
    here: Any, coordinator: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, said: str
) -> None:
    coordinator.answers["ListNodes"] = error
    done = here("status")
    assert (done.status, done.out, done.err) == (status, "", said)
    traced = here("status", SEALRING_DEBUG="1").err
    assert (type(error).__name__ in traced and "Traceback" in traced) == isinstance(error, Exception)
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    here("status")
    assert os.environ["GRPC_VERBOSITY"] == "DEBUG"
    monkeypatch.delenv("GRPC_VERBOSITY")
    here("status")
    assert os.environ["GRPC_VERBOSITY"] == "NONE"
    assert os.environ["PYDANTIC_DISABLE_PLUGINS"] == "__all__"


def test_completion_knows_the_commands(sealring: Any) -> None:
    environment = {"_SEALRING_COMPLETE": "complete_bash", "COMP_WORDS": "sealring de", "COMP_CWORD": "1"}
    done = sealring(**environment)
    assert {"demo", "deploy", "deployment"} <= set(done.out.split())


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["chat", "hello", "--gateway", "127.0.0.1:1", "--root-sha256", "ab" * 32], 10),
        (["chat", "hello", "--operator", "x" * 5000], 7),
        (["deploy", "x" * 5000], 7),
        (["deploy", "\udcff"], 2),
        (["node", "join", "--help"], 0),
    ],
)
def test_words_of_any_length_and_letter_are_refused_or_taken(
    here: Any, arguments: list[str], status: int
) -> None:
    done = here(*arguments)
    assert done.status == status, done.err
    assert "Traceback" not in done.err
    assert "FAULT" not in done.err


def test_who_stops_reading_is_no_failure(home: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "sealring.cli", "config", "show", "--json"]
    with os.fdopen(writer, "wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("command", "status"),
    [(["config", "show"], 0), (["token", "list", "--operator", "none"], 7)],
)
def test_what_is_said_to_nobody_changes_no_exit_status(home: Path, command: list[str], status: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as err:
        done = subprocess.run(
            [sys.executable, "-m", "sealring.cli", *command],
            stdout=subprocess.DEVNULL,
            stderr=err,
            timeout=200,
            check=False,
            cwd=home,
            env=os.environ | {"HOME": str(home)},
        )
    assert done.returncode == status


TREE = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, SealringError)]


@pytest.mark.parametrize("kind", TREE)
def test_every_error_has_a_documented_status(kind: type[SealringError]) -> None:
    status = exit_codes.exit_code(kind("x"))
    assert f"| {status} |" in (exit_codes.__doc__ or "")
    assert kind.code in exit_codes.BY_CODE
