"""Whether a model fits machines, on how many of them and with which context, and how fast it would be.

The plan is the coordinator's planner's, and the rate its cost model's, over machines that are only described.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sealring.cli.fitting.known import Known
from sealring.cli.fitting.machines import GB_PER_S, LAYER_SECONDS, REACHED, Mac
from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.costs import Model, Shape, estimate
from sealring.coordinator.planning.links import Network
from sealring.coordinator.planning.planner import DEFAULT_CONTEXT, plan
from sealring.coordinator.planning.speeds import Rate
from sealring.mesh.errors import ResourceExhausted
from sealring.mesh.roster.model import PIPELINE
from sealring.v1 import admin_pb2, model_pb2

RATED_CONTEXT = 8192
"""Tokens of context for which a rate is estimated: with caches half full, as the cost model has them."""

CHUNK = 2048
"""Tokens of a prompt's chunk by which a Mac's GPU gains: that of `node/engine/device.py`, which loads MLX."""


@dataclass(frozen=True)
class Fit:
    """A model of these `weights` (bytes) on machines. It fits on `machines` of them with a `context` in
    tokens, at `rate` tokens a second of one request (0: a chip is not known); or it lacks `lacking` bytes."""

    weights: int
    machines: tuple[str, ...] = ()
    context: int = 0
    rate: float = 0.0
    lacking: int = 0

    @property
    def fits(self) -> bool:
        return bool(self.machines)


def fit(
    profile: model_pb2.ModelProfile, macs: Sequence[Mac], context: int = 0, read_share: float = 1.0
) -> Fit:
    """How a model fits, as `deploy` would have it with no other deployment. `context` is what has to fit;
    without one it is as much of the model's own as does, and at least DEFAULT_CONTEXT. `read_share` as
    `Known.read_share` has it.

    Raises InvalidInput for a context beyond the model's own.
    """
    weights = sum(profile.layer_bytes) + profile.embed_bytes + (0 if profile.tied else profile.head_bytes)
    candidates = [
        Candidate(str(place), one.name, one.usable, 1, rate=rate_of(one, read_share), longest_chunk=CHUNK)
        for place, one in enumerate(macs)
    ]
    least = context or min(DEFAULT_CONTEXT, profile.max_context or DEFAULT_CONTEXT)
    spec = admin_pb2.DeploymentSpec(name="fits", model="fits", max_rows=1, context=least)
    try:
        made = plan(spec, profile, candidates)
    except ResourceExhausted as error:
        needed, there = (int(error.metadata[name]) for name in ("needed_bytes", "available_bytes"))
        return Fit(weights, lacking=max(needed - there, min(profile.layer_bytes)))
    if not context:
        spec.context = 0
        made = plan(spec, profile, candidates)
    stages = made.rings[0].stages
    chosen = tuple(candidates[int(stage.member)] for stage in stages)
    layers = tuple(stage.end_layer - stage.first_layer for stage in stages)
    rated = Model({1: profile}, min(made.spec.context, RATED_CONTEXT), prefill_chunk=made.spec.prefill_chunk)
    figures = estimate(rated, Shape(PIPELINE, chosen, layers), Network(), 1)
    rate = figures.one_request if figures is not None else 0.0
    return Fit(weights, tuple(one.name for one in chosen), made.spec.context, rate)


def rate_of(one: Mac, read_share: float) -> Rate | None:
    """How fast a Mac runs decode steps of a model of which it reads this part; None without a known chip."""
    if one.chip not in GB_PER_S:
        return None
    speed = REACHED * 1e9 * GB_PER_S[one.chip]
    return Rate(speed / read_share, layer_seconds=LAYER_SECONDS, kv_bytes_per_second=speed, metal=True)


def best_fits(models: Sequence[Known], macs: Sequence[Mac], bits: int, most: int) -> list[Known]:
    """The largest models that fit, at most `most` of them."""
    found: list[Known] = []
    for one in sorted(models, key=lambda each: -each.parameters):
        if len(found) < most and fit(one.profile(bits), macs).fits:
            found.append(one)
    return found
