"""The head's text side: prompts to tokens, tokens to text.

A thread of its own loads the tokenizer while the weights load. It and a few more turn prompts into tokens
while the compute loop runs, by turns of the clients (node.engine.text.turns): no client waits for what
another one's prompt costs. Tokens become text in the thread in which they arrive (`deliver`), which
divides it into thoughts, text and calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sealring.mesh.clock import AwakeClock, Clock, monotonic_clock
from sealring.mesh.errors import (
    FailedPrecondition,
    Internal,
    InvalidInput,
    ModelError,
    ResourceExhausted,
    SealringError,
    StageFailed,
)
from sealring.mesh.prompt.images import VISION, has_images
from sealring.mesh.prompt.validate import MAX_SCORED, MAX_STOP_CHARACTERS, validate_prompt
from sealring.mesh.ring.composition import (
    MAX_CHOICES,
    MAX_DRAFTS,
    MAX_PARAMS_BYTES,
    Adopting,
    Chunk,
    Keeping,
    Origin,
    ResolvedStep,
    Restoring,
)
from sealring.mesh.ring.limits import MAX_PREFILL_CHUNK
from sealring.mesh.ring.prefix_ends import Ends
from sealring.mesh.ring.prefix_names import (
    KEY_BYTES,
    NO_CHAIN,
    Chain,
    PrefixNames,
    chain_of,
    is_clear,
)
from sealring.mesh.rpc.problem import to_problem
from sealring.node.engine import params
from sealring.node.engine.drafts import Guesses, Lookup
from sealring.node.engine.grammar import Follower, Grammars, left_its_grammar
from sealring.node.engine.logprobs import Asking, TokenLogprobs, asking_of
from sealring.node.engine.receipts import Delivered
from sealring.node.engine.text.chat import budget_of, encode_chat, sections_of
from sealring.node.engine.text.constraints import grammar_of, may_be_held
from sealring.node.engine.text.detokenizer import Detokenizer, StopStrings
from sealring.node.engine.text.marked import TOOLS
from sealring.node.engine.text.plaintext import too_long
from sealring.node.engine.text.sections import Sections
from sealring.node.engine.text.thinking import FREE
from sealring.node.engine.text.tokenizer import Tokenizer, load_tokenizer
from sealring.node.engine.text.tokenlog import TokenLog
from sealring.node.engine.text.turns import Turn, Turns
from sealring.node.engine.trial import bad_grammar
from sealring.node.engine.vision.grid import grids_of, needs_grids
from sealring.node.engine.vision.picture import Picture, text_of, with_digests
from sealring.node.engine.vision.sizes import MAX_WAITING_BYTES, lacks_vision
from sealring.node.engine.vision.viewing import Reading, Viewer, no_viewer, viewer_of
from sealring.node.engine.weights import read_config
from sealring.node.stored.policy import Sights
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

MAX_UNREAD_BYTES = 256 << 20
MAX_UNSTARTED = 1024
"""Bounds of prompts at the head: bytes that wait to be read, and prompts that are not prefilled.

A gateway opens 16 ahead, of 4 MiB at most and up to 24 MiB of images; the head does not trust it to.
"""

READERS = 4
"""Threads that read prompts: one may have a long prompt, one images, one a costly chat, and one is left."""

LONG_BYTES = 256 << 10
"""A prompt is long from here on: to read it takes a tenth of a second and more."""

MAX_TOLD_BYTES = 900 << 10
"""Log-probabilities of a prompt in one message, of which a sealed one holds 1 MiB."""

MAX_OUTPUT_BYTES = 960 << 10
"""The largest output in one message, of which a sealed one holds 1 MiB with its padding. A tool call is
sent when it ends, and nothing else bounds how long a model makes it."""

MAX_WITHHELD = 4 * MAX_STOP_CHARACTERS
"""Tokens with log-probabilities that are held back while a stop string may go on, four for each character.

Tokens without text, such as special ones, could be any number, and all are sent with the next one.
"""

MAX_TRIED_TOOLS = 8
"""Tools whose schemas are tried one by one, in the thread that reads prompts: each takes up to
node.engine.trial's SECONDS."""

LOAD_SECONDS = 120.0
STUCK_SECONDS = 600.0
"""No prompt takes as long to read. Its images take a minute, and processes for them a minute each to start. A
chat is rendered twice, in a process that has 20 s for each and a minute to start. Where a process is lost
another is asked, which may take as long again. Grammars are tried in another process, MAX_TRIED_TOOLS and two
at most, until one costs too much: each has a part of a second of a processor. All else that a prompt costs is
bounded in processor time."""


class StoredNames(NamedTuple):
    """A key for the chains of prompts, and what finds the part of a chain that is on disk; any thread."""

    key: bytes
    held: Callable[[Chain], Chain]


Emit = Callable[[engine.EngineEvent], None]
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

    @property
    def certain(self) -> float:
        """The probability with which each of the next tokens would have to be right, if as many were right in
        the mean as the row's grammar leaves no choice for."""
        forced = len(self.forced())
        return forced / (1 + forced)

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
            raise _bad_resume("the answer had ended")

    @property
    def held(self) -> list[inference.TokenLogprob]:
        """The tokens of a row that asks for log-probabilities that are not told yet."""
        return [] if self._log is None else self._log.held()


