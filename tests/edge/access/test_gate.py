"""Admission: keys right, wrong, revoked, expired; hashes made seldom; limits before them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cheapkeys import HASH, Checks, checks
from patience import until

from sealring.edge.access import gate as gate_module
from sealring.edge.access.gate import ANY, LOOK, USE, WATCH, Gate, Limits, UnderWay
from sealring.edge.access.keyfile import KeyFile
from sealring.edge.access.keys import ApiKey, Scope, new_key
from sealring.mesh.errors import (
    ConfigError,
    InvalidInput,
    PermissionDenied,
    ResourceExhausted,
    SealringError,
    Unauthenticated,
)
from sealring.testing import ManualClock

__all__ = ["checks"]


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path)


async def enter(gate: Gate, text: str | None, scopes: Any = USE, peer: str = "192.0.2.1") -> str:
    async with gate.admit(peer, None if text is None else f"Bearer {text}", scopes) as caller:
        return caller.key_id


async def refused(gate: Gate, text: str | None, scopes: Any = USE, peer: str = "192.0.2.1") -> SealringError:
    with pytest.raises(SealringError) as caught:
        await enter(gate, text, scopes, peer)
    return caught.value


async def test_without_keys_all_are_let_in(keys: KeyFile) -> None:
    for gate in (Gate(), Gate(keys)):
        assert not gate.required
        assert not gate.usable_keys
        for text in (None, "none", new_key().text):
            assert await enter(gate, text) == ""
        async with gate.admit("", None, None) as caller:
            assert caller.known


async def test_a_real_key(keys: KeyFile) -> None:
    text, record = keys.create([Scope.INFERENCE])
    gate = Gate(keys)
    assert gate.required
    assert gate.usable_keys == 1
    async with gate.admit("192.0.2.1", f"Bearer {text}", USE) as caller:
        assert (caller.key_id, caller.known) == (record.id, True)
    wrong = text[:-8] + ("aaaaaaaa" if text[-8:] != "aaaaaaaa" else "bbbbbbbb")
    error = await refused(gate, wrong)
    assert isinstance(error, Unauthenticated)
    assert wrong not in str(error)


async def test_every_refusal_is_the_same(keys: KeyFile, checks: Checks) -> None:
    clock = ManualClock()
    text, record = keys.create([Scope.INFERENCE])
    revoked, other = keys.create([Scope.INFERENCE])
    keys.revoke(other.id)
    expired = KeyFile(keys.file.parent, clock=lambda: 5.0).create([Scope.INFERENCE], seconds=10)[0]
    gate = Gate(keys, clock=clock)
    flipped = text[:-1] + ("a" if text[-1] != "a" else "b")
    mixed = f"srk_{record.id}_{revoked.rpartition('_')[2]}"
    errors = [
        await refused(gate, each)
        for each in (
            None,
            "",
            "none",
            new_key().text,
            revoked,
            expired,
            flipped,
            mixed,
            text.upper(),
            "x" * 9999,
        )
    ]
    with pytest.raises(Unauthenticated) as basic:
        async with gate.admit("192.0.2.1", f"Basic {text}", USE):
            pass
    assert {(type(error), str(error), error.reason) for error in [*errors, basic.value]} == {
        (Unauthenticated, str(errors[0]), "INVALID_API_KEY")
    }
    assert checks.count == 2  # flipped and mixed: the others are refused without a hash
    async with gate.admit("192.0.2.1", f"bearer  {text} ", USE) as caller:
        assert caller.key_id == record.id


async def test_open_calls_need_no_key_and_tell_who_may_see_more(keys: KeyFile, checks: Checks) -> None:
    keys.create([Scope.INFERENCE])
    gate = Gate(keys)
    async with gate.admit("", None, None) as caller:
        assert not caller.known
        assert not caller.key_id


async def test_scopes(keys: KeyFile, checks: Checks) -> None:
    texts = {scope: keys.create([scope])[0] for scope in Scope}
    gate = Gate(keys)
    allowed = {
        (scope, name)
        for scope, text in texts.items()
        for name, needed in {"use": USE, "look": LOOK, "watch": WATCH, "any": ANY}.items()
        if await _allowed(gate, text, needed)
    }
    assert {name for scope, name in allowed if scope is Scope.ADMIN} == {"use", "look", "watch", "any"}
    assert {name for scope, name in allowed if scope is Scope.READ} == {"look", "watch", "any"}
    assert {name for scope, name in allowed if scope is Scope.INFERENCE} == {"use", "look", "any"}


async def _allowed(gate: Gate, text: str, scopes: Any) -> bool:
    with contextlib.suppress(PermissionDenied):
        await enter(gate, text, scopes)
        return True
    return False


async def test_a_hash_is_made_once_in_a_while(keys: KeyFile, checks: Checks) -> None:
    clock = ManualClock()
    text = keys.create([Scope.INFERENCE])[0]
    gate = Gate(keys, clock=clock)
    await asyncio.gather(*(enter(gate, text) for _ in range(100)))
    assert checks.count == 1
    for _ in range(3):
        clock.now += gate_module.REMEMBER_SECONDS - 1
        await enter(gate, text)
        assert checks.count == 1, "a key in use is remembered"
    clock.now += gate_module.REMEMBER_SECONDS
    await enter(gate, text)
    assert checks.count == 2


async def test_a_key_that_was_wrong_is_not_remembered(keys: KeyFile, checks: Checks) -> None:
    keys.create([Scope.INFERENCE])
    record_id = next(iter(keys.read()))
    gate = Gate(keys)
    wrong = f"srk_{record_id}_{'a' * 52}"
    for expected in (1, 2, 3):
        await refused(gate, wrong)
        assert checks.count == expected
    assert not gate.remembered
    assert not gate.checks


async def test_keys_are_taken_up_and_revoked_while_it_runs(keys: KeyFile, checks: Checks) -> None:
    gate = Gate(keys)
    assert await enter(gate, None) == ""
    text, record = keys.create([Scope.INFERENCE])
    assert gate.required
    other = keys.create([Scope.INFERENCE])[1]
    assert gate.usable_keys == 2
    keys.revoke(other.id)
    assert (await refused(gate, None)).reason == "INVALID_API_KEY"
    assert await enter(gate, text) == record.id
    keys.revoke(record.id)
    assert (await refused(gate, text)).reason == "INVALID_API_KEY"
    assert gate.required
    assert gate.usable_keys == 0


async def test_a_key_that_is_revoked_during_its_check_is_refused(
    keys: KeyFile, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, record = keys.create([Scope.INFERENCE])
    gate = Gate(keys)

    def revoke_meanwhile(key: ApiKey, stored: str) -> bool:
        keys.revoke(record.id)
        return True

    monkeypatch.setattr(gate_module, "matches", revoke_meanwhile)
    assert (await refused(gate, text)).reason == "INVALID_API_KEY"


async def test_expiry_ends_a_remembered_key(keys: KeyFile, checks: Checks) -> None:
    wall = ManualClock()
    text = KeyFile(keys.file.parent, clock=wall).create([Scope.INFERENCE], seconds=60)[0]
    gate = Gate(keys, wall=wall)
    await enter(gate, text)
    wall.now += 60
    assert (await refused(gate, text)).reason == "INVALID_API_KEY"


async def test_a_key_file_that_goes_bad_or_away_lets_nobody_in(keys: KeyFile, checks: Checks) -> None:
    text = keys.create([Scope.INFERENCE])[0]
    good = keys.file.read_bytes()
    gate = Gate(keys)
    await enter(gate, text)
    keys.file.write_bytes(b"{}")
    assert (await refused(gate, text)).reason == "INVALID_API_KEY"
    with pytest.raises(ConfigError):
        Gate(keys)
    keys.file.unlink()
    assert (await refused(gate, text)).reason == "INVALID_API_KEY"
    assert (await refused(gate, None)).reason == "INVALID_API_KEY"
    keys.file.write_bytes(good)
    keys.file.chmod(0o600)
    await enter(gate, text)


async def test_guessing_is_slow_and_cheap(keys: KeyFile, checks: Checks) -> None:
    clock = ManualClock()
    text, record = keys.create([Scope.INFERENCE])
    gate = Gate(keys, clock=clock)
    await enter(gate, text)
    guesses = [f"srk_{record.id}_{new_key().text.rpartition('_')[2]}" for _ in range(60)]
    reasons = [(await refused(gate, guess, peer="198.51.100.9")).reason for guess in guesses]
    assert reasons.count("INVALID_API_KEY") == gate_module.ATTEMPTS_AT_ONCE == 20
    assert set(reasons[gate_module.ATTEMPTS_AT_ONCE :]) == {"RATE_LIMITED"}
    assert checks.count == 1 + gate_module.ATTEMPTS_AT_ONCE
    # a peer that guesses shuts out neither a known key behind the same address nor others elsewhere
    await enter(gate, text, peer="198.51.100.9")
    assert (await refused(gate, guesses[0])).reason == "INVALID_API_KEY"
    clock.now += 1.5
    assert (await refused(gate, guesses[0], peer="198.51.100.9")).reason == "INVALID_API_KEY"
    assert (await refused(gate, guesses[0], peer="198.51.100.9")).reason == "RATE_LIMITED"


async def test_right_keys_use_no_attempts_up(keys: KeyFile, checks: Checks) -> None:
    clock = ManualClock()
    texts = [keys.create([Scope.INFERENCE])[0] for _ in range(gate_module.ATTEMPTS_AT_ONCE + 10)]
    gate = Gate(keys, clock=clock)
    for text in texts:
        await enter(gate, text)


class Slow(Checks):
    """Hashes that are made when the test lets them be; `order` has the ids in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.go = threading.Event()

    def __call__(self, key: ApiKey, stored: str) -> bool:
        self.order.append(key.id)
        assert self.go.wait(200)
        return super().__call__(key, stored)


