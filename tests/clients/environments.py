"""Environments of programs, load tools and frameworks that others wrote: `environments.py [NAME...]`.

They want other versions than Sealring does. Without names all but `newest` are made, and left alone until
their list changes. What cannot be installed is a row of the table in docs/clients.md and a failed test, and
the next run tries again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

LISTS = Path(__file__).resolve().parent
MADE = LISTS.parents[1] / "build" / "clients"
NEWEST = ("openai", "anthropic", "ollama")


def run(*command: str | Path, **environment: str) -> str:
    """What it prints.

    Raises:
        OSError, CalledProcessError: it is not there, or fails.
    """
    variables = os.environ | environment
    return subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def environment(folder: Path, *arguments: str | Path) -> None:
    """A Python in which pip installs these."""
    run(sys.executable, "-m", "venv", folder)
    pip(folder, *arguments)


def pip(folder: Path, *arguments: str | Path) -> None:
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def frameworks() -> None:
    environment(MADE, "-r", LISTS / "requirements.txt")


def newest() -> None:
    """In whichever versions there are today, which it says."""
    folder = MADE / "newest"
    environment(folder, "--upgrade", *NEWEST)
    installed = run(folder / "bin" / "python", "-m", "pip", "list", "--disable-pip-version-check")
    for line in installed.splitlines():
        if line.startswith(tuple(f"{name} " for name in NEWEST)):
            say(line)


def programs() -> None:
    """From npm, with a Node of theirs. No lock file, which would name where packages lie."""
    home = MADE / "npm"
    home.mkdir(parents=True, exist_ok=True)
    node = "node-" + run("node", "-p", "process.platform + '-' + process.arch").strip()
    path = f"{MADE / 'node_modules' / node / 'bin'}{os.pathsep}{os.environ['PATH']}"
    install = partial(
        run,
        *("npm", "install", "--prefix", MADE, "--no-save", "--no-package-lock", "--no-audit", "--no-fund"),
        *("--loglevel=error", f"{node}@{(LISTS / 'node.txt').read_text('utf-8').strip()}"),
        PATH=path,
        HOME=str(home),
    )
    install()
    install(*(LISTS / "programs.txt").read_text("utf-8").split())


def beside(name: str) -> None:
    """Without dependencies: the lists have what is imported."""
    environment(MADE / name, "--no-deps", "-r", LISTS / f"{name}.txt")


def vllm() -> None:
    """vLLM is built for Linux alone. `bench serve` is a client, in Python: on any system it does without the
    kernels (0.8 GB)."""
    only = ("--no-deps", "--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64", "--upgrade")
    pip(MADE / "load", *only, "--target", MADE / "vllm", "-r", LISTS / "vllm.txt")
    for kernel in (MADE / "vllm").rglob("*.so"):
        kernel.unlink()


# By name: its maker, the file that says that it is made, and its lists.
ALL: dict[str, tuple[Callable[[], None], Path, list[Path]]] = {
    "frameworks": (frameworks, MADE / ".ready", [LISTS / "requirements.txt"]),
    "programs": (programs, MADE / ".programs", [LISTS / "programs.txt", LISTS / "node.txt"]),
    **{
        name: (partial(beside, name), MADE / name / ".ready", [LISTS / f"{name}.txt"])
        for name in ("aider", "open-webui", "load")
    },
    "vllm": (vllm, MADE / "vllm" / ".ready", [LISTS / "vllm.txt", MADE / "load" / ".ready"]),
}


def stale(ready: Path, sources: list[Path]) -> bool:
    """Whether it has not been made, or of another list."""
    made = ready.stat().st_mtime if ready.exists() else 0.0
    return any(not source.exists() or source.stat().st_mtime > made for source in sources)


def main(names: list[str]) -> None:
    """Makes those of `ALL` that are stale, or `newest`.

    Raises:
        CalledProcessError: without the frameworks or the newest helpers there is nothing to test.
    """
    if names == ["newest"]:
        newest()
        return
    for name in names or ALL:
        make, ready, sources = ALL[name]
        if not stale(ready, sources):
            continue
        try:
            make()
        except (OSError, subprocess.CalledProcessError):
            if name == "frameworks":
                raise
            say(f"{name} was not installed")
        else:
            ready.touch()


if __name__ == "__main__":
    main(sys.argv[1:])
