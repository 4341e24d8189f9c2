"""Answers that are held to a grammar: what may come next, as a mask over the vocabulary (llguidance).

The head makes a grammar of what a request asks for (node.engine.text.constraints), compiles it before the row
starts, and sends it to the tail, sealed, in the row's parameter record. The tail masks logits by it while its
stage computes; the head follows the tokens that come round, and ends a row whose answer has left its grammar.
A matcher that fails in the middle lets nothing pass but the end of the answer,
which the head does not take for one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from sealring.mesh.errors import FailedPrecondition, Internal, InvalidInput

if TYPE_CHECKING:
    from sealring.node.engine.text.tokenizer import Tokenizer

_KEPT = 64
"""Compiled grammars that are kept for later rows."""

_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,  # 4 ms
    "step_lexer_fuel": 50_000,  # 4 ms
    "step_max_items": 20_000,  # 1 ms
    "max_items_in_row": 500,
    "max_lexer_states": 50_000,  # 100 MB
    "max_grammar_size": 100_000,
}
"""What a stranger's schema may cost: less than llguidance's defaults, whose figures of time these are."""


class Grammars:
    """Compiles the grammars of one model's rows. `load` gives its tokenizer when the first one comes."""

    def __init__(self, load: Callable[[], Tokenizer], vocabulary: int) -> None:
        """`vocabulary` is the number of tokens that the model may sample."""
        self._load = load
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._library: Any = None
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._thread.submit(
            int
        )  # begins now: at the end of memory Python waits for ever for a thread to begin

    def compile(self, grammar: str) -> Any:
        """The LLMatcher of a Lark grammar in llguidance's dialect, to be copied.

        Raises InvalidInput (BAD_GRAMMAR) for one that is too large or not possible, FailedPrecondition
        (NO_GRAMMARS) where the model's tokenizer cannot be read.
        """
        with self._lock:
            if (found := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return found
            if self._library is None:
                self._library = self._start()
            import llguidance

            # errors that were verbose would quote the schema and the answer
            limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
            made = llguidance.LLMatcher(self._library, grammar, log_level=0, limits=limits)
            if made.is_error():
                raise _bad_grammar(made.get_error())
            self._compiled[grammar] = made
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return made

    def start(self, grammar: str, answered: Sequence[int]) -> Matcher:
        """A row's matcher, which is compiled beside what goes on, for an answer that has begun with these."""
        return Matcher(self._thread.submit(self.compile, grammar), answered)

    def _start(self) -> Any:
        import llguidance

        tokenizer = self._load()
        text = tokenizer.vocabulary()
        if text is None:
            raise FailedPrecondition(
                "this model's answers cannot be held to a schema: its tokenizer cannot be read for it",
                hint="leave response_format and strict tools out",
                reason="NO_GRAMMARS",
            )
        size, ends = max(self._vocabulary, tokenizer.size), sorted(tokenizer.end_tokens)
        return llguidance.LLTokenizer(text, n_vocab=size, eos_token=ends)


class Matcher:
    """Of one row at the tail. Used by the compute thread."""

    def __init__(self, made: Future[Any], answered: Sequence[int]) -> None:
        self._made = made
        self._answered = answered
        self._matcher: Any = None
        self._sampled: tuple[mx.array, int] | None = None

    def copy(self) -> Matcher:
        """Of another row with the same prompt, before the first token."""
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
            self._matcher.consume_token(int(np.array(tokens, copy=False)[index]))
        return self._matcher


class Follower:
    """Of one row at the head: whether the answer's tokens are those of its grammar."""

    def __init__(self, matcher: Any, end_tokens: frozenset[int]) -> None:
        self._matcher = matcher.deep_copy()
        self._end_tokens = end_tokens

    def allows(self, token: int) -> bool:
        """Of the next token; the end only where the answer is whole."""
        if token in self._end_tokens and self._matcher.is_accepting():
            return True
        return bool(self._matcher.consume_token(token))


class Masks:
    """Of the rows of a lane that have a grammar, by their indices in it; at least one has."""

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


def _bad_grammar(why: str) -> InvalidInput:
    """The library's own words are about the schema, which is the sender's."""
    said = why.splitlines()[0] if why else "it cannot be compiled"
    return InvalidInput(
        f"the schema cannot be used: {said.split('JSON schema: ')[-1][:200]}",
        hint="leave out what is named; docs/clients.md tells what a schema may hold",
        reason="BAD_GRAMMAR",
        param="response_format",
    )
