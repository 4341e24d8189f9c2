"""Which member an operator means: members choose their names, and may mean harm by it."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.cli.calls.members import enrolled_nodes, find_member, links_along, print_links, revoked
from sealring.cli.terminal.output import moment
from sealring.mesh.crypto import encode_base32
from sealring.mesh.errors import InvalidInput, NotFound
from sealring.v1 import admin_pb2, membership_pb2

A, B, C = (encode_base32(bytes([number]) * 32) for number in (1, 2, 3))


class Admin:
    def __init__(self, names: dict[str, str], gone: dict[str, str]) -> None:
        self.nodes = [admin_pb2.Node(id=one, name=name) for one, name in names.items()]
        role = membership_pb2.ROLE_NODE
        self.revoked = [admin_pb2.RevokedIdentity(id=one, name=name, role=role) for one, name in gone.items()]

    async def call(self, method: str) -> Any:
        return admin_pb2.ListNodesResponse(nodes=self.nodes, revoked=self.revoked)


async def find(wanted: str, names: dict[str, str], gone: dict[str, str] | None = None) -> str:
    admin: Any = Admin(names, gone or {})
    return await find_member(admin, wanted, enrolled_nodes, revoked("ROLE_NODE"))


async def test_two_that_are_called_by_each_others_ids_are_told_apart() -> None:
    for wanted in (A, A[:16]):
        assert await find(wanted, {A: B, B: A}) == A
        assert await find(wanted, {B: wanted}, {A: "gone"}) == A, "also one that was evicted"


async def test_of_two_of_one_name_the_ids_are_told_and_tell_them_apart() -> None:
    with pytest.raises(InvalidInput) as error:
        await find("mac-1", {A: "mac-1", B: "mac-1", C: "mac-2"})
    assert error.value.reason == "AMBIGUOUS_NODE"
    assert f"{A[:16]}, {B[:16]}" in error.value.hint
    assert await find(B[:16], {A: "mac-1", B: "mac-1"}) == B


async def test_of_very_many_of_one_name_some_are_told() -> None:
    ids = [encode_base32(bytes([number]) * 32) for number in range(9)]
    with pytest.raises(InvalidInput) as error:
        await find("mac", dict.fromkeys(ids, "mac"))
    assert error.value.message == "9 are called mac"
    assert error.value.hint == f"name one by its id: {', '.join(one[:16] for one in ids[:8])}"


async def test_names_are_looked_for_among_the_enrolled_first() -> None:
    assert await find("mac-1", {A: "mac-1"}, {B: "mac-1"}) == A
    assert await find("mac-1", {A: "mac-2"}, {B: "mac-1"}) == B
    for wanted in ("mac-3", A[:15]):
        with pytest.raises(NotFound):
            await find(wanted, {A: "mac-1"})


def link(caller: str, called: str, host: str = "10.0.0.9", rate: int = 100 << 20) -> dict[str, Any]:
    figures = {"round_trip_us": 300, "bytes_per_second": str(rate), "measured": "1800000000"}
    return {"caller": caller, "called": called, "host": host, **figures}


def test_links_are_a_table_with_the_slowest_first(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [{"id": name * 20, "name": f"mac-{name}"} for name in "abc"]
    links = [link("a" * 20, "b" * 20), link("b" * 20, "c" * 20, host="", rate=0), link("a" * 20, "z" * 20)]
    print_links(links, nodes)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line]
    when = moment(1_800_000_000)
    assert lines == [
        "links between nodes",
        "from to over rate round trip measured",
        f"mac-b mac-c no way was found - - {when}",
        f"mac-a mac-b 10.0.0.9 100.0 MiB/s 0.30 ms {when}",
        f"mac-a {'z' * 16} 10.0.0.9 100.0 MiB/s 0.30 ms {when}",
    ]
    print_links([link(f"{number}", "b") for number in range(40)], nodes)
    assert "the slowest 32 of 40" in capsys.readouterr().out
    print_links([], nodes)
    assert capsys.readouterr().out == ""


def test_of_a_planned_ring_its_links_and_its_closing_edge_count() -> None:
    stages = [admin_pb2.StagePlan(member=name) for name in "abc"]
    links = [link("b", "a"), link("b", "c"), link("a", "c"), link("a", "d")]
    assert links_along(links, [admin_pb2.RingPlan(stages=stages)]) == links[:3]
    assert links_along(links, [admin_pb2.RingPlan(stages=stages[:2])]) == links[:1]
