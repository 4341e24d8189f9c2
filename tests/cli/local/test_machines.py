"""The machines of `sealring up` and `sealring join`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sealring.cli.local.machines import FirstMachine
from sealring.v1 import admin_pb2


class FakeAdmin:
    """Keeps join tokens."""

    def __init__(self) -> None:
        self.tokens = [admin_pb2.JoinTokenInfo(token_id="somebody's", note="for the attic")]

    async def call(self, method: str, request: Any) -> Any:
        if method == "CreateJoinToken":
            made = admin_pb2.JoinTokenInfo(token_id=f"id-{len(self.tokens)}", note=request.note)
            self.tokens.append(made)
        elif method == "RevokeJoinToken":
            self.tokens = [one for one in self.tokens if one.token_id != request.token_id]
        else:
            return admin_pb2.ListJoinTokensResponse(tokens=self.tokens)
        return admin_pb2.CreateJoinTokenResponse(token_id=self.tokens[-1].token_id)


async def test_one_token_of_up_is_good_at_a_time(tmp_path: Path) -> None:
    machine: Any = FirstMachine(tmp_path, {})
    machine.admin = FakeAdmin()
    for _ in range(3):
        made = await machine.token(uses=2, seconds=60)
        assert [one.token_id for one in machine.admin.tokens] == ["somebody's", made.token_id]
