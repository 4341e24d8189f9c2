"""The acts of the fault matrix.

Each does its harm, waits as long as it lasts, and mends what nobody else would. An act is
`async def kind(place, *words)`; it returns what a report should say of it, if anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path

import foreign
import psutil
import scarce as engines
import sharing
import slow_disk
from answering import Answer, Progress, ask_clear
from capture import paths_in
from harness import STANDBY, Lacking, Place
from patience import until
from ringtest import LIMIT_SECONDS

from sealring.cli.calls.operator import read_bundle
from sealring.coordinator.standby.follow import promote
from sealring.mesh.ring import STORED_BLOCK
from sealring.v1 import membership_pb2

ROOT = Path(__file__).parents[2]
SUPERVISOR_SECONDS = 2.0
"""After which a killed component is started again, as launchd would."""


async def kill(place: Place, *part: str) -> None:
    name = place.component(part)
    if name is None:
        (await place.process(part)).kill()
        return
    await place.cluster.children.kill_one(name)
    await asyncio.sleep(SUPERVISOR_SECONDS)
    await place.start(name)


async def batter(place: Place, *words: str) -> str:
    """A part is killed soon after each epoch begins to serve, for a number of seconds."""
    *part, seconds = words
    until, times = time.monotonic() + float(seconds), 0
    while time.monotonic() < until:
        while not serves(await place.ring.status()):
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.8)
        (await place.process(tuple(part))).kill()
        times += 1
        while serves(await place.ring.status()):
            await asyncio.sleep(0.1)
    return f"killed {times} times"


async def gone(place: Place, *part: str) -> None:
    """A node that does not come back before the ring serves without it."""
    name = place.component(part)
    assert name is not None
    before = await place.ring.status()
    await place.cluster.children.kill_one(name)
    while (now := await place.ring.status()).epoch == before.epoch or not serves(now):
        await asyncio.sleep(0.2)
    await place.start(name)


def serves(status: object) -> bool:
    return status.phase == membership_pb2.RING_PHASE_SERVING  # type: ignore[attr-defined]


async def stop(place: Place, *words: str) -> None:
    """SIGSTOP for a number of seconds; if the place is hasty, until the ring is down."""
    *part, seconds = words
    process = await place.process(tuple(part))
    process.send_signal(signal.SIGSTOP)
    try:
        await place.lasting(float(seconds))
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


async def sleep(place: Place, *words: str) -> None:
    """Machines sleep: all of their processes are stopped, and go on after that many seconds.

    Words are components (`gateway`, `daemon 1`), `nodes` for all of them, or `all`.
    """
    *parts, seconds = words
    machines = [psutil.Process(place.cluster.processes[name]) for name in _machines(place, parts)]
    asleep: list[psutil.Process] = []
    try:
        for machine in machines:  # the parent first: it starts nothing more, and its children stay its own
            machine.send_signal(signal.SIGSTOP)
            asleep.append(machine)
            for child in machine.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(signal.SIGSTOP)
                    asleep.append(child)
        await asyncio.sleep(float(seconds))
    finally:
        for process in reversed(asleep):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
    place.woken = time.monotonic()


def _machines(place: Place, words: Sequence[str]) -> list[str]:
    """The names of the components that words stand for."""
    nodes = list(place.cluster.node_names)
    named = {"nodes": nodes, "all": ["coordinator", "gateway", *nodes]}
    found: list[str] = []
    for word in words:
        if word.isdecimal():
            found.append(place.order[int(word)])
        elif word != "daemon":
            found += named.get(word, [word])
    return found


async def wait(place: Place, seconds: str) -> None:
    """Waits, because something happens without any act."""
    await asyncio.sleep(float(seconds))


async def freeze(place: Place, *words: str) -> None:
    """By the freezer of cgroups, which leaves the process's state as it was."""
    *part, seconds = words
    process = await place.process(tuple(part))
    old = Path("/sys/fs/cgroup/freezer")
    root, switch, on, off = (
        (old, "freezer.state", "FROZEN", "THAWED")
        if old.is_dir()
        else (Path("/sys/fs/cgroup"), "cgroup.freeze", "1", "0")
    )
    group = root / f"sealring-faults-{os.getpid()}"
    try:
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(str(process.pid))
        (group / switch).write_text(on)
    except OSError as error:
        raise Lacking(f"no freezer: {error.strerror}") from None
    try:
        await asyncio.sleep(float(seconds))
    finally:
        (group / switch).write_text(off)
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (root / "cgroup.procs").write_text(pid)
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            await asyncio.sleep(0.1)


