"""Folders of drafters that read hidden states: what is in them, and loading one behind a tail."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn

from sealring.mesh.errors import ModelError
from sealring.node.engine import mlx_lm_import
from sealring.node.engine.contents import REDOWNLOAD
from sealring.node.engine.drafts.drafter_models import DrafterFacts, DrafterModel, bound, classes_of
from sealring.node.engine.profile import digest
from sealring.node.engine.ranges import check_here
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.anatomy import dissect
from sealring.node.engine.staging.mtp_head import keeps_embedding
from sealring.node.engine.staging.skeleton import check_layers
from sealring.node.engine.staging.stage import tap_form
from sealring.node.engine.text.alike import check_alike
from sealring.node.engine.weights import load_lazily, read_config, read_header, weight_files
from sealring.v1 import model_pb2


def drafter_facts(folder: Path, path: Path) -> DrafterFacts:
    """What the drafter in a folder says of itself, if it fits the model at `path`. Raises ModelError (also
    DRAFT_KIND_UNKNOWN, DRAFT_NOT_ALIKE)."""
    facts = DrafterFacts.of(folder.name, read_config(folder))
    facts.check(folder.name, path.name, read_config(path))
    return facts


def load_drafter(folder: Path, path: Path, stage: Stage) -> DrafterModel:
    """The drafter in a folder, with lazy weights, behind the last stage of the model at `path`.

    Raises ModelError as `drafter_facts` does, also MODEL_PART_MISSING where the tail has no embedding and the
    model's folder lacks it, and WEIGHTS_MISMATCH.
    """
    facts = drafter_facts(folder, path)
    embeds = stage.model
    if not keeps_embedding(stage.model, stage.kept):
        check_here(path, 0, 1)
        embeds = load_lazily(path, parts=True)[0]
    return _loaded(folder, facts, stage.model, embeds)


def _loaded(folder: Path, facts: DrafterFacts, tail: nn.Module, embeds: nn.Module) -> DrafterModel:
    classes = classes_of(facts.kind)
    check_layers({**read_config(folder), "model_type": facts.kind})
    for file in weight_files(folder):
        read_header(file)
    try:
        model, _ = mlx_lm_import.import_utils().load_model(
            folder, lazy=True, strict=True, get_model_classes=lambda config: classes
        )
        return bound(model, facts, tail, embeds)
    except Exception as error:  # another package's code may raise anything on weights that it does not know
        raise ModelError(
            f"the weights of the drafter {folder.name} do not fit its configuration: {error}"[:300],
            reason="WEIGHTS_MISMATCH",
            hint=REDOWNLOAD,
        ) from error


def drafter_message(path: Path, folder: Path) -> model_pb2.ModelProfile:
    """The profile of a drafter in a folder, which is to guess for the model at `path`.

    Raises ModelError as `load_drafter` does, DRAFT_NOT_ALIKE also where the folder has another tokenizer than
    the model, and DRAFT_TAPS_UNKNOWN.
    """
    if (folder / "tokenizer.json").is_file():
        check_alike(path, folder)
    facts = drafter_facts(folder, path)
    whole, config = load_lazily(path, parts=True)
    anatomy = dissect(whole, config["model_type"])
    tap_form(anatomy, facts.layers)
    found = _loaded(folder, facts, whole, whole)
    made = model_pb2.ModelProfile(digest=digest(folder), model_type=facts.kind, taps=facts.layers)
    made.hidden_size, made.vocab_size = facts.width, facts.words
    made.residents.add(
        name="drafter",
        at=model_pb2.RING_END_TAIL,
        bytes=found.weight_bytes + found.embedding_bytes,
        bytes_per_token=found.kv_bytes_per_token,
        guesses=True,
        does=f"a drafter of kind {facts.kind} guesses",
    )
    return made
