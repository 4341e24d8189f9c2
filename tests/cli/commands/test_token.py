"""`sealring token`: what to type on the machines that join."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.cli.terminal.output import moment
from sealring.v1 import admin_pb2, membership_pb2

EXPIRES = 1_800_000_000


@pytest.mark.parametrize(
    ("options", "line", "whom"),
    [
        ((), "sealring join sr1.secret", "one node"),
        (("--uses", "2"), "sealring join sr1.secret", "2 nodes"),
        (("--role", "gateway"), "sealring gateway join sr1.secret", "one gateway"),
        (("--role", "gateway", "--uses", "3"), "sealring gateway join sr1.secret", "3 gateways"),
    ],
)
def test_the_line_to_type_is_data_and_whom_it_admits_is_said(
    here: Any, coordinator: Any, options: tuple[str, ...], line: str, whom: str
) -> None:
    coordinator.answers["CreateJoinToken"] = admin_pb2.CreateJoinTokenResponse(
        token="sr1.secret", expires=EXPIRES
    )
    done = here("token", "create", *options)
    assert done.out == line + "\n"
    assert done.err == f"good for {whom} until {moment(EXPIRES)}\n"


def test_without_options_a_token_is_for_one_node_and_ten_minutes(here: Any, coordinator: Any) -> None:
    assert here("token", "create", "--json").err == ""
    ((_, asked),) = coordinator.asked
    assert (asked.role, asked.ttl_seconds, asked.uses) == (membership_pb2.ROLE_NODE, 600, 1)


def test_a_code_is_shown_as_it_is_typed_and_whom_it_admits_is_said(here: Any, coordinator: Any) -> None:
    coordinator.answers["CreateJoinCode"] = admin_pb2.CreateJoinCodeResponse(code="0123456", expires=EXPIRES)
    done = here("token", "code", "--uses", "3")
    assert done.out == "012-3456\n"
    assert f"good for 3 nodes until {moment(EXPIRES)}" in done.err
    ((_, asked),) = coordinator.asked
    assert (asked.ttl_seconds, asked.uses) == (600, 3)
    assert here("token", "code", "--json").data == {"code": "0123456", "expires": EXPIRES}


def test_the_code_is_revoked_by_its_name_and_its_wrong_tries_are_told(here: Any, coordinator: Any) -> None:
    assert here("token", "revoke", "code").err == "revoked code\n"
    ((method, _),) = coordinator.asked
    assert method == "RevokeJoinCode"
    info = admin_pb2.JoinCodeInfo(uses=1, wrong=2)
    coordinator.answers["ListJoinTokens"] = admin_pb2.ListJoinTokensResponse(code=info)
    assert "wrong join codes that were typed: 2" in here("token", "list").err
