"""Which rows are admitted, evicted and stepped, and when: pure state machines without clocks or I/O.

In the order in which they are best read: what goes in and comes out (`actions`), and a request in an epoch
(`row`); who is next (`queue`), how long that takes (`pace`) and what becomes of it (`scheduler`); the steps
of an epoch (`planner`) and the rows that one steps together (`lane`); whether there is memory (`memory`);
whose prompt goes on (`prefill`), how far (`budget`, by `costs`) and from where (`prefixes`); and guesses
(`drafting`).

Rows are admitted and evicted in `StepPlanner._step`; when is said by `Lane.must_change`. A chunk has the
length that `StepPlanner._chunk_tokens` says, but where its prompt or a kept prefix ends (`PrefillLine`).
"""
