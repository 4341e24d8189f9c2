"""`sealring chat` at a real pseudo terminal, sealed for a head that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from patience import PATIENCE_SECONDS

from sealring.mesh.errors import InvalidInput
from sealring.testing import ScriptedGateway, saying
from sealring.v1 import inference_pb2

CTRL_C, CTRL_D, CTRL_P = "\x03", "\x04", "\x10"  # Ctrl-P: the line before, with readline and libedit alike
AT_A_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
from sealring.cli.main import main
main()
"""


class Head:
    """Answers a question with itself; remembers what was asked, and tells when an answer was given up."""

    def __init__(self, gateway: ScriptedGateway) -> None:
        self.gateway = gateway
        self.asked: list[list[str]] = []
        self.given_up = asyncio.Event()
        gateway.script = saying(self.answer)

    async def answer(self, sealed: inference_pb2.SealedPrompt) -> AsyncIterator[inference_pb2.SealedDelta]:
        said = [one.content for one in sealed.prompt.chat.messages]
        self.asked.append(said)
        if "long" in said[-1] and len(said) > 1:
            raise InvalidInput("does not fit", reason="CONTEXT_TOO_LONG")
        yield inference_pb2.SealedDelta(text=f"<{said[-1]}>", tokens=1)
        if "forever" in said[-1]:
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.set()
        yield inference_pb2.SealedDelta(tokens=1, finish=inference_pb2.FINISH_REASON_STOP)


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process = process
        self.shown = ""
        self._master = master
        self._grown = asyncio.Event()
        asyncio.get_running_loop().add_reader(master, self._read)

    @classmethod
    async def start(cls, *arguments: str, **environment: str) -> Terminal:
        master, slave = pty.openpty()
        command = (sys.executable, "-P", "-c", AT_A_TERMINAL, *arguments)
        given = os.environ | {"TERM": "dumb", "INPUTRC": "/dev/null"} | environment
        process = await asyncio.create_subprocess_exec(
            *command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=given
        )
        os.close(slave)
        return cls(process, master)

    def _read(self) -> None:
        try:
            self.shown += os.read(self._master, 4096).decode()
        except OSError:  # the other end is closed
            asyncio.get_running_loop().remove_reader(self._master)
        self._grown.set()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    async def shows(self, text: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Waits for `text`, and takes it and what is before it off."""
        async with asyncio.timeout(seconds):
            while text not in self.shown:
                self._grown.clear()
                await self._grown.wait()
        self.shown = self.shown.partition(text)[2]

    async def interrupted_shows(self, text: str) -> None:
        """Types Ctrl-C; again, if it came just before the line editor began to wait, which then misses it."""
        for _ in range(8):
            self.type(CTRL_C)
            with contextlib.suppress(TimeoutError):
                return await self.shows(text, seconds=5)
        raise TimeoutError(self.shown)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)


@pytest.fixture
async def head() -> AsyncIterator[Head]:
    async with ScriptedGateway() as gateway:
        yield Head(gateway)


@pytest.fixture
async def terminal(head: Head, home: Path) -> AsyncIterator[Terminal]:
    known = ("--gateway", head.gateway.address, "--root-sha256", head.gateway.cluster.pin)
    started = await Terminal.start("chat", *known, HOME=str(home), XDG_STATE_HOME="")
    await started.shows("> ")
    yield started
    await started.end()


async def test_a_conversation(terminal: Terminal, head: Head) -> None:
    terminal.type("half")
    await terminal.shows("half")
    await terminal.interrupted_shows("(Ctrl-D ends it")
    await terminal.shows("> ")
    terminal.type("first\n")
    await terminal.shows("<first>")
    await terminal.shows("> ")
    assert head.asked == [["first"]], "what was typed before Ctrl-C is gone"

    terminal.type("forever\n")
    await terminal.shows("<forever>")
    await terminal.interrupted_shows("(stopped)")
    await terminal.shows("> ")
    async with asyncio.timeout(PATIENCE_SECONDS):
        await head.given_up.wait()

    terminal.type("a long one\n")
    await terminal.shows("left out")
    await terminal.shows("left out")
    await terminal.shows("<a long one>")
    await terminal.shows("> ")
    assert head.asked[2:] == [
        ["first", "<first>", "forever", "<forever>", "a long one"],
        ["forever", "<forever>", "a long one"],
        ["a long one"],
    ]

    terminal.type(f"{CTRL_P}{CTRL_P}{CTRL_P}\n")
    await terminal.shows("<first>")
    await terminal.shows("> ")
    assert head.asked[-1] == ["a long one", "<a long one>", "first"]
    terminal.type(CTRL_D)
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await terminal.process.wait() == 0
