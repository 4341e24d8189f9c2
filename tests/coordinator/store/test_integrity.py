"""One bit in the database: named at the start, and nothing is signed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import storekit
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sealring.coordinator.init import init, renew_operator_bundle
from sealring.coordinator.keys import ClusterKeys
from sealring.coordinator.roster.publisher import RosterPublisher
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store, StoredMember, StoredRoster
from sealring.coordinator.store.integrity import check_stored
from sealring.coordinator.store.schema import packed
from sealring.mesh.crypto import SoftwareSigner
from sealring.mesh.errors import ConfigError
from sealring.v1.store_pb2 import StoredValue

NOW = 1_800_000_000


def settings_of(folder: Path) -> CoordinatorSettings:
    return CoordinatorSettings(state_dir=folder, cluster="demo")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Something of most kinds."""
    init(settings_of(tmp_path), clock=lambda: NOW)
    made = Store.open(tmp_path)
    keys = ClusterKeys.load(settings_of(tmp_path), now=NOW)
    made.tokens.add(storekit.token("t"), b"secret")
    made.deployments.next_epoch("demo-0")
    with RosterPublisher(made, keys, settings_of(tmp_path), clock=lambda: NOW).change():
        made.members.enrol(storekit.gateway(SoftwareSigner.generate().public_key))
    check_stored(made)
    yield made
    made.close()


@given(row=st.integers(0, 9), bit=st.integers(0, 1 << 14))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_in_any_message_is_named(store: Store, tmp_path: Path, row: int, bit: int) -> None:
    with store.transaction() as connection:
        rows = connection.execute("SELECT * FROM messages WHERE kind != 'audit'").fetchall()
        kind, key, data, _ = rows[row % len(rows)]
        flipped = bytearray(data)
        flipped[bit // 8 % len(data)] ^= 1 << bit % 8
        put = "UPDATE messages SET message = ? WHERE kind = ? AND key = ?"
        connection.execute(put, (bytes(flipped), kind, key))
    with pytest.raises(ConfigError) as caught:
        check_stored(store)
    assert caught.value.reason == "STATE_CORRUPT"
    where = tmp_path / "coordinator.db"
    assert caught.value.message == f"the database {where} is corrupt: {f'{kind} {key}'.rstrip()}"
    assert "sealring coordinator restore" in caught.value.hint
    with store.transaction() as connection:
        connection.execute(put, (data, kind, key))
    check_stored(store)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("roster", {"hash": bytes(32)}, "roster 1"),
        ("roster", {"envelope": b"{}"}, "roster 1"),
        ("member", {"identity_key": bytes(65)}, "the identity key of gate"),
        ("member", {"identity_key": b""}, "the identity key of gate"),
        ("member", {"role": "no role"}, "member"),
        ("member", {"level": "no level"}, "member"),
        ("member", {"key_type": "no key"}, "member"),
        ("meta", {"value": b"no request"}, "the operator's signing request"),
    ],
)
def test_what_does_not_agree_with_itself_is_named(
    store: Store, tmp_path: Path, kind: str, changes: dict[str, Any], named: str
) -> None:
    """It was broken before its checksum was made."""
    of: type[Message] = {"roster": StoredRoster, "member": StoredMember, "meta": StoredValue}[kind]
    with store.transaction() as connection:
        key, data = connection.execute("SELECT key, message FROM messages WHERE kind = ?", (kind,)).fetchone()
        row = packed(kind, key, storekit.changed(of.FromString(data), **changes))
        connection.execute("REPLACE INTO messages VALUES (?, ?, ?, ?)", row)
    keys = ClusterKeys.load(settings_of(tmp_path), now=NOW)
    with pytest.raises(ConfigError) as caught:
        check_stored(store)
        renew_operator_bundle(tmp_path, store, keys, "127.0.0.1:1", now=NOW)
    assert caught.value.reason == "STATE_CORRUPT"
    assert f"corrupt: {named}" in caught.value.message


def test_words_of_members_are_compared_by_value() -> None:
    """A message holds texts: `member.level is TrustLevel.NONE` is never true, whatever the level."""
    words = {"role", "level", "key_type"}
    for file in (Path(__file__).parents[3] / "coordinator").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Compare) and {*map(type, node.ops)} & {ast.Is, ast.IsNot}:
                sides = [node.left, *node.comparators]
                assert not [one for one in sides if isinstance(one, ast.Attribute) and one.attr in words], (
                    file
                )
