"""`sealring bugreport`: one archive with the logs, states and versions that a helper needs."""

from __future__ import annotations

import asyncio
import io
import json
import re
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from sealring.cli.calls.members import look
from sealring.cli.calls.operator import run_admin
from sealring.cli.commands.doctor import examine_machine
from sealring.cli.terminal.command import ADMIN, command, load_settings
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import cannot_write
from sealring.cli.terminal.output import progress, say
from sealring.mesh.errors import SealringError
from sealring.mesh.system.files import write_atomic

app = typer.Typer()

_LOG_BYTES = 4 << 20
"""The part of each log that is included, from its end."""

_SECRET = re.compile(
    r"sr2\.[a-z2-7]{52}\.[a-z2-7.]+"  # join tokens
    r"|srk_[a-z2-7]{16}_[a-z2-7]{52}"  # API keys
    r"|(?i:bearer) +\S+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
"""Secrets to look for in a report, although none of them is ever written to a log or shown in a status."""


@command(
    app,
    example="sealring bugreport --output report.tar.gz",
    section="cli",
    fields=(*ADMIN, "gateway", "gateway_ca", "api_key_file"),
    rich_help_panel="Look",
)
def bugreport(
    context: typer.Context,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="where to write it [default: sealring-bugreport-TIME.tar.gz]"),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="state folder of a local cluster [default: those that run, and services]"
        ),
    ] = None,
) -> None:
    """Pack logs, status, versions, metrics and the doctor's report into one archive.

    It holds no key, no token, no prompt and no answer. It names machines, addresses and models.
    """
    parts: dict[str, Callable[[], str]] = {
        "doctor.json": lambda: _json(_doctor(context)),
        "status.json": lambda: _json(run_admin(context, look)),
        "metrics.txt": lambda: _metrics(context),
        "versions.json": lambda: _json(_versions()),
        "machine.json": lambda: _json(_machine(context)),
    }
    found: dict[str, str] = {}
    missing: list[str] = []
    with progress("collecting", quiet=True) as shown:
        for name, get in parts.items():
            shown.update(f"collecting {name}")
            try:
                found[name] = get()
            except SealringError as error:
                missing.append(f"{name}: {error} [{error.reason}]")
        shown.update("collecting the logs")
        try:
            found |= _logs(state_dir)
        except SealringError as error:
            missing.append(f"logs: {error} [{error.reason}]")
    for line in missing:
        say(f"left out: {line}")
    found["missing.txt"] = "\n".join(missing)
    moment = time.strftime("%Y%m%d-%H%M%S")
    file = output or Path(f"sealring-bugreport-{moment}.tar.gz")
    try:
        write_atomic(file, pack(f"sealring-bugreport-{moment}", found))
    except OSError as error:
        raise cannot_write(file, error) from None
    say(f"wrote {file}")


def pack(folder: str, files: dict[str, str]) -> bytes:
    """A compressed archive of one folder, without what looks like a secret."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in sorted(files.items()):
            data = _SECRET.sub("(left out)", text).encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _json(value: Any) -> str:
    return json.dumps(value, indent=1)


def _doctor(context: typer.Context) -> Any:
    from sealring.doctor.report import plain

    return plain(examine_machine(context, None))


def _versions() -> dict[str, str]:
    import platform
    from importlib.metadata import distributions

    installed = {one.metadata["Name"]: one.version for one in distributions()}
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        **dict(sorted(installed.items())),
    }


def _machine(context: typer.Context) -> dict[str, str]:
    from sealring.doctor.hardware import machine

    return machine(host_of(context).system())


def _metrics(context: typer.Context) -> str:
    """The metrics of every gateway in the settings. Raises SealringError if one does not answer."""
    from sealring.cli.calls.gateway import gateway_access, inference

    loaded = load_settings(context)
    settings, access = loaded.settings, gateway_access(loaded)

    async def ask(address: str) -> str:
        async with inference(address, **access) as client:
            return f"# gateway {address}\n{await client.metrics(seconds=settings.timeout)}"

    return "\n".join(asyncio.run(ask(address)) for address in settings.gateway)


def _logs(state_dir: Path | None) -> dict[str, str]:
    from sealring.cli.service.logfiles import find_logs

    found = {}
    for name, path in find_logs(state_dir, []).items():
        try:
            with path.open("rb") as opened:
                opened.seek(max(0, path.stat().st_size - _LOG_BYTES))
                found[f"logs/{name}.log"] = opened.read(_LOG_BYTES).decode("utf-8", "replace")
        except OSError as error:
            found[f"logs/{name}.log"] = f"(cannot be read: {error.strerror})"
    return found
