"""Profiles and plans of protocol 12: what had fields of its own is a resident."""

from __future__ import annotations

import pytest

from sealring.coordinator.planning.older import read_plan
from sealring.v1 import admin_pb2, model_pb2


@pytest.mark.parametrize("draft", ["", "small"])
def test_what_had_fields_of_its_own_is_a_resident(draft: str) -> None:
    profile = model_pb2.ModelProfile(
        mtp_bytes=7, mtp_kv_bytes_per_token=2, vision_bytes=30, vision_working_bytes=5, image_layers=3
    )
    stages = [
        admin_pb2.StagePlan(vision_bytes=35, draft_bytes=9 if draft else 0),
        admin_pb2.StagePlan(draft_bytes=0 if draft else 11),
    ]
    spec = admin_pb2.DeploymentSpec(draft=draft)
    plan = admin_pb2.DeploymentPlan(spec=spec, profile=profile, rings=[admin_pb2.RingPlan(stages=stages)])
    read = read_plan(plan)
    mtp, vision = read.profile.residents
    assert (mtp.name, mtp.at, mtp.bytes, mtp.bytes_per_token) == ("mtp", model_pb2.RING_END_TAIL, 7, 2)
    assert (vision.name, vision.at, vision.bytes, vision.layers) == ("vision", model_pb2.RING_END_HEAD, 35, 3)
    assert (mtp.guesses, vision.guesses) == (True, False)
    head, tail = ([(o.name, o.bytes, o.model) for o in each.residents] for each in read.rings[0].stages)
    assert head == [("draft", 9, "small")] * bool(draft) + [("vision", 35, "")]
    assert tail == [("mtp", 11, "")] * (not draft)
    written = read.SerializeToString()
    assert read_plan(admin_pb2.DeploymentPlan.FromString(written)).SerializeToString() == written
