"""Whether a stage's code evaluates arrays while it is called: found out on the loaded stage.

A decode step's graph is built before its input is there (docs/decisions/0008). A model that looks at an array
in the middle of its call, as some mixtures of experts look where tokens are routed, would compute with what
lay there before. A landing tells whether it was evaluated, whatever its content, so a call of each kind that
steps make shows it. `Epoch` asks the same of every step that it builds ahead, so none is missed silently.
"""

from __future__ import annotations

import mlx.core as mx
import structlog

from sealring.mesh.errors import Internal
from sealring.node.engine import records
from sealring.node.engine.staging import Stage, caches
from sealring.node.engine.staging.caches import Cache
from sealring.node.engine.transfer import Landing, Transfer, transfer

log = structlog.get_logger()

_TOKENS = 3


def awaits_input(stage: Stage) -> bool:
    """Whether a step's input has to be there before the stage is called; also where that is not clear."""
    made = transfer()
    try:
        why = _trial(stage, made)
    except Exception as error:  # a model's own code may raise anything on what it does not expect
        why = f"the trial failed ({type(error).__name__}: {error})"[:300]
    finally:
        made.settle()
        made.close()
        mx.clear_cache()
    if why is not None:
        log.info("stage_awaits_input", model_type=stage.spec.model_type, why=why)
    return why is not None


def _trial(stage: Stage, made: Transfer) -> str | None:
    """Why the stage has to wait: steps of one row and of two that joined."""
    _check(stage, made)
    row, other = stage.make_cache(), stage.make_cache()
    evaluated = [
        _evaluates(stage, made, row, 1, _TOKENS),
        _evaluates(stage, made, row, 1, 1),
        _evaluates(stage, made, other, 1, 1),
    ]
    lane = caches.merge([row, other])
    evaluated.append(_evaluates(stage, made, lane, 2, 1))
    return "its code evaluates arrays" if any(evaluated) else None


def _evaluates(stage: Stage, made: Transfer, cache: Cache, rows: int, tokens: int) -> bool:
    landing = _landing(stage, made, rows, tokens)
    stage(landing.arrays, cache)
    return landing.evaluated


def _check(stage: Stage, made: Transfer) -> None:
    """Raises Internal where landings cannot tell what this goes by."""
    landing = _landing(stage, made, 1, 1)
    dependents = [array[:1] for array in landing.arrays]
    before = landing.evaluated
    mx.eval(dependents)
    if before or not landing.evaluated:
        raise Internal("landings do not tell whether they were evaluated")


def _landing(stage: Stage, made: Transfer, rows: int, tokens: int) -> Landing:
    """Filled with zeros, which is a token of every vocabulary."""
    landing = made.landing(stage.spec.receives, rows, tokens)
    size = sum(records.state_bytes(tensor, rows, tokens) for tensor in stage.spec.receives)
    landing.fill(memoryview(bytes(size)))
    return landing
