"""The memory that this member gives for caches, and what a gateway has already asked of it.

The gateway plans by the allowance, and is not trusted to: the member counts too. A gateway counts what a row
will need until it ends, and the member what is there, so that an honest one never comes near the bound here.
"""

from __future__ import annotations

from dataclasses import dataclass

from sealring.mesh.errors import ResourceExhausted
from sealring.mesh.ring.composition import Composition, ResolvedStep, Restoring


@dataclass(frozen=True)
class Allowance:
    """Bytes that this member gives for caches. The gateway plans by them, and the member enforces them."""

    per_token: int
    per_row: int
    budget: int
    per_mark: int = 0

    @property
    def limit(self) -> int:
        """The bytes beyond which the gateway is not one of ours: an eighth more than the budget."""
        return self.budget + self.budget // 8


class Account:
    """The bytes that announced steps and recalls take. For the thread that reads commands.

    Steps are computed later than they are announced, but a recall is read at once. So it may come while the
    memory that it is to have is still in use by what an announced step is about to drop.
    """

    def __init__(self, allowance: Allowance, earlier: int, marks: int = 0) -> None:
        """`earlier`: tokens of prefixes that earlier epochs left, which the first step adopts or drops, and
        `marks` their marks."""
        self._allowance = allowance
        self._recalled: dict[int, int] = {}  # recall -> its tokens, until a step restores it
        self._held = self._bytes(earlier, marks=marks)
        self._most = self._held  # of all states that the steps which are not computed yet go through

    def announced(self, step: ResolvedStep, state: Composition, computed: int) -> None:
        """A step leads to this state, after the first `computed` steps were computed.

        Raises ResourceExhausted (KV_BUDGET).
        """
        for change in step.changes:
            if isinstance(change, Restoring):
                self._recalled.pop(change.recall, None)
        before, self._held = self._held, self._bytes(state.tokens, state.rows, state.marks)
        self._most = max(self._held, before if computed >= step.number - 1 else self._most)
        self._check()

    def recall(self, number: int, tokens: int, there: tuple[int, int], *, idle: bool) -> bool:
        """A prefix is to be read. `there` are the tokens and the number of all prefixes that have been read
        or are on their way, with this one. `idle`: all steps are computed.

        Returns whether there is memory for it now, and not only once all announced steps are computed.
        Raises ResourceExhausted (KV_BUDGET).
        """
        self._recalled[number] = tokens
        self._check()
        if idle:
            self._most = self._held
        return self._most + self._bytes(*there) <= self._allowance.limit

    @property
    def spare(self) -> int:
        """Tokens of a row for which there is memory beside all that is asked of it. Any thread."""
        recalled = list(self._recalled.values())
        free = self._allowance.budget - self._most - self._bytes(sum(recalled), len(recalled))
        return max(0, free) // max(1, self._allowance.per_token)

    def give_up(self, number: int) -> None:
        """A recall is not wanted any more."""
        self._recalled.pop(number, None)

    def _bytes(self, tokens: int, rows: int = 0, marks: int = 0) -> int:
        given = self._allowance
        return given.per_token * tokens + given.per_row * rows + given.per_mark * marks

    def _check(self) -> None:
        recalled = self._bytes(sum(self._recalled.values()), len(self._recalled))
        held, offered = self._held + recalled, self._allowance.budget
        if held > self._allowance.limit:
            raise ResourceExhausted(
                f"the gateway asks for {held} bytes of caches and this member offers {offered}",
                hint="run the same release on gateway and nodes",
                reason="KV_BUDGET",
            )
