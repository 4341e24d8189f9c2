"""Which member an operator means: members choose their names, and may mean harm by it."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.cli.calls.members import enrolled_nodes, find_member, revoked
from sealring.mesh.crypto.encoding import encode_base32
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
