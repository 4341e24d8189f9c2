"""One row of a ring: a request from the moment it is given to the head until its eviction is announced."""

from __future__ import annotations

from dataclasses import dataclass, field

from sealring.gateway.scheduler.request import ChoiceProgress, Request


@dataclass(slots=True, eq=False)
class Row:
    """`limit` tokens may be generated with the memory that is reserved, `ceiling` at the very most.

    A row is `closed` once nothing more of it is wanted: finished, refused, cancelled. It is stepped on until
    its eviction is announced.

    A row has `begun` once its first chunk is announced, a copy with the last one. It may begin with
    the first `reused` tokens of a kept `prefix`; `names` are of its prompt's prefixes, and chunks also end at
    `cuts`. The last `answered` of its prompt's tokens are those of its answer that an earlier epoch brought.
    At most `drafts` tokens may be guessed in a step.

    A request for several answers has a row for each: one that is prefilled, and its `copies`, which become
    what it is when its prompt ends. Answers that an earlier epoch has begun have rows
    that are each prefilled.
    """

    number: int
    request: Request
    choice: int = 0
    closed: bool = False
    prompt_tokens: int = 0
    answered: int = 0
    earlier: int = 0  # those of them that only the client of a sealed prompt knows
    drafts: int = 0
    params_bytes: int = 0
    prefilled: int = 0
    begun: bool = False
    names: tuple[tuple[int, bytes], ...] = ()
    prefix: int = 0
    reused: int = 0
    cuts: tuple[int, ...] = ()
    limit: int = 0
    ceiling: int = 0
    copies: tuple[Row, ...] = ()
    last_lane_step: int = 0  # the count of its lane's steps at which the limit is reached
    progress: ChoiceProgress = field(init=False)  # a field, for it is read with every token of every row

    def __post_init__(self) -> None:
        self.progress = self.request.progress.choices[self.choice]

    @property
    def opening(self) -> bool:
        """Whether the head has not answered yet how long the prompt is."""
        return not self.prompt_tokens

    @property
    def group(self) -> tuple[Row, ...]:
        """All rows of the request, by choice; of a row that is prefilled."""
        return (self, *self.copies)

    @property
    def remaining(self) -> int:
        """Prompt tokens of which no chunk has been announced."""
        return self.prompt_tokens - self.prefilled

    @property
    def reserved(self) -> int:
        return self.prompt_tokens + self.limit
