"""Prompts' beginnings on the disks of members outlive engines, restarts and moves, and tell a thief nothing.

The tests share a cluster of three nodes, and leave it serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import patient
import pytest
import pytest_asyncio
from capture import files_of, paths_in
from hostileimages import picture, saved
from patience import until
from ringtest import CLUSTER, HASTY, LIMIT_SECONDS, MODEL, Ring, started
from sharing import Answered, ask
from tokenizers import Tokenizer
from visionmodels import write_model

from sealring.cli.calls.waiting import wait_until_serving
from sealring.cli.local.cluster import LocalCluster
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope
from sealring.mesh.errors import SealringError
from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER

WORDS = ("river", "stone", "garden", "winter", "market", "silver", "window", "bridge", "letter", "candle")
LONG = 160
"""Words of a prompt that is long enough for windows to be stored, four blocks and a snapshot, where each
token is a character."""

HEAD_BYTES = 20
"""At the front of a block, in clear."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ring(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ring]:
    state = tmp_path_factory.mktemp("disks") / "state"
    async with LocalCluster(state, MODEL, nodes=3, settings=HASTY) as cluster:
        cluster.children.command = (sys.executable, patient.__file__)
        # the split is fixed, for what is stored is of these layers alone
        async with started(cluster, split=[5, 4]) as ring:
            ring.key, _ = KeyFile(state / "gateway").create([Scope.INFERENCE, Scope.READ])
            yield ring


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def windows(ring: Ring, tmp_path_factory: pytest.TempPathFactory) -> Ring:
    """Over the same nodes, a model that sees, and whose caches cannot be cut: most layers have a window.

    The first tests do without, so that members which they end do not load it again."""
    model = write_model(tmp_path_factory.mktemp("windows") / "model")
    split = [3, 3]  # each stage has a layer whose cache is stored in blocks, beside its windows
    spec = {"name": "windows", "model": str(model), "max_rows": 2, "context": 2048, "split": split}
    await ring.cluster.admin.call("CreateDeployment", spec=spec, seconds=LIMIT_SECONDS)
    deployment = await wait_until_serving(ring.cluster.admin, "windows", seconds=LIMIT_SECONDS)
    other = dataclasses.replace(ring, deployment=deployment)
    await other.offered(1)
    return other


def text_of(name: str, count: int = 300) -> str:
    """A long text that no other test sends."""
    words = random.Random(name)
    return " ".join(words.choice(WORDS) for _ in range(count)) + f" marigold {name}"