async def memory(place: Place, *part: str) -> str:
    """The engine may have no more than it has, and gets a prompt that needs more: that one alone may fail."""
    if not hasattr(resource, "prlimit"):
        raise Lacking("no limits on other processes")
    process = await place.process(part)
    _, most = resource.prlimit(process.pid, resource.RLIMIT_AS)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (process.memory_info().vms, most))
    answer = Answer()
    await ask_clear(place.ring, "long prompt", answer, Progress())
    with contextlib.suppress(OSError):  # it may have ended
        resource.prlimit(process.pid, resource.RLIMIT_AS, (most, most))
    assert answer == place.expected["long prompt"] or answer.error == "OUT_OF_MEMORY", answer
    return answer.error


async def scarce(place: Place, *part: str) -> None:
    """A node whose engine has no memory for a long prompt: it is the one that fails, and says why."""
    name, own = str(place.component(part)), place.cluster.build
    answers = {each: Answer() for each in ("greedy", "long prompt", "drawn")}
    place.cluster.build = engines.__file__
    await restarted(place, name)
    try:
        await place.ready()
        await asyncio.gather(
            *(ask_clear(place.ring, each, answer, Progress()) for each, answer in answers.items())
        )
    finally:
        place.cluster.build = own
        await restarted(place, name)
    assert answers.pop("long prompt").error == "OUT_OF_MEMORY"
    assert answers == {name: place.expected[name] for name in answers}


async def restarted(place: Place, name: str) -> None:
    """Once no answer is under way."""
    await place.ring.idle()
    await place.cluster.children.kill_one(name)
    await place.start(name)


async def leave(place: Place) -> None:
    """Clients that hang up: while they wait, at their first token, and later."""

    async def one(after: int) -> None:
        gone = asyncio.Event()

        async def happen() -> None:
            gone.set()

        asking = asyncio.ensure_future(ask_clear(place.ring, "greedy", Answer(), Progress(after, happen)))
        if after:
            waiting = asyncio.ensure_future(gone.wait())
            await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        else:
            await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    await asyncio.gather(*(one(after) for after in (0, 1, 10) for _ in range(8)))


async def roster(place: Place) -> None:
    """A new roster or two: the spare is drained and no longer drained."""
    await asyncio.sleep(1)
    spare = await place.spare()
    await place.cluster.admin.call("DrainNode", id=spare)
    await place.cluster.admin.call("DrainNode", id=spare, undo=True)


async def cut(place: Place, *words: str) -> None:
    """Everything that the machine sends or is sent is lost."""
    *part, way, seconds = words
    ways = {"in": ("in",), "out": ("out",), "both": ("in", "out")}[way]
    with place.relay(tuple(part)) as relay:
        relay.blocked.update(ways)
        await asyncio.sleep(float(seconds))


async def lose(place: Place, *words: str) -> None:
    *part, share, seconds = words
    with place.relay(tuple(part)) as relay:
        relay.loss = float(share)
        await asyncio.sleep(float(seconds))


async def delay(place: Place, *words: str) -> None:
    *part, late, seconds = words
    with place.relay(tuple(part)) as relay:
        relay.delay = float(late)
        await asyncio.sleep(float(seconds))


async def narrow(place: Place, *words: str) -> None:
    *part, bits, seconds = words
    with place.relay(tuple(part)) as relay:
        relay.rate = float(bits) / 8
        await asyncio.sleep(float(seconds))


async def flip(place: Place, *part: str) -> None:
    """One bit of a record on its way to the machine; TCP's own sum is right."""
    known = {int(address.rpartition(":")[2]) for address in place.addresses.values()}
    with place.relay(part) as relay:
        relay.spared, relay.flips = known, 1
        for _ in range(80):
            if not relay.flips:
                return
            await asyncio.sleep(0.1)
    raise AssertionError("no record came by")


async def reset(place: Place, what: str) -> None:
    """RST on every connection of a kind."""
    ports = {name: address.rpartition(":")[2] for name, address in place.addresses.items()}
    nodes = place.order
    hub, one = "", nodes[1]
    others = " and ".join(f"dport != :{port} and sport != :{port}" for port in ports.values())
    space, condition = {
        "ring": (place.space(one), f"dst 10.77.0.0/24 and {others}"),
        "control": (hub, f"dport = :{ports[one]}"),
        "session": (place.space(one), f"dport = :{ports['coordinator']}"),
        "watch": (hub, f"dport = :{ports['coordinator']}"),
        "client": (hub, f"sport = :{ports['gateway']} or sport = :{ports['gateway-http']}"),
    }[what]
    done = place.within(space, "ss", "-HK", "-t", "state", "established", f"( {condition} )")
    closed = [line for line in done.stdout.splitlines() if line.strip()]
    if not closed:
        raise AssertionError(f"no connection was reset: {done.stderr.strip()}")


