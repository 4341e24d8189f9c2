"""The caller's check of the coordinator's proof."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from refusals import refused

from sealring.mesh.errors import RosterError, Unavailable
from sealring.mesh.member import Introduction, Purpose, by_roster_keys, check_proof
from sealring.mesh.pki import RootMetadata, sign_root
from sealring.v1 import proof_pb2


class Caller:
    """Uses the last of `roots`; a fetch adds `newer`."""

    def __init__(self, authority: Any, clock: Any) -> None:
        self.roots: list[RootMetadata] = [authority.root]
        self.newer: RootMetadata | None = None
        nobody: Any = None
        self.introduction = Introduction(
            Purpose.SESSION, nobody, nobody, lambda: self.roots[-1], self.fetch, clock=clock
        )

    async def fetch(self) -> None:
        if self.newer is None:
            raise Unavailable("there is none")
        self.roots.append(self.newer)

    async def believes(self, signers: Any, *, root_version: int) -> None:
        verify = await self.introduction.verifier(proof_pb2.ProofAnswer(root_version=root_version))
        check_proof(b"said", by_roster_keys(signers)(b"said"), verify)


@pytest.fixture
def caller(authority: Any, clock: Any) -> Caller:
    return Caller(authority, clock)


async def test_root_metadata_that_expired_while_the_machine_was_off_is_replaced_first(
    caller: Caller, authority: Any, clock: Any
) -> None:
    clock.now = authority.root.expires + 3600
    draft = dataclasses.replace(
        authority.root, version=2, issued=int(clock.now) - 60, expires=int(clock.now) + 3600, chain=()
    )
    caller.newer = sign_root(draft, authority.root_signers, previous=authority.root)
    await caller.believes(authority.roster_signers, root_version=2)
    assert [root.version for root in caller.roots] == [1, 2]


async def test_nobody_is_believed_by_root_metadata_that_has_expired(
    caller: Caller, authority: Any, clock: Any
) -> None:
    await caller.believes(authority.roster_signers, root_version=1)
    clock.now = authority.root.expires + 3600
    with refused("ROOT_EXPIRED", RosterError):
        await caller.believes(authority.roster_signers, root_version=1)
    with pytest.raises(Unavailable):
        await caller.believes(authority.roster_signers, root_version=2)
