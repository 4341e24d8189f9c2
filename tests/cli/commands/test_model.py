"""`sealring model`: checks, parts and profiles of a folder, and models on nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.terminal.exit_codes import CHECK_FAILED
from sealring.v1 import admin_pb2, membership_pb2

REPORT = {
    "model_type": "llama",
    "layers": 3,
    "stages": [[0, 2], [2, 3]],
    "weights": "random",
    "exact": True,
    "tokens_equal": True,
    "alone_equal": True,
    "right": True,
    "max_abs_diff": 0.0,
    "template": None,
}


@pytest.mark.parametrize(
    ("changes", "cells", "said"),
    [
        ({}, "yes 0 yes yes", ""),
        ({"exact": False, "right": False, "max_abs_diff": 0.25}, "no 0.25 yes yes", "whole model computes"),
        (
            {"tokens_equal": False, "right": False, "max_abs_diff": None},
            "yes not a number no yes",
            "whole model computes",
        ),
        ({"alone_equal": False, "right": False}, "yes 0 yes no", "depends on the rows that run with it"),
    ],
)
def test_a_check_passes_when_all_of_it_is_right(
    here: Any, host: Any, changes: dict[str, Any], cells: str, said: str
) -> None:
    host.reports["check"] = REPORT | changes
    done = here("model", "check", "config.json")
    assert done.status == (CHECK_FAILED if said else 0)
    assert f"llama 3 0-1 2-2 random {cells}" in " ".join(done.out.split())
    assert done.err.splitlines()[1:] == ([done.err.splitlines()[-1]] if said else [])
    assert said in done.err
    assert here("model", "check", "config.json", "--json").data == REPORT | changes


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ({"changes": [], "lost": []}, ["takes messages as they are", "it shows everything"]),
        ({"changes": ["null", "texts"], "lost": ["thoughts"]}, ["null, texts", "does not show thoughts"]),
    ],
)
def test_a_check_says_what_the_chat_template_wants(
    here: Any, host: Any, template: dict[str, Any], said: list[str]
) -> None:
    host.reports["check"] = REPORT | {"template": template}
    done = here("model", "check", "folder")
    assert all(text in line for text, line in zip(said, done.err.splitlines()[-2:], strict=True))


def test_what_a_check_asks_for_by_itself_and_within_which_bounds(here: Any, host: Any) -> None:
    host.reports["check"] = REPORT
    assert here("model", "check", "config.json").status == 0
    ((_, (path, options)),) = host.ran
    assert (path, json.loads(options)) == (
        "config.json",
        {"splits": None, "stages": None, "rows": 3, "seed": 0},
    )
    for option, least, most in (("--seed", 0, (1 << 32) - 1), ("--rows", 1, 64), ("--stages", 1, 1024)):
        for value in (least - 1, least, most, most + 1):
            status = here("model", "check", "config.json", f"{option}={value}", "--json").status
            assert status == (0 if least <= value <= most else 2)


def test_what_a_model_needs_is_shown(here: Any, host: Any, tmp_path: Path) -> None:
    measured: dict[str, Any] = {
        "model_type": "llama",
        "layers": 2,
        "layer_bytes": [100, 100],
        "embed_bytes": 100,
        "head_bytes": 100,
        "tied": False,
        "kv_bytes_per_token": [512, 512],
        "max_context": 0,
        "digest": "ab",
    }
    host.reports["profile"] = measured
    shown = here("model", "profile", str(tmp_path)).out
    for cell in ("llama", "400 B", "1.0 KiB", "not said", "ab"):
        assert cell in shown
    measured |= {"tied": True, "max_context": 256}
    shown = here("model", "profile", str(tmp_path)).out
    assert "300 B" in shown, "a tied head is no weight of its own"
    assert "256" in shown
    assert here("model", "profile", str(tmp_path), "--json").data == measured
    for verb in (("profile",), ("split", "--split", "1", "--into", str(tmp_path))):
        assert "[MODEL_NOT_FOUND]" in here("model", *verb, str(tmp_path / "none")).err


@pytest.mark.parametrize(
    ("options", "nodes", "wait", "said"),
    [
        ((), "b", True, "m is on mac-b"),
        (("--node", "mac-a", "--node", "b" * 16), "ab", True, "m is on mac-a, mac-b"),
        (("--no-wait",), "b", False, "m is on its way to mac-b"),
    ],
)
def test_a_model_is_fetched_where_it_was_said_and_removed(
    here: Any, coordinator: Any, options: Any, nodes: str, wait: bool, said: str
) -> None:
    whole = membership_pb2.HeldModel(name="m", size=1, done=int(wait), fetched=True)
    known = [
        admin_pb2.Node(
            id=name * 16,
            name=f"mac-{name}",
            models=[whole],
            memory_usable=ord(name),
            state=admin_pb2.NODE_STATE_ONLINE,
        )
        for name in "ab"
    ]
    coordinator.answers["ListNodes"] = admin_pb2.ListNodesResponse(nodes=known)
    done = here("model", "pull", "m", *options)
    assert [(one.id, one.model) for one in coordinator.calls("PullModel")] == [
        (one * 16, "m") for one in nodes
    ]
    assert done.err.splitlines()[-1] == said
    assert here("model", "remove", "m", "--node", "mac-a").err == "removed m from mac-a\n"
    assert [one.id for one in coordinator.calls("RemoveModel")] == ["a" * 16]
    (first, _) = here("model", "list", "--json").data
    assert (first["node"], first["id"], first["models"][0]["name"]) == ("mac-a", "a" * 16, "m")
    assert "mac-b" in here("model", "list").out
