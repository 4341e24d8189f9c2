"""Whether a grammar can be compiled at a bounded cost: tried in a process that can be ended.
`python -m sealring.node.engine.trial` is that process.

llguidance's own limits let pass what costs seconds and gigabytes, and what it has compiled cannot be sent to
another process. So a grammar is first compiled where seconds and memory are counted, in a fork for each. Only
one that has passed is compiled in the engine, at the same cost. A vocabulary of single bytes is enough for a
trial: a costly schema takes the same time within a tenth with 151,936 tokens, and others are cheap with both.
"""

from __future__ import annotations

import mmap
import os
import re
import resource
import signal
import sys
from typing import Any

from sealring.mesh.errors import InvalidInput
from sealring.mesh.system.start import forbid_core_files
from sealring.node.engine.answers import text_in
from sealring.node.engine.helper import BROKEN, Helpers, OverLimitsError, no_answer, no_process, serve

SECONDS = 0.15
"""Processor time to compile a grammar and make its first mask, for which a tail's step may have to wait. An
object of 512 members takes 0.05 s, schemas of programs 0.001 to 0.02 s."""

MEMORY_BYTES = 32 << 20
"""The memory that a grammar may take of a process; schemas of programs take 1 to 6 MiB."""

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,  # 4 ms
    "step_lexer_fuel": 50_000,  # 4 ms
    "step_max_items": 20_000,  # 1 ms
    "max_items_in_row": 500,
    "max_lexer_states": 50_000,  # 100 MB
    "max_grammar_size": 100_000,
}
"""Bounds of a stranger's schema, below llguidance's defaults; the times are llguidance's own figures."""

_ONE_OF = "coerce_one_of"
_BYTES = 256
_SPECIAL = 256
"""Special tokens that a grammar may name; the markers of calls and thoughts are ten or so."""

_SERVE_SECONDS = 5.0
ERROR_BYTES = 4096
"""The library's words have as much at most."""


def compiled(library: Any, grammar: str) -> Any:
    """The LLMatcher of a Lark grammar in llguidance's dialect. Raises InvalidInput (BAD_GRAMMAR)."""
    made = _make(library, grammar)
    if made.is_error():
        raise bad_grammar(made.get_error())
    return made


def _make(library: Any, grammar: str) -> Any:
    import llguidance

    # errors that were verbose would quote the schema and the answer
    limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
    return llguidance.LLMatcher(library, grammar, log_level=0, limits=limits)


class Trial:
    """The process, started with the first grammar. Any thread; a trial waits for those before it, which have
    their limits, too."""

    def __init__(self) -> None:
        self._process = Helpers("sealring.node.engine.trial", first={}, most=1)

    def run(self, grammar: str) -> None:
        """Raises InvalidInput (BAD_GRAMMAR) for one that cannot be compiled or costs too much, and
        Unavailable (NO_PROCESS, NO_ANSWER) where it cannot be tried.

        Each fork has limits of its own, so a process that does not answer is this machine's fault, and so is
        a fork that somebody has ended.
        """
        question = {"grammar": _renumbered(grammar)}
        try:
            if not (self._process.ask(question, _read) or self._process.ask(question, _read)):
                raise no_answer()
        except OverLimitsError:
            raise no_answer() from None

    def close(self) -> None:
        """Ends the process."""
        self._process.close()


def _read(answer: dict[str, Any]) -> bool:
    """Whether the grammar has been tried: not, where its fork was ended."""
    if answer.get("not_begun"):
        raise no_process()
    if answer.get("ended"):
        raise bad_grammar(
            f"to compile it takes more than {SECONDS:g} s or {MEMORY_BYTES >> 20} MiB", limit=SECONDS
        )
    if "error" in answer:
        raise bad_grammar(text_in(answer, "error", ERROR_BYTES))
    return not answer.get("lost")


def _renumbered(grammar: str) -> str:
    """The grammar with special tokens by the ids that they have in the trial's vocabulary.

    Numbers in a schema's own strings may change with them, which costs what it did.
    """
    numbers: dict[str, int] = {}

    def found(match: re.Match[str]) -> str:
        return f"<[{_BYTES + numbers.setdefault(match[1], len(numbers)) % _SPECIAL}]>"

    return re.sub(r"<\[(\d+)\]>", found, grammar)


def bad_grammar(why: str, **metadata: object) -> InvalidInput:
    """The library's own words are about the schema, which is the sender's. One that costs too much has the
    `limit` in its metadata."""
    lines = why.splitlines() or ["it cannot be compiled"]
    said = lines[0]
    if said.endswith("parse error:"):  # the reason stands below the expression
        said += next((line.removeprefix("error:") for line in lines if line.startswith("error:")), "")
    hint = "leave out what is named; docs/clients.md tells what a schema may hold"
    if _ONE_OF in said:  # the library names its own option, which no client has
        said = "the alternatives of a oneOf may overlap"
        hint = "use anyOf instead of oneOf"
    return InvalidInput(
        f"the schema cannot be used: {said.split('JSON schema: ')[-1][:200]}",
        hint=hint,
        reason="BAD_GRAMMAR",
        param="response_format",
        **metadata,
    )


# The process


class _Bytes:
    """A vocabulary of single bytes and of special tokens, as llguidance asks for one."""

    special_token_ids = range(_BYTES, _BYTES + _SPECIAL)
    tokens = [
        *(bytes([byte]) for byte in range(_BYTES)),
        *(b"\xff<%d>" % token for token in special_token_ids),
    ]
    eos_token_id = _BYTES
    bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class _Trials:
    def __init__(self) -> None:
        self._library: Any = None
        self._words = mmap.mmap(-1, ERROR_BYTES)
        """A fork writes its words here, in shared memory: a confined process can make no pipe."""

    def answer(self, told: dict[str, Any]) -> dict[str, Any]:
        if self._library is None:
            import llguidance

            wrapped = llguidance.TokenizerWrapper(_Bytes())
            self._library = llguidance.LLTokenizer(wrapped, eos_token=[_BYTES])
            _make(self._library, "start: /a/")  # the first one reads code from disk, which is not counted
            return {}
        self._words[:] = bytes(ERROR_BYTES)
        try:
            if (child := os.fork()) == 0:
                self._compile(told["grammar"])
        except OSError:
            return {"not_begun": True}
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            ended = os.WTERMSIG(status)
            return {"ended": True} if ended == signal.SIGPROF or ended in BROKEN else {"lost": True}
        said = self._words[:].rstrip(b"\0").decode(errors="replace")
        return {"ended": True} if status else {"error": said} if said else {}

    def _compile(self, grammar: str) -> None:
        """In a fork, which this ends: with 0, and without a word where the grammar can be used."""
        status = 1
        try:
            before = _peak()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            made = _make(self._library, grammar)
            if made.is_error():
                said = (made.get_error() or "it cannot be compiled").encode()[:ERROR_BYTES]
                self._words[: len(said)] = said
            else:
                made.compute_bitmask()
            status = int(_peak() - before > MEMORY_BYTES)
        finally:
            os._exit(status)


def _peak() -> int:
    """Bytes that this process has had in memory at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def main() -> None:
    forbid_core_files()
    serve(_Trials().answer, _SERVE_SECONDS, forks=True)


if __name__ == "__main__":
    main()
