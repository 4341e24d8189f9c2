"""`sealring operator`: bundles for others, and who has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sealring.cli.commands.operator import _folder_for
from sealring.cli.terminal.output import moment
from sealring.mesh.errors import InvalidInput
from sealring.v1 import admin_pb2

AT = 1_800_000_000


def test_a_bundles_folder_is_there_before_anything_is_asked(tmp_path: Path) -> None:
    bundle = tmp_path / "new" / "bundle"
    with _folder_for(bundle):
        assert bundle.stat().st_mode & 0o777 == 0o700
    assert bundle.is_dir()


def test_of_a_bundle_that_was_refused_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    bundle = tmp_path / "there" / "new" / "bundle"
    with pytest.raises(KeyboardInterrupt), _folder_for(bundle):
        raise KeyboardInterrupt
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_where_no_folder_can_be_made_nothing_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidInput) as refused, _folder_for(tmp_path / "file" / "bundle"):
        raise AssertionError("asked all the same")
    assert refused.value.reason == "BAD_FILE"
    assert (tmp_path / "file").read_text() == "in the way"


def test_operators_are_listed_with_what_they_may(here: Any, coordinator: Any) -> None:
    one = admin_pb2.Operator(
        name="alice", role=admin_pb2.OPERATOR_ROLE_READ, added=AT, expires=AT + 60, key_hash=bytes(32)
    )
    coordinator.answers["ListOperators"] = admin_pb2.ListOperatorsResponse(operators=[one])
    heading, row = here("operator", "list").out.splitlines()
    assert heading.split() == ["name", "role", "key", "since", "expires", "key"]
    assert row.split() == ["alice", "read", *moment(AT).split(), *moment(AT + 60).split(), "0" * 16]
    assert here("operator", "list", "--json").data[0]["key_hash"] == "00" * 32
    assert here("operator", "revoke", "alice").err == "revoked alice\n"
    assert coordinator.asked[-1][1].name == "alice"
