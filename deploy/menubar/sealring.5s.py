#!/usr/bin/python3
# <xbar.title>sealring</xbar.title>
# <xbar.desc>What the cluster serves, and how fast; opens the dashboard.</xbar.desc>
# <xbar.dependencies>python3,sealring</xbar.dependencies>
"""The cluster in a Mac's menu bar, by SwiftBar or xbar, on any machine of it.

To install, put this file into the plugin folder of SwiftBar or xbar, and keep it
executable. It looks every five seconds, as its name says. macOS's own Python 3.9 runs it. It finds `sealring`
where pipx, uv and Homebrew put it; SEALRING is another path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import webbrowser
from pathlib import Path
from typing import Any

HOME = Path.home()
PLACES = (HOME / ".local/bin", "/opt/homebrew/bin", "/usr/local/bin", "/usr/local/sealring/bin")
SECONDS = 20
WINDOW = 60.0
"""Seconds over which tokens are counted: those of an answer come at its end."""

MOST_LINES, MOST_TEXT = 16, 120


def find() -> str | None:
    """The path of the `sealring` command."""
    path = os.pathsep.join([*map(str, PLACES), os.environ.get("PATH", "")])
    return shutil.which(os.environ.get("SEALRING") or "sealring", path=path)


def ask(program: str, *words: str) -> tuple[Any, list[str]]:
    """What a command prints as JSON, None if it fails; and what it says."""
    try:
        done = subprocess.run([program, *words], capture_output=True, timeout=SECONDS, check=False)
        said = done.stderr.decode("utf-8", "replace").splitlines()
        return (json.loads(done.stdout) if done.returncode == 0 else None), said
    except subprocess.TimeoutExpired:
        return None, [f"sealring did not answer in {SECONDS} seconds"]
    except (OSError, ValueError) as error:
        return None, [str(error)]


def line(words: str) -> str:
    """A line of the menu, in which a bar would begin parameters, and two dashes a menu below it."""
    text = "".join(one if one.isprintable() and one != "|" else " " for one in words).strip(" -")
    return text[: MOST_TEXT - 1] + "…" if len(text) > MOST_TEXT else text


def rate(program: str) -> float | None:
    """Answered tokens a second over the last minute; None while that is not known."""
    rows, _ = ask(program, "usage", "--json", "--days", "2")
    if rows is None:
        return None
    now, tokens = time.time(), sum(row["answered_tokens"] for row in rows)
    folder = Path(os.environ.get("SWIFTBAR_PLUGIN_CACHE_PATH") or HOME / "Library/Caches/sealring-menubar")
    file = folder / "tokens.json"
    try:
        kept = json.loads(file.read_text())
        seen = [one for one in kept if now - WINDOW <= one[0] < now and 0 <= one[1] <= tokens]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        seen = []
    seen = [*seen[-99:], [now, tokens]]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(json.dumps(seen))
    except OSError:
        return None
    return (tokens - seen[0][1]) / (now - seen[0][0]) if len(seen) > 1 else None


def state_of(deployment: Any, away: set[str]) -> tuple[str, str]:
    """A deployment's state in a word, and a line about it."""
    name, rings = deployment["plan"]["spec"]["name"], deployment["rings"]
    stages = [one for ring in deployment["plan"]["rings"] for one in ring["stages"]]
    names = sorted({one["member_name"] for one in stages})
    if rings and all(ring["phase"] == "serving" for ring in rings):
        return "serves", f"{name} serves on {', '.join(names)}"
    missing = [one for one in names if one in away]
    if missing:
        return "waits", f"{name} waits for {', '.join(missing)}"
    if not rings and deployment.get("load"):
        return "rests", f"{name} is loaded when a client asks for it"
    reasons = [ring["reason"] for ring in rings if ring["reason"]]
    return ("waits", f"{name}: {reasons[0]}") if reasons else ("loads", f"{name} is loading")


def cluster(program: str, found: Any) -> tuple[str, list[str]]:
    """The title, and the lines below it."""
    away = {node["name"] for node in found["nodes"] if node["state"] == "offline"}
    states = [state_of(one, away) for one in found["deployments"]]
    lines = [f"{len(found['nodes']) - len(away)} of {len(found['nodes'])} machines online"]
    lines += [f"{name} is away" for name in sorted(away)]
    lines += [words for _, words in states] or ["no model is served: sealring deploy MODEL"]
    words = {word for word, _ in states}
    if "waits" in words:
        return "▲ waiting", lines
    if "loads" in words:
        return "◌ loading", lines
    speed = rate(program) if "serves" in words else None
    return ("○" if "serves" not in words else "●" if speed is None else f"● {speed:.0f} t/s"), lines


def show(program: str) -> None:
    """Opens the dashboard in the browser, and keeps it until Ctrl-C."""
    with subprocess.Popen([program, "dashboard"], stderr=subprocess.PIPE, text=True) as dashboard:
        for said in dashboard.stderr or ():
            sys.stdout.write(said)
            sys.stdout.flush()
            scheme, _, rest = said.partition(":")
            if scheme == "http" and rest.startswith("//127.0.0.1:"):
                webbrowser.open(said.strip())


def main() -> None:
    sys.stdout.reconfigure(encoding="utf-8")
    program = find()
    if program is None:
        print("○ sealring\n---\nsealring is not installed: its command is in no usual folder")
    elif sys.argv[1:] == ["dashboard"]:
        show(program)
    else:
        found, said = ask(program, "status", "--json")
        title, lines = ("○ sealring", said) if found is None else cluster(program, found)
        print(title, "---", *map(line, lines[:MOST_LINES]), "---", sep="\n")
        print(f'Open the dashboard | bash="{Path(__file__).resolve()}" param1=dashboard terminal=true')
        print("Look again | refresh=true")


if __name__ == "__main__":
    main()
