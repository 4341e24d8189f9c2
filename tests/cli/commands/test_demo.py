"""`sealring demo`: over a cluster that only says what it was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest
from bundles import SigningCluster
from commands import Asker

from sealring.cli.local.leftovers import PORTS
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

    grpc_address, http_url = "127.0.0.1:5", "http://127.0.0.1:6"

    def __init__(self, state: Path, model: Path, *, nodes: int, name: str, say: Any) -> None:
        self.state_dir, self.model, self.nodes, self.name = state, model, nodes, name
        self.did: list[Any] = []
        self.operator_bundle = Path()

    async def __aenter__(self) -> Self:
        assert self.state_dir.is_dir() or not self.state_dir.exists()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.did.append("left")

    async def start(self) -> None:
        self.did.append("started")

    async def deploy(self, *, stages: int, name: str = "demo", model: str = "") -> admin_pb2.Deployment:
        self.did.append(stages if name == "demo" else name)
        return deployed()

    async def wait_for_end(self) -> None:
        self.did.append("served")


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> SigningCluster:
    return SigningCluster(tmp_path_factory.mktemp("signed"))


@pytest.fixture
def made(host: Any, signed: SigningCluster) -> list[Cluster]:
    clusters: list[Cluster] = []

    def make(*arguments: Any, **options: Any) -> Cluster:
        clusters.append(Cluster(*arguments, **options))
        clusters[-1].operator_bundle = signed.bundle
        return clusters[-1]

    host.machine, host.asker = make, Asker()
    return clusters


def test_it_serves_three_nodes_until_it_is_ended(here: Any, made: list[Cluster]) -> None:
    done = here("demo")
    assert done.status == 0
    (cluster,) = made
    assert (cluster.nodes, cluster.name) == (3, "demo")
    assert (cluster.model / "config.json").is_file()
    assert cluster.did == ["started", 3, "demo-vision", "served", "left"]
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
    assert "0.12 s after the question" in done.err


def test_the_question_is_sealed_for_the_cluster_itself(
    here: Any, host: Any, made: list[Cluster], signed: SigningCluster
) -> None:
    done = here("demo", "--once", "--question", "why?")
    for target in host.asker.targets:
        assert (target.addresses, target.pin) == (["127.0.0.1:5"], signed.authority.root.fingerprint)
    asked, shown = host.asker.asked
    assert (asked.messages, asked.model) == ([("user", "why?")], "demo")
    picture, question = shown.messages[0][1]
    assert (picture[:4], question, shown.model) == (b"\x89PNG", "What is in this picture?", "demo-vision")
    assert done.out.startswith("Par[2Jis\t.\n")
    assert "\n> why?\n" in done.err


def test_once_it_leaves_after_the_answer(here: Any, made: list[Cluster]) -> None:
    done = here("demo", "--once", "--nodes", "2", "--question", "why?")
    assert made[0].did == ["started", 2, "demo-vision", "left"]
    assert "ring demo-0, epoch 2, minimum trust software" in done.out
    assert "until Ctrl-C" not in done.out


def test_what_programs_read_of_it(here: Any, made: list[Cluster]) -> None:
    found = here("demo", "--once", "--json").data
    assert (found["answer"], found["suite"], found["min_trust"]) == ("Paris.", "hybrid", "self_signed")
    assert [one["layers"] for one in found["ring"]] == [[0, 3], [3, 4]]


@pytest.mark.parametrize(("length", "status"), [(1, 0), (4096, 0), (4097, 2)])
def test_a_question_is_so_long_at_most(here: Any, made: list[Cluster], length: int, status: int) -> None:
    assert here("demo", "--once", "--question", "x" * length).status == status
    assert len(made) == (status == 0)


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
