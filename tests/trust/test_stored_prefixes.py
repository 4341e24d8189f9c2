"""Attacks on prefixes on disk: whatever is there, it is the block or snapshot that was written, or a miss."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sealring.mesh.crypto import SoftwareSigner
from sealring.mesh.ring import Chain, chain_of
from sealring.node.stored.codec import HEAD_BYTES, USES_AT
from sealring.node.stored.keys import StageIdentity, model_folder, stage_key
from sealring.node.stored.places import Place, blocks_of, snapshot_of
from sealring.node.stored.store import Store

OWN = StageIdentity("cluster", "deployment", "ab" * 32, (0, 8), 0, (), (b"1", b"2"))
OTHERS = {
    "other layers": replace(OWN, layers=(8, 16)),
    "more layers": replace(OWN, layers=(0, 9)),
    "other cluster": replace(OWN, cluster="other"),
    "other deployment": replace(OWN, deployment="other"),
    "other model": replace(OWN, model_digest="cd" * 32),
    "other bits": replace(OWN, kv_bits=8),
    "other releases": replace(OWN, releases=(b"1", b"2")),
    "other weights on another member": replace(OWN, caches=(b"1", b"3")),
}
SIZE, SNAPSHOT_SIZE = 3000, 4500
USES = range(USES_AT, USES_AT + 4)
"""Not authenticated: how often a block was used."""


@dataclass(frozen=True)
class Shelf:
    """A store with two prompts in each of two scopes."""

    store: Store
    folder: Path
    files: dict[tuple[bytes, Place], tuple[Path, bytes]]


def prompt(number: int) -> Chain:
    return chain_of(bytes(32), b"ckey", random.Random(number).randbytes(4 * 800))


def places(chain: Chain) -> list[Place]:
    """Blocks, and a snapshot at the end of each."""
    return [*blocks_of(chain), *(snapshot_of(chain.first(edge)) for edge in chain.edges)]


SNAPSHOTS = {
    place for number in (1, 2) for place in places(prompt(number)) if place not in blocks_of(prompt(number))
}


def size_of(place: Place) -> int:
    return SNAPSHOT_SIZE if place in SNAPSHOTS else SIZE


def content(scope: bytes, place: Place, of: str) -> bytes:
    return random.Random(f"{scope!r} {place} {of}").randbytes(size_of(place))


def shelf(root: Path, stage: StageIdentity, signer: SoftwareSigner, of: str) -> Shelf:
    folder = model_folder(root, stage.model_digest)
    store = Store(root, folder, stage_key(root, stage, "org/model", signer), 1 << 30)
    store.look()
    files = {}
    for scope in (b"a" * 16, b"b" * 16):
        for number in (1, 2):
            for place in places(prompt(number)):
                before = set(folder.rglob("*.block"))
                assert store.write(scope, place, memoryview(content(scope, place, of)))
                (path,) = set(folder.rglob("*.block")) - before
                files[scope, place] = path, path.read_bytes()
    return Shelf(store, folder, files)


Attack = Callable[[random.Random, bytes], bytes]


def flipped(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.choice([each for each in range(len(data)) if each not in USES])
        changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed)


def swapped(chance: random.Random, data: bytes) -> bytes:
    """Two pieces of 16 bytes in each other's place."""
    one, two = sorted(chance.sample(range((len(data) - HEAD_BYTES) // 16), 2))
    pieces = [data[at : at + 16] for at in range(HEAD_BYTES, len(data), 16)]
    pieces[one], pieces[two] = pieces[two], pieces[one]
    return data[:HEAD_BYTES] + b"".join(pieces)


DAMAGE: dict[str, Attack] = {
    "flipped": flipped,
    "cut": lambda chance, data: data[: chance.randrange(len(data))],
    "longer": lambda chance, data: data + chance.randbytes(chance.randint(1, 64)),
    "shifted": lambda chance, data: data[(by := chance.randint(1, 64)) :] + data[:by],
    "zeros": lambda chance, data: data[: (at := chance.randrange(len(data)))] + bytes(len(data) - at),
    "another file": lambda chance, data: data[:HEAD_BYTES] + chance.randbytes(len(data) - HEAD_BYTES),
    "pieces swapped": swapped,
}


@pytest.mark.parametrize("tries", [600, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_no_block_or_snapshot_that_is_wrong_foreign_stale_or_damaged_is_ever_read(
    tmp_path: Path, tries: int
) -> None:
    """Each try puts something else in a block's place. No try gives other content than was written there."""
    signer, chance = SoftwareSigner.generate(), random.Random(30)
    own = shelf(tmp_path / "own", OWN, signer, "own")
    foreign = {name: shelf(tmp_path / name, stage, signer, name).files for name, stage in OTHERS.items()} | {
        "other identity": shelf(tmp_path / "stranger", OWN, SoftwareSigner.generate(), "stranger").files,
        "stale: an earlier seed": shelf(tmp_path / "earlier", OWN, signer, "earlier").files,
    }
    kinds = [*DAMAGE, *foreign, "other block", "head of another", "end of another"]
    done: Counter[str] = Counter()
    for number in range(tries):
        kind = kinds[number % len(kinds)]
        (scope, place), (path, data) = chance.choice(list(own.files.items()))
        others = [each for _, each in own.files.values() if each != data]
        if kind in DAMAGE:
            planted = DAMAGE[kind](chance, data)
        elif kind in foreign:  # in the place that has the same name there, or in any
            same = foreign[kind][scope, place][1]
            planted = chance.choice([same, chance.choice(list(foreign[kind].values()))[1]])
        elif kind == "other block":
            planted = chance.choice(others)
        else:
            at = chance.choice([HEAD_BYTES, HEAD_BYTES + 12, chance.randrange(HEAD_BYTES, len(data))])
            other = chance.choice(others)
            planted = other[:at] + data[at:] if kind == "head of another" else data[:at] + other[at:]
        if planted[:USES_AT] + planted[USES.stop :] == data[:USES_AT] + data[USES.stop :]:
            continue
        path.write_bytes(planted)
        found = own.store.read(scope, place, size_of(place))
        assert found is None, f"{kind} was read"
        path.write_bytes(data)
        done[kind] += 1
    for (scope, place), _ in own.files.items():
        assert own.store.read(scope, place, size_of(place)) == content(scope, place, "own")
    assert set(done) == set(kinds)
    assert own.store.figures().damaged == done.total() >= 0.95 * tries
