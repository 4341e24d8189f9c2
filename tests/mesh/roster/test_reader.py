"""The reader of rosters: the order of its checks, and its memory of what it has used."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

from sealring.mesh.crypto import (
    Ed25519Signer,
    SignedEnvelope,
    SoftwareSigner,
    encode_envelope,
    member_id,
    parse_envelope,
    sign_envelope,
)
from sealring.mesh.errors import FailedPrecondition, RosterError
from sealring.mesh.pki import sign_root
from sealring.mesh.roster import (
    MAX_PAYLOAD_BYTES,
    MAX_VERSION_JUMP,
    PAYLOAD_TYPE,
    Equivocation,
    RosterMemory,
    RosterReader,
    RosterStateFile,
    check_roster,
    complete_roster,
    encode_roster,
    sign_roster,
)
from sealring.mesh.roster.memory import RosterState

NOW = 1_800_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "state" / "roster.json"
    RosterStateFile(path).create("demo")
    return path


@pytest.fixture
def reader(cluster: Any, path: Path, clock: Any) -> RosterReader:
    return RosterReader(cluster.authority.root, path, own(cluster), clock=clock)


def own(cluster: Any) -> str:
    return member_id(cluster.signers[1].public_key)


def refusal(reader: RosterReader, envelope: bytes) -> str:
    before = reader.memory.load()
    with pytest.raises(RosterError) as error:
        reader.accept(envelope)
    assert reader.memory.load() == before
    return error.value.reason


def following(cluster: Any, roster: Any, **changes: Any) -> bytes:
    version = changes.pop("version", roster.version + 1)
    return bytes(cluster.sign(version=version, previous=changes.pop("previous", roster.hash), **changes))


def test_a_good_roster_is_accepted_and_remembered(cluster: Any, reader: RosterReader, path: Path) -> None:
    roster = reader.accept(cluster.sign())
    assert reader.current is roster
    assert RosterStateFile(path).load() == RosterState("demo", 1, 1, roster.hash, NOW)
    assert roster.rings_of(own(cluster)) == roster.rings
    assert oct(path.stat().st_mode)[-3:] == "600"


def test_the_same_roster_again_is_fine_also_after_a_restart(
    cluster: Any, reader: RosterReader, path: Path, clock: Any
) -> None:
    envelope = cluster.sign()
    reader.accept(envelope)
    assert reader.accept(envelope) == reader.current
    again = RosterReader(cluster.authority.root, path, own(cluster), clock=clock)
    with pytest.raises(FailedPrecondition):
        _ = again.current
    assert again.accept(envelope) == again.current


def test_versions_go_up(cluster: Any, reader: RosterReader) -> None:
    first = reader.accept(cluster.sign(version=10))
    second = reader.accept(following(cluster, first))
    assert refusal(reader, cluster.sign(version=10)) == "ROSTER_ROLLBACK"
    skipped = reader.accept(following(cluster, second, version=111))
    assert skipped.version == 111
    far = following(cluster, skipped, version=111 + MAX_VERSION_JUMP + 1)
    assert refusal(reader, far) == "ROSTER_VERSION_JUMP"
    assert reader.accept(following(cluster, skipped, version=111 + MAX_VERSION_JUMP)).version > 111


def test_a_machine_that_knows_no_roster_takes_any_version(cluster: Any, reader: RosterReader) -> None:
    """Each standby that takes over skips many."""
    assert reader.accept(cluster.sign(version=MAX_VERSION_JUMP + 1)).version == MAX_VERSION_JUMP + 1


def test_a_standby_that_took_over_is_told_of_where_a_term_is_over(cluster: Any, reader: RosterReader) -> None:
    first = reader.accept(cluster.sign(version=11))
    for hint in ("", "a standby took over from the coordinator that signed it: stop that one"):
        with pytest.raises(RosterError) as error:
            reader.accept(cluster.sign(version=10))
        assert (error.value.reason, error.value.hint) == ("ROSTER_ROLLBACK", hint)
        first = reader.accept(following(cluster, first, version=first.version + (1 << 32)))


def test_rollback_after_a_restart(cluster: Any, reader: RosterReader, path: Path, clock: Any) -> None:
    old = cluster.sign()
    first = reader.accept(old)
    reader.accept(following(cluster, first))
    again = RosterReader(cluster.authority.root, path, own(cluster), clock=clock)
    assert refusal(again, old) == "ROSTER_ROLLBACK"


def test_no_start_without_memory(cluster: Any, reader: RosterReader, path: Path, clock: Any) -> None:
    reader.accept(cluster.sign())
    for breakage, reason in (
        (lambda: path.unlink(), "ROSTER_STATE_MISSING"),
        (lambda: path.write_bytes(b""), "ROSTER_STATE_CORRUPT"),
        (lambda: path.write_bytes(b"{}"), "ROSTER_STATE_CORRUPT"),
        (lambda: path.write_bytes(bytes(5000)), "ROSTER_STATE_CORRUPT"),
    ):
        breakage()
        if path.exists():
            path.chmod(0o600)
        with refused(reason, RosterError):
            RosterReader(cluster.authority.root, path, own(cluster), clock=clock)


def test_memory_that_others_can_write_is_not_trusted(cluster: Any, path: Path) -> None:
    path.chmod(0o644)
    with pytest.raises(RosterError) as told:
        RosterReader(cluster.authority.root, path)
    assert "can be read by others" in told.value.message
    assert "0600" in told.value.hint
    path.chmod(0o600)
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(RosterError):
        RosterReader(cluster.authority.root, link)


def test_memory_of_another_cluster(cluster: Any, tmp_path: Path) -> None:
    file = RosterStateFile(tmp_path / "other.json")
    file.create("other")
    with refused("ROSTER_STATE_CLUSTER", RosterError):
        RosterReader(cluster.authority.root, file.path)
    with pytest.raises(RosterError):
        file.create("demo")
    file.create("other")


@pytest.mark.parametrize("function", ["open", "fsync", "replace", "link"])
@pytest.mark.parametrize("failing", range(2))
def test_a_crash_at_any_write_step_leaves_old_or_new_and_never_uses_unsaved(
    cluster: Any, reader: RosterReader, path: Path, clock: Any, monkeypatch: Any, function: str, failing: int
) -> None:
    first = reader.accept(cluster.sign())
    second = following(cluster, first)
    real, calls = getattr(os, function), 0

    def crash(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing + 1 and (function != "open" or arguments[1] & os.O_CREAT or failing):
            raise OSError(28, "no space left")
        return real(*arguments, **options)

    reason = ""
    with monkeypatch.context() as patch:
        patch.setattr(os, function, crash)
        try:
            reader.accept(second)
        except RosterError as error:
            reason = error.reason
    crashed = bool(reason)
    if crashed:
        assert reason == "ROSTER_STATE_UNWRITABLE"
        assert reader.current is first
    stored = RosterStateFile(path).load()
    assert stored.version in ({1, 2} if crashed else {2})
    assert [entry.name for entry in path.parent.iterdir()] == ["roster.json"]
    restarted = RosterReader(cluster.authority.root, path, own(cluster), clock=clock)
    assert restarted.accept(second).version == 2


def test_the_state_is_saved_before_the_roster_is_used(cluster: Any, clock: Any) -> None:
    saved: list[int] = []

    class Watched(RosterMemory):
        def save(self, state: RosterState) -> None:
            with pytest.raises(FailedPrecondition):
                _ = reader.current
            saved.append(state.version)
            super().save(state)

    reader = RosterReader(cluster.authority.root, Watched("demo"), own(cluster), clock=clock)
    reader.accept(cluster.sign())
    assert saved == [1]


def test_equivocation_raises_the_alarm(cluster: Any, path: Path, clock: Any) -> None:
    alarms: list[Equivocation] = []
    reader = RosterReader(
        cluster.authority.root, path, own(cluster), clock=clock, on_equivocation=alarms.append
    )
    roster = reader.accept(cluster.sign())
    other = cluster.sign(issued=NOW - 1)
    assert refusal(reader, other) == "ROSTER_EQUIVOCATION"
    assert [(alarm.version, alarm.known) for alarm in alarms] == [(1, roster.hash)]
    assert alarms[0].seen != roster.hash
    fork = following(cluster, roster, previous=b"\x01" * 32)
    assert refusal(reader, fork) == "ROSTER_PREVIOUS"
    assert len(alarms) == 2
    assert reader.current is roster


def test_times(cluster: Any, reader: RosterReader, clock: Any) -> None:
    envelope = cluster.sign()
    for now, reason in (
        (NOW - 61, "ROSTER_NOT_YET_VALID"),
        (NOW + 660, "ROSTER_EXPIRED"),
    ):
        clock.now = now
        assert refusal(reader, envelope) == reason
    for now in (NOW - 60, NOW + 659):
        clock.now = now
        reader.accept(envelope)


def test_expiry_takes_the_roster_out_of_use(cluster: Any, reader: RosterReader, clock: Any) -> None:
    assert reader.expired()
    roster = reader.accept(cluster.sign())
    clock.now = NOW + 659
    assert not reader.expired()
    clock.now = NOW + 660
    assert reader.expired()
    with refused("ROSTER_EXPIRED", FailedPrecondition):
        _ = reader.current
    clock.now = NOW + 700
    reader.accept(following(cluster, roster, issued=NOW + 690, expires=NOW + 1290))
    assert not reader.expired()


def turned(cluster: Any, path: Path, clock: Any) -> tuple[RosterReader, list[float]]:
    """A reader, and the seconds since its machine was started."""
    boot = [500.0]
    reader = RosterReader(cluster.authority.root, path, own(cluster), clock=clock, boot=lambda: boot[0])
    boot[0] += 1  # until it hears of a roster
    return reader, boot


def test_a_clock_moved_back_does_not_keep_an_expired_roster_alive(
    cluster: Any, path: Path, clock: Any
) -> None:
    reader, boot = turned(cluster, path, clock)
    envelope = cluster.sign()
    reader.accept(envelope)
    clock.now = NOW - 3600
    boot[0] += 659
    assert (reader.expired(), reader.now()) == (False, NOW + 659)
    reader.accept(envelope)  # once more is not once again
    boot[0] += 1
    assert reader.expired()
    assert reader.lapse().message == "the roster has expired", "no word of a clock that is behind"
    assert refusal(reader, envelope) == "ROSTER_EXPIRED"


def test_a_clock_moved_back_brings_no_unseen_roster_to_life(cluster: Any, path: Path, clock: Any) -> None:
    """One that was held back on its way, and shown when its time is over."""
    reader, boot = turned(cluster, path, clock)
    roster = reader.accept(cluster.sign())
    held = following(cluster, roster, issued=NOW + 100, expires=NOW + 700)
    clock.now = NOW + 100
    boot[0] += 760
    assert refusal(reader, held) == "ROSTER_EXPIRED"
    newer = following(cluster, roster, issued=NOW + 760, expires=NOW + 1300)
    reader.accept(newer)  # a roster in its time is accepted, though this clock is behind


def test_a_clock_that_was_ahead_is_not_remembered(cluster: Any, path: Path, clock: Any) -> None:
    reader, boot = turned(cluster, path, clock)
    roster = reader.accept(cluster.sign())
    newer = following(cluster, roster, issued=NOW + 10, expires=NOW + 610)
    clock.now, boot[0] = NOW + 3610, boot[0] + 10
    assert reader.expired()
    assert "clock, which is 3600 s ahead" in reader.lapse().message
    assert refusal(reader, newer) == "ROSTER_EXPIRED"
    clock.now, boot[0] = NOW + 20, boot[0] + 10
    assert not reader.expired()
    reader.accept(newer)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_roster_that_the_coordinator_signed_while_all_clocks_were_ahead_bars_no_later_one(
    cluster: Any, path: Path, clock: Any, restarted: bool
) -> None:
    reader, boot = turned(cluster, path, clock)
    clock.now = NOW + 3600
    ahead = reader.accept(cluster.sign(issued=NOW + 3600, expires=NOW + 4200))
    clock.now, boot[0] = NOW + 100, boot[0] + 100
    if restarted:
        reader, boot = turned(cluster, path, clock)
    later = reader.accept(following(cluster, ahead, issued=NOW + 100, expires=NOW + 700))
    assert (reader.current, reader.now()) == (later, NOW + 100)
    clock.now, boot[0] = NOW + 200, boot[0] + 760
    newest = following(cluster, later, issued=NOW + 200, expires=NOW + 800)
    assert refusal(reader, newest) == "ROSTER_EXPIRED", "from there on the time is counted as ever"


def test_a_roster_of_a_clock_that_came_back_is_no_older_than_this_clock_allows(
    cluster: Any, path: Path, clock: Any
) -> None:
    reader, _ = turned(cluster, path, clock)
    clock.now = NOW + 3600
    ahead = reader.accept(cluster.sign(issued=NOW + 3600, expires=NOW + 4200))
    held = following(cluster, ahead, issued=NOW + 100, expires=NOW + 700)
    clock.now = NOW + 760
    assert refusal(reader, held) == "ROSTER_EXPIRED"
    clock.now = NOW + 30
    assert refusal(reader, held) == "ROSTER_NOT_YET_VALID"


def test_keys_whose_time_is_over_take_no_time_back(cluster: Any, path: Path, clock: Any) -> None:
    """They may be stolen: that is why the root lets them expire. A machine's clock may be set back."""
    reader, boot = turned(cluster, path, clock)
    last = cluster.authority.root.expires - 1
    clock.now = last
    used = reader.accept(cluster.sign(issued=last, expires=last + 600))
    clock.now, boot[0] = last - 3600, boot[0] + 120
    back = following(cluster, used, issued=last - 3600, expires=last - 3000)
    assert refusal(reader, back) == "ROOT_EXPIRED"


