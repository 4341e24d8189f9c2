"""The others as processes: mlx-lm in process, `mlx_lm.server`, and it under `mlx.launch` on several ranks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from bench.clusters import family, pin
from bench.openai_client import ask
from sealring.mesh.errors import Unavailable
from sealring.mesh.system.addresses import free_port

_ROOT = Path(__file__).resolve().parents[1]
_START_SECONDS = 120.0


class Process:
    """A rival; `pause` stops it so that it costs the others nothing, `resume` lets it go on."""

    def __init__(self, process: asyncio.subprocess.Process, url: str = "") -> None:
        self.process = process
        self.url = url

    @property
    def pid(self) -> int:
        return self.process.pid

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for one in family(self.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    async def round(self) -> dict[str, Any]:
        """One measurement of `bench.baseline --serve`."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        return await self.line()

    async def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise Unavailable("mlx-lm ended", reason="COMPONENT_ENDED")
        found: dict[str, Any] = json.loads(line)
        return found


@asynccontextmanager
async def _running(arguments: Sequence[str], *, pipes: bool) -> AsyncIterator[Process]:
    end = asyncio.subprocess.PIPE if pipes else asyncio.subprocess.DEVNULL
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=end,
            stdout=end if pipes else log,
            stderr=log,
            cwd=_ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
            limit=1 << 24,
        )
        running = Process(process)
        try:
            yield running
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in reversed(family(process.pid)):
                    one.kill()
            await process.wait()


@asynccontextmanager
async def in_process(
    model: Path,
    *,
    rows: int,
    tokens: int,
    prompt: int = 0,
    words: int = 0,
    cores: Sequence[int] = (),
    in_batches: bool = False,
) -> AsyncIterator[Process]:
    """mlx-lm without a server, with prompts of `prompt` tokens or those of `bench.serve` of so many `words`;
    `in_batches`: with the scheduling policy of an engine."""
    arguments = [sys.executable, "-m", "bench.baseline", str(model), "--serve", "--rows", str(rows)]
    arguments += ["--tokens", str(tokens), "--prompt", str(prompt), "--words", str(words)]
    if cores:
        arguments += ["--cores", ",".join(map(str, cores))]
    if in_batches:
        arguments.append("--in-batches")
    async with _running(arguments, pipes=True) as running:
        await running.line()
        yield running


@asynccontextmanager
async def server(
    model: Path, *, cores: Sequence[int], ranks: int = 1, rows: int = 0
) -> AsyncIterator[Process]:
    """`mlx_lm.server`; with several ranks `--pipeline` under `mlx.launch`, each on a core of its own.

    `rows`: that it may decode at once, if more than its own 32.
    """
    port = free_port("127.0.0.1")
    binaries = Path(sys.executable).parent
    arguments = ["--model", str(model), "--port", str(port), "--log-level", "ERROR"]
    arguments += ["--decode-concurrency", str(rows)] if rows > 32 else []
    command = [sys.executable, "-m", "mlx_lm", "server", *arguments]
    if ranks > 1:
        launch = [str(binaries / "mlx.launch"), "--backend", "ring", "-n", str(ranks)]
        launch += ["--starting-port", str(free_port("127.0.0.1")), "--"]
        command = [*launch, sys.executable, str(binaries / "mlx_lm.server"), *arguments, "--pipeline"]
    async with _running(command, pipes=False) as running:
        running.url = f"http://127.0.0.1:{port}"
        await _wait(running, model)
        if ranks > 1:
            found = [one for one in family(running.pid) if "--pipeline" in one.cmdline() and _is_rank(one)]
            for core, one in zip(cores, found, strict=False):
                pin(one.pid, [core])
        elif cores:
            pin(running.pid, cores)
        yield running


def _is_rank(process: psutil.Process) -> bool:
    command = process.cmdline()
    return "mlx.launch" not in " ".join(command) and not any(
        "--pipeline" in child.cmdline() for child in process.children()
    )


async def _wait(running: Process, model: Path) -> None:
    """Until it has answered once. Raises Unavailable (COMPONENT_ENDED, NOT_READY)."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _START_SECONDS
    body = {"model": str(model), "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    while loop.time() < deadline:
        if running.process.returncode is not None:
            raise Unavailable("mlx_lm.server ended", reason="COMPONENT_ENDED")
        reply = await ask(running.url, body, seconds=15)
        if reply.ok:
            return
        await asyncio.sleep(0.5)
    raise Unavailable(f"mlx_lm.server did not answer in {_START_SECONDS:g} s", reason="NOT_READY")
