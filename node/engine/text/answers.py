"""Open rows at the head, and what their tokens become: text, thoughts, calls, log-probabilities, ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import numpy.typing as npt

from sealring.mesh.errors import InvalidInput, ResourceExhausted, SealringError, StageFailed
from sealring.mesh.prompt.validate import MAX_STOP_CHARACTERS
from sealring.mesh.receipt.digests import vector_text
from sealring.mesh.ring.prefix_ends import Ends
from sealring.mesh.ring.prefix_names import NO_CHAIN, Chain, PrefixNames
from sealring.mesh.rpc.problem import to_problem
from sealring.node.engine.drafts.source import RowSource, Source
from sealring.node.engine.grammar import Follower, left_its_grammar
from sealring.node.engine.logprobs import TokenLogprobs
from sealring.node.engine.receipts import Delivered
from sealring.node.engine.text.detokenizer import Detokenizer, StopStrings
from sealring.node.engine.text.picture import Picture
from sealring.node.engine.text.sections import Sections
from sealring.node.engine.text.tokenlog import TokenLog
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

MAX_TOLD_BYTES = 900 << 10
"""Log-probabilities of a prompt in one message, of which a sealed one holds 1 MiB."""

MAX_OUTPUT_BYTES = 960 << 10
"""The largest output in one message, of which a sealed one holds 1 MiB with its padding. A tool call is
sent when it ends, and nothing else bounds how long a model makes it."""

MAX_WITHHELD = 4 * MAX_STOP_CHARACTERS
"""Tokens with log-probabilities that are held back while a stop string may go on, four for each character.