def test_a_root_that_ends_before_the_time_of_a_roster_needs_a_version_that_lasts_longer(
    cluster: Any, path: Path, clock: Any
) -> None:
    """It may be one that was withheld, with keys that are stolen by now. Or all clocks were far ahead and are
    right, and an operator rotates the root: to one that lasts as long as the default."""
    reader, _ = turned(cluster, path, clock)
    authority, year = cluster.authority, 365 * 86_400
    clock.now = NOW + year - 700
    used = reader.accept(cluster.sign(issued=clock.now, expires=clock.now + 600))
    clock.now = NOW

    def rotated(days: int) -> Any:
        draft = dataclasses.replace(authority.root, version=2, issued=NOW, expires=NOW + days * 86_400)
        return sign_root(
            dataclasses.replace(draft, chain=()), authority.root_signers, previous=authority.root
        )

    with refused("ROOT_EXPIRED", RosterError):
        reader.update_root(rotated(90).chain[-1])
    assert reader.root == authority.root
    reader.update_root(rotated(3650).chain[-1])
    back = following(cluster, used, root_version=2, issued=NOW, expires=NOW + 600)
    assert reader.accept(back).issued == NOW


def test_a_clock_that_is_ahead_by_no_more_than_the_skew_is_not_blamed(
    cluster: Any, path: Path, clock: Any
) -> None:
    reader, boot = turned(cluster, path, clock)
    reader.accept(cluster.sign())
    boot[0] += 610
    for ahead in (60, 61):
        clock.now = NOW + 610 + ahead
        assert reader.expired()
        assert ("ahead of it" in reader.lapse().message) == (ahead > 60)


