import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.mesh.errors import HandshakeError
from sealring.node.daemon import rotation
from sealring.node.daemon.rotation import StepGate


async def test_an_open_gate_lets_steps_through() -> None:
    gate = StepGate()
    async with asyncio.timeout(200):
        await gate.pass_step()


async def test_a_held_gate_tells_who_knocks_and_opens_when_all_let_go() -> None:
    gate = StepGate()
    with gate.held():
        with gate.held():
            knocking = asyncio.create_task(gate.knocked())
            step = asyncio.create_task(gate.pass_step())
            async with asyncio.timeout(200):
                await knocking
        await asyncio.sleep(0)
        assert not step.done()
    async with asyncio.timeout(200):
        await step
    with gate.held():
        again = asyncio.create_task(gate.knocked())
        await asyncio.sleep(0.01)
        assert not again.done()
        again.cancel()


class Conversation:
    """With a neighbour whose last step is this."""

    def __init__(self, last: bytes) -> None:
        self.last, self.told = last, list[bytes]()
        self.session = SimpleNamespace(to_carrier=lambda: b"keys")

    async def tell(self, label: bytes, note: bytes) -> None:
        self.told.append(note)

    async def hear(self, label: bytes) -> bytes:
        return self.last


class Link:
    def __init__(self, receives: bool) -> None:
        self.receives, self.params = receives, SimpleNamespace(peer_id="b")


class Carrier:
    def __init__(self) -> None:
        self.installed: list[tuple[bytes, bool, int]] = []

    async def install(self, keys: bytes, *, outgoing: bool, at_step: int) -> None:
        self.installed.append((keys, outgoing, at_step))


@pytest.mark.parametrize("receives", [False, True])
async def test_keys_change_at_the_step_after_the_later_of_two_ends(receives: bool) -> None:
    """And not before those that were prepared last have been used."""
    carrier, gate = Carrier(), StepGate()
    unused: Any = None
    made: Any = rotation.Rotation(unused, unused, gate, carrier, unused)
    links = {name: Link(receives) for name in ("one", "other")}
    for name, mine, theirs in (
        ("one", 7, 5),
        ("one", 7, 6),
        ("one", 7, 8),
        ("other", 7, 5),
        ("one", 8, 7),
        ("one", 9, 0),
    ):
        gate.passed(mine)
        found = Conversation(theirs.to_bytes(8, "big"))
        await made.change(links[name], found)
        assert found.told == [mine.to_bytes(8, "big")]
        await gate.pass_step()
    assert carrier.installed == [(b"keys", not receives, step) for step in (8, 9, 8, 10)]
    for malformed in (b"", bytes(7), bytes(9)):
        with pytest.raises(HandshakeError) as caught:
            await made.change(links["one"], Conversation(malformed))
        assert caught.value.reason == "BAD_STEP_NOTE"
    assert len(carrier.installed) == 4


def test_a_gate_rests_where_no_step_has_passed_for_a_second() -> None:
    now = [100.0]
    gate = StepGate(lambda: now[0])
    assert (gate.resting, gate.last) == (True, 0)
    gate.passed(4)
    for now[0], resting in ((101.0, False), (101.1, True)):
        assert (gate.resting, gate.last) == (resting, 4)
