"""Deployment names as clients write them, and ring ids made of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput
from sealring.mesh.names import (
    check_deployment_name,
    check_name,
    is_alias,
    ring_id,
    served_name,
    split_pin,
)

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


def test_a_beginning_stands_for_all_names_that_no_other_one_is_nearer_to() -> None:
    names, aliases = (
        ["big", "small"],
        {"gpt-5*": "big", "gpt-5-mini*": "small", "gpt-5-mini-x": "big", "o3*": "gone"},
    )
    asked = {"gpt-5": "big", "openai/gpt-5.5": "big", "gpt-5-mini-2": "small", "gpt-5-mini-x": "big"}
    for name, known in asked.items():
        assert served_name(name, names, aliases) == known
    for name in ("gpt-4", "o3-pro", "gpt-"):
        assert served_name(name, names, aliases) is None


def test_names_that_programs_ask_for_by_themselves_mean_the_only_model() -> None:
    for name in ("claude-haiku-4-5-20251001", "gpt-5.5", "codex-auto-review", "openai/gpt-4o"):
        assert served_name(name, ["qwen"]) == "qwen"
        assert served_name(name, ["qwen", "other"]) is None
    assert served_name("gpt-oss-120b", ["qwen"]) is None


@pytest.mark.parametrize("alias", ["qwen3:8b", "gpt-5*", "a" * 128, "claude-opus-*"])
def test_aliases(alias: str) -> None:
    assert is_alias(alias)


@pytest.mark.parametrize("alias", ["", "*", "a*b", "a**", "a" * 129, "a" * 128 + "*", "a b", "a\n"])
def test_no_aliases(alias: str) -> None:
    assert not is_alias(alias)


def test_a_digest_may_follow_a_name() -> None:
    digest = "0a" * 32
    assert split_pin("") == ("", "")
    assert split_pin("org/model:8b") == ("org/model:8b", "")
    assert split_pin(f"org/model:8b@{digest}") == ("org/model:8b", digest)
    assert split_pin(f"@{digest}") == ("", digest)
    for wrong in (
        "@",
        f"{digest}@",
        f"x@{digest[1:]}",
        f"x@{digest}a",
        f"x@{digest.upper()}",
        f"x@@{digest}",
    ):
        with pytest.raises(InvalidInput) as caught:
            split_pin(wrong)
        assert caught.value.reason == "BAD_DIGEST"