def test_own_key_absent_takes_the_old_roster_out_of_use(cluster: Any, reader: RosterReader) -> None:
    roster = reader.accept(cluster.sign())
    draft = complete_roster(cluster.draft)
    others = tuple(member for member in draft.members if member.id != own(cluster))
    envelope = following(cluster, roster, members=others, rings=())
    assert refusal(reader, envelope) == "ROSTER_SELF_ABSENT"
    with refused("NO_ROSTER", FailedPrecondition):
        _ = reader.current
    assert reader.expired()


def test_an_old_roster_without_us_does_not_evict_us(cluster: Any, reader: RosterReader) -> None:
    draft = complete_roster(cluster.draft)
    others = tuple(member for member in draft.members if member.id != own(cluster))
    old = cluster.sign(members=others, rings=(), version=1)
    reader.accept(cluster.sign(version=2))
    assert refusal(reader, old) == "ROSTER_ROLLBACK"
    assert reader.current.version == 2


def test_a_gateway_reads_the_roster_too(cluster: Any, path: Path, clock: Any) -> None:
    gateway = member_id(cluster.gateway.public_key)
    RosterReader(cluster.authority.root, path, gateway, clock=clock).accept(cluster.sign())
    stranger = member_id(SoftwareSigner.generate().public_key)
    RosterReader(cluster.authority.root, path, None, clock=clock).accept(cluster.sign())
    with pytest.raises(RosterError):
        RosterReader(cluster.authority.root, path, stranger, clock=clock).accept(cluster.sign())


