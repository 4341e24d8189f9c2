"""The store: one writer, all or nothing, tokens spent once, versions and epochs used once, a chained log."""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import storekit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sealring.coordinator.store import (
    Store,
    StoredDeployment,
    StoredMember,
    StoredRoster,
    StoredToken,
    revocation_of,
)
from sealring.coordinator.store.audit import AuditLog
from sealring.coordinator.store.database import Database
from sealring.mesh.audit import Beginning, verify_chain
from sealring.mesh.crypto import KeyType
from sealring.mesh.errors import (
    AlreadyExists,
    ConfigError,
    FailedPrecondition,
    Internal,
    NotFound,
    Unavailable,
)
from sealring.mesh.pki import Role
from sealring.mesh.trust.levels import TrustLevel
from sealring.v1 import admin_pb2, membership_pb2

NOW = 1_800_000_000
MEMBER = StoredMember(
    id="m" * 52,
    role=Role.MEMBER,
    name="alpha",
    identity_key=b"k" * 65,
    key_type=KeyType.SOFTWARE,
    enrolled_at=NOW,
    sealing_key=b"s" * 32,
    level=TrustLevel.SOFTWARE,
    trust=10,
    attestation=b"{}",
    attested_at=NOW,
    challenged_at=NOW,
    manifest_hash=bytes(32),
    addresses=("127.0.0.1:7000", "[::1]:7000"),
    software_version="1",
    draining=1,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store.create(tmp_path)
    yield made
    made.close()


def token(identifier: str = "t1", *, expires: int = NOW + 600) -> StoredToken:
    return storekit.changed(storekit.token(identifier), expires=expires, note="for the attic")


def test_a_second_coordinator_on_the_same_state_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Store.open(tmp_path)
    assert caught.value.reason == "STATE_IN_USE"
    store.close()
    Store.open(tmp_path).close()


def test_a_state_that_cannot_be_used_is_not_kept_from_others(tmp_path: Path) -> None:
    Store.create(tmp_path).close()
    for _ in range(2):
        with pytest.raises(AlreadyExists):
            Store.create(tmp_path)
    Store.open(tmp_path).close()
    (tmp_path / "coordinator.db").write_bytes(b"no database" * 1000)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            Store.open(tmp_path)
        assert caught.value.reason == "STATE_CORRUPT"


def test_a_missing_corrupt_or_foreign_database_is_refused(tmp_path: Path) -> None:
    def reason() -> str:
        with pytest.raises(ConfigError) as caught:
            Store.open(tmp_path)
        return caught.value.reason

    assert reason() == "STATE_MISSING"
    path = tmp_path / "coordinator.db"
    path.write_bytes(b"not a database at all" * 100)
    assert reason() == "STATE_CORRUPT"
    path.unlink()
    sqlite3.connect(path).execute("CREATE TABLE other (x)").connection.close()
    assert reason() == "STATE_CORRUPT"


def test_a_damaged_page_is_found(store: Store, tmp_path: Path) -> None:
    for number in range(200):
        store.audit.append(NOW, "a", "b", "c", {"number": number, "filler": "x" * 200})
    store.close()
    path = tmp_path / "coordinator.db"
    data = bytearray(path.read_bytes())
    data[8192:12288] = b"\xff" * 4096
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        Store.open(tmp_path)
    assert caught.value.reason == "STATE_CORRUPT"


def test_a_transaction_is_all_or_nothing_even_nested(store: Store) -> None:
    with pytest.raises(RuntimeError), store.transaction():
        store.tokens.add(token(), b"secret")
        store.members.save(MEMBER)
        raise RuntimeError
    assert store.tokens.open(now=NOW) == []
    assert store.members.all() == []


def test_a_full_disk_is_one_clear_error_and_changes_nothing(store: Store) -> None:
    with store.transaction() as connection:
        pass
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(Unavailable) as caught, store.transaction():
        store.tokens.add(token(), b"secret")
        store.set_meta("big", b"x" * (1 << 20))
    assert caught.value.reason == "STATE_UNWRITABLE"
    assert store.trouble == caught.value.message
    assert store.tokens.open(now=NOW) == []
    connection.execute("PRAGMA max_page_count = 1000000")
    store.tokens.add(token(), b"secret")
    assert store.trouble == ""


def test_tokens_are_listed_while_nothing_can_be_written(store: Store) -> None:
    store.tokens.add(token(expires=NOW + 5), b"secret")
    with store.transaction() as connection:
        pass
    connection.execute("PRAGMA query_only = ON")
    assert len(store.tokens.open(now=NOW)) == 1
    assert store.tokens.open(now=NOW + 5) == []
    connection.execute("PRAGMA query_only = OFF")
    store.tokens.add(storekit.changed(token(), id="t2", created=NOW + 5), b"secret")
    assert not store.tokens.is_open("t1"), "it is dropped with the next change"


def test_a_token_is_spent_once(store: Store) -> None:
    store.tokens.add(token(), b"secret")
    assert not store.tokens.spend("t1", b"wrong", Role.MEMBER, now=NOW)
    assert not store.tokens.spend("t1", b"secret", Role.GATEWAY, now=NOW)
    assert not store.tokens.spend("t2", b"secret", Role.MEMBER, now=NOW)
    assert store.tokens.spend("t1", b"secret", Role.MEMBER, now=NOW)
    assert not store.tokens.spend("t1", b"secret", Role.MEMBER, now=NOW)


def test_a_token_enrols_as_many_as_it_is_for(store: Store) -> None:
    store.tokens.add(storekit.changed(token(), uses=2), b"secret")
    assert store.tokens.spend("t1", b"secret", Role.MEMBER, now=NOW)
    assert not store.tokens.spend("t1", b"wrong", Role.MEMBER, now=NOW)
    assert [one.id for one in store.tokens.open(now=NOW)] == ["t1"]
    assert store.tokens.spend("t1", b"secret", Role.MEMBER, now=NOW)
    assert not store.tokens.spend("t1", b"secret", Role.MEMBER, now=NOW)
    assert store.tokens.open(now=NOW) == []


def test_an_expired_token_is_worth_nothing(store: Store) -> None:
    store.tokens.add(token(expires=NOW), b"secret")
    assert not store.tokens.spend("t1", b"secret", Role.MEMBER, now=NOW)
    assert store.tokens.open(now=NOW) == []


def test_a_revoked_token_is_gone(store: Store) -> None:
    store.tokens.add(token(), b"secret")
    assert [one.id for one in store.tokens.open(now=NOW)] == ["t1"]
    store.tokens.revoke("t1")
    with pytest.raises(NotFound):
        store.tokens.revoke("t1")


def test_no_secret_is_on_disk(store: Store, tmp_path: Path) -> None:
    store.tokens.add(token(), b"the-secret-of-this-token")
    store.close()
    assert all(b"the-secret" not in path.read_bytes() for path in tmp_path.iterdir())


def test_members_come_back_as_they_were_stored(store: Store) -> None:
    store.members.enrol(MEMBER)
    assert store.members.get(MEMBER.id) == MEMBER
    assert store.members.all(Role.GATEWAY) == []
    changed = storekit.changed(MEMBER, draining=0, addresses=("h:1",))
    store.members.save(changed)
    assert store.members.all(Role.MEMBER) == [changed]
    with pytest.raises(NotFound):
        store.members.get("nobody")


def test_what_a_later_release_knows_of_a_member_is_kept_by_this_release(store: Store) -> None:
    later = StoredMember.FromString(MEMBER.SerializeToString() + b"\xfa\x7f\x03new")  # field 2047, a text
    store.members.enrol(later)
    found = store.members.get(MEMBER.id)
    found.draining = 0
    store.members.save(found)
    assert store.members.get(MEMBER.id).SerializeToString().endswith(b"\xfa\x7f\x03new")


def test_an_evicted_member_may_come_back_and_a_banned_one_may_not(store: Store) -> None:
    store.members.enrol(MEMBER)
    store.members.revoke(revocation_of(MEMBER, NOW, banned=False))
    assert store.members.find(MEMBER.id) is None
    assert not store.members.banned(MEMBER.id)
    assert len(store.members.revocations(since=NOW, limit=10)) == 1
    store.members.enrol(MEMBER)
    assert store.members.gone(limit=10) == []
    assert store.members.find_revocation(MEMBER.id) is None
    again = store.members.get(MEMBER.id)
    store.members.revoke(revocation_of(again, NOW + 5, banned=True))
    store.members.revoke(revocation_of(again, NOW + 9, banned=False))
    assert store.members.banned(MEMBER.id)
    (gone,) = store.members.gone(limit=10)
    assert gone == store.members.find_revocation(MEMBER.id) == revocation_of(again, NOW + 5, banned=True)


STEPS = st.lists(st.tuples(st.sampled_from(["enrol", "evict", "ban"]), st.integers(-9, 9)), max_size=12)


@given(steps=STEPS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_enrolments_of_an_identity_follow_each_other_whatever_a_clock_says(
    store: Store, steps: list[tuple[str, int]]
) -> None:
    """What is revoked is one enrolment, and its end stays where it was."""
    mine = storekit.changed(MEMBER, id=secrets.token_hex(8))
    now, ends = NOW, dict[int, int]()
    for step, later in steps:
        now += later
        member = store.members.find(mine.id)
        if step == "enrol" and not store.members.banned(mine.id):
            store.members.enrol(storekit.changed(mine, enrolled_at=now))
            since = store.members.get(mine.id).enrolled_at
            assert since == member.enrolled_at if member else all(since > end for end in ends.values())
        elif step != "enrol" and (who := member or store.members.find_revocation(mine.id)) is not None:
            store.members.revoke(revocation_of(who, now, banned=step == "ban"))
            ends.setdefault(who.enrolled_at, max(now, who.enrolled_at))
        found = store.members.revocations(since=0, limit=None)
        assert {one.enrolled_at: one.at for one in found if one.id == mine.id} == ends


def test_the_evictions_of_one_identity_that_are_remembered_are_bounded(store: Store) -> None:
    for _ in range(130):
        store.members.enrol(MEMBER)
        store.members.revoke(revocation_of(store.members.get(MEMBER.id), NOW, banned=False))
    found = store.members.revocations(since=0, limit=1000)
    assert len(found) == 101
    assert min(one.enrolled_at for one in found) == NOW + 29, "the oldest are forgotten"


def test_a_gateway_that_is_back_is_no_longer_revoked(store: Store) -> None:
    gateway = storekit.changed(MEMBER, role=Role.GATEWAY)
    store.members.enrol(gateway)
    store.members.revoke(revocation_of(gateway, NOW, banned=False))
    store.members.enrol(gateway)
    assert store.members.revocations(since=0, limit=10) == []


def deployment(name: str = "demo") -> StoredDeployment:
    spec = admin_pb2.DeploymentSpec(name=name, model="m")
    return StoredDeployment(
        name=name, asked=spec, plan=admin_pb2.DeploymentPlan(spec=spec, plan_hash="ab"), created=NOW
    )


def test_deployments_have_unique_names(store: Store) -> None:
    store.deployments.add(deployment())
    with pytest.raises(AlreadyExists) as caught:
        store.deployments.add(deployment())
    assert caught.value.reason == "NAME_TAKEN"
    assert "sealring deployment delete demo" in caught.value.hint
    assert store.deployments.all() == [deployment()]
    assert store.deployments.remove("demo")
    assert not store.deployments.remove("demo")


def test_rings_of_before_are_those_that_were_stored_last(store: Store, tmp_path: Path) -> None:
    one, two = (
        membership_pb2.FormerRing(stages=[membership_pb2.FormerStage(member=member, caches=b"weights")])
        for member in "ab"
    )
    store.deployments.save_former({"gone": [one], "demo": [one]})
    store.deployments.save_former({"demo": [two, one]})
    store.close()
    again = Store.open(tmp_path)
    assert again.deployments.former() == {"demo": [two, one]}
    again.close()


def test_epoch_numbers_rise_for_ever(store: Store, tmp_path: Path) -> None:
    assert [store.deployments.next_epoch("r") for _ in range(3)] == [1, 2, 3]
    assert store.deployments.next_epoch("other") == 1
    store.close()
    again = Store.open(tmp_path)
    assert again.deployments.next_epoch("r") == 4
    again.close()


def roster(version: int) -> StoredRoster:
    return StoredRoster(version=version, hash=bytes([version]) * 32, envelope=b"envelope")


def test_a_roster_version_is_stored_once_and_in_order(store: Store) -> None:
    for version in range(1, 40):
        store.rosters.add(roster(version))
    for version in (39, 41):
        with pytest.raises(Internal):
            store.rosters.add(roster(version))
    assert store.rosters.latest() == roster(39)
    assert store.rosters.find(1) is None
    assert store.rosters.find(30) is not None


@given(bit=st.integers(0, 1 << 12))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_bit_in_a_stored_deployment_is_found(store: Store, bit: int) -> None:
    store.deployments.save(deployment())
    with store.transaction() as connection:
        data = bytearray(connection.execute("SELECT message FROM messages").fetchone()[0])
        data[bit // 8 % len(data)] ^= 1 << bit % 8
        connection.execute("UPDATE messages SET message = ?", (bytes(data),))
    with pytest.raises(ConfigError, match="corrupt: deployment demo"):
        store.deployments.all()


def test_an_entry_of_the_audit_log_is_bound_to_the_one_before(store: Store) -> None:
    """Other programs verify it: the hashed words do not change from release to release."""
    assert store.audit.head() == (0, bytes(32))
    previous = bytes(32)
    for number, at in enumerate((7.9, 8.0), 1):
        store.audit.append(at, "chief", "act", "node", {"why": "w" * 300, "count": number})
        (entry,) = store.audit.entries(after=number - 1, limit=1)
        told = {"count": str(number), "why": "w" * 256}
        words = {"sequence": number, "at": int(at), "actor": "chief", "action": "act", "subject": "node"}
        content = json.dumps(words | {"details": told}, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(b"sealring/v1 audit\0" + previous + content.encode()).digest()
        assert (entry.previous, entry.hash) == (previous, digest)
        assert store.audit.head() == (number, digest)
        previous = digest
    assert verify_chain(store.audit.entries(after=1, limit=9), after=(1, entry.previous)) == (2, previous)


def test_the_newest_entries_of_the_audit_log_are_read_oldest_first(store: Store) -> None:
    for number in range(5):
        store.audit.append(NOW, "operator", "do", f"thing-{number}", {})
    assert [entry.sequence for entry in store.audit.entries(after=0, limit=2, newest=True)] == [4, 5]
    assert [entry.sequence for entry in store.audit.entries(after=4, limit=2, newest=True)] == [5]


def test_the_oldest_entries_are_dropped_and_the_rest_is_verified_from_there(tmp_path: Path) -> None:
    database = Database.create(tmp_path / "audit.db")
    log = AuditLog(database, kept=20, at_once=5)
    for number in range(100):
        log.append(NOW, "operator", "do", f"thing-{number}", {})
        assert len(log.entries(after=0, limit=1000)) <= 26
    entries = log.entries(after=0, limit=1000)
    assert entries[-1].subject == "thing-99"
    assert len(entries) >= 20
    beginning = Beginning(kept=20)
    begins = [beginning.read(entries[at : at + 7]) for at in range(0, len(entries), 7)]
    assert verify_chain(entries, after=begins[-1]) == log.head()
    beginning.check()
    for cut in (1, 5):
        shorter = Beginning(kept=20)
        shorter.read(entries[cut:])
        with pytest.raises(FailedPrecondition) as caught:
            shorter.check()
        assert caught.value.reason == "AUDIT_BROKEN"
    database.close()


def test_an_operators_word_drops_nothing(store: Store) -> None:
    for number in range(3):
        store.audit.append(NOW, "operator", "do", f"thing-{number}", {})
    second = store.audit.entries(after=1, limit=1)[0]
    claims = {"through": 1, "hash": second.previous.hex()}
    store.audit.append(NOW, "operator", "prune_audit", "audit", claims)
    beginning = Beginning(kept=1)
    beginning.read(store.audit.entries(after=1, limit=9))
    with pytest.raises(FailedPrecondition):
        beginning.check()
    whole = Beginning(kept=1)
    whole.read(store.audit.entries(after=0, limit=9))
    whole.check()


@pytest.mark.parametrize("through", ["1", "01", "-9", "1" * 30, "one"])
def test_a_forged_entry_drops_none_of_the_newest(store: Store, through: str) -> None:
    """A program that may write to the database could write it in the coordinator's name."""
    for number in range(6):
        store.audit.append(NOW, "operator", "do", f"thing-{number}", {})
    second = store.audit.entries(after=1, limit=1)[0]
    claims = {"through": through, "hash": second.previous.hex()}
    store.audit.append(NOW, "coordinator", "prune_audit", "audit", claims)
    for kept, found in ((5, through == "1"), (6, False)):
        beginning = Beginning(kept=kept)
        beginning.read(store.audit.entries(after=1, limit=9))
        if found:
            beginning.check()
        else:
            with pytest.raises(FailedPrecondition) as caught:
                beginning.check()
            assert caught.value.reason == "AUDIT_BROKEN"


@pytest.mark.parametrize(
    "change", ["actor", "action", "subject", "at", "details", "order", "missing", "hash"]
)
def test_any_change_to_the_audit_log_is_found(store: Store, change: str) -> None:
    for number in range(4):
        store.audit.append(NOW, "operator", "do", "thing", {"number": number})
    entries = store.audit.entries(after=0, limit=100)
    if change == "order":
        entries[1], entries[2] = entries[2], entries[1]
    elif change == "missing":
        del entries[1]
    elif change == "details":
        entries[1].details["number"] = "9"
    elif change == "at":
        entries[1].at += 1
    elif change == "hash":
        entries[1].hash = bytes(32)
    else:
        setattr(entries[1], change, "somebody else")
    with pytest.raises(FailedPrecondition) as caught:
        verify_chain(entries)
    assert caught.value.metadata["sequence"] == "2"
