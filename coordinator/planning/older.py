"""Profiles and plans of protocol 12, in which residents have fields of their own.

Nodes of the release before report such profiles while machines are updated, and the store of an updated
coordinator has such plans.
"""

from __future__ import annotations

from sealring.mesh.rpc.protocol12 import read_singly
from sealring.v1 import admin_pb2, model_pb2


def read_profile(profile: model_pb2.ModelProfile) -> None:
    """Puts residents and the card in the place of these fields."""
    read_singly(profile, "card")
    mtp, each = profile.mtp_bytes, profile.mtp_kv_bytes_per_token
    tower, layers = profile.vision_bytes + profile.vision_working_bytes, profile.image_layers
    if mtp:
        made = profile.residents.add(name="mtp", bytes=mtp, bytes_per_token=each, guesses=True)
        made.at, made.does = model_pb2.RING_END_TAIL, "the model's MTP head guesses"
    if profile.vision_bytes:
        made = profile.residents.add(name="vision", bytes=tower, layers=layers)
        made.at, made.does = model_pb2.RING_END_HEAD, "the model's vision tower reads images"
    profile.mtp_bytes = profile.vision_bytes = 0


def read_plan(plan: admin_pb2.DeploymentPlan) -> admin_pb2.DeploymentPlan:
    """The plan with residents in the place of these fields."""
    read_profile(plan.profile)
    name, model = ("draft", plan.spec.draft) if plan.spec.draft else ("mtp", "")
    for stage in (one for ring in plan.rings for one in ring.stages):
        if stage.draft_bytes:
            stage.residents.add(name=name, bytes=stage.draft_bytes, model=model, guesses=True)
        if stage.vision_bytes:
            stage.residents.add(name="vision", bytes=stage.vision_bytes)
        stage.draft_bytes = stage.vision_bytes = 0
    return plan