def forge(cluster_: Any, **changes: Any) -> bytes:
    """A roster that breaks a rule, signed by the roster key nevertheless."""
    payload = encode_roster(dataclasses.replace(complete_roster(cluster_.draft), **changes))
    return sign_envelope(PAYLOAD_TYPE, payload, cluster_.authority.roster_signers)


def test_the_order_of_the_checks(cluster: Any, reader: RosterReader) -> None:
    """Each envelope breaks one rule and all later ones; the reason is always that of the first."""
    roster = reader.accept(cluster.sign(version=5))
    other_root = {"root_version": 2}
    old, fork = {"version": 4}, {"version": 6, "previous": b"\x09" * 32}
    late, structure = {"issued": NOW - 3000, "expires": NOW - 2400}, {"members": ()}
    lasting = {"issued": NOW - 3000, "expires": NOW - 2099}
    trust = {"min_trust": 30}
    good = {"version": 6, "previous": roster.hash}
    stranger = [Ed25519Signer.generate()]
    payload = encode_roster(dataclasses.replace(complete_roster(cluster.draft), **trust))
    unsigned = sign_envelope(PAYLOAD_TYPE, payload, stranger)
    assert refusal(reader, unsigned + b" " * 2_000_000) == "ENVELOPE_TOO_LARGE"
    assert refusal(reader, unsigned) == "THRESHOLD_NOT_MET"
    assert refusal(reader, forge(cluster, cluster="other", **other_root, **old)) == "ROSTER_CLUSTER"
    assert refusal(reader, forge(cluster, **other_root, **old, **late)) == "ROSTER_ROOT_VERSION"
    assert refusal(reader, forge(cluster, **old, **late, **structure)) == "ROSTER_ROLLBACK"
    assert refusal(reader, forge(cluster, **fork, **lasting, **structure)) == "ROSTER_PREVIOUS"
    assert refusal(reader, forge(cluster, **good, **lasting, **structure, **trust)) == "ROSTER_LIFETIME"
    assert refusal(reader, forge(cluster, **good, **late, **structure, **trust)) == "ROSTER_EXPIRED"
    assert refusal(reader, forge(cluster, **good, **structure, **trust)) == "ROSTER_RINGS"
    assert reader.current is roster
    assert refusal(reader, forge(cluster, **good, **trust)) == "ROSTER_TRUST"
    absent = forge(cluster, **good, **structure, **trust, rings=())
    assert refusal(reader, absent) == "ROSTER_SELF_ABSENT"