async def fill(place: Place, *words: str) -> None:
    """No room is left on the disk of a component's state."""
    *part, seconds = words
    name = place.component(tuple(part))
    filler = place.disk(str(name)) / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    try:
        await asyncio.sleep(float(seconds))
    finally:
        filler.unlink()


async def readonly(place: Place, *words: str) -> str:
    """A component is killed and started on a disk that cannot be written, and then on its own again."""
    *part, seconds = words
    name = str(place.component(tuple(part)))
    disk = place.disk(name)
    await place.cluster.children.kill_one(name)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        return await _starts(place, name, float(seconds))
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        await place.start(name)


async def cache(place: Place, how: str, rank: str) -> str:
    """The disk with a member's prefixes fails, and its memory is lost.

    Meanwhile a prompt that is on it is asked for, and one that is to be written.
    """
    name, known, new = place.order[int(rank)], _long_prompt(), _long_prompt()
    before = {node: len(_blocks(place, node)) for node in place.order}
    cold = await sharing.ask(place.ring, known)
    # it is written behind
    await until(lambda: all(len(_blocks(place, node)) != had for node, had in before.items()), pause=0.1)
    progress = Progress()
    async with CACHES[how](place, name):
        warm, fresh, _ = await asyncio.gather(
            sharing.ask(place.ring, known),
            sharing.ask(place.ring, new),
            ask_clear(place.ring, "greedy", Answer(), progress),
        )
    (await place.process(("engine", rank))).kill()  # else it would leave a disk that failed alone for a while
    again = await sharing.ask(place.ring, new)
    assert (warm.text, again.text) == (cold.text, fresh.text)
    assert warm.cached >= STORED_BLOCK or how in ("slow", "damaged"), warm
    times = progress.times["greedy"]
    pause = max((after - at for at, after in pairwise(times)), default=0.0)
    return (
        f"{warm.cached} of {cold.prompt_tokens} tokens from disk, {pause:.2f} s between two others beside it"
    )


def _long_prompt() -> list[dict[str, str]]:
    """A prompt of several blocks that nobody has sent before, in the midst of a conversation."""
    text = " ".join(secrets.token_hex(2) for _ in range(200))
    asked = [("user", text), ("assistant", "Yes."), ("user", "Go on.")]
    return [{"role": role, "content": content} for role, content in asked]


def _blocks(place: Place, name: str) -> list[Path]:
    return [path for path in paths_in(place.disk(name) / "prefixes") if path.suffix == ".block"]


@contextlib.asynccontextmanager
async def _remounted(place: Place, name: str, failing: str, sound: str) -> AsyncIterator[None]:
    """A disk with other options, and the engine anew on it."""
    disk = place.disk(name) / "prefixes"
    remount = ("mount", "-o")
    subprocess.run([*remount, f"remount,{failing}", str(disk)], check=True)
    try:
        (await place.process(("engine", str(place.order.index(name))))).kill()
        yield
    finally:
        subprocess.run([*remount, f"remount,{sound}", str(disk)], check=True)


def _full(place: Place, name: str) -> contextlib.AbstractAsyncContextManager[None]:
    """No file more can be made."""
    there = os.statvfs(place.disk(name) / "prefixes")
    return _remounted(place, name, f"nr_inodes={there.f_files - there.f_ffree}", f"nr_inodes={there.f_files}")


def _readonly(place: Place, name: str) -> contextlib.AbstractAsyncContextManager[None]:
    return _remounted(place, name, "ro", "rw")


@contextlib.asynccontextmanager
async def _slow(place: Place, name: str) -> AsyncIterator[None]:
    own, place.cluster.build = place.cluster.build, slow_disk.__file__
    await restarted(place, name)
    try:
        await place.ready()
        yield
    finally:
        place.cluster.build = own
        await restarted(place, name)


