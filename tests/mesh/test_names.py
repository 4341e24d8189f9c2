"""Deployment names as clients write them, and ring ids made of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput
from sealring.mesh.names import check_deployment_name, check_name, ring_id, served_name

NAMES = st.from_regex(r"\A[A-Za-z0-9._/-]{1,128}\Z")


@pytest.mark.parametrize("name", ["demo", "Qwen2.5", "org/Model-7B_q4", "a" * 128, ".", "-"])
def test_names_that_clients_use(name: str) -> None:
    assert check_deployment_name(name) == name


@pytest.mark.parametrize("name", ["", "a" * 129, "a b", "ä", "a\n", "a:b", "a\0", "a@b"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_deployment_name(name)
    assert (caught.value.reason, caught.value.metadata["param"]) == ("BAD_NAME", "name")


def test_ring_ids() -> None:
    assert ring_id("demo", 0) == "demo-0"
    assert ring_id("Qwen2.5", 1).startswith("qwen2-5-")
    assert ring_id("///", 0).startswith("ring-")


@settings(max_examples=25)
@given(NAMES, st.integers(0, 63))
def test_every_name_makes_a_ring_id_that_is_a_label(name: str, replica: int) -> None:
    identifier = ring_id(name, replica)
    check_name(identifier, "ring")
    assert identifier.endswith(f"-{replica}")


@settings(max_examples=25)
@given(NAMES, NAMES)
def test_names_that_differ_have_rings_that_differ(first: str, second: str) -> None:
    assert (first == second) == (ring_id(first, 0) == ring_id(second, 0))


def test_names_that_look_alike_have_rings_that_differ() -> None:
    alike = ["qwen2-5", "Qwen2.5", "qwen2.5", "Qwen2-5", "QWEN2/5"]
    assert len({ring_id(name, 0) for name in alike}) == len(alike)


def test_a_client_means_a_deployment_by_its_name_first_and_then_by_an_alias() -> None:
    names = ["coder", "chat"]
    aliases = {"gpt-4o": "coder", "chat": "coder", "old": "gone"}
    asked = {"coder": "coder", "openai/chat": "chat", "gpt-4o": "coder", "openai/gpt-4o": "coder"}
    for name, known in asked.items():
        assert served_name(name, names, aliases) == known
    for name in ("", "old", "other"):
        assert served_name(name, names, aliases) is None
