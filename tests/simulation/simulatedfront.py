"""The head's front of a simulated engine: prompts to tokens, tokens to text, and names of prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from rowoutput import row_output
from simulatedmodel import EMPTY, END, SimulatedModel, after, packed, prompt_text, spell
from simulatedrows import Parameters

from sealring.mesh.errors import FailedPrecondition, InvalidInput, SealringError
from sealring.mesh.ring import (
    KEY_BYTES,
    MAX_DRAFTS,
    NO_CHAIN,
    Adopting,
    Chain,
    Chunk,
    Ends,
    Keeping,
    Origin,
    PrefixNames,
    ResolvedStep,
    Restoring,
    chain_of,
    is_clear,
    names_key,
)
from sealring.mesh.rpc import to_problem
from sealring.node.engine import Delivered
from sealring.node.engine.text import too_long
from sealring.node.stored.policy import Sights
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    from simulateddisk import StoredPrefixes
    from simulatedengine import SimulatedEngine


@dataclass
class _Opened:
    """A row: `tokens` of its prompt and of the answer that an earlier epoch has brought."""

    text: str
    tokens: list[int]
    parameters: Parameters
    max_tokens: int
    names: PrefixNames | None
    cache: bytes
    """After all tokens so far, by which the front knows the next one."""
    count: int
    client: bytes = b""
    generated: list[int] = field(default_factory=list)
    finish: int = inference.FINISH_REASON_UNSPECIFIED
    receipt: Delivered | None = None
    copies: list[int] = field(default_factory=list)
    chain: Chain = NO_CHAIN


class SimulatedFront:
    """The rows that are open at the head."""

    def __init__(self, model: SimulatedModel, context: int, owner: SimulatedEngine) -> None:
        self._model, self._context, self._owner = model, context, owner
        self._rows: dict[int, _Opened] = {}
        self._kept: dict[int, tuple[Origin, PrefixNames]] = {}
        self._earlier: dict[Origin, PrefixNames] = {}
        self._ends = Ends()
        self._key = bytes(KEY_BYTES)
        self._reading: dict[int, engine.OpenEngineRow] = {}
        self._free_at = 0.0
        self._generation = 0
        self._speculate = False
        self._sights = Sights()
        self._recalled: dict[int, tuple[PrefixNames, Chain]] = {}

    def begin_epoch(self, origins: Sequence[Origin], *, speculate: bool) -> dict[Origin, tuple[bytes, bytes]]:
        """Names are made under another key from now on; the new names of what is kept."""
        self.close_rows()
        self._speculate = speculate
        self._key = self._owner.children.wires.random.randbytes(KEY_BYTES)
        earlier = self._earlier | dict(self._kept.values())
        self._kept = {}
        self._earlier = {
            origin: earlier[origin].first(origin.tokens, self._key) for origin in origins if origin in earlier
        }
        self._ends.clear()
        self._recalled.clear()
        for names in self._earlier.values():
            self._ends.remember(names)
        return {origin: names.told() for origin, names in self._earlier.items()}

    def close_rows(self) -> None:
        """Forgets all rows, also those that wait to be read."""
        self._generation += 1
        self._rows.clear()
        self._reading.clear()

    # Opening

    def open(self, asked: engine.OpenEngineRow) -> None:
        """Answers with RowOpened or RowRefused once the prompt is read; one is read after the other."""
        self._reading[asked.row] = asked
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + self._model.read_seconds
        self._owner.child.later(self._free_at - now, partial(self._read, asked, self._generation))

    def discard(self, row: int) -> None:
        """Forgets a row that no step will name."""
        if self._reading.pop(row, None) is not None:
            gone = FailedPrecondition("nobody wants the row any more", reason="DISCARDED")
            self._refuse(row, gone)
        self.forget(row)

    def _read(self, asked: engine.OpenEngineRow, generation: int) -> None:
        if generation != self._generation or self._reading.pop(asked.row, None) is not asked:
            return
        try:
            self._owner.says(opened=self._opened(asked))
        except SealringError as error:
            self._refuse(asked.row, error)

    def _refuse(self, row: int, error: SealringError) -> None:
        self._owner.says(refused=control.RowRefused(row=row, problem=to_problem(error)))

    def _opened(self, asked: engine.OpenEngineRow) -> control.RowOpened:
        numbers = range(asked.row, asked.row + (asked.choices or 1))
        if any(number in self._rows for number in numbers):
            raise FailedPrecondition("a row of this number is open already", reason="ROW_EXISTS")
        text, resume = prompt_text(asked.prompt), asked.prompt.resume
        prompt = self._model.tokens(text)
        if not prompt:
            raise InvalidInput("the prompt is empty", reason="EMPTY_PROMPT", param="prompt")
        if len(prompt) >= self._context:
            raise too_long(len(prompt), self._context, "prompt")
        answered = list(resume.tokens)
        room = self._context - len(prompt)
        most = min(asked.max_tokens or room, room)
        tokens = prompt + answered
        if len(answered) >= most or (asked.prompt.HasField("resume") and len(numbers) > 1):
            raise InvalidInput("the answer cannot go on", reason="BAD_RESUME", param="resume")
        lengths = tuple(self._model.length(text, resume.choice + at) for at in range(len(numbers)))
        chain = self._chain(asked, tokens)
        worth = self._sights.worth(chain, returns=_returns(asked.prompt)) if chain.names else NO_CHAIN
        parameters = Parameters(resume.choice, len(prompt), len(answered), lengths, asked.receipt, worth)
        cache = EMPTY
        for at, token in enumerate(tokens):
            if at >= len(prompt) and token != self._model.sample(cache, resume.choice):
                self._note("an answer goes on behind other tokens than those that were given")
            cache = after(cache, token)
        names = PrefixNames(self._key, asked.prefix_scope) if asked.prefix_scope else None
        prefixes, ends = self._ends.extend(names, packed(tokens)) if names else (b"", b"")
        for at, number in enumerate(numbers):
            receipt = Delivered(asked.receipt, len(prompt), len(answered)) if asked.receipt else None
            for token in answered if receipt is not None else ():
                receipt.token(token)
                receipt.add(spell(token), None)
            row = _Opened(
                text,
                tokens,
                parameters.copy(at),
                most,
                None if at else names,
                cache,
                len(answered),
                receipt=receipt,
            )
            self._rows[number] = row
        self._rows[asked.row].chain = chain
        self._rows[asked.row].copies = list(numbers[1:])
        return control.RowOpened(
            row=asked.row,
            prompt_tokens=len(tokens),
            params_bytes=len(parameters.encode()),
            max_tokens=most - len(answered),
            answered=len(answered),
            drafts=_drafts(asked.prompt.sampling) * self._speculate,
            prefixes=prefixes,
            ends=ends,
            stored=self._stored.held(chain).packed() if self._stored is not None else b"",
        )

    @property
    def _stored(self) -> StoredPrefixes | None:
        return self._owner.disk

    def _chain(self, asked: engine.OpenEngineRow, tokens: Sequence[int]) -> Chain:
        """The names on disk of a prompt's blocks, where it may be stored."""
        if self._stored is None or not is_clear(asked.prefix_scope):
            return NO_CHAIN
        return chain_of(names_key(self._stored.key), asked.prefix_scope, packed(tokens))

    # Prefixes on disk

    def recalls(self, asked: control.Recall) -> bool:
        """As `Book.recalls`."""
        opened, chain = self._rows.get(asked.row), Chain.unpack(asked.chain)
        if opened is None:
            return False
        if opened.chain.first(chain.tokens) != chain or asked.number in self._recalled:
            self._note(f"recalls what is not row {asked.row}'s")
        assert opened.names is not None
        self._recalled[asked.number] = opened.names, chain
        return True

    def restore(self, change: Restoring) -> None:
        names, chain = self._recalled.pop(change.recall, (None, NO_CHAIN))
        if names is None or chain.first(change.tokens).names[-1:] != (change.name,):
            raise _not_kept(change.prefix)
        self._kept[change.prefix] = change.origin, names.first(change.tokens)

    # The epoch

    def announced(self, rows: Iterable[int]) -> None:
        self._owner.children.wires.announced.update(self._rows[row].text for row in rows if row in self._rows)

    def parameters(self, chunk: Chunk) -> bytes:
        """The row's parameter record."""
        opened = self._row(chunk.row)
        self._owner.children.wires.begun[opened.text] += 1
        self._owner.children.wires.resumed += opened.parameters.answered > 0
        record = opened.parameters.encode()
        if len(record) != chunk.params_bytes:
            raise _bad_chunk(chunk)
        return record

    def chunk(self, chunk: Chunk) -> list[int]:
        """The tokens of a prompt's chunk."""
        tokens = self._row(chunk.row).tokens
        if chunk.end > len(tokens) or chunk.last != (chunk.end == len(tokens)):
            raise _bad_chunk(chunk)
        if chunk.last:
            self._rows[chunk.row].copies = []
        return tokens[chunk.start : chunk.end]

    def _row(self, number: int) -> _Opened:
        row = self._rows.get(number)
        if row is None:
            raise InvalidInput(f"row {number} is not open", reason="BAD_STEP")
        return row

    def keep(self, keeping: Keeping) -> None:
        opened = self._rows.get(keeping.row)
        if opened is None or opened.names is None or keeping.tokens not in opened.names.names:
            raise _not_kept(keeping.prefix)
        self._kept[keeping.prefix] = keeping.origin, opened.names.first(keeping.tokens)

    def adopt(self, adopting: Adopting) -> None:
        if adopting.origin not in self._earlier:
            raise _not_kept(adopting.prefix)
        self._kept[adopting.prefix] = adopting.origin, self._earlier[adopting.origin]

    def reuse(self, chunk: Chunk) -> None:
        _, kept = self._kept.get(chunk.prefix, (None, None))
        own = self._row(chunk.row).names
        if own is None or kept is None or own.names.get(chunk.start) != kept.names.get(chunk.start, b""):
            raise _not_kept(chunk.prefix)

    def drop(self, prefix: int) -> None:
        self._kept.pop(prefix, None)

    def forget(self, row: int) -> None:
        """Forgets an evicted row."""
        opened = self._rows.pop(row, None)
        for copy in opened.copies if opened is not None else ():
            self.forget(copy)

    def ended(self, row: int) -> bool:
        """Whether the row's answer has ended."""
        return row in self._rows and bool(self._rows[row].finish)

    def guesses(self, row: int) -> Callable[[int, int], list[int]]:
        """Gives the next drafts of a row, some of them wrong, by their place and their number."""
        opened, source = self._rows.get(row), self._owner.children.wires.random
        cache = opened.cache if opened is not None else EMPTY
        choice = opened.parameters.choice if opened is not None else 0

        def more(_: int, count: int) -> list[int]:
            nonlocal cache
            found = []
            for _ in range(count):
                token = self._model.sample(cache, choice)
                found.append(token if source.random() < self._model.guessed else 1 + token % 3)
                cache = after(cache, token)
            return found

        return more

    def deliver(self, step: ResolvedStep, tokens: Sequence[int], *, refuted: bool = False) -> None:
        """Says what a step has brought: nothing of rows that have finished or are gone."""
        done = control.StepDone(step=step.number, refuted=refuted)
        if step.asks:
            done.rates.add(source=control.DRAFT_SOURCE_LOOKUP, right=round(100 * self._model.guessed))
        ended = []
        for number, token in zip(step.sampled, tokens, strict=False):
            opened = self._rows.get(number)
            if opened is None or opened.finish:
                continue
            done.outputs.append(self._output(number, opened, token))
            if opened.finish and opened.receipt is not None:
                ended.append((number, opened))
        self._owner.says(done=done)
        for number, opened in ended if self._owner.children.signs else ():
            assert opened.receipt is not None
            self._owner.says(digests=opened.receipt.digests(number, opened.finish))

    def _output(self, number: int, opened: _Opened, token: int) -> control.RowOutput:
        asked = opened.parameters
        self._owner.children.wires.computed[opened.text] = asyncio.get_running_loop().time()
        ends = opened.count + 1 >= asked.length
        if token != (END if ends else self._model.sample(opened.cache, asked.choice)):
            self._note(f"row {number} has a wrong token")
        opened.cache = after(opened.cache, token)
        opened.count += 1
        if token == END:
            opened.finish = inference.FINISH_REASON_STOP
        elif opened.count >= opened.max_tokens:
            opened.finish = inference.FINISH_REASON_LENGTH
        text = spell(token)
        if opened.receipt is not None:
            opened.receipt.token(token)
            opened.receipt.add(text, None)
        output = row_output(number, text=text, tokens=opened.count, token=token)
        output.finish = opened.finish
        if opened.names is not None:
            opened.generated.append(token)
            if opened.finish:  # caches may hold the last token, or not
                for part in (opened.generated[:-1], opened.generated[-1:]):
                    prefixes, ends_ = self._ends.extend(opened.names, packed(part))
                    output.prefixes += prefixes
                    output.ends += ends_
        return output

    def _note(self, what: str) -> None:
        self._owner.children.wires.note(f"{self._owner.host}: {what}")


def _returns(prompt: inference.Prompt) -> bool:
    """Whether a next prompt will begin with this one, by its shape."""
    return any(message.role == "assistant" for message in prompt.chat.messages)


def _drafts(sampling: inference.Sampling) -> int:
    return sampling.num_draft_tokens if sampling.HasField("num_draft_tokens") else MAX_DRAFTS


def _bad_chunk(chunk: Chunk) -> InvalidInput:
    return InvalidInput(f"a chunk of row {chunk.row} does not fit it", reason="BAD_STEP")


def _not_kept(prefix: int) -> InvalidInput:
    return InvalidInput(f"prefix {prefix} must not be used like this", reason="BAD_STEP")