Tokens without text, such as special ones, could be any number, and all are sent with the next one.
"""

Tokens = npt.NDArray[np.uint32]


class Answer:
    """One row's text: counts its tokens and tells when it ends. `log` is for a row that asks for one, and
    `follower` for one that has a grammar."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings,
        end_tokens: frozenset[int],
        max_tokens: int,
        log: TokenLog | None = None,
        sections: Sections | None = None,
        follower: Follower | None = None,
        receipt: Delivered | None = None,
    ) -> None:
        self.receipt = receipt
        """What it notes for a receipt, where the row asks for one."""

        self._detokenizer = detokenizer
        self._stops = stops
        self._end_tokens = end_tokens
        """Tokens that end the answer and are not part of it."""

        self._max_tokens = max_tokens
        self._log = log
        self._sections = sections
        self._follower = follower
        self._told = 0  # characters of the text
        self.tokens = 0
        self.finish: inference.FinishReason.ValueType = inference.FINISH_REASON_UNSPECIFIED

    def forced(self) -> list[int]:
        """The next tokens, as far as the row's grammar leaves no choice."""
        return [] if self._follower is None or self.finish else self._follower.forced()

    def add(self, token: int) -> tuple[str, inference.Parsed | None]:
        """The text that may be sent after this token, and what was found beside it. The last sets `finish`.

        Raises Internal (GRAMMAR_FAILED) where it is none of the row's grammar.
        """
        self.tokens += 1
        if self.receipt is not None:
            self.receipt.token(token)
        if self._follower is not None and not self._follower.allows(token):
            raise left_its_grammar()
        if self._stops.stopped:  # in a call that was read when the token before had been sent
            self.finish = inference.FINISH_REASON_STOP
            return "", None
        if token in self._end_tokens:
            self.finish = inference.FINISH_REASON_STOP
            return self._divide(self._detokenizer.flush())
        piece = self._detokenizer.add(token)
        if self.tokens >= self._max_tokens:
            self.finish = inference.FINISH_REASON_LENGTH
            piece += self._detokenizer.flush()
        return self._divide(piece)

    def end_with(self, token: int, parsed: inference.Parsed) -> None:
        """The answer is a vector."""
        self.tokens, self.finish = 1, inference.FINISH_REASON_STOP
        if self.receipt is not None:
            self.receipt.token(token)
            self.receipt.add(vector_text(parsed.vector), None)

    def add_logged(
        self, token: int, told: TokenLogprobs
    ) -> tuple[str, inference.Parsed | None, list[inference.TokenLogprob]]:
        """As `add`, with the tokens that are to be sent beside the text."""
        assert self._log is not None
        start = self._stops.seen
        text, parsed = self.add(token)
        if self._log.ends or token not in self._end_tokens:
            self._log.add(token, told, start, self._stops.seen)
        if self.finish:
            return text, parsed, self._log.rest(self._told, stopped=self._stops.stopped)
        return text, parsed, self._log.take(self._told)

    def of_prompt(self, tokens: Sequence[int], told: TokenLogprobs) -> list[inference.TokenLogprob]:
        """The prompt's tokens as they are sent beside the answer's first; `told` belongs to that one."""
        assert self._log is not None
        return self._log.of_prompt(tokens, told.prompt) if tokens else []

    def _divide(self, piece: str) -> tuple[str, inference.Parsed | None]:
        if self._sections is None:
            text, parsed = self._stops.add(piece), None
            if self.finish:
                text += self._stops.flush()
        else:
            text, parsed = self._sections.take(piece, self.finish)
            if self._sections.over:
                self.finish = inference.FINISH_REASON_STOP
        if self._stops.stopped:
            self.finish = inference.FINISH_REASON_STOP
        return self._tell(text, parsed)

    def _tell(self, text: str, parsed: inference.Parsed | None) -> tuple[str, inference.Parsed | None]:
        if self._stops.stopped:
            parsed = parsed or inference.Parsed()
            parsed.stop = self._stops.matched
        if self.receipt is not None:
            self.receipt.add(text, parsed)
        self._told += len(text)
        return text, parsed

    def resume(self, resume: inference.Resume) -> None:
        """Goes to where the answer was when its ring broke; whatever was sent then is not sent again.

        Raises InvalidInput (BAD_RESUME) for an answer that had ended.
        """
        told = len(resume.tokens) - len(resume.held)
        for index, token in enumerate(resume.tokens):
            start = self._stops.seen
            self.add(token)
            if self._log is not None and index >= told:
                self._log.restore(resume.held[index - told], start, self._stops.seen)
        if self.finish:
            raise bad_resume("the answer had ended")

    @property
    def held(self) -> list[inference.TokenLogprob]:
        """The tokens of a row that asks for log-probabilities that are not told yet."""
        return [] if self._log is None else self._log.held()


