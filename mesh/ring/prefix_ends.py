"""Ends of prompts and answers that the head has named: it names later prompts of the scope there, too.

Boundaries grow apart with their distance from a prompt's beginning, and a conversation goes on between two of
them. Of the ends that it does not share, a prompt has no names.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from sealring.mesh.ring.prefix_names import PrefixNames, boundaries, ends

MOST = 1024
"""Ends that are remembered. A turn of a conversation has four, and the next one needs these."""

SHARED = 8
"""Earlier ends that a prompt is named at, the longest."""


class Ends:
    """The ends of names under one key. Any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()  # by name: scope and length
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Names are made under another key from now on."""
        with self._lock:
            self._known.clear()

    def extend(self, names: PrefixNames, tokens: bytes) -> tuple[bytes, bytes]:
        """Appends tokens, 4 bytes each; returns their names as `split` takes them. Their ends are
        remembered."""
        before = names.tokens
        own = ends(before + len(tokens) // 4, before)
        with self._lock:
            known = {length for scope, length in self._known.values() if scope == names.scope}
        regular = names.extend(tokens, known.union(own))
        reached = [length for length in sorted(known.difference(own)) if before < length <= names.tokens]
        with self._lock:
            shared = [length for length in reached if names.names[length] in self._known][-SHARED:]
        names.forget(set(reached).difference(shared))
        self._remember(names, own)
        return regular, names.packed([*shared, *own])

    def remember(self, names: PrefixNames, marks: Iterable[int] = ()) -> None:
        """Remembers the ends of a sequence that is named already, and its marks."""
        found = {length for length in ends(names.tokens) if length in names.names}
        self._remember(names, sorted(found.union(marks).difference(boundaries(names.tokens))))

    def _remember(self, names: PrefixNames, lengths: Iterable[int]) -> None:
        with self._lock:
            for length in lengths:
                name = names.names[length]
                self._known[name] = names.scope, length
                self._known.move_to_end(name)
            while len(self._known) > MOST:
                self._known.popitem(last=False)
