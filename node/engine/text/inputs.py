"""Makes rows of what clients sent: prompts as tokens, with their images, grammars, names and parameters.

Threads of `PromptReader` call it; several may do so at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sealring.mesh.errors import (
    FailedPrecondition,
    InvalidInput,
)
from sealring.mesh.prompt.images import VISION, has_images
from sealring.mesh.prompt.validate import MAX_SCORED, validate_prompt
from sealring.mesh.ring.composition import (
    MAX_CHOICES,
    MAX_DRAFTS,
    MAX_PARAMS_BYTES,
)
from sealring.mesh.ring.limits import MAX_PREFILL_CHUNK
from sealring.mesh.ring.prefix_names import (
    NO_CHAIN,
    Chain,
)
from sealring.node.engine import params
from sealring.node.engine.drafts.source import RowText, Source
from sealring.node.engine.drafts.sources import of_row
from sealring.node.engine.drafts.tally import Tally
from sealring.node.engine.generation import own_options, with_own
from sealring.node.engine.grammar import Follower, Grammars
from sealring.node.engine.receipts import Delivered
from sealring.node.engine.staging.grid import needs_grids
from sealring.node.engine.staging.pooling import pooling_of
from sealring.node.engine.text.answers import Answer, OpenRow, Tokens, bad_resume
from sealring.node.engine.text.book import Book
from sealring.node.engine.text.chat import budget_of, encode_chat, sections_of
from sealring.node.engine.text.constraints import grammar_of, may_be_held
from sealring.node.engine.text.detokenizer import StopStrings
from sealring.node.engine.text.marked import TOOLS
from sealring.node.engine.text.picture import Picture, Reading, Sight, grids_of, text_of, with_digests
from sealring.node.engine.text.plaintext import too_long
from sealring.node.engine.text.pooled import Vectors, other_kind
from sealring.node.engine.text.thinking import FREE
from sealring.node.engine.text.tokenizer import Tokenizer, load_tokenizer
from sealring.node.engine.text.tokenlog import TokenLog
from sealring.node.engine.trial import bad_grammar
from sealring.node.engine.weights import read_config
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

MAX_TRIED_TOOLS = 8
"""Tools whose schemas are tried one by one, in the thread that reads prompts: each takes up to
node.engine.trial's SECONDS."""


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