def test_signatures(make_cluster: Callable[..., Any], clock: Any) -> None:
    cluster = make_cluster(rosters=3, roster_threshold=2)
    root, signers = cluster.authority.root, cluster.authority.roster_signers
    draft = complete_roster(cluster.draft)
    check_roster(sign_roster(draft, signers[:2]), root, now=NOW)
    check_roster(sign_roster(draft, [*signers[1:], Ed25519Signer.generate()]), root, now=NOW)

    def reason(envelope: bytes) -> str:
        with pytest.raises(RosterError) as error:
            check_roster(envelope, root, now=NOW)
        return error.value.reason

    assert reason(sign_roster(draft, signers[:1])) == "THRESHOLD_NOT_MET"
    assert reason(sign_roster(draft, [signers[0], Ed25519Signer.generate()])) == "THRESHOLD_NOT_MET"
    assert reason(sign_roster(draft, cluster.authority.root_signers)) == "THRESHOLD_NOT_MET"
    whole = parse_envelope(
        sign_roster(draft, signers[:2]), payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES
    )
    one, two = whole.signatures
    twice = SignedEnvelope(PAYLOAD_TYPE, whole.payload, (one, one))
    assert reason(encode_envelope(twice)) == "DUPLICATE_KEY_ID"
    crossed = SignedEnvelope(PAYLOAD_TYPE, whole.payload, ((one[0], two[1]), (two[0], one[1])))
    assert reason(encode_envelope(crossed)) == "BAD_SIGNATURE"
    other_type = sign_envelope("application/vnd.sealring.root+json", whole.payload, signers)
    assert reason(other_type) == "ENVELOPE_TYPE"
    assert reason(other_type.replace(b"sealring.root+json", b"sealring.roster+json")) == "BAD_SIGNATURE"


def test_an_expired_root_ends_everything(cluster: Any, reader: RosterReader, clock: Any) -> None:
    far = NOW + 366 * 86400
    clock.now = far
    assert refusal(reader, cluster.sign(issued=far, expires=far + 600)) == "ROOT_EXPIRED"


def test_root_rotation_changes_the_roster_keys(
    cluster: Any, reader: RosterReader, path: Path, clock: Any
) -> None:
    first = reader.accept(cluster.sign())
    authority = cluster.authority
    fresh = Ed25519Signer.generate()
    draft = dataclasses.replace(
        authority.root, version=2, roster_keys=(fresh.public_key,), issued=NOW, chain=()
    )
    rotated = sign_root(draft, authority.root_signers, previous=authority.root)
    by_new = sign_roster(
        complete_roster(dataclasses.replace(cluster.draft, version=2, previous=first.hash, root_version=2)),
        [fresh],
    )
    assert refusal(reader, by_new) == "THRESHOLD_NOT_MET"
    assert reader.update_root(rotated.chain[-1]) == rotated
    assert reader.root == rotated
    assert refusal(reader, following(cluster, first)) == "THRESHOLD_NOT_MET"
    assert reader.accept(by_new).root_version == 2
    with refused("ROOT_ROLLBACK", RosterError):
        RosterReader(authority.root, path, own(cluster), clock=clock)


