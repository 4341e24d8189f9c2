"""The runs of drafts of an epoch's rows, and which drafts were right.

A step with drafts computes a row's last token and the drafts behind it, and the tail samples a token behind
each. A sampled token counts as long as all drafts before it equal the tokens sampled in their places. Further
steps compute the next drafts, before the head knows whether the earlier ones were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring.composition import ResolvedStep, Settling
from sealring.node.engine.drafts.source import Proposed, Take
from sealring.node.wire.timelog import TimeLog, now
from sealring.v1 import control_pb2 as control


@dataclass(slots=True)
class _Chain:
    """The drafts of one row from one settling to the next, and how many were accepted."""

    guessed: list[int]
    more: Take | None
    modelled: bool = False
    at: int = 0
    accepted: int = 0
    last: int = 0  # that was sampled
    broken: bool = False

    @property
    def refuted(self) -> bool:
        """Whether the draft is wrong that was guessed where the last sampled token is."""
        place = self.accepted - 1
        return 0 <= place < len(self.guessed) and self.guessed[place] != self.last


class Runs:
    """The runs of all rows of an epoch, and how many of their drafts were accepted.

    `came` is called by the receiving thread, the rest by the compute loop. No lock: a run is added before its
    step is launched, so before its tokens can arrive.
    """

    def __init__(self) -> None:
        self._chains: dict[int, _Chain] = {}
        self._runs: dict[int, list[tuple[_Chain, list[int]]]] = {}
        self.drafted = self.accepted = 0
        """Drafts of the runs that came back, and the accepted ones among them."""
        self._log = TimeLog(4)

    def begin(self, step: ResolvedStep, row: int, last: int, drafts: Proposed) -> list[int]:
        """The tokens to compute of a row: its last, and the first of these drafts. To be called for a step's
        rows in order."""
        modelled = step.source != control.DRAFT_SOURCE_LOOKUP
        chain = self._chains[row] = _Chain(list(drafts.there), drafts.more, modelled)
        return self._sent(step, chain, [last, *self._next(chain, step.drafts)])

    def go_on(self, step: ResolvedStep) -> list[int]:
        """The tokens to compute behind those of the run before."""
        chain = self._chains[step.rows[0]]
        return self._sent(step, chain, self._next(chain, 1 + step.drafts))

    @staticmethod
    def _next(chain: _Chain, count: int) -> list[int]:
        missing = chain.at + count - len(chain.guessed)
        if chain.more is not None and missing > 0:
            chain.guessed += chain.more(len(chain.guessed), missing)
        chain.at += count
        return chain.guessed[chain.at - count : chain.at]

    def at(self, row: int) -> int:
        """Drafts of the row's chain that steps compute, or have computed."""
        chain = self._chains.get(row)
        return 0 if chain is None else chain.at

    def broken(self, row: int) -> bool:
        """Whether a draft of the row's chain was wrong, so that no further run brings tokens."""
        chain = self._chains.get(row)
        return chain is None or chain.broken

    def _sent(self, step: ResolvedStep, chain: _Chain, run: list[int]) -> list[int]:
        self._runs.setdefault(step.number, []).append((chain, run))
        return run

    def came(self, step: ResolvedStep, sampled: Sequence[int]) -> list[int]:
        """The places of the sampled tokens that count: at least the first of each row, unless a draft of an
        earlier run was wrong."""
        places: list[int] = []
        for row, (chain, run) in enumerate(self._runs.pop(step.number)):
            begin = row * len(run)
            first = not (chain.accepted or chain.broken)
            count = self._counted(chain, run, sampled[begin : begin + len(run)])
            self._note(len(run) - first, count - first, modelled=chain.modelled)
            places += range(begin, begin + count)
        return places

    def since(self, moment: int) -> tuple[int, int, int]:
        """Drafts, the accepted ones, and those of a model, of the runs that came back since `moment`; any
        thread.

        `moment`: nanoseconds on the machine's monotonic clock.
        """
        recent = [entry for entry in self._log.entries()[0] if entry[0] >= moment]
        drafted, accepted, modelled = (sum(entry[place] for entry in recent) for place in (1, 2, 3))
        return drafted, accepted, modelled

    def _note(self, drafted: int, accepted: int, *, modelled: bool) -> None:
        self.drafted += drafted
        self.accepted += accepted
        self._log.add(now(), drafted, accepted, drafted * modelled)

    @staticmethod
    def _counted(chain: _Chain, run: Sequence[int], sampled: Sequence[int]) -> int:
        if chain.accepted and run[0] != chain.last:
            chain.broken = True  # the draft was taken when that token had come, so `refuted` did not see it
        if chain.broken:
            return 0
        count = 1
        while count < len(run) and run[count] == sampled[count - 1]:
            count += 1
        chain.accepted += count
        chain.last = sampled[count - 1]
        chain.broken = count < len(run) or chain.refuted
        return count

    def settle(self, change: Settling, *, ended: bool = False) -> None:
        """Ends a row's chain. An answer that has `ended` may have done so before the last token that counts.
        Raises InvalidInput (BAD_STEP) if the gateway counts other tokens."""
        chain = self._chains.pop(change.row, None)
        most = 0 if chain is None else chain.accepted
        if chain is None or (change.accepted != most and not (ended and change.accepted < most)):
            raise InvalidInput(
                f"not {change.accepted} tokens of row {change.row} were right",
                reason="BAD_STEP",
                hint="gateway and head disagree; the epoch must end",
            )
        chain.broken = True  # tokens that are still under way do not count

    def forget(self, row: int) -> None:
        self._chains.pop(row, None)
