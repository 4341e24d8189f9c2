"""Prefixes that go through the disk: every member writes, forgets all, reads, and answers the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from patience import PATIENCE_SECONDS
from stagering import (
    CHUNK,
    Prompts,
    Ring,
    compute_thread,
    doubled_stages_of,
    expected,
    prompt_of,
    setting,
    stages_of,
)

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import STORED_BLOCK, Chain, chain_of, names_key
from sealring.node.engine import RowParameters, params
from sealring.node.engine.blocks import BlockLayout, layout_of
from sealring.node.engine.disk import Disk
from sealring.node.engine.staging import Stage
from sealring.node.stored.codec import HEAD_BYTES, BlockHead
from sealring.node.stored.parts import Former, Part
from sealring.node.stored.places import Place
from sealring.node.stored.store import Store
from sealring.v1 import control_pb2 as control

LENGTH = STORED_BLOCK + 2 * CHUNK
BUDGET = 1 << 30
STORED = ["llama", "qwen3", "qwen3:4", "mixtral", "deepseek_v3"]
SNAPSHOTS = ["gemma3_text", "gpt_oss", "mamba2", "qwen3_next", "gemma3_text:8"]
"""Families with windows or states, which are stored as they are at an edge of blocks."""


def chain(tokens: list[int]) -> Chain:
    words = b"".join(token.to_bytes(4, "little") for token in tokens)
    return chain_of(names_key(b"key of the head's stage on disk."), b"ckey one", words)


Shape = tuple[int, bool]
"""The number of stages, and whether the model is cut in other places for prompts."""


def members(family: str, size: int, doubled: bool = False) -> list[Stage]:
    """`doubled`: all layers are held twice but those at the ends and, of three members, in the middle."""
    if not doubled:
        return stages_of(family, size)
    layers = setting(family, "num_hidden_layers")
    prompts, answers = ((layers - 1,), (1,)) if size == 2 else ((2, layers - 1), (1, layers - 2))
    if prompts[0] <= answers[0] or prompts[0] > (*answers, layers)[1]:
        pytest.skip("no layer is left to be doubled")
    return doubled_stages_of(family, prompts, answers)


def disk_of(stage: Stage, rank: int, root: Path, computed_by: str = "a release") -> Disk | None:
    layout = compute_thread(rank).submit(layout_of, stage.prefill, computed_by).result(PATIENCE_SECONDS)
    if layout is None:
        return None
    folder = root / str(rank)
    return Disk(layout, Store(folder, folder / "model", layout.digest, BUDGET))


def disks(ring: Ring, stages: list[Stage], root: Path) -> list[Disk]:
    """Gives each member of the ring a disk, in its own folder."""
    made = [disk_of(stage, rank, root) for rank, stage in enumerate(stages)]
    for prefixes, disk in zip(ring.prefixes, made, strict=True):
        prefixes.disk = disk
    return [disk for disk in made if disk is not None]


def prefill(row: int, prompt: list[int], first: int, record: int, prefix: int = 0) -> list[control.Step]:
    steps = []
    for start in range(first, len(prompt), CHUNK):
        step = control.Step()
        step.prefill.chunks.add(
            row=row,
            start=start,
            end=min(start + CHUNK, len(prompt)),
            prompt_tokens=len(prompt),
            params_bytes=record if start == first else 0,
            prefix=prefix if start == first else 0,
        )
        steps.append(step)
    return steps


def perform(ring: Ring, steps: list[control.Step], last: int) -> None:
    for number, step in enumerate(steps, 1):
        step.number = number
        ring.announce(step)
    ring.wait_for(last)


def decoded(count: int) -> list[control.Step]:
    return [control.Step(decode=control.Decode(lane=0)) for _ in range(count)]


def row_of(prompt: list[int]) -> RowParameters:
    return RowParameters(stored=chain(prompt).packed())


def write(
    family: str,
    size: int,
    prompt: list[int],
    root: Path,
    *,
    tokens: int = STORED_BLOCK + CHUNK,
    marks: Sequence[int] = (),
    fail: bool = False,
    doubled: bool = False,
) -> None:
    """An epoch in which the prompt is computed and written behind. Its first `tokens`, if any, are kept in
    place of what is kept at `marks`. It may `fail` then."""
    stages, row = members(family, size, doubled), row_of(prompt)
    ring = Ring(stages, Prompts({1: (prompt, row)}))
    made = disks(ring, stages, root)
    steps = [*prefill(1, prompt, 0, len(params.encode(row))), *decoded(2)]
    for prefix, length in enumerate([*marks, *([tokens] if tokens else [])], 1):
        changes = steps[length // CHUNK].changes  # behind the chunk that ends there
        if prefix > 1:
            changes.add().drop.prefix = prefix - 1
        changes.add().keep.CopyFrom(
            control.Keep(prefix=prefix, row=1, tokens=length, marks=marks[: prefix - 1])
        )
    steps[-2].changes.add().admit.row = 1
    try:
        perform(ring, steps, len(steps))
        if fail:
            ring.announce(control.Step(number=len(steps) + 1, changes=[control.Change()]))
            ring.wait_for_fault()
    finally:
        ring.close()
    for disk in made:
        disk.close(PATIENCE_SECONDS)


def test_nothing_stays_on_disk_of_what_was_computed_before_a_failure(tmp_path: Path) -> None:
    """The device may have failed, and what it left in a cache would be a wrong answer for weeks."""
    write("llama", 1, prompt_of("llama", 0, LENGTH), tmp_path, fail=True)
    assert not list(tmp_path.rglob("*.block"))


def recall(disk: Disk, number: int, wanted: Chain) -> int:
    found: list[int] = []
    done = threading.Event()

    def recalled(tokens: int) -> None:
        found.append(tokens)
        done.set()

    if (begin := disk.recall(number, wanted, recalled)) is not None:
        begin()
    assert done.wait(PATIENCE_SECONDS)
    return found[0]


@pytest.mark.parametrize(
    ("family", "size"),
    [
        pytest.param(family, size, marks=[] if (family, size) in always else [pytest.mark.sweep])
        for always in [{("llama", 3), ("qwen3:4", 1), ("deepseek_v3", 2), ("gpt_oss", 3), ("qwen3_next", 1)}]
        for family in (*STORED, *SNAPSHOTS)
        for size in (1, 2, 3)
    ],
)
def test_after_a_restart_a_prompt_goes_on_from_the_disk(family: str, size: int, tmp_path: Path) -> None:
    prompt = prompt_of(family, 0, LENGTH)
    write(family, size, prompt, tmp_path, tokens=STORED_BLOCK)
    goes_on(family, stages_of(family, size), prompt, lambda ring, stages: disks(ring, stages, tmp_path))


@pytest.mark.parametrize(
    ("family", "size"),
    [
        pytest.param(family, size, marks=[] if (family, size) in always else [pytest.mark.sweep])
        for always in [{("llama", 3), ("qwen3:4", 2), ("gpt_oss", 2), ("qwen3_next", 2)}]
        for family in (*STORED, *SNAPSHOTS)
        for size in (2, 3)
    ],
)
def test_with_two_cuts_each_member_reads_what_it_holds(family: str, size: int, tmp_path: Path) -> None:
    prompt = prompt_of(family, 0, LENGTH)
    write(family, size, prompt, tmp_path, tokens=STORED_BLOCK, doubled=True)
    stages = members(family, size, True)
    goes_on(family, stages, prompt, lambda ring, stages: disks(ring, stages, tmp_path))


MOVES: list[tuple[Shape, Shape]] = [
    *(((2, False), (3, False)), ((3, False), (2, False)), ((1, False), (2, False)), ((3, False), (1, False))),
    *(((2, True), (2, False)), ((2, False), (2, True)), ((3, False), (2, True)), ((2, True), (1, False))),
]


@pytest.mark.parametrize(
    ("family", "before", "now"),
    [
        pytest.param(family, *move, marks=[] if (family, place) in always else [pytest.mark.sweep])
        for always in [
            {("llama", 0), ("qwen3:4", 3), ("gpt_oss", 2), ("qwen3_next", 0)}
            | {("llama", 4), ("qwen3_next", 5), ("gpt_oss", 4)}
        ]
        for family in (*STORED, *SNAPSHOTS)
        for place, move in enumerate(MOVES)
    ],
)
def test_a_ring_with_other_stages_goes_on_from_what_each_had(
    family: str, before: Shape, now: Shape, tmp_path: Path
) -> None:
    prompt = prompt_of(family, 0, LENGTH)
    write(family, before[0], prompt, tmp_path, tokens=STORED_BLOCK, doubled=before[1])
    had = members(family, *before)
    stores = [disk.store for disk in (disk_of(stage, q, tmp_path) for q, stage in enumerate(had)) if disk]

    def give(ring: Ring, stages: list[Stage]) -> list[Disk]:
        made = []
        for rank, (prefixes, stage) in enumerate(zip(ring.prefixes, stages, strict=True)):
            layout, parts = layout_at(stage, rank), []
            at, own = stage.prefill.held
            for q, (old, store) in enumerate(zip(had, stores, strict=True)):
                lo, hi = old.prefill.held
                table = layout_at(old, q).table
                assert table is not None
                if lo <= at < min(hi, own):
                    parts.append(Part(store, table, at - lo, min(hi, own) - lo))
                    at = min(hi, own)
            assert layout.table is not None
            folder = tmp_path / f"now {rank}"
            store = Store(folder, folder / "model", layout.digest, BUDGET)
            prefixes.disk = Disk(layout, store, {0: Former(parts, layout.table)})
            made.append(prefixes.disk)
        return made

    goes_on(family, members(family, *now), prompt, give)


def layout_at(stage: Stage, rank: int) -> BlockLayout:
    layout = compute_thread(rank).submit(layout_of, stage.prefill, "a release").result(PATIENCE_SECONDS)
    assert layout is not None
    return layout


def goes_on(
    family: str, stages: list[Stage], prompt: list[int], give: Callable[[Ring, list[Stage]], list[Disk]]
) -> None:
    """A row begins behind the first block of a prompt, which each member reads, and is answered as ever."""
    other = prompt[:STORED_BLOCK] + prompt_of(family, 1, 5)
    row = row_of(other)
    ring = Ring(stages, Prompts({2: (other, row)}), number=2)
    try:
        wanted = chain(other)
        for disk in give(ring, stages):
            assert disk.held(wanted) == wanted
            assert recall(disk, 7, wanted) == STORED_BLOCK
        steps = [*prefill(2, other, STORED_BLOCK, len(params.encode(row)), prefix=1), *decoded(4)]
        restore = control.Restore(prefix=1, recall=7, tokens=STORED_BLOCK, name=wanted.names[0])
        steps[0].changes.add().restore.CopyFrom(restore)
        steps[-4].changes.add().admit.row = 2
        perform(ring, steps, len(steps))
    finally:
        ring.close()
        for prefixes in ring.prefixes:
            if prefixes.disk is not None:
                prefixes.disk.close()
    assert ring.prompts.answers[2] == expected(family, tuple(other), 5)
    assert ring.prompts.reused == [STORED_BLOCK]


@pytest.mark.parametrize("lost", ["snapshot", "block"])
def test_a_snapshot_is_of_use_with_all_of_its_blocks_only(tmp_path: Path, lost: str) -> None:
    family, edges = "gpt_oss", (STORED_BLOCK, 2 * STORED_BLOCK)
    prompt = prompt_of(family, 0, LENGTH + STORED_BLOCK)
    for tokens in edges:
        write(family, 1, prompt, tmp_path, tokens=tokens)
    files = {
        tuple(BlockHead.parse(file.read_bytes()[:HEAD_BYTES]) or ())[:2]: file for file in blocks_in(tmp_path)
    }
    assert set(files) == {(0, 256), (0, 512), (256, 512)}, "the first block and the first snapshot are alike"
    files[(0, 512) if lost == "snapshot" else (256, 512)].unlink()
    (stage,) = stages_of(family, 1)
    disk, wanted = disk_of(stage, 0, tmp_path), chain(prompt)
    assert disk is not None
    assert disk.held(wanted).tokens == recall(disk, 1, wanted) == STORED_BLOCK
    disk.close()


def test_a_snapshot_is_of_the_last_edge_of_blocks_at_which_the_row_was_kept(tmp_path: Path) -> None:
    """A longer prefix takes the place of the one that ends there, often before that is written."""
    prompt = prompt_of("mamba2", 0, LENGTH)
    write("mamba2", 1, prompt, tmp_path, tokens=STORED_BLOCK + CHUNK)
    assert blocks_in(tmp_path) == []
    write("mamba2", 1, prompt, tmp_path, tokens=STORED_BLOCK + CHUNK, marks=[STORED_BLOCK])
    (snapshot,) = blocks_in(tmp_path)  # a state, and no keys and values
    assert (BlockHead.parse(snapshot.read_bytes()[:HEAD_BYTES]) or ())[:2] == (0, STORED_BLOCK)


def blocks_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.block"))


def test_stages_with_other_caches_have_other_layouts() -> None:
    layouts = {
        compute_thread(rank).submit(layout_of, stage, "").result(PATIENCE_SECONDS).digest
        for family in ("llama", "qwen3", "qwen3:8", "qwen3:4")
        for rank, stage in enumerate(stages_of(family, 1))
    }
    assert len(layouts) == 4


def test_a_row_without_a_chain_leaves_nothing(tmp_path: Path) -> None:
    """As a sealed prompt's, which the head gives none."""
    prompt = prompt_of("llama", 0, LENGTH)
    stages = stages_of("llama", 1)
    ring = Ring(stages, Prompts({1: (prompt, RowParameters())}))
    made = disks(ring, stages, tmp_path)
    steps = [*prefill(1, prompt, 0, params.BLOCK), *decoded(1)]
    steps[-1].changes.add().keep.CopyFrom(control.Keep(prefix=1, row=1, tokens=STORED_BLOCK))
    steps[-1].changes.add().admit.row = 1
    try:
        perform(ring, steps, len(steps))
    finally:
        ring.close()
    made[0].close(PATIENCE_SECONDS)
    assert not list(tmp_path.rglob("*.block"))


