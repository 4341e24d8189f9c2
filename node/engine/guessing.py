"""Loads what guesses tokens: a draft model at the head, an MTP head or another drafter at the tail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from sealring.mesh.errors import ModelError
from sealring.mesh.ring.limits import DRAFT_MARKS
from sealring.node.engine.cache_bytes import kv_bytes, mark_bytes, with_kv_bits
from sealring.node.engine.caches import trimmable
from sealring.node.engine.caches.undo import can_go_back
from sealring.node.engine.drafter_folder import load_drafter
from sealring.node.engine.drafts.hidden import HiddenDrafter
from sealring.node.engine.drafts.model import Drafter, ModelAtHead
from sealring.node.engine.drafts.mtp import MtpDrafter
from sealring.node.engine.drafts.sources import FREE, Sources
from sealring.node.engine.profile import digest, measure
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.anatomy import dissect
from sealring.node.engine.staging.mtp_head import keeps_embedding
from sealring.node.engine.text.alike import cannot_go_back, check_alike
from sealring.node.engine.warm_up import timed, warm_up
from sealring.node.engine.weights import cut_stage, load_lazily, load_mtp_head, read_arrays, read_weights
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine

log = structlog.get_logger()

_DRAFT_CHUNK, _DRAFT_SECONDS = 256, 1.0
"""Tokens of a draft model's longest chunk: a head does not wait for longer ones. Seconds in which its steps
are timed."""


def load_sources(
    path: Path, command: engine.LoadStage, stage: Stage, words: int, wake: Callable[[], None]
) -> Sources:
    """The sources of drafts of a member's stage, which has `words` tokens. `wake`: as `folder.load`. Raises
    ModelError."""
    if command.ranks > 1:
        return Sources()
    spec, facts = stage.spec, list(FREE) if stage.spec.is_head else []
    if command.taps:
        return _reading(path, command, stage, facts)
    if spec.is_head and command.draft.path:
        drafter = _drafter(path, command, words)
        workers = {control.DRAFT_SOURCE_MODEL: ModelAtHead(drafter, wake)}
        return Sources(workers, facts=(*facts, drafter.facts), memory=drafter.memory)
    if not command.mtp:
        return Sources(facts=tuple(facts))
    tail = _tail_drafter(path, command, stage) if spec.is_tail else None
    told, memory = ([tail.facts], tail.memory) if tail is not None else ([], 0)
    return Sources(tail=tail, ahead=control.DRAFT_SOURCE_MTP_HEAD, facts=(*facts, *told), memory=memory)


def _drafter(path: Path, command: engine.LoadStage, words: int) -> Drafter:
    """The draft model of the model at `path`, which has `words` tokens.

    Raises ModelError (also MODEL_DIGEST_MISMATCH, DRAFT_NOT_ALIKE, DRAFT_NOT_REVERSIBLE).
    """
    asked = command.draft
    folder = Path(asked.path)
    check_digest(folder, asked.digest)
    check_alike(path, folder)
    model, config = load_lazily(folder)
    anatomy = dissect(model, config["model_type"])
    measured = with_kv_bits(measure(folder, model, config, anatomy), asked.kv_bits)
    layers = len(anatomy.layers)
    stage = cut_stage(model, anatomy, 0, layers, asked.kv_bits)
    if not can_go_back(stage.make_cache()):
        raise cannot_go_back(folder.name)
    read_weights(stage, folder, lambda done, total: None)
    warm_up(stage, _DRAFT_CHUNK)
    times = timed(stage, _DRAFT_CHUNK, 1, _DRAFT_SECONDS)
    per_token, per_row = kv_bytes(measured, 0, layers, asked.context, _DRAFT_CHUNK)
    memory = stage.weight_bytes + per_row + per_token * asked.context
    if not trimmable(stage.make_cache()):
        memory += DRAFT_MARKS * mark_bytes(measured, 0, layers, asked.context)
    made = Drafter(stage, words, asked.context, times, memory)
    log.info("draft_model_loaded", weight_bytes=stage.weight_bytes, guess_ms=round(1e3 * made.seconds, 2))
    return made


def _tail_drafter(path: Path, command: engine.LoadStage, stage: Stage) -> MtpDrafter | None:
    """The MTP head of the model at `path`, behind its last stage; None if its code fails, so that the stage
    serves without guesses.

    Raises ModelError (NO_MTP_HEAD, WEIGHTS_MISMATCH, WEIGHTS_CORRUPT).
    """
    head = load_mtp_head(path, stage.model, shares=keeps_embedding(stage.model, stage.kept))
    read_arrays(path, head.kept)
    memory = head.weight_bytes + command.context * head.kv_bytes_per_token
    made = MtpDrafter(head, stage, command.context, memory)
    if made.failed:
        return None
    log.info("mtp_head_loaded", weight_bytes=head.weight_bytes, guess_ms=round(1e3 * made.seconds, 2))
    return made


def _reading(path: Path, command: engine.LoadStage, stage: Stage, facts: list[control.DraftFacts]) -> Sources:
    """The sources of a member of a ring whose tail has the drafter at `command.draft`, which reads hidden
    states; each stage taps them.

    Raises ModelError (also DRAFT_TAPS_UNKNOWN, MODEL_DIGEST_MISMATCH, DRAFT_NOT_ALIKE).
    """
    for one in {stage, stage.prefill}:
        one.tap(command.taps)
    tail, memory = None, 0
    if stage.spec.is_tail:
        folder = Path(command.draft.path)
        check_digest(folder, command.draft.digest)
        model = load_drafter(folder, path, stage)
        if list(model.facts.layers) != list(command.taps):
            raise ModelError(f"the drafter {folder.name} reads other layers than planned", reason="BAD_MODEL")
        read_arrays(folder, model.kept)
        memory = model.weight_bytes + command.context * model.kv_bytes_per_token
        tail = HiddenDrafter(model, stage, command.context, memory)
        if not tail.failed:
            facts.append(tail.facts)
        log.info("drafter_loaded", kind=model.facts.kind, pass_ms=round(1e3 * tail.seconds, 2))
    return Sources(tail=tail, ahead=control.DRAFT_SOURCE_HIDDEN, facts=tuple(facts), memory=memory)


def check_digest(path: Path, wanted: str, adapter: Path | None = None) -> None:
    """Raises ModelError (MODEL_DIGEST_MISMATCH) unless the folder holds the model that is `wanted`, tuned by
    the adapter in `adapter` if there is one."""
    if wanted and digest(path, adapter) != wanted:
        raise ModelError(
            f"the folder {path.name} does not hold the model of this deployment",
            reason="MODEL_DIGEST_MISMATCH",
            hint="copy the same model, and the same adapter, to every member",
        )