@dataclass(slots=True)
class OpenRow:
    """A row between RowOpened and its eviction; the prompt goes once it is prefilled.

    `copies` are rows that will be once it is, and go with it until then. `scored` are the prompt's tokens
    until their log-probabilities are sent. A row of which nothing is guessed has no `lookup`, and `guesses`
    only where a draft model makes some. `chain` names
    the blocks of its prompt that may be stored.

    """

    prompt: Tokens | None
    parameters: bytes
    answer: Answer
    names: PrefixNames | None
    lookup: Lookup | None
    guesses: Guesses | None = None
    chain: Chain = NO_CHAIN
    copies: list[int] = field(default_factory=list)
    scored: Sequence[int] = ()
    client: bytes = b""
    pictures: Sequence[Picture] = ()
    generated: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt that was read."""

    ids: list[int]
    answered: Sequence[int]
    """Tokens of the answer that an earlier epoch has brought."""
    pictures: Sequence[Picture]
    tokens: Tokens
    """The prompt's and those of the answer so far."""
    texts: Tokens
    """Those of `tokens` that stand for no image: an answer may repeat them."""
    scored: Sequence[int]
    """The prompt's tokens, if their log-probabilities are asked for."""
    grammar: str
    matcher: Any
    """What the grammar is compiled to; None without one."""
    max_tokens: int
    """The limit of the whole answer."""
    images: Reading | None
    """Reads the files of `pictures`."""

    @property
    def text_length(self) -> int:
        """How many of `texts` are the prompt's."""
        return len(self.texts) - len(self.answered)