GOES_ON = [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go on."}]
"""Only of a conversation is everything written when it is computed for the first time."""


def messages(name: str) -> list[dict[str, Any]]:
    begins = [{"role": "system", "content": text_of(name)}, {"role": "user", "content": "Hello!"}]
    return [*begins, *GOES_ON]


def read_long(name: str) -> list[dict[str, Any]]:
    """A prompt of more than 1,024 tokens for the model with windows."""
    return [{"role": "user", "content": text_of(name, LONG)}, *GOES_ON]


async def members(ring: Ring) -> list[str]:
    """The names of the ring's nodes, by rank."""
    answer = await ring.cluster.admin.call("ListDeployments")
    (plan,) = (one.plan for one in answer.deployments if one.plan.spec.name == ring.model)
    return [ring.node_of(stage.member) for stage in plan.rings[0].stages]


def blocks(ring: Ring, node: str) -> set[tuple[Path, int]]:
    """Paths and inodes: a block that is written again has another."""
    found = set()
    for path in paths_in(ring.cluster.state_dir / node / "prefixes"):
        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
            if path.suffix == ".block":
                found.add((path, path.stat().st_ino))
    return found


def looked_at(shape: tuple[int, int]) -> list[dict[str, Any]]:
    """A prompt of that length with a picture."""
    image = inference.Image(data=saved(picture(*shape), "PNG"))
    return [{**read_long("looked at")[0], "images": [image]}, *GOES_ON]


async def stored(ring: Ring, asked: list[dict[str, Any]], *, key: str = "", more: int = 1) -> Answered:
    """Asks, and waits until all members have `more` blocks than before: they are written behind."""
    before = {node: len(blocks(ring, node)) for node in await members(ring)}
    answer = await ask(ring, asked, key=key)
    await until(lambda: all(len(blocks(ring, node)) >= had + more for node, had in before.items()), pause=0.1)
    return answer


async def restart(ring: Ring, *names: str) -> None:
    children = ring.cluster.children
    for name in names:
        await children.kill_one(name)
    for name in names:
        await ring.cluster.start_one(name)
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            with contextlib.suppress(SealringError):
                await ring.cluster.admin.call("ListNodes")
                return
            await asyncio.sleep(0.1)


async def test_a_killed_engine_reads_again_what_it_had_stored(ring: Ring) -> None:
    await ring.serving()
    cold = await stored(ring, messages("killed"))
    assert (cold.cached, cold.prompt_tokens > 300) == (0, True)
    read = await ring.counted("prefix_cache_disk_tokens_total")
    for node in await members(ring):
        ring.part(node, "engine.main").kill()
        warm = await ask(ring, messages("killed"))
        assert (warm.cached >= 256, warm.text) == (True, cold.text)
        before, read = read, await ring.counted("prefix_cache_disk_tokens_total")
        assert read >= before + 256
        assert (await ask(ring, messages("killed"))).cached >= 256
        assert await ring.counted("prefix_cache_disk_tokens_total") == read, "it is one of memory now"


async def test_a_member_without_its_folder_costs_a_miss(ring: Ring) -> None:
    await ring.serving()
    cold = await stored(ring, messages("folder"))
    node = (await members(ring))[1]
    folder = ring.cluster.state_dir / node / "prefixes"
    await ring.cluster.children.kill_one(node)
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    try:
        await ring.cluster.start_one(node)
        await ring.serving()
        without = await ask(ring, messages("folder"))
        assert (without.cached, without.text) == (0, cold.text)
        assert (await ask(ring, messages("folder"))).cached >= 256, "memory serves as ever"
    finally:
        folder.unlink()
        await restart(ring, node)


async def test_everything_may_be_restarted_and_what_was_seen_is_not_computed_again(
    ring: Ring, windows: Ring
) -> None:
    for each in (ring, windows):
        await each.serving()
    first = looked_at((300, 200))
    seen = await stored(windows, first, more=5)
    cold = await stored(ring, messages("restarted"))
    slid = await stored(windows, read_long("restarted"), more=5)
    assert min(seen.prompt_tokens, slid.prompt_tokens) > 1024
    everything = "coordinator", "gateway", *await members(ring)
    await restart(ring, *everything)
    for each in (ring, windows):
        await each.serving()
    warm = await ask(ring, messages("restarted"))
    assert (warm.cached >= 256, warm.text) == (True, cold.text)
    again = await ask(windows, read_long("restarted"))
    assert (again.cached >= 1024, again.text) == (True, slid.text)
    more = [{"role": "assistant", "content": "A ramp."}, {"role": "user", "content": "And now?"}]
    turn = await ask(windows, [*first, *more])
    other, _ = KeyFile(ring.cluster.state_dir / "gateway").create([Scope.INFERENCE])
    computed = await ask(windows, [*first, *more], key=other)
    assert (turn.cached >= 1024, computed.cached, turn.text) == (True, 0, computed.text)
    unlike = await ask(windows, [*looked_at((200, 300)), *more])
    assert unlike.cached == 0, "another picture, of the same text"


async def drain(ring: Ring, node: str, *, undo: bool = False) -> None:
    """Has no ring on a node any more; with `undo`, it may be used again."""
    nodes = (await ring.cluster.admin.call("ListNodes")).nodes
    (found,) = (each.id for each in nodes if each.name == node)
    await ring.cluster.admin.call("DrainNode", id=found, undo=undo)
    async with asyncio.timeout(LIMIT_SECONDS):
        while not undo and node in await members(ring):
            await asyncio.sleep(0.1)
    await ring.serving()


@pytest.mark.sweep  # two moves and two restarts: minutes on two busy cores
async def test_a_ring_that_moves_reads_what_its_members_have_stored_and_no_foreign_block(ring: Ring) -> None:
    await ring.serving()
    cold = await stored(ring, messages("moved"))
    first, left = await members(ring)
    theirs = blocks(ring, left)
    await drain(ring, left)
    (new,) = set(await members(ring)) - {first}
    moved = await ask(ring, messages("moved"))
    assert (moved.cached >= 256, moved.text) == (True, cold.text), "who left has handed it over"
    await until(lambda: blocks(ring, new), pause=0.1)
    ring.part(new, "engine.main").kill()
    again = await ask(ring, messages("moved"))
    assert (again.cached >= 256, again.text) == (True, cold.text), "one member stayed, the other stored anew"
    foreign = itertools.cycle(path.read_bytes() for path, _ in sorted(theirs))
    for (path, _), data in zip(sorted(blocks(ring, new)), foreign, strict=False):
        path.write_bytes(data)
    before = (await ring.serving()).epoch
    ring.part(new, "engine.main").kill()
    async with asyncio.timeout(LIMIT_SECONDS):
        while (await ring.serving()).epoch == before:  # which answers from memory as long as it goes on
            await asyncio.sleep(0.1)
    planted = await ask(ring, messages("moved"))
    assert (planted.cached, planted.text) == (0, cold.text)
    await drain(ring, left, undo=True)
    await drain(ring, new)
    assert await members(ring) == [first, left]
    back = await ask(ring, messages("moved"))
    assert (back.cached >= 256, back.text) == (True, cold.text), "the first members have theirs still"
    await drain(ring, new, undo=True)


async def test_who_steals_the_folders_finds_no_text_no_tokens_and_nothing_equal(
    ring: Ring, windows: Ring
) -> None:
    """Two API keys send the same prompts, so that each has its blocks, and snapshots of windows."""
    await ring.serving()
    await windows.serving()
    other, _ = KeyFile(ring.cluster.state_dir / "gateway").create([Scope.INFERENCE])
    for each, asked, more in ((ring, messages("stolen"), 1), (windows, read_long("stolen"), 5)):
        own = await stored(each, asked, more=more)
        assert (await stored(each, asked, key=other, more=more)).text == own.text
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text_of("stolen")).ids
    assert len(ids) > 256
    for node in await members(ring):
        folder = ring.cluster.state_dir / node / "prefixes"
        found = dict(files_of(folder))
        stolen = b"".join(data + str(path.relative_to(folder)).encode() for path, data in found.items())
        assert b"marigold" not in stolen
        for form in ("<u2", ">u2", "<u4", ">u4", "<u8", ">u8"):
            assert np.array(ids[64:72], form).tobytes() not in stolen
        sealed = {path.name: data[HEAD_BYTES:] for path, data in found.items() if path.suffix == ".block"}
        assert len(sealed) == sum(path.suffix == ".block" for path in found) >= 2
        pieces = [data[at : at + 16] for data in sealed.values() for at in range(0, len(data) - 16, 16)]
        assert len(set(pieces)) == len(pieces), "two blocks have bytes in common"