@dataclass(slots=True)
class OpenRow:
    """A row between RowOpened and its eviction; the prompt goes once it is prefilled.

    `copies` are rows that will be once it is, and go with it until then. `scored` are the prompt's tokens
    until their log-probabilities are sent. `sources` guess its next tokens; a row of which nothing is to be
    guessed has none. `chain` names the blocks of its prompt that may be stored.
    """

    prompt: Tokens | None
    parameters: bytes
    answer: Answer
    names: PrefixNames | None
    sources: Mapping[Source, RowSource]
    chain: Chain = NO_CHAIN
    copies: list[int] = field(default_factory=list)
    scored: Sequence[int] = ()
    client: bytes = b""
    pictures: Sequence[Picture] = ()
    generated: list[int] = field(default_factory=list)
    made: Callable[[Sequence[float]], list[float]] | None = None
    """Makes the answer of the vector that the tail sends in its place."""

    def output(self, row: int, token: int, logprobs: TokenLogprobs | None, ends: Ends) -> control.RowOutput:
        """The gateway's message of the next token of row number `row`. `ends` notes where the answer ends:
        there another prompt may go on.

        Raises Internal (GRAMMAR_FAILED), ResourceExhausted (TOO_MANY_LOGPROBS, OUTPUT_TOO_LARGE).
        """
        answer = self.answer
        output = control.RowOutput(row=row)
        delta = output.delta
        if self.made is not None:
            assert logprobs is not None
            vector = inference.Parsed(vector=self.made(logprobs.vector))
            answer.end_with(token, vector)
            parsed: inference.Parsed | None = vector
        elif logprobs is not None:
            delta.text, parsed, told = answer.add_logged(token, logprobs)
            delta.logprobs.extend(answer.of_prompt(self.scored, logprobs))
            self.scored = ()
            if output.ByteSize() > MAX_TOLD_BYTES:
                raise too_many_logprobs(
                    "the log-probabilities of the prompt's tokens are too long for one message",
                    "send a shorter prompt, or ask for fewer likely tokens beside each",
                )
            delta.logprobs.extend(told)
            output.held.extend(answer.held)
            size = sum(one.ByteSize() for one in output.held)
            if len(output.held) > MAX_WITHHELD or size > MAX_TOLD_BYTES:
                raise too_many_logprobs(
                    "too many tokens without text come where a stop string may go on",
                    "leave the stop strings out, or the log-probabilities",
                )
        else:
            delta.text, parsed = answer.add(token)
        if parsed is not None:
            delta.parsed.CopyFrom(parsed)
        for source in self.sources.values():
            source.heard(token)
        output.token = token
        delta.tokens, output.finish = answer.tokens, answer.finish
        if self.names is not None:
            self.generated.append(token)
            if answer.finish:  # caches may hold the last token, or not
                said, last = np.split(np.array(self.generated, np.uint32), [-1])
                for part in (said, last):
                    prefixes, ended = ends.extend(self.names, part.tobytes())
                    output.prefixes += prefixes
                    output.ends += ended
        if output.ByteSize() > MAX_OUTPUT_BYTES:
            raise ResourceExhausted(
                "the answer has a tool call that is too long for one message",
                hint="send the request again, or with a lower max_tokens",
                reason="OUTPUT_TOO_LARGE",
                param="max_tokens",
            )
        return output


def rates(rows: Sequence[OpenRow]) -> list[control.DraftRate]:
    """How likely the next guess of each source is right, in the mean of the rows. A source that guesses for
    some of them alone counts for none, because a step's drafts are of one source."""
    return [
        control.DraftRate(
            source=source, right=round(100 * fmean(row.sources[source].right() for row in rows))
        )
        for source in (rows[0].sources if rows else ())
        if all(source in row.sources for row in rows)
    ]


def parts_of(outputs: Sequence[control.RowOutput]) -> list[list[control.RowOutput]]:
    """The outputs of a step by messages: none has more than MAX_TOLD_BYTES but where one output alone has."""
    parts: list[list[control.RowOutput]] = [[]]
    size = 0
    for output in outputs:
        size += (bytes_of := output.ByteSize())
        if size > MAX_TOLD_BYTES and parts[-1]:
            parts.append([])
            size = bytes_of
        parts[-1].append(output)
    return parts


def refusal(row: int, error: BaseException) -> engine.EngineEvent:
    """RowRefused. What is not of our own tree may quote the prompt and is masked."""
    if isinstance(error, MemoryError):
        error = StageFailed(
            "the head had no memory left to read the prompt",
            hint="send shorter prompts, or lower the node's memory_limit so that less is planned there",
            reason=StageFailed.out_of_memory,
        )
    elif not isinstance(error, SealringError):
        error = InvalidInput(
            "the prompt could not be tokenized",
            reason="PROMPT_UNUSABLE",
            hint="check it for unusual characters",
        )
    return engine.EngineEvent(refused=control.RowRefused(row=row, problem=to_problem(error)))


def too_many_logprobs(what: str, hint: str) -> ResourceExhausted:
    return ResourceExhausted(what, hint=hint, reason="TOO_MANY_LOGPROBS", param="logprobs")


def bad_resume(why: str) -> InvalidInput:
    return InvalidInput(
        f"the answer cannot go on: {why}", reason="BAD_RESUME", hint="ask anew", param="resume"
    )