class Front:
    """Implements node.engine.epoch.Prompts. `emit` may be called from any of its threads."""

    def __init__(
        self,
        path: Path,
        context: int,
        vocabulary: int,
        emit: Emit,
        clock: Clock = monotonic_clock,
        *,
        sees: bool = False,
        picture_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """`vocabulary` is the number of tokens that the model may sample. `sees`: its vision tower is loaded,
        too, and prompts may have images unless `blind` is called."""
        # under the lock; a prompt that was being read while the machine slept is not stuck for it
        self._clock = AwakeClock(clock)
        self._context = context
        self._vocabulary = vocabulary
        self._emit = emit
        self._rows: dict[int, OpenRow] = {}
        self._kept: dict[int, tuple[Origin, PrefixNames]] = {}
        self._earlier: dict[Origin, PrefixNames] = {}
        self._prefix_key = os.urandom(KEY_BYTES)
        self._ends = Ends()
        self._recalled: dict[int, tuple[PrefixNames, Chain]] = {}
        self._disk: StoredNames | None = None
        self._sights = Sights()
        self._asking: dict[int, tuple[int, int]] = {}  # of open rows that ask for log-probabilities: of how
        # many tokens in each place, and of how many of the prompt
        self._unread = 0  # bytes of prompts that wait to be read
        self._turns: Turns[tuple[engine.OpenEngineRow, Generator[Reading]]] = Turns()
        self._resting: dict[int, int] = {}  # rows whose images are half read, and what these hold
        self._reading: dict[int, float] = {}  # rows whose prompts are being read, and since when
        self._discarded: set[int] = set()  # of these
        self._generation = 0
        self._speculate = False
        self._modelled = self._tail_reads = False
        self._lock = threading.Lock()
        self._telling = threading.Lock()  # outputs leave in their order; taken before the other lock
        self._loaded = threading.Event()
        self._failure: BaseException | None = None
        self._tokenizer: Tokenizer | None = None
        self._path = path
        self._sees = sees
        self._most_picture_bytes = picture_bytes
        self._viewer: Viewer | None = None
        self._longest = MAX_PREFILL_CHUNK
        self._placed = False  # whether all stages need to know where images are
        self.grammars = Grammars(self.tokenizer, vocabulary)
        threading.Thread(target=self._run, args=(path,), name="front", daemon=True).start()
        for number in range(1, READERS):
            threading.Thread(target=self._read, name=f"front {number}", daemon=True).start()

    def wait_loaded(self) -> None:
        """Returns when the tokenizer is there. Raises ModelError where the folder has none that works."""
        if not self._loaded.wait(LOAD_SECONDS):
            raise ModelError(
                f"the tokenizer could not be loaded within {LOAD_SECONDS:g} s",
                reason="TOKENIZER_CORRUPT",
                hint="download or convert the model again",
            )
        if self._failure is not None:
            raise self._failure

    @property
    def capabilities(self) -> list[str]:
        """The model's abilities beside answering, by its template (mesh.prompt.tools.CAPABILITIES)."""
        form, shape = self.tokenizer().format, self.tokenizer().shape
        return (
            ["tools"] * (form.call is not None and TOOLS not in shape.lost)
            + ["thinking"] * (form.thinking is not None)
            + [VISION] * (self._viewer is not None)
        )

    @property
    def vision_not_installed(self) -> bool:
        """Whether the model would see if `sealring[vision]` were installed here."""
        return self._viewer is None and lacks_vision(self._path)

    def blind(self) -> None:
        """Refuses images from now on; the model's tower cannot be used."""
        viewer, self._viewer = self._viewer, None
        if viewer is not None:
            viewer.close()

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, once it is loaded."""
        assert self._tokenizer is not None  # nobody has opened a row before
        return self._tokenizer

    @property
    def stuck(self) -> bool:
        """Whether a prompt has been read for longer than any takes; the thread cannot be helped then."""
        with self._lock:
            now, since = self._clock(), min(self._reading.values(), default=None)
        return since is not None and now - since > STUCK_SECONDS

    def stop(self) -> None:
        """Ends the threads."""
        self.close_rows()
        self._turns.close()

    # The thread that reads commands

    def open(self, command: engine.OpenEngineRow) -> None:
        """Answers with RowOpened or RowRefused, for each client in the order of the calls; at once if there
        are too many."""
        size = command.ByteSize()
        with self._lock:
            unstarted = sum(row.prompt is not None for row in self._rows.values())
            waiting = len(self._turns)
            if (
                self._unread + size > MAX_UNREAD_BYTES
                or unstarted >= MAX_UNSTARTED
                or waiting >= MAX_UNSTARTED
            ):
                full = ResourceExhausted("the head holds too many prompts", reason="TOO_MANY_ROWS")
                self._emit(refusal(command.row, full))
                return
            self._unread += size
            item = command, self._open(command, self._generation)
            kind = "images" if has_images(command.prompt) else "long" if size > LONG_BYTES else ""
            self._turns.put(_client(command), command.row, item, kind)

    def discard(self, row: int) -> None:
        """Forgets a row that no step will name; if it waits to be read it is refused instead."""
        with self._lock:
            waiting = self._turns.remove(row)
            if waiting is not None:
                self._unread -= waiting[0].ByteSize()
                self._resting.pop(row, None)
            elif row in self._reading:
                self._discarded.add(row)
        if waiting is not None:
            self._emit(refusal(row, FailedPrecondition("nobody wants the row any more", reason="DISCARDED")))
        self.forget(row)

    def close_rows(self) -> None:
        """Forgets all rows, also those that wait to be opened."""
        with self._telling, self._lock:
            self._generation += 1
            self._unread -= sum(command.ByteSize() for command, _ in self._turns.clear())
            self._resting.clear()
            self._rows.clear()
            self._asking.clear()

    def begin_epoch(
        self,
        origins: Mapping[Origin, Sequence[int]],
        *,
        speculate: bool,
        modelled: bool = False,
        tail_reads: bool = False,
        longest: int = MAX_PREFILL_CHUNK,
    ) -> dict[Origin, tuple[bytes, bytes]]:
        """An epoch opens: all rows are forgotten, and names are made under another key from now on.

        Returns the new names of kept prefixes (PrefixNames.told), so that nobody can tell by names what two
        epochs have in common but for what goes on. `origins` has the lengths of their marks. Nothing is
        guessed, and nobody told what repeats, unless the deployment wants it to `speculate`. With `modelled`
        a model guesses, too. With `tail_reads` that is the tail's MTP head, which is sent prompts: the tail
        comes next there, and no other member may see tokens. `longest` is the number of tokens of a chunk at
        most, and so of an image.
        """
        self.close_rows()
        self._recalled.clear()
        self._disk = None
        self._longest = longest
        self._speculate, self._modelled, self._tail_reads = speculate, modelled, tail_reads and speculate
        self._prefix_key = os.urandom(KEY_BYTES)
        earlier = self._earlier | dict(self._kept.values())
        self._kept.clear()
        self._earlier = {
            origin: earlier[origin].first(origin.tokens, self._prefix_key, marks)
            for origin, marks in origins.items()
            if origin in earlier
        }
        self._ends.clear()
        told = {}
        for origin, names in self._earlier.items():
            marks = origins[origin]
            self._ends.remember(names, marks)
            told[origin] = names.told((*marks, origin.tokens) if marks else ())
        return told

    # The front's own threads

    def use_disk(self, disk: StoredNames) -> None:
        """Blocks of prompts in clear are named by this in the open epoch."""
        self._disk = disk

    def _run(self, path: Path) -> None:
        try:
            self._tokenizer = load_tokenizer(path, context=self._context)
            self.grammars.prepare()
            self._viewer = viewer_of(path, self._tokenizer) if self._sees else None
            self._placed = self._viewer is not None and needs_grids(read_config(path))
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._loaded.set()
        self._read()
        self._tokenizer.close()
        self.blind()
        self.grammars.close()

    def _read(self) -> None:
        self._loaded.wait()
        while (turn := self._turns.take()) is not None:
            command, steps = turn.item
            with self._lock:
                self._unread -= command.ByteSize()
                self._resting.pop(command.row, None)
                begun = self._reading[command.row] = self._clock()
            for images in steps:
                with self._lock:
                    now = self._clock()
                    if self._turns.charge(turn, now - begun) and self._rest(turn, images):
                        break
                    begun = now
            else:
                self._turns.done(turn)

    def _rest(self, turn: Turn[tuple[engine.OpenEngineRow, Generator[Reading]]], images: Reading) -> bool:
        """Has a prompt go on later, whose images are half read; whether there is memory for them until then.
        Under the lock."""
        command, _ = turn.item
        size = images.nbytes
        if self._picture_bytes() + sum(self._resting.values()) + size > self._most_picture_bytes:
            return False
        images.close()
        self._resting[command.row] = size
        del self._reading[command.row]
        self._unread += command.ByteSize()
        self._turns.put_back(turn, command.row)
        return True

    def _open(self, command: engine.OpenEngineRow, generation: int) -> Generator[Reading]:
        """Reads a prompt. It may rest after each of its images, which are in what is yielded then."""
        rows: list[OpenRow] = []
        try:
            with contextlib.ExitStack() as reading:
                opened, rows = yield from self._prepare(self.tokenizer(), command, reading)
            event = engine.EngineEvent(opened=opened)
        except Exception as error:
            event = refusal(command.row, error)
        with self._lock:
            del self._reading[command.row]
            wanted = command.row not in self._discarded
            self._discarded.discard(command.row)
            if generation != self._generation:
                return
            size = sum(picture.nbytes for row in rows for picture in row.pictures)
            if size and size + self._picture_bytes() > self._most_picture_bytes:
                event, rows = refusal(command.row, _too_many_pictures()), []
            sampling = command.prompt.sampling
            for number, row in enumerate(rows if wanted else (), command.row):
                self._rows[number] = row
                if sampling.HasField("logprobs"):
                    self._asking[number] = sampling.logprobs, max(0, len(row.scored) - 1)
        self._emit(event)

    def _prepare(
        self, tokenizer: Tokenizer, command: engine.OpenEngineRow, reading: contextlib.ExitStack
    ) -> Generator[Reading, None, tuple[control.RowOpened, list[OpenRow]]]:
        """The row, and the copies that it will have. `reading` is closed once the prompt is read."""
        prompt = yield from self._read_prompt(tokenizer, command, reading)
        words = with_digests(prompt.tokens, prompt.pictures).tobytes()
        shares = command.prefix_scope and not prompt.scored  # what is kept of a prompt has no logits
        chain, disk = NO_CHAIN, self._disk
        if shares and disk is not None and is_clear(command.prefix_scope):
            chain = chain_of(disk.key, command.prefix_scope, words)
        stored = self._sights.worth(chain, returns=_returns(command.prompt)) if chain.names else NO_CHAIN
        record = self._record(tokenizer, command, prompt, stored)
        if len(record) > MAX_PARAMS_BYTES or len(prompt.answered) >= prompt.max_tokens:
            raise _bad_resume("the answer was longer than it may be")
        names = PrefixNames(self._prefix_key, command.prefix_scope) if shares else None
        prefixes, named = self._ends.extend(names, words) if names else (b"", b"")
        if prompt.images is not None:
            kept = self._kept_of(names) if names else 0
            for _ in prompt.images.make_ready(sum(picture.end <= kept for picture in prompt.pictures)):
                yield prompt.images
        opened = control.RowOpened(
            row=command.row,
            prompt_tokens=len(prompt.tokens),
            params_bytes=len(record),
            max_tokens=prompt.max_tokens - len(prompt.answered),
            answered=len(prompt.answered),
            drafts=_drafts(command.prompt.sampling) if self._speculate else 0,
            prefixes=prefixes,
            ends=named,
            stored=disk.held(chain).packed() if disk is not None and chain.names else b"",
            unbroken=[control.TokenSpan(begin=one.start, end=one.end) for one in prompt.pictures],
        )
        row, *copies = self._rows_of(tokenizer, command, prompt, guessed=bool(opened.drafts))
        row.parameters, row.names, row.chain = record, names, chain
        return opened, [row, *copies]

    def _read_prompt(
        self, tokenizer: Tokenizer, command: engine.OpenEngineRow, reading: contextlib.ExitStack
    ) -> Generator[Reading, None, _Prompt]:
        """The prompt of a row as tokens, once everything that was asked for is known to be possible."""
        asked, sampling = command.prompt, command.prompt.sampling
        validate_prompt(asked)
        answered = list(asked.resume.tokens)
        _check_resume(command, self._vocabulary)
        numbers = range(command.row, command.row + (command.choices or 1))
        if len(numbers) > MAX_CHOICES or any(number in self._rows for number in numbers):
            raise FailedPrecondition("a row of this number is open already", reason="ROW_EXISTS")
        images, pictures = None, list[Picture]()
        if has_images(asked):
            images = self._read_images(command)
            reading.callback(images.close)
            for _ in images.add_all():
                yield images
        if asked.WhichOneof("input") == "chat":
            ids, pictures = self._encode_chat(tokenizer, asked.chat, images)
            param = "messages"
        elif asked.WhichOneof("input") == "tokens":
            ids, param = list(asked.tokens.ids), "prompt"
        else:
            ids, param = tokenizer.encode_text(asked.text), "prompt"
        room = self._room(len(ids), param)
        _check_ids(ids, self._vocabulary, param, "BAD_TOKEN")  # a tokenizer may have more than the model
        _check_ids(sampling.logit_bias, tokenizer.size, "logit_bias")
        _check_ids(sampling.stop_token_ids, tokenizer.size, "stop_token_ids")
        scores = sampling.prompt_logprobs and not answered
        if scores:
            _check_scored(len(ids), sampling)
        most = min(command.max_tokens or room, room)
        grammar, matcher = self._grammar(asked, tokenizer, tokenizer.last_turn(ids), most)
        if grammar and not grammar.endswith(FREE):
            _check_free(sampling)
        tokens = np.array(ids + answered, np.uint32)
        return _Prompt(
            ids,
            answered,
            pictures,
            tokens,
            text_of(tokens, pictures),
            ids if scores else (),
            grammar,
            matcher,
            most,
            images,
        )

    def _record(
        self, tokenizer: Tokenizer, command: engine.OpenEngineRow, prompt: _Prompt, chain: Chain
    ) -> bytes:
        """The row's parameter record."""
        sampling = command.prompt.sampling
        penalized = prompt.texts[: prompt.text_length].tolist() if prompt.pictures else prompt.ids
        found = params.from_sampling(
            sampling,
            penalized,
            prompt.answered,
            command.prompt.resume.choice,
            prompt.grammar,
            sorted(tokenizer.end_tokens),
            chain.packed(),
            command.receipt,
            grids_of(prompt.pictures) if self._placed else (),
        )
        if prompt.pictures and prompt.scored:
            found = dataclasses.replace(found, scored=tuple(prompt.scored))
        guessed = self._tail_reads and not prompt.grammar and _drafts(sampling) > 0 and not prompt.pictures
        if guessed and len(prompt.tokens) <= params.MOST_COMPUTED:
            found = dataclasses.replace(found, prompt=tuple(prompt.tokens.tolist()))
        return params.encode(found)

    def _rows_of(
        self, tokenizer: Tokenizer, command: engine.OpenEngineRow, prompt: _Prompt, *, guessed: bool
    ) -> list[OpenRow]:
        """A row for each choice, the first of them with the prompt. `guessed`: drafts are made of them."""
        asked, sampling = command.prompt, command.prompt.sampling
        ends = tokenizer.end_tokens.union(sampling.stop_token_ids)

        def answer() -> Answer:
            log = None
            if sampling.HasField("logprobs"):
                log = TokenLog(tokenizer.spelling, ends=sampling.prompt_logprobs)
            stops = StopStrings(asked.stop)
            sections = sections_of(tokenizer, asked, prompt.ids, stops)
            return Answer(
                tokenizer.detokenizer(spelt=sections is not None, begun=asked.chat.begun),
                stops,
                ends,
                prompt.max_tokens,
                log,
                sections,
                None if prompt.matcher is None else Follower(prompt.matcher, tokenizer.end_tokens),
                Delivered(command.receipt, len(prompt.ids), len(prompt.answered))
                if command.receipt
                else None,
            )

        lookup = self._lookup(tokenizer, asked, prompt.texts, prompt.text_length) if guessed else None
        modelled = guessed and self._modelled and not prompt.pictures  # a draft model sees nothing
        guesses = Guesses(prompt.tokens, command.prefix_scope) if modelled else None
        client = _client(command)
        row = OpenRow(prompt.tokens, b"", answer(), None, lookup, guesses, client=client)
        row.copies = list(range(command.row + 1, command.row + (command.choices or 1)))
        row.scored, row.pictures = prompt.scored, prompt.pictures
        row.answer.resume(asked.resume)
        copies = (
            OpenRow(
                None, b"", answer(), None, lookup and lookup.copy(), guesses and guesses.copy(), client=client
            )
            for _ in row.copies
        )
        return [row, *copies]

    def _read_images(self, command: engine.OpenEngineRow) -> Reading:
        """The images of a prompt. Raises as `Viewer.read`, and FailedPrecondition (VISION_NOT_INSTALLED)."""
        if self._viewer is None:
            raise no_viewer(self._path, sees=self._sees)
        return self._viewer.read(command.prompt.chat.messages, command.prefix_scope, self._longest)

    def _encode_chat(
        self, tokenizer: Tokenizer, chat: inference.Chat, images: Reading | None
    ) -> tuple[list[int], list[Picture]]:
        """The tokens of a chat, and its images. Raises InvalidInput."""
        if images is None:
            return encode_chat(tokenizer, chat), []
        ids = encode_chat(tokenizer, chat, images.shown)
        return ids, images.pictures_in(ids)

    def _kept_of(self, names: PrefixNames) -> int:
        """Tokens of the longest kept prefix with which a row of these names may begin, as far as the head
        knows: it may be dropped before, and begin elsewhere if caches cannot be cut."""
        kept = [*self._earlier.values(), *(names for _, names in list(self._kept.values()))]
        return max((names.common(each) for each in kept if each.scope == names.scope), default=0)

    def _picture_bytes(self) -> int:
        """The images of all prompts that are not prefilled."""
        return sum(picture.nbytes for row in self._rows.values() for picture in row.pictures)

    def _lookup(
        self, tokenizer: Tokenizer, prompt: inference.Prompt, tokens: Tokens, prompt_tokens: int
    ) -> Lookup:
        """What guesses tokens, by the prompt, the answer so far and the client's prediction.

        A prediction that cannot be guessed from is left out: it changes no answer.
        """
        predicted: list[int] = []
        if prompt.prediction:
            with contextlib.suppress(InvalidInput):
                predicted = tokenizer.encode_answer(prompt.prediction)
        if not predicted or max(predicted) >= self._vocabulary:
            return Lookup(tokens)
        lookup = Lookup(tokens[:prompt_tokens], predicted)
        for token in tokens[prompt_tokens:].tolist():
            lookup.add(token)
        return lookup

    def _grammar(
        self, prompt: inference.Prompt, tokenizer: Tokenizer, said: str, most: int
    ) -> tuple[str, Any]:
        """The grammar of the answer to a prompt, and what it is compiled to; empty and None where it is free.

        A call that is required is held to the schemas of its tools wherever that is possible. Where they are
        not possible together, each is tried, while they are few. `most` is the length of the answer.
        """
        budget = budget_of(tokenizer, prompt.chat, self.grammars.special, most)

        def made(held: frozenset[int]) -> tuple[str, Any]:
            special, silent = self.grammars.special, tokenizer.special
            grammar = grammar_of(prompt, tokenizer.format, special, said, held, silent, budget)
            return grammar, self._compiled(grammar) if grammar else None

        costly = False

        def possible(held: frozenset[int]) -> tuple[str, Any] | None:
            nonlocal costly
            try:
                return None if costly or not held else made(held)
            except InvalidInput as error:
                costly = "limit" in error.metadata  # nobody gets to try several of these
                return None

        held = may_be_held(prompt.chat)
        found = possible(held)
        if found is None and 1 < len(held) <= MAX_TRIED_TOOLS:
            held = frozenset(place for place in held if possible(frozenset({place})))
            found = possible(held)
        return found or made(frozenset())

    def _compiled(self, grammar: str) -> Any:
        """Raises InvalidInput (BAD_GRAMMAR), FailedPrecondition (NO_GRAMMARS)."""
        if len(grammar) > MAX_PARAMS_BYTES // 4:  # a character may take four bytes in the row's record
            raise bad_grammar("with all that it refers to it is too long")
        self.grammars.try_out(grammar)
        return self.grammars.compile(grammar)

    def _room(self, prompt_tokens: int, param: str) -> int:
        """Tokens that the context leaves for the answer, at least one."""
        if prompt_tokens == 0:
            raise InvalidInput(
                "the prompt is empty", reason="EMPTY_PROMPT", hint="send some text", param=param
            )
        if prompt_tokens >= self._context:
            raise too_long(prompt_tokens, self._context, param)
        return self._context - prompt_tokens

    # The epoch

    def prompt(self, row: int) -> Tokens:
        opened = self._rows.get(row)
        if opened is None or opened.prompt is None:
            raise _bad_step(f"row {row} is not open at the head")
        return opened.prompt

    def parameters(self, row: int) -> bytes:
        opened = self._rows.get(row)
        if opened is None:
            raise _bad_step(f"row {row} is not open at the head")
        return opened.parameters

    def drafts(self, row: int, last: int, count: int) -> list[int]:
        opened = self._rows.get(row)
        if opened is None:
            return [last] * count
        if opened.lookup is None:  # what is right would tell the gateway what it is not to know
            raise _bad_step(f"row {row} is to have no drafts")
        looked_up = opened.lookup.drafts(last, count)
        forced = opened.answer.forced()[:count]
        return [*forced, *looked_up[len(forced) :]]

    def guesses(self, row: int) -> Guesses | None:
        opened = self._rows.get(row)
        return opened.guesses if opened is not None else None

    def ended(self, row: int) -> bool:
        opened = self._rows.get(row)
        return opened is not None and bool(opened.answer.finish)

    def pictures(self, row: int) -> Sequence[Picture]:
        opened = self._rows.get(row)
        return opened.pictures if opened is not None else ()

    def prefilled(self, row: int) -> None:
        if (opened := self._rows.get(row)) is not None:
            opened.prompt = None
            opened.pictures = ()
            opened.copies = []

    def fail(self, row: int, error: SealringError) -> None:
        with self._telling:
            opened = self._rows.get(row)
            if opened is not None and not opened.answer.finish:
                opened.answer.finish = inference.FINISH_REASON_STOP  # nothing more is sent
                self._emit(refusal(row, error))

    def keep(self, keeping: Keeping) -> None:
        names = self._names(keeping.row)
        if names is None or keeping.tokens not in names.names:
            raise _not_kept(keeping.prefix)
        kept = names.first(keeping.tokens, also=keeping.marks)  # an earlier row's end may be one
        self._kept[keeping.prefix] = keeping.origin, kept

    def adopt(self, adopting: Adopting) -> None:
        names = self._earlier.get(adopting.origin)
        if names is None:
            raise _not_kept(adopting.prefix)
        self._kept[adopting.prefix] = adopting.origin, names

    def reuse(self, chunk: Chunk) -> None:
        _, kept = self._kept.get(chunk.prefix, (None, None))
        own = self._names(chunk.row)
        name = kept.names.get(chunk.start, b"") if kept is not None else b""
        if own is None or not name or not hmac.compare_digest(name, own.names.get(chunk.start, b"")):
            raise _not_kept(chunk.prefix)

    def recalls(self, recall: control.Recall) -> bool:
        """Whether a recall names blocks of its row's own prompt; a Restore of it may follow then. For the
        thread that reads commands."""
        opened = self._rows.get(recall.row)
        chain = Chain.unpack(recall.chain)
        if (
            opened is None
            or opened.names is None
            or not opened.chain.names
            or chain.scope != opened.chain.scope
        ):
            return False
        if opened.chain.names[: len(chain.names)] != chain.names:
            return False
        if recall.number in self._recalled or len(self._recalled) >= MAX_UNSTARTED:
            return False  # what is read under a number belongs to the row that it was first used for
        self._recalled[recall.number] = opened.names, chain
        return True

    def cancel_recall(self, number: int) -> None:
        """Forgets a recall. For the thread that reads commands."""
        self._recalled.pop(number, None)

    def restore(self, change: Restoring) -> None:
        names, chain = self._recalled.pop(change.recall, (None, NO_CHAIN))
        part = chain.first(change.tokens)
        if names is None or (part.tokens, part.names[-1:]) != (change.tokens, (change.name,)):
            raise _not_kept(change.prefix)
        self._kept[change.prefix] = change.origin, names.first(change.tokens)

    def drop(self, prefix: int) -> None:
        self._kept.pop(prefix, None)

    def _names(self, row: int) -> PrefixNames | None:
        opened = self._rows.get(row)
        return opened.names if opened is not None else None

    def forget(self, row: int) -> None:
        with self._lock:  # `open`, in another thread, may be counting rows
            opened = self._rows.pop(row, None)
            self._asking.pop(row, None)
        for copy in opened.copies if opened is not None else ():
            self.forget(copy)

    def asking(self, rows: Sequence[int], *, first: bool) -> Asking:
        if not self._asking:
            return ()
        asked = [self._asking.get(row, (None, 0)) for row in rows]
        return asking_of((count for count, _ in asked), (tokens * first for _, tokens in asked))

    def deliver(
        self,
        step: ResolvedStep,
        tokens: list[int],
        logprobs: Mapping[int, TokenLogprobs],
        *,
        refuted: bool = False,
    ) -> None:
        """Tells the gateway what a step brought. Rows that have finished or are gone are left out."""
        with self._telling:
            self._deliver(step, tokens, logprobs, refuted)

    def _deliver(
        self,
        step: ResolvedStep,
        tokens: list[int],
        logprobs: Mapping[int, TokenLogprobs],
        refuted: bool,
    ) -> None:
        outputs, failed, ended = [], [], []
        for index, (row, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            opened = self._rows.get(row)
            if opened is None or opened.answer.finish:
                continue
            try:
                outputs.append(output := self._output(row, opened, token, logprobs.get(index)))
            except (Internal, ResourceExhausted) as error:
                opened.answer.finish = inference.FINISH_REASON_STOP  # nothing more is sent
                failed.append(refusal(row, error))
            else:
                if output.finish:
                    ended.append((row, opened))
        *parts, rest = _parts(outputs)
        for part in parts:
            done = control.StepDone(step=step.number, outputs=part, more=True)
            self._emit(engine.EngineEvent(done=done))
        done = control.StepDone(step=step.number, outputs=rest, refuted=refuted)
        if step.asks and outputs:
            self._say_likely(
                done, [self._rows[row] for row in dict.fromkeys(step.sampled) if row in self._rows]
            )
        for event in failed:  # first, for a row whose last step is done must have ended
            self._emit(event)
        self._emit(engine.EngineEvent(done=done))
        for row, opened in ended:  # the gateway may have had it forgotten by now
            self._say_digests(row, opened)

    def _say_digests(self, row: int, opened: OpenRow) -> None:
        """Says what is to be signed for a row whose answer is sent whole, where it asks for a receipt."""
        if opened.answer.receipt is not None:
            digests = opened.answer.receipt.digests(row, opened.answer.finish)
            self._emit(engine.EngineEvent(digests=digests))

    @staticmethod
    def _say_likely(done: control.StepDone, rows: Sequence[OpenRow]) -> None:
        """Says how likely the next guess of a row is right, in the mean of those of which any is made."""
        looked_up = [max(row.lookup.likely(), row.answer.certain) for row in rows if row.lookup is not None]
        modelled = [row.guesses.likely() for row in rows if row.guesses is not None]
        done.likely = round(100 * fmean(looked_up or [0.0]))
        done.modelled = round(100 * fmean(modelled or [0.0]))

    def _output(
        self, row: int, opened: OpenRow, token: int, logprobs: TokenLogprobs | None
    ) -> control.RowOutput:
        """Raises Internal (GRAMMAR_FAILED), ResourceExhausted (TOO_MANY_LOGPROBS, OUTPUT_TOO_LARGE)."""
        answer = opened.answer
        output = control.RowOutput(row=row)
        if logprobs is not None:
            output.text, parsed, told = answer.add_logged(token, logprobs)
            output.logprobs.extend(answer.of_prompt(opened.scored, logprobs))
            opened.scored = ()
            if output.ByteSize() > MAX_TOLD_BYTES:
                raise _too_many_logprobs(
                    "the log-probabilities of the prompt's tokens are too long for one message",
                    "send a shorter prompt, or ask for fewer likely tokens beside each",
                )
            output.logprobs.extend(told)
            output.held.extend(answer.held)
            size = sum(one.ByteSize() for one in output.held)
            if len(output.held) > MAX_WITHHELD or size > MAX_TOLD_BYTES:
                raise _too_many_logprobs(
                    "too many tokens without text come where a stop string may go on",
                    "leave the stop strings out, or the log-probabilities",
                )
        else:
            output.text, parsed = answer.add(token)
        if parsed is not None:
            output.parsed.CopyFrom(parsed)
        if opened.lookup is not None:
            opened.lookup.add(token)
        if opened.guesses is not None:
            opened.guesses.add(token)
        output.token = token
        output.tokens, output.finish = answer.tokens, answer.finish
        if opened.names is not None:
            opened.generated.append(token)
            if answer.finish:  # caches may hold the last token, or not
                said, last = np.split(np.array(opened.generated, np.uint32), [-1])
                for part in (said, last):
                    prefixes, ends = self._ends.extend(opened.names, part.tobytes())
                    output.prefixes += prefixes
                    output.ends += ends
        if output.ByteSize() > MAX_OUTPUT_BYTES:
            raise ResourceExhausted(
                "the answer has a tool call that is too long for one message",
                hint="send the request again, or with a lower max_tokens",
                reason="OUTPUT_TOO_LARGE",
                param="max_tokens",
            )
        return output


def _client(command: engine.OpenEngineRow) -> bytes:
    return command.client or command.prefix_scope


def _parts(outputs: Sequence[control.RowOutput]) -> list[list[control.RowOutput]]:
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


def _returns(prompt: inference.Prompt) -> bool:
    """Whether a next prompt will begin with this one, by its shape: it is the middle of a conversation, or of
    an agent's work."""
    chat = prompt.chat
    return bool(chat.tools) or any(message.role in ("assistant", "tool") for message in chat.messages)


def _drafts(sampling: inference.Sampling) -> int:
    """Tokens that one step may guess."""
    return sampling.num_draft_tokens if sampling.HasField("num_draft_tokens") else MAX_DRAFTS


def _not_kept(prefix: int) -> InvalidInput:
    """The gateway may ask for a row's own prefixes only: else an answer would show another's prompt."""
    return _bad_step(f"prefix {prefix} is not one of the row's own")


def _bad_step(what: str) -> InvalidInput:
    return InvalidInput(what, reason="BAD_STEP", hint="gateway and head disagree; the epoch must end")


def _check_free(sampling: inference.Sampling) -> None:
    """Refuses what lets an answer go on behind the end of its schema. Raises InvalidInput (BAD_SAMPLING)."""
    name = "ignore_eos" if sampling.ignore_eos else "min_tokens"
    if sampling.ignore_eos or sampling.min_tokens:
        raise InvalidInput(
            f"{name} cannot be had with a schema: the answer ends where the schema does",
            hint=f"leave {name} out, or the schema",
            reason="BAD_SAMPLING",
            param=name,
        )


def _check_ids(ids: Iterable[int], size: int, param: str, reason: str = "BAD_SAMPLING") -> None:
    """Looking up an embedding that the model does not have would read memory of others."""
    if max(ids, default=0) >= size:
        raise InvalidInput(
            f"a token of {param} is none of the model's",
            hint=f"its token ids are 0 to {size - 1}",
            reason=reason,
            param=param,
            limit=size,
        )


def _check_scored(tokens: int, sampling: inference.Sampling) -> None:
    likeliest = sampling.logprobs
    if tokens * (1 + likeliest) > MAX_SCORED:
        raise InvalidInput(
            f"log-probabilities of {tokens} tokens, with {likeliest} others beside each, are too many",
            hint=f"send at most {MAX_SCORED // (1 + likeliest)}, or ask for fewer beside each",
            reason="TOO_MANY_LOGPROBS",
            param="logprobs",
            prompt_tokens=tokens,
        )


def _too_many_pictures() -> ResourceExhausted:
    return ResourceExhausted(
        "the head holds too many images of prompts that are not prefilled",
        hint="try again later, or send fewer images",
        reason="TOO_MANY_ROWS",
    )


def _too_many_logprobs(what: str, hint: str) -> ResourceExhausted:
    return ResourceExhausted(what, hint=hint, reason="TOO_MANY_LOGPROBS", param="logprobs")


def _check_resume(command: engine.OpenEngineRow, vocabulary: int) -> None:
    resume = command.prompt.resume
    most_held = len(resume.tokens) if command.prompt.sampling.HasField("logprobs") else 0
    sound = len(resume.held) <= most_held and resume.choice < MAX_CHOICES
    if max(resume.tokens, default=0) >= vocabulary or not sound:
        raise _bad_resume("its figures cannot be")
    if command.prompt.HasField("resume") and command.choices > 1:
        raise _bad_resume("several answers go on one by one")


def _bad_resume(why: str) -> InvalidInput:
    return InvalidInput(
        f"the answer cannot go on: {why}", reason="BAD_RESUME", hint="ask anew", param="resume"
    )
