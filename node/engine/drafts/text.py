"""Guesses by the row's own text: what its grammar forces, and behind that what followed the same tokens."""

from __future__ import annotations

from sealring.mesh.ring.composition import MAX_UNSETTLED
from sealring.node.engine.drafts.lookup import Lookup
from sealring.node.engine.drafts.source import Proposed, RowText


class TextSource:
    """The source that every head has."""

    def __init__(self, text: RowText, lookup: Lookup | None = None) -> None:
        self._forced = text.forced
        self._lookup = lookup or _looked_up(text)

    def another(self, text: RowText) -> TextSource:
        return TextSource(text, self._lookup.copy())

    def heard(self, token: int) -> None:
        self._lookup.heard(token)

    def right(self) -> float:
        """With n forced tokens, that with which each would have to be right for n right ones in the mean."""
        forced = len(self._forced())
        return max(self._lookup.right(), forced / (1 + forced))

    def propose(self, last: int, count: int) -> Proposed:
        looked_up, forced = self._lookup.drafts(last, MAX_UNSETTLED), self._forced()[:MAX_UNSETTLED]
        return Proposed([*forced, *looked_up[len(forced) :]])


def _looked_up(text: RowText) -> Lookup:
    if not len(text.predicted):
        return Lookup(text.text)
    lookup = Lookup(text.text[: text.prompt_tokens], text.predicted)
    for token in text.text[text.prompt_tokens :].tolist():
        lookup.heard(token)
    return lookup
