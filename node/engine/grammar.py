"""Answers that are held to a grammar: what may come next, as a mask over the vocabulary (llguidance).

The head makes a grammar of what a request asks for (node.engine.text.constraints), tries out what it costs
(node.engine.trial), compiles it before the row starts, and sends it to the tail, sealed, in the row's
parameter record. The tail masks logits by it while its stage computes; the head follows the tokens that come
round, and ends a row whose answer has left its grammar.
A matcher that fails in the middle lets nothing pass but the end of the answer,
which the head does not take for one.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from sealring.mesh.errors import FailedPrecondition, Internal, ModelError
from sealring.mesh.ring.composition import MAX_UNSETTLED
from sealring.node.engine.trial import Trial, compiled

_KEPT_BYTES = 64 << 20
"""Memory of compiled grammars that are kept for later rows."""

_BYTES_PER_SECOND = 512 << 20
"""What one takes at most, by the processor time that it took to compile: measured 0.1 to 0.3 MiB for each
millisecond. llguidance does not say it, and a process that computes meanwhile cannot tell by its own size."""


class Spells(Protocol):
    """A model's tokenizer, as far as grammars need it."""

    @property
    def size(self) -> int:
        """Token ids are below this."""

    @property
    def end_tokens(self) -> Collection[int]:
        """Tokens that end an answer."""

    def vocabulary(self) -> str | None:
        """The content of a `tokenizer.json`; None for a model without one."""


_COMPILING = 4
"""Grammars that a tail compiles at once, beside its steps."""