def test_only_what_was_recalled_is_restored(tmp_path: Path) -> None:
    prompt = prompt_of("llama", 0, LENGTH)
    write("llama", 1, prompt, tmp_path)
    wanted, stages = chain(prompt), stages_of("llama", 1)
    name = wanted.names[0]
    for restore in (
        control.Restore(prefix=1, recall=8, tokens=STORED_BLOCK, name=name),
        control.Restore(prefix=1, recall=7, tokens=STORED_BLOCK - 64, name=name),
        control.Restore(prefix=1, recall=7, tokens=STORED_BLOCK, name=bytes(16)),
        control.Restore(prefix=1, recall=9, tokens=STORED_BLOCK, name=name),
    ):
        ring = Ring(stages, Prompts({2: (prompt, row_of(prompt))}), number=2)
        (disk,) = disks(ring, stages, tmp_path)
        try:
            assert recall(disk, 7, wanted) == STORED_BLOCK
            assert recall(disk, 9, wanted) == STORED_BLOCK
            disk.cancel(9)
            ring.announce(control.Step(number=1, changes=[control.Change(restore=restore)]))
            ring.wait_for_fault()
            assert isinstance(ring.faults[0], InvalidInput)
        finally:
            ring.close()
            disk.close()


def test_what_is_computed_is_stored_though_memory_keeps_nothing_of_it(tmp_path: Path) -> None:
    """A full ring drops what it has kept within a step: that is what its disk is for."""
    prompt = prompt_of("llama", 0, 3 * STORED_BLOCK)
    write("llama", 2, prompt, tmp_path, tokens=0)
    for rank, stage in enumerate(stages_of("llama", 2)):
        disk = disk_of(stage, rank, tmp_path)
        assert disk is not None
        assert recall(disk, 1, chain(prompt)) == 3 * STORED_BLOCK
        disk.close()


