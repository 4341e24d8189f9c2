"""Which parts of a model are here, to the part and to the byte."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from sealring.mesh.errors import ModelError
from sealring.node.models import kept
from sealring.node.models.folders import FolderState
from sealring.node.models.kept import (
    Note,
    beginnings,
    check_commit,
    commit_of,
    every_part,
    headers,
    length_of,
    parts_between,
    parts_of,
    runs,
    to_message,
    with_ranges,
)
from sealring.node.models.manifest import Manifest, ModelFile

PART = 64
COMMIT, OTHER = "ab" * 20, "cd" * 20


pytestmark = pytest.mark.usefixtures("small_parts")


def file(name: str, size: int, mark: int = 1) -> ModelFile:
    return ModelFile(name, size, bytes([mark]) * 32 * -(-size // PART))


CONFIG, WEIGHTS = file("config.json", 10), file("model.safetensors", 9 * PART + 1)
MODEL = Manifest((CONFIG, WEIGHTS))


def parts(*wanted: set[int]) -> list[frozenset[int]]:
    return [frozenset(one) for one in wanted]


def note(have: Any, model: Manifest = MODEL, **more: Any) -> Note:
    return Note(model, have, FolderState(Path("m"), ()), **more)


def test_a_file_is_so_many_parts_and_the_last_is_shorter() -> None:
    assert [file("a", size).parts for size in (0, 1, 64, 65)] == [0, 1, 1, 2]
    assert [WEIGHTS.length(part) for part in (0, 8, 9)] == [64, 64, 1]
    assert (CONFIG.is_weights, WEIGHTS.is_weights) == (False, True)
    learnt = file("a", 200, mark=0).with_hash(1, b"h" * 32)
    assert [learnt.knows(part) for part in range(4)] == [False, True, False, False]
    assert (learnt.hash_of(1), learnt.fits(1, b"h" * 32), learnt.fits(2, b"h" * 32)) == (
        b"h" * 32,
        True,
        False,
    )
    assert len(learnt.hashes) == 4 * 32
    assert (MODEL.size, length_of(MODEL.files, every_part(MODEL))) == (9 * PART + 11, 9 * PART + 11)
    assert length_of(MODEL.files, parts(set(), {8, 9})) == 65


def test_parts_are_sent_as_bits_and_all_of_a_file_as_none() -> None:
    have = parts({0}, {0, 3, 8, 9})
    message = to_message(MODEL, have)
    assert [one.have for one in message.files] == [b"", b"\x09\x03"]
    assert parts_of(message, MODEL) == have
    nothing = parts(set(), set())
    assert [one.have for one in to_message(MODEL, nothing).files] == [b"\0", b"\0\0"]
    assert parts_of(to_message(MODEL, nothing), MODEL) == nothing
    assert parts_of(MODEL.message(), MODEL) == every_part(MODEL)
    for wrong in (b"\x09", b"\x09\x03\0"):
        message.files[1].have = wrong
        with pytest.raises(ModelError) as caught:
            parts_of(message, MODEL)
        assert caught.value.reason == "BAD_MANIFEST"


@pytest.mark.parametrize(
    ("have", "more", "whole", "hashed"),
    [
        (parts({0}, set(range(10))), {}, True, True),
        (parts({0}, set(range(9))), {}, False, True),
        (parts({0}, set(range(10))), {"commit": COMMIT}, True, False),
        (parts({0}, set(range(10))), {"commit": COMMIT, "checked": True}, True, True),
        (parts({0}, set(range(9))), {"commit": COMMIT, "checked": True}, False, True),
    ],
)
def test_a_model_is_here_once_all_of_it_is_and_is_confirmed(
    have: Any, more: dict[str, Any], whole: bool, hashed: bool
) -> None:
    found = note(have, **more)
    assert (found.whole, found.hashed, found.is_part) == (whole, hashed, not (whole and hashed))
    assert found.done == 10 + 9 * PART + whole


def test_bytes_are_here_where_all_of_their_parts_are() -> None:
    found = note(parts({0}, {1, 2}))
    for ranges, here in (
        ([], True),
        ([("model.safetensors", 64, 192)], True),
        ([("model.safetensors", 63, 65)], False),
        ([("model.safetensors", 191, 193)], False),
        ([("model.safetensors", 64, 65), ("config.json", 0, 10)], True),
        ([("config.json", 0, 10), ("model.safetensors", 0, 1)], False),
        ([("other.json", 0, 0)], False),
    ):
        assert found.holds(ranges) is here
    assert [list(parts_between(*ends)) for ends in ((0, 0), (0, 1), (63, 65), (64, 128))] == [
        *([], [0], [0, 1], [1])
    ]
    assert with_ranges(MODEL, parts({0}, {9}), [("model.safetensors", 63, 65)]) == parts({0}, {0, 1, 9})
    assert runs([]) == []
    assert runs({8, 1, 3, 2, 7, 5}) == [range(1, 4), range(5, 6), range(7, 9)]


def test_a_part_is_of_another_model_as_far_as_it_is_here() -> None:
    changed = Manifest((CONFIG, WEIGHTS.with_hash(4, b"h" * 32)))
    assert note(parts({0}, {0, 3})).agrees(changed)
    assert not note(parts({0}, {0, 4})).agrees(changed)
    assert not note(parts({0}, set())).agrees(Manifest((CONFIG,)))
    assert not note(parts({0}, set())).agrees(Manifest((CONFIG, file("model.safetensors", 9 * PART + 2))))
    assert not note(parts({0}, set())).agrees(Manifest((CONFIG, file("other.safetensors", 9 * PART + 1))))
    less, more = note(parts({0}, {1})), note(parts({0}, {1, 2}))
    assert (less.is_of(more), less.is_of(less), more.is_of(less)) == (True, True, False)
    assert not less.is_of(note(parts({0}, {1, 2}), changed))


def test_a_stage_begins_with_what_is_not_weights_and_all_of_the_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = Manifest((file("adapter_config.json", 20), file("adapters.safetensors", 3 * PART)))
    assert beginnings(tuned) == parts({0, 1, 2} & {0, *range(tuned.files[0].parts)}, {0, 1, 2})
    assert Manifest.from_message(tuned.message()) == tuned
    model = Manifest((file("config.json", 200), file("empty.safetensors", 0), WEIGHTS))
    assert beginnings(model) == parts({0, 1, 2, 3}, set(), {0})
    (tmp_path / "empty.safetensors").write_bytes(b"")
    for length, reached in ((56, {0, 9}), (57, {0, 1, 9}), (9 * PART, set(range(10)))):
        (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little"))
        wanted = parts({0, 1, 2, 3}, set(), {0, 9})
        assert headers(model, wanted, tmp_path) == parts({0, 1, 2, 3}, set(), reached)
    monkeypatch.setattr(kept, "_MAX_HEADER", 9 * PART + 7)
    with pytest.raises(ModelError) as caught:
        headers(model, wanted, tmp_path)
    assert caught.value.reason == "WEIGHTS_CORRUPT"


def test_a_folder_is_of_a_commit_by_its_note_or_in_the_hubs_cache() -> None:
    cached = Path("models--org--m/snapshots") / COMMIT
    for folder, found, commit in (
        (cached, None, COMMIT),
        (cached, note(every_part(MODEL)), ""),
        (Path("m"), note(every_part(MODEL), commit=OTHER), OTHER),
        (Path("models") / COMMIT, None, ""),
        (Path("snapshots/main"), None, ""),
    ):
        assert commit_of(folder, found) == commit
    for here, asked in (("", COMMIT), (COMMIT, ""), (COMMIT, COMMIT)):
        check_commit("m", here, asked)
    with pytest.raises(ModelError, match="commit abababab, and cdcdcdcd is deployed") as caught:
        check_commit("m", COMMIT, OTHER)
    assert caught.value.reason == "OTHER_MODEL_VERSION"


def test_a_manifests_digest_covers_names_sizes_and_hashes() -> None:
    total = hashlib.sha256()
    for one in MODEL.files:
        for field in (one.name.encode(), one.size.to_bytes(8, "big"), one.hashes):
            total.update(len(field).to_bytes(8, "big") + field)
    assert MODEL.digest == total.digest()