class Grammars:
    """Compiles the grammars of one model's rows."""

    def __init__(self, load: Callable[[], Spells], vocabulary: int) -> None:
        """`load` gives the model's tokenizer, and `vocabulary` is the number of tokens that it may sample."""
        self._load = load
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._kept_bytes = 0
        self._library: Any = None
        self._special: Mapping[int, str] = {}
        self._trial = Trial()
        self._threads = ThreadPoolExecutor(_COMPILING, "grammars")
        begun = threading.Barrier(_COMPILING + 1)  # at the end of memory Python waits for ever for a thread
        for _ in range(_COMPILING):
            self._threads.submit(begun.wait)
        begun.wait()

    def prepare(self) -> None:
        """Reads the vocabulary; to be called while the model is loaded, for it holds up all threads: 2.7 s of
        processor time for the 201,088 tokens of gpt-oss, of which llguidance takes 2.2 s. Where the tokenizer
        cannot be read for grammars, `compile` says so."""
        with self._lock:
            if self._library is None:
                self._library = self._start()

    def begin(self) -> Future[None]:
        """`prepare` in a thread of its own."""
        return self._threads.submit(self.prepare)

    def special(self) -> Mapping[int, str]:
        """The tokens that a grammar matches as tokens and never as text, by their names.

        To llguidance every added token that is spelt `<...>` is special, whatever its own flag says. A marker
        of tool calls that a grammar wrote as text would get a mask that allows the marker's token, and the
        token would not be taken. Raises FailedPrecondition (NO_GRAMMARS).
        """
        self._usable()
        return self._special

    def try_out(self, grammar: str) -> None:
        """Finds out in another process whether a grammar can be compiled within limits; for the head, before
        it compiles one and has the tail compile it. Raises InvalidInput (BAD_GRAMMAR), FailedPrecondition
        (NO_GRAMMARS)."""
        self._usable()
        with self._lock:
            known = grammar in self._compiled
        if not known:
            self._trial.run(grammar)

    def compile(self, grammar: str) -> Any:
        """The LLMatcher of a Lark grammar in llguidance's dialect, to be copied. Several threads at once.

        Raises InvalidInput (BAD_GRAMMAR) for one that is not possible, FailedPrecondition (NO_GRAMMARS) where
        the model's tokenizer cannot be read.
        """
        library = self._usable()
        with self._lock:
            if (found := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return found[0]
        begun = time.thread_time()
        made = compiled(library, grammar)
        taken = len(grammar) + int(_BYTES_PER_SECOND * (time.thread_time() - begun))
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = made, taken
                self._kept_bytes += taken
            while self._kept_bytes > _KEPT_BYTES:
                _, (_, freed) = self._compiled.popitem(last=False)
                self._kept_bytes -= freed
        return made

    def start(self, grammar: str, answered: Sequence[int]) -> Matcher:
        """A row's matcher, which is compiled beside what goes on, for an answer that has begun with these."""
        return Matcher(self._threads.submit(self.compile, grammar), answered)

    def close(self) -> None:
        """Ends the process of trials and the threads that wait."""
        self._trial.close()
        self._threads.shutdown(wait=False)

    def _usable(self) -> Any:
        self.prepare()
        if self._library is _UNREADABLE:
            raise FailedPrecondition(
                "this model's answers cannot be held to a schema: its tokenizer cannot be read for it",
                hint="leave response_format and strict tools out",
                reason="NO_GRAMMARS",
            )
        return self._library

    def _start(self) -> Any:
        import llguidance

        try:
            tokenizer = self._load()
            text = tokenizer.vocabulary()
            if text is None:
                return _UNREADABLE
            size, ends = max(self._vocabulary, tokenizer.size), sorted(tokenizer.end_tokens)
            library = llguidance.LLTokenizer(text, n_vocab=size, eos_token=ends)
            # no more of the text, which takes half a second for a large vocabulary
            added, _ = json.JSONDecoder().raw_decode(text, text.index("[", text.index('"added_tokens"')))
            special = (token for token in added if library.is_special_token(token["id"]))
            self._special = {token["id"]: token["content"] for token in special}
            return library
        except (ModelError, ValueError):  # a tail needs a tokenizer for nothing else
            return _UNREADABLE


_UNREADABLE = object()


class Matcher:
    """The grammar of one row at the tail, as far as its answer has come. The compute thread uses it."""

    def __init__(self, made: Future[Any], answered: Sequence[int]) -> None:
        self._made = made
        self._answered = answered
        self._matcher: Any = None
        self._sampled: tuple[mx.array, int] | None = None
        self._taken: deque[bool] = deque(maxlen=MAX_UNSETTLED)  # whether each of the last tokens was possible

    def copy(self) -> Matcher:
        """A matcher for another row with the same prompt, before the first token."""
        return Matcher(self._made, self._answered)

    def sampled(self, tokens: mx.array, index: int) -> None:
        """The row's next token is at this place of uint32 [rows], which may still be computed."""
        self._sampled = (tokens, index)

    def advance(self) -> Any:
        """The LLMatcher after all tokens so far, for which it waits; None where there can be none."""
        if self._matcher is None:
            try:
                self._matcher = self._made.result().deep_copy()
            except Exception:  # the head has compiled it, and lets no token pass that it does not allow
                return None
            self._matcher.consume_tokens(self._answered)
        if self._sampled is not None:
            tokens, index = self._sampled
            self._sampled = None
            self._taken.append(self._matcher.consume_token(int(np.array(tokens, copy=False)[index])))
        return self._matcher

    def take_back(self, tokens: int) -> None:
        """Takes the last `tokens` sampled tokens back, which were drafts that do not count."""
        if tokens and self._sampled is not None:
            self._sampled, tokens = None, tokens - 1
        taken = sum(self._taken.pop() for _ in range(min(tokens, len(self._taken))))
        if taken:
            self._matcher.rollback(taken)


class Follower:
    """Checks at the head that one row's tokens are those of its grammar."""

    def __init__(self, matcher: Any, end_tokens: frozenset[int]) -> None:
        self._matcher = matcher.deep_copy()
        self._end_tokens = end_tokens

    def allows(self, token: int) -> bool:
        """Whether the grammar has the next token here; it has an end only where the answer is whole."""
        if token in self._end_tokens and self._matcher.is_accepting():
            return True
        return bool(self._matcher.consume_token(token))

    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice of what the answer says. It may be spelt in
        other tokens."""
        forced: list[int] = self._matcher.compute_ff_tokens()
        return forced


class Masks:
    """The masks of those rows of a lane that have a grammar, by their indices in it; at least one has."""

    def __init__(self, matchers: Sequence[tuple[int, Matcher]], rows: int) -> None:
        self._matchers = matchers
        self._places = None if len(matchers) == rows else mx.array([index for index, _ in matchers])
        self._table: mx.array | None = None

    def __call__(self, logits: mx.array) -> mx.array:
        """Logits [rows, vocabulary], -inf where these rows' grammars allow no token; others as they are."""
        words = -(-logits.shape[-1] // 32)
        found = [matcher.advance() for _, matcher in self._matchers]
        mask = np.full((len(found), words), -1, np.int32)
        for row, matcher in zip(mask, found, strict=True):
            if matcher is not None:
                allowed = np.frombuffer(matcher.compute_bitmask(), np.int32)[:words]
                row[: len(allowed)], row[len(allowed) :] = allowed, 0
        if self._table is None:
            bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
            self._table = mx.array(np.where(bits, 0.0, -np.inf)).astype(logits.dtype)
        added = self._table[mx.array(mask).view(mx.uint8)].flatten(-2)[:, : logits.shape[-1]]
        return logits + added if self._places is None else logits.at[self._places].add(added)

    def sampled(self, tokens: mx.array) -> None:
        """What was sampled with these masks, uint32 [rows]."""
        for index, matcher in self._matchers:
            matcher.sampled(tokens, index)


def left_its_grammar() -> Internal:
    """The error of a row whose answer cannot be held to its grammar any more."""
    return Internal(
        "the answer could not be held to its schema",
        hint="use a simpler schema, above all simpler patterns in it",
        reason="GRAMMAR_FAILED",
    )
