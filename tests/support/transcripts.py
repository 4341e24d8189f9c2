"""Plays transcripts of commands. `tests/cli/transcripts/README.md` has their form."""

from __future__ import annotations

import ast
import json
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import EXPIRES, Coordinator, FakeHost
from google.protobuf import text_format
from google.protobuf.message_factory import GetMessageClass

from sealring.mesh import errors
from sealring.mesh.system.paths import state_root_of
from sealring.v1 import admin_pb2

WIDTH = 108
_TIMES = re.compile(r"(\\?\w+)\*(\d+)")
_MANY = re.compile(r"([a-z])\1{15,}")
"""A letter that comes 52 times is written as a*52, in what is given and in what comes out."""
_SILENCES = re.compile(r"^(.+)\n(?:\1 \(\d+ s\)\n)+", re.MULTILINE)
"""Lines of slow machines, which say a long wait again, behind the line that every machine has."""
_HASH = re.compile(r"\b[0-9a-f]{64}\b")
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
_SECONDS = re.compile(r"\b\d{10}\b")
Scene = Callable[..., None]


@dataclass(frozen=True)
class Section:
    file: Path
    title: str

    head: str
    text: str

    def update(self, text: str) -> None:
        whole = self.file.read_text()
        self.file.write_text(whole.replace(f"== {self.title}\n{self.text}", f"== {self.title}\n{text}"))


def find_sections(folder: Path) -> Iterator[Section]:
    for file in sorted(folder.glob("*.txt")):
        head, *parts = re.split("^== ", file.read_text(), flags=re.MULTILINE)
        titles = [part.partition("\n")[0] for part in parts]
        assert len(set(titles)) == len(titles), f"{file.name}: two sections have one title"
        yield from (
            Section(file, title, head, part.partition("\n")[2])
            for title, part in zip(titles, parts, strict=True)
        )


