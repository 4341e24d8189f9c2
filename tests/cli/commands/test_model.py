"""`sealring model`: checks, parts and profiles of a folder, and models on nodes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sealring.cli.commands import model as command
from sealring.cli.commands.model import app
from sealring.cli.terminal.exit_codes import CHECK_FAILED
from sealring.v1 import admin_pb2, membership_pb2


@pytest.mark.parametrize(("largest", "shown"), [(0.25, "0.25"), (None, "not a number")])
def test_how_far_stages_are_off_is_told(
    largest: float | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {"model_type": "llama", "layers": 3, "stages": [[0, 2], [2, 3]], "weights": "random"}
    answers = {"exact": False, "tokens_equal": True, "alone_equal": True, "right": False}
    told = report | answers | {"max_abs_diff": largest}
    monkeypatch.setattr("sealring.cli.commands.model.ask_apart", lambda *_: told)
    done = CliRunner().invoke(app, ["check", "config.json"])
    assert done.exit_code == CHECK_FAILED
    assert f" 0-1 2-2  random   no     {shown} " in done.output
    assert "do not compute what the whole model computes" in done.output


def test_parts_of_a_model_are_told_with_their_sizes(
    here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ranges(module: str, arguments: list[str]) -> Any:
        asked.append(arguments[1])
        return {"stages": ["first", "second"]}

    def write_parts(source: Path, into: Path, stages: list[str], shown: Any) -> Any:
        return [(into / stage, (number + 1) << 20) for number, stage in enumerate(stages)]

    monkeypatch.setattr("sealring.cli.commands.model.ask_apart", ranges)
    monkeypatch.setattr("sealring.node.models.partial_model.split", write_parts)
    command = ("model", "split", str(tmp_path), "--split", "2,3", "--into", str(tmp_path / "parts"))
    parts = [str(tmp_path / "parts" / stage) for stage in ("first", "second")]
    assert here(*command, "--json").data == [
        {"part": parts[0], "bytes": 1 << 20},
        {"part": parts[1], "bytes": 2 << 20},
    ]
    rows = [line.split() for line in here(*command).out.splitlines()]
    assert rows == [["part", "size"], [parts[0], "1.0", "MiB"], [parts[1], "2.0", "MiB"]]
    assert asked == ["2,3"] * 2
    assert here("model", "split", str(tmp_path / "none"), *command[3:]).status == 7


@pytest.mark.parametrize("right", [True, False])
def test_a_check_passes_when_all_of_it_is_right(
    here: Any, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    """Stages may be exact, and rows depend on those beside them all the same."""
    report = {"model_type": "llama", "layers": 3, "stages": [[0, 2], [2, 3]], "weights": "random"}
    answers = {"exact": True, "tokens_equal": True, "alone_equal": right, "right": right, "max_abs_diff": 0.0}
    monkeypatch.setattr("sealring.cli.commands.model.ask_apart", lambda *_: report | answers)
    done = here("model", "check", "config.json")
    assert done.status == (0 if right else CHECK_FAILED)
    assert ("depends on the rows that run with it" in done.err) == (not right)
    assert "whole model computes" not in done.err
    assert here("model", "check", "config.json", "--json").data["right"] == right


@pytest.mark.parametrize(
    ("option", "least", "most"),
    [("--seed", 0, (1 << 32) - 1), ("--rows", 1, 64), ("--stages", 1, 1024)],
)
def test_a_checks_options_have_bounds(
    here: Any, monkeypatch: pytest.MonkeyPatch, option: str, least: int, most: int
) -> None:
    asked: list[Any] = []

    def ask(module: str, arguments: list[str]) -> Any:
        asked.append(json.loads(arguments[1])[option[2:]])
        return {"right": True}

    monkeypatch.setattr("sealring.cli.commands.model.ask_apart", ask)
    for value in (least - 1, least, most, most + 1):
        status = here("model", "check", "config.json", f"{option}={value}", "--json").status
        assert status == (0 if least <= value <= most else 2)
    assert asked == [least, most]


def test_what_a_check_asks_for_by_itself(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "sealring.cli.commands.model.ask_apart", lambda _, given: asked.append(given) or {"right": True}
    )
    assert here("model", "check", "config.json", "--json").status == 0
    ((path, options),) = asked
    assert (path, json.loads(options)) == (
        "config.json",
        {"splits": None, "stages": None, "rows": 3, "seed": 0},
    )


def test_what_a_model_needs_is_shown(here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {
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
    told = dict(measured)
    monkeypatch.setattr("sealring.cli.commands.model.ask_apart", lambda *_: told)
    shown = here("model", "profile", str(tmp_path)).out
    for cell in ("llama", "400 B", "1.0 KiB", "not said", "ab"):
        assert cell in shown
    told |= {"tied": True, "max_context": 256}
    shown = here("model", "profile", str(tmp_path)).out
    assert "300 B" in shown, "a tied head is no weight of its own"
    assert "256" in shown
    assert here("model", "profile", str(tmp_path), "--json").data == told
    assert here("model", "profile", str(tmp_path / "none")).status == 7


@pytest.mark.parametrize(
    ("options", "nodes", "wait", "said"),
    [
        ((), [], True, "m is on mac-1"),
        (("--node", "a", "--node", "b"), ["a", "b"], True, "m is on a, b"),
        (("--no-wait",), [], False, "m is on its way to mac-1"),
    ],
)
def test_a_model_is_fetched_where_it_was_said(
    here: Any, monkeypatch: pytest.MonkeyPatch, options: Any, nodes: list[str], wait: bool, said: str
) -> None:
    asked: list[Any] = []

    async def pull(admin: Any, model: str, wanted: list[str], shown: Any, *, wait: bool) -> list[str]:
        asked.append((model, wanted, wait))
        return wanted or ["mac-1"]

    monkeypatch.setattr(command, "pull", pull)
    monkeypatch.setattr(command, "run_admin", lambda context, work: asyncio.run(work(None)))
    done = here("model", "pull", "m", *options)
    assert asked == [("m", nodes, wait)]
    assert done.err.splitlines() == ["fetching m", said]


@pytest.mark.parametrize(("options", "nodes"), [((), []), (("--node", "a"), ["a"])])
def test_a_model_is_removed_where_it_was_said(
    here: Any, monkeypatch: pytest.MonkeyPatch, options: Any, nodes: list[str]
) -> None:
    async def remove(admin: Any, model: str, wanted: list[str]) -> list[str]:
        assert wanted == nodes
        return ["mac-1", "mac-2"]

    monkeypatch.setattr(command, "remove", remove)
    monkeypatch.setattr(command, "run_admin", lambda context, work: asyncio.run(work(None)))
    assert here("model", "remove", "m", *options).err == "removed m from mac-1, mac-2\n"


def test_models_are_listed_by_node(here: Any, coordinator: Any) -> None:
    models = [membership_pb2.HeldModel(name="demo")]
    node = admin_pb2.Node(id="a", name="mac-1", models=models)
    coordinator.answers["ListNodes"] = admin_pb2.ListNodesResponse(nodes=[node])
    (one,) = here("model", "list", "--json").data
    assert (one["node"], one["id"], one["models"][0]["name"]) == ("mac-1", "a", "demo")
    assert "demo" in here("model", "list").out