class InputProcessor:
    """Makes rows for `book`, once it has loaded the model's tokenizer."""

    def __init__(self, path: Path, context: int, vocabulary: int, book: Book, sight: Sight) -> None:
        """As `Front`."""
        self._path = path
        self._context = context
        self._vocabulary = vocabulary
        self._book = book
        self._sight = sight
        self._tokenizer: Tokenizer | None = None
        self._vectors: Vectors | None = None
        self.own: Mapping[str, Any] = {}  # options where requests name none
        self._placed = False  # whether all stages need to know where images are
        self._sources: Collection[Source] = ()
        self._tail_reads = self._sealed = False
        self._model = Tally.of_all_rows()  # how often the guesses of its draft model were right
        self._longest = MAX_PREFILL_CHUNK
        self.grammars = Grammars(self.tokenizer, vocabulary)

    def load(self) -> None:
        """Loads the tokenizer, and starts processes for images where the model sees. Raises ModelError."""
        self._tokenizer = load_tokenizer(self._path, context=self._context)
        self.grammars.prepare()
        self._sight.open(self._tokenizer)
        config = read_config(self._path)
        self.own = own_options(self._path)
        self._placed = self._sight.sees and needs_grids(config)
        if (pooling := pooling_of(self._path, config)) is not None:
            self._vectors = Vectors(pooling, len(pooling.tokens) or int(config["hidden_size"]))
            self._book.width = self._vectors.width

    def close(self) -> None:
        """Ends the processes of a loaded processor."""
        self.tokenizer().close()
        self._sight.close()
        self.grammars.close()

    @property
    def capabilities(self) -> list[str]:
        """The model's abilities beside answering, by its template (mesh.prompt.tools.CAPABILITIES)."""
        if self._vectors is not None:
            return [self._vectors.capability]
        form, shape = self.tokenizer().format, self.tokenizer().shape
        return (
            ["tools"] * (form.call is not None and TOOLS not in shape.lost)
            + ["thinking"] * (form.thinking is not None)
            + [VISION] * self._sight.sees
        )

    @property
    def vision_not_installed(self) -> bool:
        """As `Sight.not_installed`."""
        return self._sight.not_installed

    def blind(self) -> None:
        """Refuses images from now on; the model's tower cannot be used."""
        self._sight.close()

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, once it is loaded."""
        assert self._tokenizer is not None  # nobody has opened a row before
        return self._tokenizer

    def begin_epoch(
        self, *, sources: Collection[Source], tail_reads: bool, sealed: bool, longest: int
    ) -> None:
        """As `Front.begin_epoch`."""
        self._longest, self._sealed = longest, sealed
        self._sources, self._tail_reads = sources, tail_reads

    def rows(
        self, command: engine.OpenEngineRow, reading: contextlib.ExitStack
    ) -> Generator[Reading, None, tuple[control.RowOpened, list[OpenRow]]]:
        """Reads a prompt: the gateway's message of its row, the row, and the copies that it will have.

        A caller may pause after each image; what is yielded holds the images so far. `reading` is to be
        closed once the prompt is read.

        Raises InvalidInput, FailedPrecondition, ResourceExhausted: the prompt cannot be served.
        """
        tokenizer = self.tokenizer()
        prompt = yield from self._read_prompt(tokenizer, command, reading)
        words = with_digests(prompt.tokens, prompt.pictures).tobytes()
        shares = command.prefix_scope and not prompt.scored and self._vectors is None  # logits are not kept
        chain = self._book.chain(command.prefix_scope, words) if shares else NO_CHAIN
        worth = self._book.worth(chain, returns=_returns(command.prompt))
        record = self._record(tokenizer, command, prompt, worth)
        if len(record) > MAX_PARAMS_BYTES or len(prompt.answered) >= prompt.max_tokens:
            raise bad_resume("the answer was longer than it may be")
        names, prefixes, ends = self._book.name(command.prefix_scope, words) if shares else (None, b"", b"")
        if prompt.images is not None:
            kept = self._book.kept_of(names) if names else 0
            for _ in prompt.images.make_ready(sum(picture.end <= kept for picture in prompt.pictures)):
                yield prompt.images
        opened = control.RowOpened(
            row=command.row,
            prompt_tokens=len(prompt.tokens),
            params_bytes=len(record),
            max_tokens=prompt.max_tokens - len(prompt.answered),
            answered=len(prompt.answered),
            drafts=_drafts(command.prompt.sampling) if self._sources and self._vectors is None else 0,
            prefixes=prefixes,
            ends=ends,
            stored=self._book.stored(chain),
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
        if self._vectors is not None:
            self._vectors.check(command)
        elif asked.HasField("pooled"):
            raise other_kind("")
        answered = list(asked.resume.tokens)
        _check_resume(command, self._vocabulary)
        numbers = range(command.row, command.row + (command.choices or 1))
        if len(numbers) > MAX_CHOICES or any(self._book.holds(number) for number in numbers):
            raise FailedPrecondition("a row of this number is open already", reason="ROW_EXISTS")
        images, pictures = None, list[Picture]()
        if has_images(asked):
            images = self._sight.read(asked.chat.messages, command.prefix_scope, self._longest)
            reading.callback(images.close)
            for _ in images.add_all():
                yield images
        if asked.WhichOneof("input") == "chat":
            ids, pictures = self._encode_chat(tokenizer, asked.chat, images)
            param = "messages"
        elif asked.WhichOneof("input") == "tokens":
            ids, param = list(asked.tokens.ids), "prompt"
        elif self._vectors is not None:
            ids, param = self._vectors.encode(tokenizer, asked.pooled), "input"
        else:
            ids, param = tokenizer.encode_text(asked.text), "prompt"
        room = self._room(len(ids), param)
        _check_ids(ids, self._vocabulary, param, "BAD_TOKEN")  # a tokenizer may have more than the model
        _check_ids(sampling.logit_bias, tokenizer.size, "logit_bias")
        _check_ids(sampling.stop_token_ids, tokenizer.size, "stop_token_ids")
        scores = sampling.prompt_logprobs and not answered
        if scores:
            _check_scored(len(ids), sampling)
        most = 1 if self._vectors is not None else min(command.max_tokens or room, room)
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
        sampling = with_own(command.prompt.sampling, self.own)
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
        return params.encode(found, apart=self._sealed)

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

        client, first = client_of(command), answer()
        text = RowText(
            prompt.tokens,
            prompt.texts,
            prompt.text_length,
            self._predicted(tokenizer, asked) if guessed else (),
            command.prefix_scope,
            first.forced,
            self._model,
            pictured=bool(prompt.pictures),
        )
        sources = of_row(text, self._sources if guessed else ())
        row = OpenRow(prompt.tokens, b"", first, None, sources, client=client)
        row.copies = list(range(command.row + 1, command.row + (command.choices or 1)))
        row.scored, row.pictures = prompt.scored, prompt.pictures
        if self._vectors is not None:
            row.made = partial(self._vectors.made, dimensions=asked.pooled.dimensions)
        row.answer.resume(asked.resume)

        def copy() -> OpenRow:
            other = answer()
            own = dataclasses.replace(text, forced=other.forced)
            there = {source: one.another(own) for source, one in sources.items()}
            return OpenRow(None, b"", other, None, there, client=client)

        copies = [copy() for _ in row.copies]
        return [row, *copies]

    def _encode_chat(
        self, tokenizer: Tokenizer, chat: inference.Chat, images: Reading | None
    ) -> tuple[list[int], list[Picture]]:
        """The tokens of a chat, and its images. Raises InvalidInput."""
        if images is None:
            return encode_chat(tokenizer, chat), []
        ids = encode_chat(tokenizer, chat, images.shown)
        return ids, images.pictures_in(ids)

    def _predicted(self, tokenizer: Tokenizer, prompt: inference.Prompt) -> list[int]:
        """The tokens of the client's prediction. One that cannot be guessed from is left out: it changes no
        answer."""
        predicted: list[int] = []
        if prompt.prediction:
            with contextlib.suppress(InvalidInput):
                predicted = tokenizer.encode_answer(prompt.prediction)
        return predicted if max(predicted, default=0) < self._vocabulary else []

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


def client_of(command: engine.OpenEngineRow) -> bytes:
    """The client whose turn a prompt takes."""
    return command.client or command.prefix_scope


def _returns(prompt: inference.Prompt) -> bool:
    """Whether a next prompt will begin with this one, by its shape: it is the middle of a conversation, or of
    an agent's work."""
    chat = prompt.chat
    return bool(chat.tools) or any(message.role in ("assistant", "tool") for message in chat.messages)


def _drafts(sampling: inference.Sampling) -> int:
    """Tokens that one step may guess."""
    return sampling.num_draft_tokens if sampling.HasField("num_draft_tokens") else MAX_DRAFTS


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


def _check_resume(command: engine.OpenEngineRow, vocabulary: int) -> None:
    resume = command.prompt.resume
    most_held = len(resume.tokens) if command.prompt.sampling.HasField("logprobs") else 0
    sound = len(resume.held) <= most_held and resume.choice < MAX_CHOICES
    if max(resume.tokens, default=0) >= vocabulary or not sound:
        raise bad_resume("its figures cannot be")
    if command.prompt.HasField("resume") and command.choices > 1:
        raise bad_resume("several answers go on one by one")
