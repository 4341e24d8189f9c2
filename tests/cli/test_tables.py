from __future__ import annotations

from typing import Any

import pytest

from sealring.cli.calls.asking import Answer
from sealring.cli.calls.members import print_nodes
from sealring.cli.commands.deployment import (
    default_name,
    make_spec,
    parse_split,
    print_change,
    print_deployments,
    print_plan,
)
from sealring.cli.commands.roster import print_roster
from sealring.cli.local.output import print_ring, report
from sealring.cli.terminal.output import moment, plain
from sealring.mesh.errors import InvalidInput
from sealring.v1 import admin_pb2, membership_pb2

SUITE = "x25519-chacha20poly1305"


@pytest.fixture
def deployment() -> admin_pb2.Deployment:
    stages = [
        admin_pb2.StagePlan(
            member=f"id{rank}",
            member_name=f"node-{rank}",
            rank=rank,
            first_layer=3 * rank,
            end_layer=3 * rank + 3,
            trust=10,
            weight_bytes=1 << 20,
        )
        for rank in range(3)
    ]
    links = [
        membership_pb2.LinkInfo(from_rank=rank, to_rank=(rank + 1) % 3, suite=SUITE) for rank in range(3)
    ]
    return admin_pb2.Deployment(
        plan=admin_pb2.DeploymentPlan(
            spec=admin_pb2.DeploymentSpec(name="demo", model="/m"),
            rings=[admin_pb2.RingPlan(ring="demo-0", stages=stages, min_trust=10)],
        ),
        rings=[
            admin_pb2.RingStatus(ring="demo-0", epoch=1, phase=membership_pb2.RING_PHASE_SERVING, links=links)
        ],
        created=1_700_000_000,
    )


def test_the_demo_reports_what_the_issue_names(deployment: admin_pb2.Deployment) -> None:
    answer = Answer("demo", "demo-0", 10, 12, 3, "stop", "Paris.", sealed=True, ttft_s=0.5, tok_s=40.0)
    assert report(answer, deployment) == {
        "answer": "Paris.",
        "prompt_tokens": 12,
        "completion_tokens": 3,
        "ttft_s": 0.5,
        "tok_s": 40.0,
        "suite": SUITE,
        "min_trust": "software",
        "ring": [
            {"rank": rank, "node": f"node-{rank}", "layers": [3 * rank, 3 * rank + 3], "trust": "software"}
            for rank in range(3)
        ],
    }


