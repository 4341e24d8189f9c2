"""Deployment specifications as operators send them: bounded, consistent, and with the defaults filled in."""

from __future__ import annotations

from itertools import accumulate

from sealring.mesh.crypto.identity import check_member_id
from sealring.mesh.errors import InvalidInput
from sealring.mesh.names import check_deployment_name, is_alias
from sealring.mesh.ring.limits import (
    BACKENDS,
    MAX_ALIASES,
    MAX_CONTEXT,
    MAX_KEEP_ALIVE,
    MAX_LAYERS,
    MAX_PREFILL_CHUNK,
    MAX_REPLICAS,
    MAX_ROWS,
    MAX_STAGES,
)
from sealring.mesh.roster.model import PIPELINE, TENSOR
from sealring.mesh.trust.levels import MAX_SCORE
from sealring.v1 import admin_pb2

KV_BITS = (8, 4)
ONE_CUT = [0]
"""The `prompt_split` of a deployment whose prompts are cut as its answers are, whatever would be faster."""

RANKS = (2, 4, 8)
_MAX_MODEL = 256

KEEP_ALIVE_SECONDS = 900
"""Seconds without a request after which a model on demand is unloaded. Policy: an agent's user reads, edits
and runs tests between two turns for some minutes, and loading costs the next turn up to a minute."""


def check_spec(spec: admin_pb2.DeploymentSpec) -> admin_pb2.DeploymentSpec:
    """A copy with replicas and strategy filled in; prefill chunk, context, rows and stages are the planner's.

    Raises InvalidInput; `param` in its metadata names the field.
    """
    checked = admin_pb2.DeploymentSpec()
    checked.CopyFrom(spec)
    check_deployment_name(spec.name)
    if not _is_name(spec.model):
        raise bad("model", f"model is empty, longer than {_MAX_MODEL} or has control characters")
    checked.strategy = spec.strategy or PIPELINE
    if checked.strategy == TENSOR:
        _check_tensor(checked)
    elif checked.strategy != PIPELINE:
        raise bad("strategy", "strategy is not one that is served", f"use {PIPELINE} or {TENSOR}")
    elif spec.clear_links or spec.backend or spec.or_pipeline:
        raise bad("strategy", "a pipeline has no links in clear and no backend", f"use {TENSOR}")
    _check_draft(checked)
    if spec.adapter and (not _is_name(spec.adapter) or spec.adapter == spec.model):
        raise bad("adapter", f"adapter is longer than {_MAX_MODEL}, has control characters, or is the model")
    checked.replicas = spec.replicas or 1
    _at_most("context", spec.context, MAX_CONTEXT)
    _at_most("trust_floor", spec.trust_floor, MAX_SCORE)
    _at_most("replicas", spec.replicas, MAX_REPLICAS)
    _at_most("max_rows", spec.max_rows, MAX_ROWS)
    _at_most("stages", spec.stages, MAX_STAGES)
    _at_most("prefill_chunk", spec.prefill_chunk, MAX_PREFILL_CHUNK)
    if spec.kv_bits not in (0, *KV_BITS):
        raise bad("kv_bits", f"kv_bits is {spec.kv_bits}", "8, 4, or 0 for the model's own precision")
    _check_split(checked)
    _check_members(checked)
    _check_on_demand(checked)
    _check_aliases(checked)
    return checked


def as_pipeline(spec: admin_pb2.DeploymentSpec) -> None:
    """Makes a tensor deployment's specification that of a ring whose group does not come up."""
    spec.strategy, spec.backend, spec.clear_links, spec.or_pipeline = PIPELINE, "", False, False


def _check_tensor(spec: admin_pb2.DeploymentSpec) -> None:
    """Refuses a tensor ring without `clear_links`: links in clear have to be asked for."""
    if not spec.clear_links:
        raise bad(
            "clear_links",
            "nodes that compute parts of every layer add them up over links that cannot be sealed",
            "say that the network may read them (--clear-links), or use a pipeline",
        )
    spec.backend = spec.backend or BACKENDS[0]
    if spec.backend not in BACKENDS:
        raise bad("backend", "backend is not one of MLX's that are served", f"use {', '.join(BACKENDS)}")
    if spec.stages not in RANKS or spec.split:
        raise bad(
            "stages", f"a tensor ring has {' or '.join(map(str, RANKS))} nodes", "say how many: --stages"
        )
    if spec.adapter:
        raise bad("adapter", "an adapter cannot be divided among ranks", "use a pipeline, or mlx_lm.fuse")
    if spec.speculate:
        raise bad("speculate", "a tensor ring guesses no tokens", "leave speculate out")


