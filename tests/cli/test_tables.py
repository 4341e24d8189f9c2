from __future__ import annotations

import pytest

from sealring.cli.calls.asking import Answer
from sealring.cli.commands.deployment import (
    default_name,
)
from sealring.cli.local.output import print_ring, report
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