def test_the_ring_is_shown(deployment: admin_pb2.Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    print_ring(deployment)
    shown = capsys.readouterr().out
    assert "epoch 1, minimum trust software" in shown
    assert f"node-2  6-8     software  -> rank 0: {SUITE}" in shown
    del deployment.rings[:]
    print_ring(deployment)
    assert capsys.readouterr().out == "", "nothing is known of it yet"


def test_a_ring_of_one_has_no_link(
    deployment: admin_pb2.Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    del deployment.rings[0].links[:]
    print_ring(deployment)
    assert "no link" in capsys.readouterr().out
    answer = Answer("demo", "demo-0", 10, 12, 3, "stop", "", sealed=True, ttft_s=0.5, tok_s=40.0)
    assert report(answer, deployment)["suite"] == "none"


def test_plans_and_deployments_are_shown(
    deployment: admin_pb2.Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    print_plan(deployment.plan)
    print_deployments([plain(deployment)])
    deployment.rings[0].phase = membership_pb2.RING_PHASE_FORMING
    deployment.rings[0].progress.add(what="loading", fraction=0.25)
    deployment.rings[0].progress.add(what="loading")
    print_deployments([plain(deployment)])
    deployment.rings[0].drafted, deployment.rings[0].accepted = 1204, 956
    print_deployments([plain(deployment)])
    deployment.plan.spec.speculate = True
    deployment.plan.profile.layers = 9
    del deployment.rings[:]
    print_deployments([plain(deployment)])
    shown = capsys.readouterr().out
    assert "1.0 MiB" in shown
    assert shown.count("cannot guess tokens") == 1
    assert shown.count("956 of 1204 guessed tokens right") == 1
    assert "serving" in shown
    assert "forming, loading 0%" in shown  # of the slowest
    assert SUITE in shown


def test_nodes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    node = admin_pb2.Node(
        id="a" * 52, name="node-0", state=admin_pb2.NODE_STATE_ONLINE, level="software", trust=10
    )
    rings = [admin_pb2.NodeRing(ring=ring, end_layer=end) for ring, end in (("demo-0", 5), ("small-0", 3))]
    serving = admin_pb2.Node(name="node-1", rings=rings)
    print_nodes([plain(node), plain(serving)])
    shown = capsys.readouterr().out
    assert "online" in shown
    assert "software" in shown
    assert "demo-0, small-0" in shown
    assert "0-4, 0-2" in shown


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/Qwen3-0.6B/", "qwen3-0-6b"),
        ("org/name", "name"),
        ("/models/my model", "my-model"),
        ("/", "model"),
        ("é", "model"),
        ("x" * 300, "x" * 56),
    ],
)
def test_a_model_names_its_deployment(model: str, name: str) -> None:
    assert default_name(model) == name


def test_splits() -> None:
    assert parse_split("") == []
    assert parse_split("4, 4,1") == [4, 4, 1]
    for bad in ("4,", "0", "-1", "a", "4;4", "999999", ",".join(["1"] * 257)):
        with pytest.raises(InvalidInput) as caught:
            parse_split(bad)
        assert caught.value.reason == "BAD_SPLIT"


def test_a_spec_keeps_hub_ids_and_resolves_folders(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    spec = make_spec("org/name", split="4,5", kv_bits=8)
    assert (spec.model, spec.name, list(spec.split), spec.kv_bits) == ("org/name", "name", [4, 5], 8)
    assert make_spec(".", "here").model == str(tmp_path)


def test_a_node_of_several_rings_is_shown_with_all_of_them(
    deployment: admin_pb2.Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what each takes of its memory; and in the roster."""
    mib = 1 << 20
    stage = deployment.plan.rings[0].stages[0]
    stage.weight_bytes, stage.kv_budget = 100 * mib, 28 * mib
    other = admin_pb2.NodeRing(ring="other-0", end_layer=9, memory=256 * mib)
    size = {"memory_usable": 1024 * mib, "memory_used": 50 * mib, "memory_overhead": 64 * mib}
    for rings, shown in (
        ([], "50.0 MiB 128.0 MiB 896.0 MiB demo-0 0-2"),
        ([other], "256.0 MiB 448.0 MiB 576.0 MiB other-0, demo-0 0-2"),
        ([other, other], "576.0 MiB 768.0 MiB 256.0 MiB other-0, other-0, demo-0 0-2"),
    ):
        node = admin_pb2.Node(id=stage.member, name="mac", rings=rings, **size)
        print_change(deployment.plan, [plain(node)])
        (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("mac"))
        assert " ".join(row.split()) == f"mac 1.0 GiB {shown}"

    rings = [
        {"id": f"{name}-0", "members": [{"id": "m", "rank": rank, "layers": [0, end]}]}
        for name, rank, end in (("demo", 1, 3), ("other", 0, 9))
    ]
    member = {"id": "m", "trust": "software", "key_type": "software", "attested_at": 0}
    empty: dict[str, Any] = dict.fromkeys(("gateways", "revoked", "suites"), ())
    said = dict.fromkeys(("cluster", "version", "hash", "min_trust", "trust_floor"), "1")
    times = {"issued": 0, "expires": 0}
    idle = member | {"id": "idle", "attested_at": 7}
    print_roster({**empty, **said, **times, "members": [member, idle], "rings": rings})
    *_, busy, free = capsys.readouterr().out.splitlines()
    assert "demo-0, other-0  1, 0  0-2, 0-8" in busy
    assert free.split() == ["idle", "software", "software", "-", "-", "-", *moment(7).split()]