def _is_name(model: str) -> bool:
    return 1 <= len(model) <= _MAX_MODEL and all(ord(character) >= 0x20 for character in model)


def _check_draft(spec: admin_pb2.DeploymentSpec) -> None:
    if not spec.draft:
        return
    if spec.strategy == TENSOR:
        raise bad("draft", "a tensor ring guesses no tokens", "leave draft out")
    if not _is_name(spec.draft) or spec.draft == spec.model:
        raise bad(
            "draft", f"draft is longer than {_MAX_MODEL}, has control characters, or is the model itself"
        )
    spec.speculate = True


def _check_split(spec: admin_pb2.DeploymentSpec) -> None:
    if list(spec.prompt_split) != ONE_CUT and spec.prompt_split and len(spec.prompt_split) != len(spec.split):
        raise bad("prompt_split", "prompt_split and split have different numbers of stages", "give both")
    if not spec.split:
        return
    if spec.stages:
        raise bad("split", "split and stages exclude each other", "leave stages out")
    if len(spec.split) > MAX_STAGES or any(not 1 <= layers <= MAX_LAYERS for layers in spec.split):
        raise bad("split", f"split is not 1 to {MAX_STAGES} numbers of layers, each at least 1")
    if any(spec.prompt_split):
        _check_prompt_split(spec)


def _check_prompt_split(spec: admin_pb2.DeploymentSpec) -> None:
    prompts, answers = (list(accumulate(each)) for each in (spec.prompt_split, spec.split))
    if min(spec.prompt_split) < 1 or prompts[-1] != answers[-1]:
        raise bad("prompt_split", "prompt_split has not as many layers as split, or a stage without any")
    if any(one < other for one, other in zip(prompts, answers, strict=True)):
        hint = "put machines that compute prompts faster first: --member"
        raise bad("prompt_split", "prompts would go back to a member before the one that computed them", hint)
    if any(one > behind for one, behind in zip(prompts, answers[1:], strict=False)):
        raise bad("prompt_split", "a layer would be held by three members", "move fewer layers forward")


def _check_members(spec: admin_pb2.DeploymentSpec) -> None:
    if len(spec.members) > MAX_STAGES * MAX_REPLICAS:
        raise bad("members", "members are too many")
    if len(set(spec.members)) != len(spec.members):
        raise bad("members", "members name one node twice")
    for member in spec.members:
        try:
            check_member_id(member)
        except InvalidInput as error:
            error.metadata["param"] = "members"
            raise
    needed = len(spec.split) * spec.replicas
    if spec.split and spec.members and len(spec.members) != needed:
        raise bad("members", f"split and replicas ask for {needed} members and {len(spec.members)} are named")


def _check_on_demand(spec: admin_pb2.DeploymentSpec) -> None:
    if not spec.on_demand:
        for param in ("keep_alive", "pinned"):
            if getattr(spec, param):
                raise bad(param, f"only a deployment on demand has {param}", "say on_demand too")
        spec.ClearField("keep_alive")
    elif not spec.HasField("keep_alive"):
        spec.keep_alive = KEEP_ALIVE_SECONDS
    _at_most("keep_alive", spec.keep_alive, MAX_KEEP_ALIVE)


def _check_aliases(spec: admin_pb2.DeploymentSpec) -> None:
    _at_most("aliases", len(spec.aliases), MAX_ALIASES)
    for alias in spec.aliases:
        if not is_alias(alias):
            raise bad(
                "aliases",
                "an alias is not 1 to 128 letters, digits and . _ / : -, or the beginning of it and *",
            )
    if len({spec.name, *spec.aliases}) != 1 + len(spec.aliases):
        raise bad("aliases", "aliases name the deployment twice")


def _at_most(param: str, value: int, limit: int) -> None:
    if value > limit:
        raise bad(param, f"{param} is {value}", f"at most {limit}")


def bad(param: str, message: str, hint: str = "") -> InvalidInput:
    """The refusal of a specification by its field `param` (BAD_DEPLOYMENT)."""
    return InvalidInput(message, hint=hint, reason="BAD_DEPLOYMENT", param=param)
