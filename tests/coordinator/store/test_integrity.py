"""One bit in the database: named at the start, and nothing is signed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sealring.coordinator.init import init, renew_operator_bundle
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store, StoredMember
from sealring.coordinator.store.integrity import check_stored
from sealring.mesh.crypto import KeyType, SoftwareSigner, member_id
from sealring.mesh.errors import ConfigError
from sealring.mesh.pki import Role

NOW = 1_800_000_000


def flip(store: Store, table: str, column: str, where: str = "1") -> None:
    """The lowest bit of one byte in the middle of a value."""
    with store.transaction() as connection:
        row = connection.execute(f"SELECT {column} FROM {table} WHERE {where}").fetchone()
        data = bytearray(row[0])
        data[len(data) // 2] ^= 1
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (bytes(data),))


@pytest.mark.parametrize(
    ("table", "column", "where", "named"),
    [
        ("rosters", "hash", "1", "roster 1"),
        ("rosters", "envelope", "1", "roster 1"),
        ("members", "identity_key", "1", "the identity key of gate"),
        ("meta", "value", "name = 'operator_csr'", "the operator's signing request"),
    ],
)
def test_what_does_not_agree_with_itself_is_named(
    tmp_path: Path, table: str, column: str, where: str, named: str
) -> None:
    settings = CoordinatorSettings(state_dir=tmp_path, cluster="demo")
    init(settings, clock=lambda: NOW)
    store = Store.open(tmp_path)
    keys = ClusterKeys.load(settings, now=NOW)
    key = SoftwareSigner.generate().public_key
    with RosterPublisher(store, keys, settings, clock=lambda: NOW).change():
        store.members.enrol(StoredMember(member_id(key), Role.GATEWAY, "gate", key, KeyType.SOFTWARE, NOW))
    check_stored(store)
    flip(store, table, column, where)
    with pytest.raises(ConfigError) as caught:
        check_stored(store)
        renew_operator_bundle(tmp_path, store, keys, "127.0.0.1:1", now=NOW)
    assert caught.value.reason == "STATE_CORRUPT"
    assert caught.value.message == f"table {table} of {tmp_path / 'coordinator.db'} is corrupt: {named}"
    assert "sealring coordinator restore" in caught.value.hint
    store.close()


def test_a_key_that_is_none_and_a_list_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    settings = CoordinatorSettings(state_dir=tmp_path, cluster="demo")
    init(settings, clock=lambda: NOW)
    store = Store.open(tmp_path)
    key = SoftwareSigner.generate().public_key
    with RosterPublisher(store, ClusterKeys.load(settings, now=NOW), settings, clock=lambda: NOW).change():
        store.members.enrol(StoredMember(member_id(key), Role.GATEWAY, "gate", key, KeyType.SOFTWARE, NOW))
    for column, value, named in (
        ("identity_key", b"", "the identity key of gate"),
        ("role", "no role", "the list of members"),
    ):
        with store.transaction() as connection:
            connection.execute(f"UPDATE members SET {column} = ?", (value,))
        with pytest.raises(ConfigError) as caught:
            check_stored(store)
        assert (caught.value.reason, caught.value.message.endswith(f"corrupt: {named}")) == (
            "STATE_CORRUPT",
            True,
        )
    store.close()
