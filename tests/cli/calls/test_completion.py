"""What a shell is offered for names, by the command that it asks."""

from __future__ import annotations

from typing import Any

import pytest
from commands import Coordinator, FakeHost
from typer._completion_classes import completion_init
from typer.main import get_command

from sealring.cli.main import app
from sealring.v1 import admin_pb2


def offered(host: FakeHost, *words: str) -> list[str]:
    """The names for the last of `words`, which is not finished."""
    command: Any = get_command(app)
    context = command.make_context("sealring", list(words[:1]), resilient_parsing=True, obj=host)
    for word in words[:-1]:
        if not hasattr(command, "get_command"):
            break
        command = command.get_command(context, word)
        context = command.make_context(word, [], parent=context, resilient_parsing=True, obj=host)
    (param, *_) = [
        one
        for one in command.params
        if (words[-2] in one.opts if words[-2].startswith("-") else one.param_type_name == "argument")
    ]
    return [one.value for one in param.shell_complete(context, words[-1])]


@pytest.fixture
def host() -> FakeHost:
    made = FakeHost()
    nodes = admin_pb2.ListNodesResponse(nodes=[admin_pb2.Node(name="attic"), admin_pb2.Node(name="desk")])
    for name in ("org/tiny", "tall"):
        nodes.nodes[0].heartbeat.models.add(name=name)
    deployments = admin_pb2.ListDeploymentsResponse()
    for name in ("qwen3", "gemma"):
        deployments.deployments.add().plan.spec.name = name
    made.coordinator = Coordinator(ListNodes=nodes, ListDeployments=deployments)
    return made


CASES: list[tuple[tuple[str, ...], list[str]]] = [
    (("node", "evict", "d"), ["desk"]),
    (("deployment", "delete", ""), ["gemma", "qwen3"]),
    (("chat", "--model", "q"), ["qwen3"]),
    (("deploy", "--member", ""), ["attic", "desk"]),
    (("deploy", "t"), ["tall"]),
    (("model", "remove", "o"), ["org/tiny"]),
    (("model", "fits", "Kimi-K2-"), ["Kimi-K2-Instruct"]),
    (("logs", "--component", "g"), ["gateway"]),
]


@pytest.mark.parametrize(("words", "names"), CASES)
def test_names_are_those_of_the_cluster(host: FakeHost, words: tuple[str, ...], names: list[str]) -> None:
    completion_init()
    assert offered(host, *words) == names


def test_without_a_cluster_nothing_is_offered_and_nothing_fails() -> None:
    assert offered(FakeHost(), "node", "evict", "") == []
