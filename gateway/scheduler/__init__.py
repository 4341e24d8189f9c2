"""Admission, eviction and stepping of rows: pure state machines without clocks or I/O.

Read them in this order. Data: `request`, `facts`, `actions`. Waiting: `queue`. Events in and actions out:
`scheduler`. The order in which rows begin: `admission`. What announced steps make of rows: `board`. The steps
of an epoch: `planner`, with `lane`, `memory` and, for prompts, `prefill`, `budget` and `prefixes`. Drafts:
`drafting`.

Rows are admitted and evicted in `StepPlanner._step`; `Lane.must_change` decides when.
`StepPlanner._chunk_tokens` sets the length of chunks, and `PrefillLine` ends them at the end of a prompt or
of a kept prefix.
"""

from sealring.mesh.system.faces import face

__all__, __getattr__ = face(
    __name__,
    actions="Action AnnounceStep Begin Deliver DiscardRow EndEpoch Fail Finish OpenRow Pause RecallBlocks",
    facts="LOOKUP MAX_SOURCES MemberMemory NO_MODEL RingFacts SourceFacts StepCosts Timed",
    memory="Ledger rounded",
    planner="StepPlanner",
    queue="retry_after",
    request="ChoiceProgress Request Row TOKEN_BYTES",
    scheduler="MAX_ATTEMPTS RingLoad Scheduler",
)
