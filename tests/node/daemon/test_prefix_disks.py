"""Keys for engines, from the identity; and their end."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.mesh.crypto import SoftwareSigner
from sealring.mesh.errors import Unavailable
from sealring.node.daemon.prefix_disks import PrefixDisks


@dataclasses.dataclass(frozen=True)
class Plan:
    deployment: str = "chat"
    model: str = "org/model"
    model_digest: str = "ab" * 32
    held: tuple[int, int] = (0, 8)
    kv_bits: int = 0
    backend: str = ""
    size: int = 2
    releases: tuple[bytes, ...] = (b"one",)


PLAN: Any = Plan()
CACHES = [b"what rank 0 computes with", b"what rank 1 does"]
SIGNER = SoftwareSigner.generate()
NOBODY: Any = None  # to bring blocks from


def disks(root: Path, signer: Any = SIGNER, size: int | None = None, cluster: str = "cluster") -> PrefixDisks:
    return PrefixDisks(root, cluster, signer, size, NOBODY)


async def test_a_stage_has_one_key_for_as_long_as_nothing_is_removed(tmp_path: Path) -> None:
    first = await disks(tmp_path).of(PLAN, CACHES)
    again = await disks(tmp_path, size=5).of(PLAN, CACHES)
    assert first is not None
    assert again is not None
    assert first.key == again.key
    assert (first.HasField("size"), again.size) == (False, 5)
    others: list[dict[str, Any]] = [
        {"deployment": "other"},
        {"held": (0, 9)},
        {"kv_bits": 4},
        {"model_digest": "cd"},
        {"releases": (b"one", b"two")},
        {"releases": (b"three", b"two")},
    ]
    updated = await disks(tmp_path).of(dataclasses.replace(PLAN, releases=(b"two",)), CACHES)
    assert updated is not None
    assert updated.key == first.key, "all members were, and the engine's versions decide"
    keys = {first.key}
    for change in others:
        other = await disks(tmp_path).of(dataclasses.replace(PLAN, **change), CACHES)
        assert other is not None
        keys.add(other.key)
    for rank in range(2):
        replaced = await disks(tmp_path).of(PLAN, [*CACHES[:rank], b"other weights", *CACHES[rank + 1 :]])
        assert replaced is not None
        keys.add(replaced.key)
    elsewhere = await disks(tmp_path, cluster="other").of(PLAN, CACHES)
    stranger = await disks(tmp_path, SoftwareSigner.generate()).of(PLAN, CACHES)
    assert elsewhere is not None
    assert stranger is not None
    assert len(keys | {elsewhere.key, stranger.key}) == len(others) + 5
    await disks(tmp_path).forget("org/other")
    await disks(tmp_path).forget("org/model")
    anew = await disks(tmp_path).of(PLAN, CACHES)
    assert anew is not None
    assert anew.key != first.key


async def test_nothing_is_stored_where_it_is_turned_off_or_cannot_be(tmp_path: Path) -> None:
    class Broken(SoftwareSigner):
        def derive(self, seed: bytes) -> bytes:
            raise Unavailable("the helper is older")

    tensor = dataclasses.replace(PLAN, backend="ring")
    stranger = SimpleNamespace(public_key=b"", key_type="software")
    for silent in ([], CACHES[:1], [CACHES[0], b""]):
        assert await disks(tmp_path).of(PLAN, silent) is None, "a member of an earlier release"
    assert await disks(tmp_path, size=0).of(PLAN, CACHES) is None
    assert await disks(tmp_path).of(tensor, CACHES) is None
    assert await disks(tmp_path, stranger).of(PLAN, CACHES) is None
    assert await disks(tmp_path, Broken.generate()).of(PLAN, CACHES) is None
    (tmp_path / "file").write_bytes(b"")
    assert await disks(tmp_path / "file").of(PLAN, CACHES) is None


@pytest.mark.parametrize(("size", "left"), [(0, 0), (5, 1), (None, 1)])
async def test_turned_off_it_removes_what_is_there(tmp_path: Path, size: int | None, left: int) -> None:
    await disks(tmp_path).of(PLAN, CACHES)
    await disks(tmp_path, size=size).run()
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == left