class Stage:
    """Plays one section."""

    def __init__(self, home: Path, host: FakeHost, run: Callable[..., Any], scenes: dict[str, Scene]) -> None:
        self.home, self.host, self._run, self._scenes = home, host, run, scenes
        vars(host)["now"] = lambda: EXPIRES - 59 * 60.0
        self.coordinator: Coordinator | None = None
        self.effects: list[str] = []
        """What scenes have noted since the last command."""
        self.names = {"STATE": str(state_root_of(home)), "~": str(home)}
        """Names, by which sections call what differs from run to run."""
        self.numbers = False
        """Whether hashes are named in the order in which they come out, and all moments are alike."""
        self.closing = ExitStack()
        """Ends what scenes have begun."""
        self._stdin = ""
        self._fresh: set[str] = set()

    def play(self, section: Section) -> str:
        """The section with what really comes out."""
        with self.closing:
            self._play([line for line in section.head.splitlines() if line.startswith(("< ", "    "))])
            self._fresh.clear()
            return "".join(f"{line}\n" for line in self._play(section.text.splitlines()))

    def _play(self, lines: list[str]) -> list[str]:
        shown: list[str] = []
        while lines:
            line = lines.pop(0)
            if line[:2] in ("> ", "| ", "! ", "= ") or line in ("|", "!"):
                continue
            shown.append(line)
            if line.startswith("< "):
                body = []
                while lines and lines[0].startswith("    "):
                    body.append(lines.pop(0))
                shown += body
                self._give(line[2:], "".join(f"{one[4:]}\n" for one in body))
            elif line.startswith("$ "):
                shown += self._do(line[2:])
            else:
                assert not line or line.startswith("#"), line
        return shown

    def _give(self, line: str, body: str) -> None:
        what, _, rest = line.partition(" ")
        if what in self._scenes:
            self._scenes[what](self, *shlex.split(rest))
        elif what in ("file", "secret"):
            path = self.home / self._resolved(rest)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body)
            path.chmod(0o600 if what == "secret" else 0o644)
        elif what == "stdin":
            self._stdin = self._resolved(body)
        elif what == "typed":
            lines = self._resolved(body).splitlines()
            self.host.typed = [int(one) if len(one) == 1 else one for one in lines]
        elif what == "host":
            name, _, value = rest.partition(" ")
            assert hasattr(self.host, name), name
            setattr(self.host, name, ast.literal_eval(value + body))
        else:
            self._answer(what, rest, body)

    def _answer(self, method: str, how: str, body: str) -> None:
        described = admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name[method]
        if how.startswith("fails "):
            kind, reason, message = how.split(" ", 3)[1:]
            answer: Any = getattr(errors, kind)(message, reason=reason)
        elif how == "stops":
            answer = KeyboardInterrupt
        else:
            text = _TIMES.sub(lambda found: found[1] * int(found[2]), body or how)
            answer = text_format.Parse(text, GetMessageClass(described.output_type)())
        self.answer(method, answer)

    def answer(self, method: str, answer: Any) -> None:
        """What the coordinator answers to a method, after what was given for it since the last command."""
        if self.coordinator is None:
            self.coordinator = self.host.coordinator = Coordinator()
        if method not in self._fresh:
            self.coordinator.answers[method] = []
            self._fresh.add(method)
        self.coordinator.answers[method].append(answer)

    def _do(self, line: str) -> Iterator[str]:
        words = [self._resolved(word) for word in shlex.split(line)]
        environment = {}
        while "=" in words[0]:
            name, _, environment[name] = words.pop(0).partition("=")
        name, *arguments = words
        self._fresh.clear()
        if name != "sealring":
            yield from _marked("|", self._named(self._look(name, *arguments)))
            return
        done = self._run(*arguments, stdin=self._stdin, **environment)
        self._stdin = ""
        out = done.out
        if "--json" in arguments and out:
            out = f"{_dense(json.loads(self._named(out)))}\n"
        for mark, text in (
            (">", "".join(f"{one}\n" for one in self._done())),
            ("|", out),
            ("!", _SILENCES.sub(r"\1\n", done.err)),
        ):
            yield from _marked(mark, _MANY.sub(_counted, self._named(text)))
        if done.status:
            yield f"= {done.status}"

    def _resolved(self, text: str) -> str:
        for name, meant in self.names.items():
            if name != "~":
                text = text.replace(name, meant)
        return text

    def _named(self, text: str) -> str:
        for name, meant in self.names.items():
            text = text.replace(meant, name)
        if self.numbers:
            text = _SECONDS.sub("1800000000", _MOMENT.sub("MOMENT", _HASH.sub(self._number, text)))
        return text

    def _number(self, found: re.Match[str]) -> str:
        known = sum(name.startswith("HASH-") for name in self.names)
        names = {meant: name for name, meant in self.names.items()}
        name = names.get(found[0], f"HASH-{known + 1:02}")
        self.names[name] = found[0]
        return name

    def _look(self, name: str, *files: str) -> str:
        if name == "ls":
            found = {self._named(str(one)).removeprefix("~/"): one for one in self.home.rglob("*")}
            files_there = {name: one for name, one in sorted(found.items()) if one.is_file()}
            return "".join(f"{one.stat().st_mode & 0o777:o} {name}\n" for name, one in files_there.items())
        if name == "rm":
            for file in files:
                (self.home / file).unlink()
            return ""
        assert name == "cat", name
        return "".join((self.home / file).read_text() for file in files)

    def _done(self) -> Iterator[str]:
        yield from self.effects
        self.effects.clear()
        for method, request in self.coordinator.asked if self.coordinator else ():
            yield f"{method} {text_format.MessageToString(request, as_one_line=True)}".rstrip()
        if self.coordinator:
            if self.coordinator.seconds is not None:
                yield f"waits for at most {self.coordinator.seconds:g} s"
            self.coordinator.asked.clear()
            self.coordinator.seconds = None
        for program, given in self.host.ran:
            yield f"{program} {shlex.join(given)}"
        self.host.ran.clear()
        for component, settings, token in self.host.joined:
            yield f"joins as {component} {settings.name} in {settings.state_dir} with {token}"
        self.host.joined.clear()
        for became in self.host.became:
            yield f"becomes sealring {shlex.join(became)}"
        self.host.became.clear()
        for offer, code in self.host.shown_codes:
            yield f"shows {code} to {offer.name} at {' '.join(offer.addresses)}"
        self.host.shown_codes.clear()
        if self.host.services is not None:
            yield from (f"launchd {verb}" for verb in self.host.services.did)
            self.host.services.did.clear()


def _counted(letters: re.Match[str]) -> str:
    return f"{letters[1]}*{len(letters[0])}"


def _marked(mark: str, text: str) -> Iterator[str]:
    return (f"{mark} {line}".rstrip() for line in text.removesuffix("\n").split("\n") if text)


def _dense(data: Any, room: int = WIDTH) -> str:
    if isinstance(data, dict):
        data = {name: one for name, one in data.items() if one or one is None}
    whole = json.dumps(data, ensure_ascii=False)
    if len(whole) <= room or not isinstance(data, dict | list) or not data:
        return whole
    parts = (
        [f"{json.dumps(name)}: {_dense(one, room - 6 - len(name))}" for name, one in data.items()]
        if isinstance(data, dict)
        else [_dense(one, room - 2) for one in data]
    )
    lines = [""]
    for number, part in enumerate(parts):
        part += "," * (number < len(parts) - 1)
        if "\n" in lines[-1] + part or len(lines[-1]) + len(part) > room - 3:
            lines.append("")
        lines[-1] += f" {part}" if lines[-1] else part
    body = textwrap.indent("\n".join(filter(None, lines)), "  ")
    begin, end = "{}" if isinstance(data, dict) else "[]"
    return f"{begin}\n{body}\n{end}"