@pytest.mark.parametrize("harm", ["flipped", "gone"])
def test_a_damaged_block_is_written_again_when_its_prompt_is_computed_again(
    tmp_path: Path, harm: str
) -> None:
    """Else what lies behind it would be of no use for as long as it is stored."""
    whole = 3 * STORED_BLOCK
    prompt = prompt_of("llama", 0, whole)
    write("llama", 1, prompt, tmp_path, tokens=whole)
    heads = {file: file.read_bytes()[:HEAD_BYTES] for file in tmp_path.rglob("*.block")}
    (damaged,) = (
        file for file, head in heads.items() if (BlockHead.parse(head) or ())[:1] == (STORED_BLOCK,)
    )
    if harm == "gone":
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    (stage,) = stages_of("llama", 1)
    for expected_tokens in (STORED_BLOCK, whole):
        disk = disk_of(stage, 0, tmp_path)
        assert disk is not None
        assert recall(disk, 1, chain(prompt)) == expected_tokens
        assert disk.since(0)[0] >= expected_tokens
        disk.close()
        write("llama", 1, prompt, tmp_path, tokens=whole)


class HungStore(Store):
    """On a disk that answers nothing until it is released."""

    def __init__(self, folder: Path, key: bytes) -> None:
        super().__init__(folder, folder / "model", key, BUDGET)
        self.released = threading.Event()

    def look(self) -> None:
        self.released.wait()
        super().look()

    def read(self, scope: bytes, place: Place, size: int) -> memoryview | None:
        self.released.wait()
        return super().read(scope, place, size)