async def test_of_one_id_so_many_wait_for_a_hash_and_ids_take_turns(
    keys: KeyFile, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guesser with an id and many addresses delays nobody but those with that id."""
    slow = Slow()
    monkeypatch.setattr(gate_module, "matches", slow)
    monkeypatch.setattr(gate_module, "HASHES_AT_ONCE", 1)
    texts, gate = [keys.create([Scope.INFERENCE])[0] for _ in range(20)], Gate(keys, clock=ManualClock())
    learnt = texts[0][:20]
    guesses = [f"{learnt}_{new_key().text.rpartition('_')[2]}" for _ in range(40)]
    guessing = [
        asyncio.create_task(refused(gate, guess, peer=f"198.51.100.{number}"))
        for number, guess in enumerate(guesses)
    ]
    await until(lambda: slow.order)
    honest = [asyncio.create_task(enter(gate, text)) for text in texts[1:]]
    for _ in range(10):
        await asyncio.sleep(0)
    slow.go.set()
    assert await asyncio.gather(*honest) == [text[4:20] for text in texts[1:]]
    reasons = [(await one).reason for one in guessing]
    assert reasons.count("INVALID_API_KEY") == gate_module.HASHES_OF_ID
    assert set(reasons) == {"INVALID_API_KEY", "TOO_MANY_AT_ONCE"}
    ahead = slow.order[: slow.order.index(texts[-1][4:20])]
    assert ahead.count(texts[0][4:20]) <= 2, "the hash that was being made, and one in its turn"
    assert not gate.checks


async def test_bad_keys_of_an_address_refuse_no_right_one(keys: KeyFile, checks: Checks) -> None:
    """All come through one proxy, and none is remembered: keys of ids that nobody has, none at all, and of
    an id that was learnt. They refuse no key of another id."""
    texts, gate = [keys.create([Scope.INFERENCE])[0] for _ in range(30)], Gate(keys, clock=ManualClock())
    learnt = texts[0][:20]
    for number in range(290):
        await refused(gate, new_key().text)
        await refused(gate, None)
        await refused(gate, f"{learnt}_{new_key().text.rpartition('_')[2]}")
        with contextlib.suppress(ResourceExhausted):
            async with gate.admit("192.0.2.1", None, None):
                pass
        if number % 10 == 5:
            await enter(gate, texts[1 + number // 10])
    assert checks.count == gate_module.ATTEMPTS_AT_ONCE + 29
    assert (await refused(gate, texts[0])).reason == "RATE_LIMITED"
    await enter(gate, texts[0], peer="192.0.2.2")
    await enter(gate, texts[0])


async def test_strangers_of_an_address_are_few_at_once(
    keys: KeyFile, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "STRANGERS_AT_ONCE", 1)
    text, gate = keys.create([Scope.INFERENCE])[0], Gate(keys, clock=ManualClock())
    async with gate.admit("192.0.2.1", None, None):
        assert (await refused(gate, None, None)).reason == "TOO_MANY_AT_ONCE"
        await enter(gate, text)
        await enter(gate, None, None, peer="192.0.2.2")
    await enter(gate, None, None)


async def test_limits_per_peer_and_key(keys: KeyFile, checks: Checks) -> None:
    clock = ManualClock()
    text = keys.create([Scope.INFERENCE])[0]
    other = keys.create([Scope.INFERENCE])[0]
    counted: list[str] = []
    gate = Gate(keys, Limits(1.0, 2, 2.0), clock=clock, on_refused=counted.append)
    for _ in range(4):
        await enter(gate, text, peer="192.0.2.1")
    error = await refused(gate, text, peer="192.0.2.2")
    assert error.metadata["retry_after"] == "2"
    await enter(gate, other, peer="192.0.2.2")
    for _ in range(8):
        async with gate.admit("192.0.2.1", None, None):
            pass
    assert (await refused(gate, None, None, peer="192.0.2.1")).reason == "RATE_LIMITED"
    assert counted == ["RATE_LIMITED", "RATE_LIMITED"]
    clock.now += 60
    async with gate.admit("", f"Bearer {text}", USE), gate.admit("", f"Bearer {text}", USE):
        assert (await refused(gate, text)).reason == "TOO_MANY_AT_ONCE"
        await enter(gate, other)
    await enter(gate, text)


async def test_one_request_at_a_time_may_always_be_made(keys: KeyFile) -> None:
    gate = Gate(keys, Limits(peer_per_second=0.01), clock=ManualClock())
    await enter(gate, None)
    assert (await refused(gate, None)).reason == "RATE_LIMITED"


async def test_use_is_written_down(keys: KeyFile, checks: Checks) -> None:
    text, record = keys.create([Scope.INFERENCE])
    wall = ManualClock()
    wall.now = record.created + 7200.0
    gate = Gate(keys, wall=wall)
    await enter(gate, text)
    assert keys.read()[record.id].last_used == 0
    await gate.flush()
    noted = keys.read()[record.id].last_used
    assert noted % 3600 == 0
    assert 0 <= wall.now - noted < 3600
    await enter(gate, text)
    keys.file.write_bytes(b"")
    await gate.flush()


async def test_no_key_reaches_a_log(
    keys: KeyFile, checks: Checks, capfd: pytest.CaptureFixture[str], capture_logs: Callable[[], str]
) -> None:
    text = keys.create([Scope.INFERENCE])[0]
    gate = Gate(keys)
    await enter(gate, text)
    await refused(gate, text[:-1])
    await refused(gate, text[:-1] + "a" if text[-1] != "a" else text[:-1] + "b")
    keys.file.write_bytes(text.encode())
    await refused(gate, text)
    out, err = capfd.readouterr()
    written = out + err + capture_logs()
    assert "api_key_refused" in written
    assert text[:-1].rpartition("_")[2] not in written


@pytest.fixture
def capture_logs() -> Any:
    import structlog

    with structlog.testing.capture_logs() as events:
        yield lambda: repr(events)


async def test_so_many_keys_are_remembered_and_what_was_not_used_longest_goes_first(
    keys: KeyFile, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "_REMEMBERED", 2)
    made = [f"Bearer {keys.create([Scope.INFERENCE])[0]}" for _ in range(3)]
    gate = Gate(keys)
    for which, count in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 4), (2, 5)):
        async with gate.admit("peer", made[which], USE):
            assert checks.count == count


async def test_a_remembered_key_counts_for_nothing_once_it_stands_otherwise(
    keys: KeyFile, checks: Checks
) -> None:
    text, record = keys.create([Scope.INFERENCE])
    gate = Gate(keys)
    async with gate.admit("peer", f"Bearer {text}", USE):
        pass
    for changed in ({"hash": f"{HASH}{'b' * 22}${'b' * 43}"}, None):
        known = gate.known.records.pop(record.id)
        if changed is not None:
            gate.known.records[record.id] = known.model_copy(update=changed)
        with pytest.raises(Unauthenticated):
            async with gate.admit("peer", f"Bearer {text}", USE):
                pass
        assert not gate.remembered
        gate.known.records[record.id] = known
        async with gate.admit("peer", f"Bearer {text}", USE):
            pass


@pytest.mark.parametrize("ever", [True, False])
async def test_a_folder_that_cannot_be_entered_leaves_no_key_valid(
    tmp_path: Path, checks: Checks, ever: bool
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    keys = KeyFile(folder)
    text = keys.create([Scope.INFERENCE])[0] if ever else None
    gate = Gate(keys)
    await enter(gate, text)
    folder.rename(tmp_path / "away")
    folder.touch()  # what no account may enter, root included
    assert (await refused(gate, text)).reason == "INVALID_API_KEY"
    assert (gate.required, gate.usable_keys) == (True, 0)
    folder.unlink()
    (tmp_path / "away").rename(folder)
    if text:
        await enter(gate, text)


@pytest.mark.parametrize("fails", [None, OSError("full"), ConfigError("broken")])
async def test_uses_are_written_down_once_and_where_there_are_any(fails: Exception | None) -> None:
    noted: list[Any] = []

    def note_use(used: Any) -> None:
        noted.append(used)
        if fails is not None:
            raise fails

    gate: Any = Gate(None)
    gate.used = {"key": 7}
    await gate.flush()  # without a file there is nowhere to
    gate.known.file = SimpleNamespace(note_use=note_use)
    await gate.flush()
    assert noted == []
    gate.used = {"key": 9}
    for _ in range(2):
        await gate.flush()
    assert noted == [{"key": 9}]


async def test_each_answer_counts_for_the_limits_of_its_key(keys: KeyFile, checks: Checks) -> None:
    """One body may ask for 512 answers, each a row of a ring."""
    text = keys.create([Scope.INFERENCE])[0]
    time, counted = ManualClock(), list[str]()
    gate = Gate(keys, Limits(key_per_second=1.0, key_at_once=6), on_refused=counted.append, clock=time)
    authorization = f"Bearer {text}"
    async with gate.admit("peer", authorization, USE) as caller:
        caller.claim(4)
        time.now += 20.0
        async with gate.admit("peer", authorization, USE) as another:
            with pytest.raises(ResourceExhausted) as caught:
                another.claim(3)
            assert caught.value.reason == "TOO_MANY_AT_ONCE"
            with pytest.raises(InvalidInput) as refused_for_good:
                another.claim(7)
            assert refused_for_good.value.reason == "TOO_MANY_ANSWERS"
    time.now += 20.0
    async with gate.admit("peer", authorization, USE) as caller:
        caller.claim(6)
    assert (await refused(gate, text)).reason == "RATE_LIMITED", "two seconds' worth is owed"
    time.now += 3.0
    await enter(gate, text)
    assert counted == ["TOO_MANY_AT_ONCE", "TOO_MANY_ANSWERS", "RATE_LIMITED"]


async def test_without_a_key_nothing_is_claimed(keys: KeyFile) -> None:
    async with Gate(keys, Limits(key_at_once=1)).admit("peer", None, USE) as caller:
        caller.claim(512)


def test_under_way() -> None:
    under_way = UnderWay(2)
    with under_way.more("a"), under_way.more("b"):
        with under_way.more("a"), pytest.raises(ResourceExhausted) as caught, under_way.more("a"):
            pass
        assert caught.value.reason == "TOO_MANY_AT_ONCE"
        assert caught.value.metadata["retry_after"] == "1"
        with pytest.raises(ZeroDivisionError), under_way.more("a"):
            raise ZeroDivisionError
        with under_way.more("a"):
            pass
    assert not under_way.counts


async def test_a_quota_is_the_one_that_stands_in_the_file(keys: KeyFile, checks: Checks) -> None:
    text, record = keys.create([Scope.INFERENCE], tokens_a_day=1000)
    gate = Gate(keys)
    assert (gate.quota(record.id), gate.quota("unknown")) == (1000, 0)
    keys.limit(record.id, 2000)
    await enter(gate, text)
    assert gate.quota(record.id) == 2000


async def test_a_gate_that_always_needs_a_key_needs_it_before_there_is_one(keys: KeyFile) -> None:
    """Also for calls that are open to everybody elsewhere, for which any scope does."""
    gate = Gate(keys, required=True)
    for scopes in (None, USE, LOOK):
        assert (await refused(gate, None, scopes)).reason == "INVALID_API_KEY"
    assert str((await refused(gate, None)).hint).endswith("key create --lan"), (
        "a key of the other door is no use"
    )
    text, record = keys.create([Scope.READ])
    assert await enter(gate, text, None) == record.id
    keys.file.unlink()
    for scopes in (None, LOOK):
        assert (await refused(gate, text, scopes)).reason == "INVALID_API_KEY"
    assert gate.required
