"""Keys on disk: made, listed, revoked, by several processes at once."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sealring.edge.access import keyfile
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import Scope, matches, parse_key
from sealring.mesh.errors import ConfigError, InvalidInput, NotFound, ResourceExhausted

HASH = "$argon2id$v=19$m=65536,t=2,p=1$" + "a" * 22 + "$" + "b" * 43
USE = [Scope.INFERENCE]


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes that cost nothing, where the hash is not what is tried."""
    monkeypatch.setattr(keyfile, "hash_key", lambda key: HASH)


def test_a_key_is_kept_as_a_hash(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "gateway" / "state", clock=lambda: 1000.5)
    assert keys.stamp() is None
    assert keys.read() == {}
    text, record = keys.create([Scope.READ, Scope.INFERENCE], label="laptop ☃", seconds=60)
    assert keys.read() == {record.id: record}
    assert (record.created, record.expires, record.last_used, record.revoked) == (1000, 1060, 0, 0)
    assert record.scopes == (Scope.INFERENCE, Scope.READ)
    key = parse_key(text)
    assert key is not None
    assert key.id == record.id
    assert matches(key, record.hash)
    folder = tmp_path / "gateway" / "state"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = list(folder.iterdir())
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert not any(text.rpartition("_")[2].encode() in file.read_bytes() for file in files)
    assert record.hash not in repr(record)


@pytest.mark.usefixtures("cheap")
def test_what_a_record_allows() -> None:
    keys = {scope: _record(scope) for scope in Scope}
    assert keys[Scope.ADMIN].allows([Scope.INFERENCE])
    assert keys[Scope.READ].allows([Scope.INFERENCE, Scope.READ])
    assert not keys[Scope.READ].allows([Scope.INFERENCE])
    assert not keys[Scope.INFERENCE].allows([Scope.ADMIN])
    limited = _record(Scope.READ, expires=10)
    assert limited.usable(9.9)
    assert not limited.usable(10)
    assert not _record(Scope.READ, revoked=1).usable(0)
    assert _record(Scope.READ).usable(1e12)


def _record(scope: Scope, **fields: int) -> keyfile.KeyRecord:
    record = keyfile.KeyRecord(id="a" * 16, hash=HASH, scopes=(scope,), created=0)
    return record.model_copy(update=fields)


@pytest.mark.usefixtures("cheap")
def test_revoked_keys_stay_and_stay_revoked(tmp_path: Path) -> None:
    now = [5.0]
    keys = KeyFile(tmp_path, clock=lambda: now[0])
    record = keys.create(USE)[1]
    before = keys.stamp()
    assert keys.revoke(record.id).revoked == 5
    assert keys.stamp() != before
    now[0] = 9.0
    assert keys.revoke(record.id).revoked == 5
    assert keys.read()[record.id].revoked == 5
    with pytest.raises(NotFound):
        keys.revoke("b" * 16)


@pytest.mark.usefixtures("cheap")
def test_use_is_noted_by_the_hour(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path)
    record = keys.create(USE)[1]
    keys.note_use({record.id: 2 * 3600 + 17, "b" * 16: 9})
    assert keys.read()[record.id].last_used == 2 * 3600
    before = keys.stamp()
    keys.note_use({record.id: 2 * 3600 + 1800})
    keys.note_use({record.id: 3600})
    assert keys.stamp() == before


@pytest.mark.usefixtures("cheap")
def test_changes_at_once_are_all_kept(tmp_path: Path) -> None:
    def change(number: int) -> str:
        keys = KeyFile(tmp_path)
        record = keys.create(USE, label=str(number))[1]
        keys.note_use({record.id: 7200})
        return record.id

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(change, range(24)))
    records = KeyFile(tmp_path).read()
    assert sorted(records) == sorted(made)
    assert {record.last_used for record in records.values()} == {7200}


@pytest.mark.usefixtures("cheap")
def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeyFile(tmp_path)
    labelled = keys.create(USE, label="x" * 64)[1]
    assert labelled.label == "x" * 64
    for label in ("x" * 65, "new\nline", "\x1b[2J"):
        with pytest.raises(InvalidInput) as caught:
            keys.create(USE, label=label)
        assert caught.value.reason == "BAD_LABEL"
    with pytest.raises(InvalidInput) as none:
        keys.create([])
    assert none.value.reason == "NO_SCOPE"
    assert keyfile.MAX_KEYS == 1000
    monkeypatch.setattr(keyfile, "MAX_KEYS", 4)
    first, second, third = (keys.create(USE)[1] for _ in range(3))
    with pytest.raises(ResourceExhausted):
        keys.create(USE)
    keys.revoke(second.id)
    fourth = keys.create(USE)[1]
    assert set(keys.read()) == {labelled.id, first.id, third.id, fourth.id}


@pytest.mark.usefixtures("cheap")
def test_files_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    keys, file = KeyFile(tmp_path), tmp_path / keyfile.KEYS_FILE
    record = json.loads(keys.create(USE)[1].model_dump_json())
    bad = [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        *(
            json.dumps({"version": version, "keys": entries}).encode()
            for version, entries in [
                (2, []),
                (1, [record, record]),
                (1, [{**record, "more": 1}]),
                (1, [{**record, "hash": "x"}]),
                (1, [{**record, "id": "../../etc/passwd"}]),
                (1, [{**record, "scopes": []}]),
                (1, [{**record, "scopes": ["root"]}]),
                (1, [{**record, "revoked": -1}]),
            ]
        ),
    ]
    for content in bad:
        file.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            keys.read()
        assert caught.value.reason == "KEYS_CORRUPT"
        with pytest.raises(ConfigError):
            keys.create(USE)
        assert file.read_bytes() == content
    file.write_bytes(b" " * (1 << 20))
    with pytest.raises(ConfigError) as read:
        keys.read()
    assert read.value.reason == "KEYS_CORRUPT"
    file.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(ConfigError) as long:
        keys.read()
    assert long.value.reason == "SECRET_FILE_UNSAFE"
    file.write_bytes(b"{}")
    file.chmod(0o644)
    with pytest.raises(ConfigError) as wide:
        keys.read()
    assert wide.value.reason == "SECRET_FILE_UNSAFE"
    file.unlink()
    file.symlink_to("nowhere")
    assert keys.stamp() is not None, "a link to nothing is not no file"


def test_what_is_wrong_with_a_file_of_keys_is_said_without_what_it_holds() -> None:
    for model in (keyfile.Content, keyfile.KeyRecord):
        with pytest.raises(ValueError) as caught:
            model.model_validate({"keys": ["a secret"], "id": "a secret"})
        assert "a secret" not in str(caught.value)