def test_a_disk_that_hangs_holds_up_no_step_and_no_epoch(tmp_path: Path) -> None:
    prompt = prompt_of("llama", 0, LENGTH)
    write("llama", 1, prompt, tmp_path)
    stages, row, wanted = stages_of("llama", 1), row_of(prompt), chain(prompt)
    layout = compute_thread(0).submit(layout_of, stages[0], "a release").result(PATIENCE_SECONDS)
    assert layout is not None
    store = HungStore(tmp_path / "0", layout.digest)
    disk, found = Disk(layout, store), list[int]()
    for number in (1, 2):
        ring = Ring(stages, Prompts({number: (prompt, row)}), number=number)
        ring.prefixes[0].disk = disk
        begin = disk.recall(number, wanted, found.append)
        assert begin is not None
        begin()
        steps = [*prefill(number, prompt, 0, len(params.encode(row))), *decoded(4)]
        keep = control.Keep(prefix=1, row=number, tokens=STORED_BLOCK)
        steps[-4].changes.add().keep.CopyFrom(keep)
        steps[-4].changes.add().admit.row = number
        try:
            perform(ring, steps, len(steps))
        finally:
            ring.close()
    assert found == []
    store.released.set()
    disk.close(PATIENCE_SECONDS)
    assert found == [], "nobody waits any more"


