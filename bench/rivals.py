"""The others as processes: mlx-lm alone, `mlx_lm.server`, and it under `mlx.launch` on several ranks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from bench.clusters import family, pin
from bench.openai_client import ask
from sealring.mesh.errors import Unavailable
from sealring.mesh.system.addresses import free_port

ROOT = Path(__file__).resolve().parents[1]
_START_SECONDS = 120.0


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process, as subprocess.Popen has it, that ends with this block, and with it all that it started."""
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in reversed(family(process.pid)):
                one.kill()
        process.communicate()


class Baseline:
    """The process of `bench.baseline`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def run(self, **work: Any) -> dict[str, Any]:
        """What it answers to a line. Raises Unavailable (COMPONENT_ENDED)."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(work).encode() + b"\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line: the first one says that the model is loaded."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise Unavailable("mlx-lm ended", reason="COMPONENT_ENDED")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def baseline(
    model: str,
    *,
    cores: Sequence[int] = (),
    in_batches: bool = False,
    environment: dict[str, str] | None = None,
) -> Iterator[Baseline]:
    """mlx-lm without a server, which has yet to say that it is loaded; `model` as `bench.baseline` takes it.

    `in_batches`: with the scheduling policy of an engine.
    """
    command = ["-m", "bench.baseline", model, *(["--in-batches"] if in_batches else [])]
    command += ["--cores", ",".join(map(str, cores))] if cores else []
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with started(command, env=os.environ | (environment or {}), **pipes) as process:
        yield Baseline(process)


class Server:
    """A server; `pause` stops it so that it costs the others nothing, `resume` lets it go on."""

    def __init__(self, pid: int, url: str) -> None:
        self.pid = pid
        self.url = url
        self.servers: list[psutil.Process] = []
        """Once it is up: not `mlx.launch`, which waits for its ranks by looking at them all the time."""

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for one in family(self.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)


@contextlib.asynccontextmanager
async def server(
    model: Path,
    *,
    cores: Sequence[int],
    ranks: int = 1,
    rows: int = 0,
    pipeline: bool = True,
    backend: str = "ring",
) -> AsyncIterator[Server]:
    """`mlx_lm.server`; with several ranks `--pipeline` or tensor parallel under `mlx.launch`, each on a core
    of its own, and with NCCL on a GPU of its own.

    `rows`: that it may decode at once, if more than its own 32. Raises Unavailable.
    """
    port = free_port("127.0.0.1")
    binaries = Path(sys.executable).parent
    arguments = ["--model", str(model), "--port", str(port), "--log-level", "ERROR"]
    arguments += ["--decode-concurrency", str(rows)] if rows > 32 else []
    command = ["-m", "mlx_lm", "server", *arguments]
    if ranks > 1:
        command = [str(binaries / "mlx.launch"), "--backend", backend, "-n", str(ranks)]
        command += ["--starting-port", str(free_port("127.0.0.1"))]
        command += ["--nccl-port", str(free_port("127.0.0.1")), "--"]
        command += [sys.executable, str(binaries / "mlx_lm.server"), *arguments]
        command += ["--pipeline"] * pipeline
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile() as log:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        with started(command, env=environment, start_new_session=True, **streams) as process:
            running = Server(process.pid, f"http://127.0.0.1:{port}")
            await _wait(running, process, model)
            running.servers = family(running.pid)
            if ranks > 1:
                running.servers = [one for one in running.servers if _is_rank(one)]
                for core, one in zip(cores, running.servers, strict=False):
                    pin(one.pid, [core])
            elif cores:
                pin(running.pid, cores)
            yield running


def _is_rank(process: psutil.Process) -> bool:
    """Neither `mlx.launch` nor what it starts its ranks by."""
    command = process.cmdline()
    return (
        any("mlx_lm.server" in one for one in command)
        and "mlx.launch" not in " ".join(command)
        and not any("mlx_lm.server" in " ".join(child.cmdline()) for child in process.children())
    )


async def _wait(running: Server, process: subprocess.Popen[bytes], model: Path) -> None:
    """Waits until the server has answered once. Raises Unavailable (COMPONENT_ENDED, NOT_READY)."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _START_SECONDS
    body = {"model": str(model), "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    while loop.time() < deadline:
        if process.poll() is not None:
            raise Unavailable("mlx_lm.server ended", reason="COMPONENT_ENDED")
        reply = await ask(running.url, body, seconds=15)
        if reply.ok:
            return
        await asyncio.sleep(0.5)
    raise Unavailable(f"mlx_lm.server did not answer in {_START_SECONDS:g} s", reason="NOT_READY")