def test_of_several_steps_of_the_root_only_the_last_has_to_be_valid(
    cluster: Any, reader: RosterReader
) -> None:
    """A machine may have been off while one came and went."""
    authority = cluster.authority
    gone = sign_root(
        dataclasses.replace(authority.root, version=2, issued=NOW - 900, expires=NOW - 61, chain=()),
        authority.root_signers,
        previous=authority.root,
    )
    newest = sign_root(
        dataclasses.replace(authority.root, version=3, issued=NOW - 100, chain=()),
        authority.root_signers,
        previous=gone,
    )
    assert reader.update_root(*newest.chain[1:]) == newest
    assert reader.update_root() == newest


def test_root_rotation_is_checked(cluster: Any, reader: RosterReader) -> None:
    authority = cluster.authority
    stranger = Ed25519Signer.generate()
    hostile = sign_root(
        dataclasses.replace(authority.root, version=2, root_keys=(stranger.public_key,), chain=()), [stranger]
    )
    with refused("THRESHOLD_NOT_MET", RosterError):
        reader.update_root(hostile.chain[0])
    expired = sign_root(
        dataclasses.replace(authority.root, version=2, issued=NOW - 900, expires=NOW - 61, chain=()),
        authority.root_signers,
        previous=authority.root,
    )
    with refused("ROOT_EXPIRED", RosterError):
        reader.update_root(expired.chain[-1])
    assert reader.root == authority.root


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["next", "old", "fork", "again", "restart", "later", "earlier"]),
            st.integers(1, 400),
        ),
        max_size=25,
    )
)
def test_versions_never_go_back_whatever_happens(
    cluster: Any, tmp_path: Path, clock: Any, actions: list[tuple[str, int]]
) -> None:
    """A property over accepts, replays, forks, restarts and a clock that jumps both ways."""
    path = tmp_path / secrets.token_hex(8)
    RosterStateFile(path).create("demo")
    clock.now, version, tip, used = float(NOW), 0, bytes(32), b""
    reader = RosterReader(cluster.authority.root, path, own(cluster), clock=clock)
    for action, amount in actions:
        if action == "restart":
            reader = RosterReader(cluster.authority.root, path, own(cluster), clock=clock)
        elif action in {"later", "earlier"}:
            clock.advance(amount if action == "later" else -amount)
        elif action == "again" and used:
            try:
                assert reader.accept(used).version == version
            except RosterError as error:
                assert error.reason in {"ROSTER_NOT_YET_VALID", "ROSTER_EXPIRED"}  # noqa: PT017
        else:
            wanted = {"next": version + 1, "old": max(1, version - amount), "fork": max(1, version)}
            issued = max(NOW, int(clock.now)) - amount % 7
            previous = tip if action == "next" else bytes(32)
            envelope = cluster.sign(
                version=wanted.get(action, 1), previous=previous, issued=issued, expires=issued + 600
            )
            try:
                roster = reader.accept(envelope)
            except RosterError:
                assert action != "next" or clock.now < NOW
                continue
            assert roster.version > version or (roster.version, roster.hash) == (version, tip)
            version, tip, used = roster.version, roster.hash, envelope
        stored = RosterStateFile(path).load()
        assert (stored.version, stored.hash) == (version, tip)


def test_after_a_gap_the_previous_hash_is_another_one(cluster: Any, reader: RosterReader) -> None:
    """The machine was away: only the very next version has to name the roster in use as the one before."""
    first = reader.accept(cluster.sign())
    wrong = following(cluster, first, previous=b"\x77" * 32)
    assert refusal(reader, wrong) == "ROSTER_PREVIOUS"
    assert reader.accept(following(cluster, first, version=3, previous=b"\x77" * 32)).version == 3


def test_a_new_state_starts_at_nothing_and_is_bounded(path: Path) -> None:
    state = RosterStateFile(path)
    assert state.load() == RosterState("demo", 0, 0, bytes(32), 0)
    content = path.read_bytes()
    path.write_bytes(content.ljust(4096))
    assert state.load().cluster == "demo"
    path.write_bytes(content.ljust(4097))
    with refused("ROSTER_STATE_CORRUPT", RosterError):
        state.load()