def test_what_another_release_has_stored_is_a_miss_until_that_runs_again(tmp_path: Path) -> None:
    prompt = prompt_of("llama", 0, LENGTH)
    write("llama", 1, prompt, tmp_path)
    (stage,) = stages_of("llama", 1)
    for release, tokens in (("another", 0), ("a release", STORED_BLOCK)):
        disk = disk_of(stage, 0, tmp_path, release)
        assert disk is not None
        assert disk.held(chain(prompt)).tokens == tokens
        assert recall(disk, 1, chain(prompt)) == tokens
        disk.close()


def test_what_is_not_there_is_a_miss(tmp_path: Path) -> None:
    prompt = prompt_of("llama", 0, LENGTH)
    write("llama", 1, prompt, tmp_path)
    (stage,) = stages_of("llama", 1)
    disk = disk_of(stage, 0, tmp_path)
    assert disk is not None
    wanted, other = chain(prompt), chain(prompt_of("llama", 3, LENGTH))
    assert disk.held(other).names == ()
    assert recall(disk, 1, other) == 0
    longer = Chain(wanted.scope, (*wanted.names, bytes(16), bytes(16)))
    assert disk.held(longer) == wanted
    assert recall(disk, 2, longer) == STORED_BLOCK
    for file in tmp_path.rglob("*.block"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    assert recall(disk, 3, wanted) == 0
    disk.close()
