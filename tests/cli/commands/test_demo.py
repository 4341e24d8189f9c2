"""`sealring demo`: over a cluster that only says what it was asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from bundles import SigningCluster

from sealring.cli.calls.asking import Answer, Question, Target
from sealring.cli.local import cluster as local
from sealring.cli.local.leftovers import PORTS
from sealring.cli.terminal.output import Progress
from sealring.v1 import admin_pb2, membership_pb2


def deployed() -> admin_pb2.Deployment:
    """Two stages with one link between them."""
    stages = [
        admin_pb2.StagePlan(rank=0, member_name="node-0", first_layer=0, end_layer=3, trust=10),
        admin_pb2.StagePlan(rank=1, member_name="node-1", first_layer=3, end_layer=4, trust=30),
    ]
    plan = admin_pb2.DeploymentPlan(rings=[admin_pb2.RingPlan(ring="demo-0", stages=stages, min_trust=10)])
    link = membership_pb2.LinkInfo(from_rank=0, to_rank=1, suite="hybrid")
    return admin_pb2.Deployment(plan=plan, rings=[admin_pb2.RingStatus(ring="demo-0", epoch=2, links=[link])])


class Cluster:
    """Starts nothing. Keeps what it was made with."""

    made: list[Cluster] = []
    grpc_address, http_url, operator_bundle = "127.0.0.1:5", "http://127.0.0.1:6", Path("/bundle")

    def __init__(self, state: Path, model: Path, *, nodes: int, name: str, say: Any) -> None:
        self.state_dir, self.model, self.nodes, self.name = state, model, nodes, name
        self.did: list[Any] = []
        self.made.append(self)

    async def __aenter__(self) -> Self:
        assert self.state_dir.is_dir() or not self.state_dir.exists()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.did.append("left")

    async def start(self) -> None:
        self.did.append("started")

    async def deploy(self, *, stages: int) -> admin_pb2.Deployment:
        self.did.append(stages)
        return deployed()

    async def wait_for_end(self) -> None:
        self.did.append("served")


class Asker:
    """Answers Paris, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    @asynccontextmanager
    async def open(self, target: Target, *, seconds: float) -> AsyncIterator[Self]:
        self.asked.append((target.addresses, target.pin))
        yield self

    async def ask(self, question: Question, on_text: Any) -> Answer:
        self.asked.append((question.messages, question.model))
        on_text("Paris.")
        return Answer("demo", "demo-0", 10, 5, 2, "stop", "Paris.", sealed=True, ttft_s=0.25, tok_s=8.0)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> SigningCluster:
    return SigningCluster(tmp_path_factory.mktemp("signed"))


@pytest.fixture
def asker(monkeypatch: pytest.MonkeyPatch) -> Asker:
    made = Asker()
    monkeypatch.setattr("sealring.cli.calls.asking.asking", made.open)
    return made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, asker: Asker, signed: SigningCluster) -> list[Cluster]:
    monkeypatch.setattr(Cluster, "made", [])
    monkeypatch.setattr(Cluster, "operator_bundle", signed.bundle)
    monkeypatch.setattr(local, "LocalCluster", Cluster)
    return Cluster.made


def test_it_serves_three_nodes_until_it_is_ended(
    here: Any, made: list[Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(Progress, "close", lambda shown: closed.append(shown))
    done = here("demo")
    assert done.status == 0
    assert len(closed) == 2, "what is waited for is taken away before, and in the end"
    (cluster,) = made
    assert (cluster.nodes, cluster.name) == (3, "demo")
    assert (cluster.model / "config.json").is_file()
    assert cluster.did == ["started", 3, "served", "left"]
    assert not cluster.state_dir.exists(), "of a temporary folder nothing stays"
    rows = [line.split() for line in done.out.splitlines()]
    assert ["0", "node-0", "0-2", "software", "->", "rank", "1:", "hybrid"] in rows
    assert ["1", "node-1", "3-3", "hardware", "no", "link"] in rows
    for way in (
        "curl -sN http://127.0.0.1:6/v1/",
        "chat --gateway 127.0.0.1:5",
        f"status --operator {cluster.operator_bundle}",
    ):
        assert way in done.out
    assert "0.25 s after the question" in done.err


def test_the_question_is_sealed_for_the_cluster_itself(
    here: Any, made: list[Cluster], asker: Asker, signed: SigningCluster
) -> None:
    done = here("demo", "--once", "--question", "why?")
    assert asker.asked == [
        (["127.0.0.1:5"], signed.root.fingerprint),
        ([("user", "why?")], "demo"),
    ]
    assert done.out.startswith("Paris.\n")
    assert "\n> why?\n" in done.err


def test_once_it_leaves_after_the_answer(here: Any, made: list[Cluster]) -> None:
    done = here("demo", "--once", "--nodes", "2", "--question", "why?")
    assert made[0].did == ["started", 2, "left"]
    assert "ring demo-0, epoch 2, minimum trust software" in done.out
    assert "until Ctrl-C" not in done.out


def test_what_programs_read_of_it(here: Any, made: list[Cluster]) -> None:
    found = here("demo", "--once", "--json").data
    assert (found["answer"], found["suite"], found["min_trust"]) == ("Paris.", "hybrid", "software")
    assert [one["layers"] for one in found["ring"]] == [[0, 3], [3, 4]]


@pytest.mark.parametrize(("length", "status"), [(1, 0), (4096, 0), (4097, 2)])
def test_a_question_is_so_long_at_most(here: Any, made: list[Cluster], length: int, status: int) -> None:
    assert here("demo", "--once", "--question", "x" * length).status == status
    assert len(made) == (status == 0)


@pytest.mark.parametrize(("nodes", "status"), [("0", 2), ("1", 0), ("64", 0), ("65", 2)])
def test_so_many_nodes_at_most(here: Any, made: list[Cluster], nodes: str, status: int) -> None:
    assert here("demo", "--once", "--nodes", nodes).status == status


def test_another_model_has_its_folders_name(here: Any, made: list[Cluster], home: Path) -> None:
    (home / "My Model").mkdir()
    assert here("demo", "--once", "--model", "My Model").status == 7, "it has no config.json"
    (home / "My Model" / "config.json").write_text("{}")
    assert here("demo", "--once", "--model", "My Model").status == 0
    assert (made[0].model, made[0].name) == (home / "My Model", "my-model")


def test_a_state_folder_is_new_or_that_of_a_local_cluster(here: Any, made: list[Cluster], home: Path) -> None:
    state = home / "state"
    assert here("demo", "--once", "--state-dir", "state").status == 0, "it is made"
    state.mkdir(exist_ok=True)
    assert here("demo", "--once", "--state-dir", "state").status == 0, "it is empty"
    (state / "mine").write_text("")
    refused = here("demo", "--once", "--state-dir", "state")
    assert (refused.status, "BAD_STATE_FOLDER" in refused.err) == (7, True)
    (state / PORTS).write_text("{}")
    assert here("demo", "--once", "--state-dir", "state").status == 0
    assert here("demo", "--once", "--state-dir", "state/mine").status == 7
    assert (state / "mine").exists()
    assert len(made) == 3