@contextlib.asynccontextmanager
async def _damaged(place: Place, name: str) -> AsyncIterator[None]:
    """A byte of every block is another, or it has lost its end."""
    for number, block in enumerate(_blocks(place, name)):
        data = bytearray(block.read_bytes())
        data[len(data) // 2] ^= 255
        block.write_bytes(data[: -1 - number % 2] if number % 2 else data)
    (await place.process(("engine", str(place.order.index(name))))).kill()
    yield


CACHES = {"full": _full, "readonly": _readonly, "slow": _slow, "damaged": _damaged}


async def clock(place: Place, *words: str) -> None:
    """A component's wall clock jumps, and jumps back; it was started with a clock that can."""
    *part, step, seconds = words
    name = str(place.component(tuple(part)))
    place.turn(name, int(step))
    try:
        await asyncio.sleep(float(seconds))
    finally:
        place.turn(name, 0)


async def taken(place: Place, *words: str) -> str:
    """A component is killed, and another program has its port when it starts."""
    *part, seconds = words
    name = str(place.component(tuple(part)))
    host, _, port = place.addresses[name].rpartition(":")
    await place.cluster.children.kill_one(name)
    program = f"import socket, time; s = socket.create_server(('{host}', {port})); time.sleep(60)"
    squatter = subprocess.Popen([*place.entering(name), sys.executable, "-c", program])
    try:
        await asyncio.sleep(0.5)
        return await _starts(place, name, float(seconds))
    finally:
        squatter.kill()
        squatter.wait()
        await place.start(name)


async def double(place: Place, *part: str) -> str:
    """A second process of a component on the same state folder."""
    name = str(place.component(part))
    ended = await asyncio.create_subprocess_exec(
        *place.command(name),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    said = (await ended.communicate())[1].decode()
    assert ended.returncode, "two processes have one state folder"
    return _last(said)


async def copied(place: Place, *words: str) -> str:
    """A node's state folder is copied, and both run."""
    *part, seconds = words
    name = str(place.component(tuple(part)))
    with place.twin(name) as command:
        log = place.cluster.state_dir / "logs" / "twin.log"
        with log.open("wb") as out:
            twin = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
        try:
            await asyncio.sleep(float(seconds))
            return f"twin {'runs' if twin.returncode is None else _last(log.read_text())}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                twin.kill()
            await twin.wait()
            log.unlink()


async def wrong(place: Place, *part: str) -> str:
    """A node is killed, and started from a build with which it cannot work, until its operator learns it."""
    name, own = str(place.component(part)), place.cluster.build
    await place.cluster.children.kill_one(name)
    place.cluster.build = foreign.__file__
    try:
        await place.start(name)
        async with asyncio.timeout(LIMIT_SECONDS):
            while "cannot work together" not in (trouble := await _trouble(place, name)):
                await asyncio.sleep(0.2)
    finally:
        place.cluster.build = own
        await place.cluster.children.kill_one(name)
        await place.start(name)
    return trouble[:160]


async def usurp(place: Place, *words: str) -> None:
    """The standby takes over while it or the coordinator is cut off; each member follows one of them.

    As soon as they reach each other, the coordinator ends.
    """
    *part, seconds = words
    cluster, bundle = place.cluster, place.standby.state_dir / "operator"
    old = cluster.children.expect_end("coordinator")
    with place.relay(tuple(part)) as relay:
        relay.blocked.update(("in", "out"))
        await asyncio.sleep(float(seconds))
        promote(place.standby)
        await until(lambda: read_bundle(bundle).coordinator == STANDBY, pause=0.1)
        await asyncio.sleep(float(seconds))
        assert old.returncode is None, "it heard of no other"
    await cluster.administer(bundle)
    async with asyncio.timeout(LIMIT_SECONDS):
        assert await old.wait() != 0
    assert "DEPOSED" in cluster.logs["coordinator"].read_text()


async def _trouble(place: Place, name: str) -> str:
    nodes = (await place.cluster.admin.call("ListNodes")).nodes
    return next(str(one.trouble) for one in nodes if one.name == name)


async def _starts(place: Place, name: str, seconds: float) -> str:
    """The outcome of a start that should fail. A component that runs all the same is killed in the end."""
    await place.start(name)
    child = place.cluster.children.child(name)
    said = ""
    async with asyncio.timeout(LIMIT_SECONDS):
        while child.process.returncode is None and "_started" not in said:
            await asyncio.sleep(0.1)
            said = child.log.read_bytes()[child.begins :].decode()
    if child.process.returncode is None:
        await asyncio.sleep(seconds)
        await place.cluster.children.kill_one(name)
        return f"it started: {_last(said)}"
    return f"exit {child.process.returncode}: {_last(said)}"


def _last(said: str) -> str:
    """The last thing that a component said, without what changes from run to run."""
    lines = [line for line in said.splitlines() if line.strip()]
    return re.sub(r"/\S+/|\b\d+\.\d+\.\d+\.\d+:\d+\b", "", lines[-1])[:160] if lines else "nothing"


ACTS: dict[str, Callable[..., Awaitable[str | None]]] = {
    act.__name__: act
    for act in (
        *(
            kill,
            batter,
            gone,
            stop,
            sleep,
            wait,
            freeze,
            memory,
            scarce,
            leave,
            roster,
            cut,
            lose,
            delay,
            narrow,
            flip,
            reset,
        ),
        *(fill, readonly, cache, clock, taken, double, copied, wrong, usurp),
    )
}
