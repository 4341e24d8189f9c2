from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from sealring.mesh.errors import InvalidInput, ModelError
from sealring.mesh.prompt.options import MODELS_OWN
from sealring.mesh.prompt.validate import MAX_STOP_CHARACTERS
from sealring.mesh.receipt.digests import HASH_BYTES
from sealring.mesh.ring import (
    OPENING,
    Adopting,
    Chain,
    Chunk,
    Dropping,
    Keeping,
    Origin,
    ResolvedStep,
    Restoring,
    split,
)
from sealring.node.engine import TokenLogprobs, params
from sealring.node.engine.text import (
    Answer,
    Front,
    StopStrings,
    StoredNames,
    Tokenizer,
    answers,
    inputs,
    load_tokenizer,
)
from sealring.node.engine.text import reading as reader
from sealring.node.engine.text.chat import sections_of
from sealring.node.engine.text.detokenizer import BytesDetokenizer
from sealring.node.engine.text.thinking import FREE
from sealring.node.engine.text.tokenlog import TokenLog
from sealring.node.engine.trial import bad_grammar
from sealring.node.engine.vision.viewing import FolderSight
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference
from sealring.v1.membership_pb2 import Problem

CONTEXT = 40
VOCABULARY = 512
END = 256

LOOKUP, HEAD = [control.DRAFT_SOURCE_LOOKUP], control.DRAFT_SOURCE_MTP_HEAD


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of single bytes: a token's id is the byte; 256 ends an answer."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Backend(models.BPE(vocab={character: spell(character) for character in alphabet}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.description }}"
        "{{ (tool.function.parameters.properties or {}) | join }}{% endfor %}"
        "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
        "{{ call.function | tojson }}{% endfor %}{% endfor %}:"
    )
    settings = {"eos_token": "<end>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture(scope="module")
def tokenizers() -> Iterator[dict[Any, Tokenizer]]:
    made: dict[Any, Tokenizer] = {}
    yield made
    for tokenizer in made.values():
        tokenizer.close()


@pytest.fixture(autouse=True)
def _loads_equal_folders_once(tokenizers: dict[Any, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process for chats takes an eighth of a second of a processor to start."""

    def load(path: Path, *, context: int) -> Tokenizer:
        key = (context, *(file.read_bytes() for file in sorted(path.glob("*.json"))))
        if key not in tokenizers:
            tokenizers[key] = load_tokenizer(path, context=context)
        monkeypatch.setattr(tokenizers[key], "close", lambda: None)
        return tokenizers[key]

    monkeypatch.setattr(inputs, "load_tokenizer", load)


def spell(character: str) -> int:
    from sealring.node.engine.text import byte_level_table

    return byte_level_table()[character]


class Desk:
    """A front and what it says."""

    def __init__(self, folder: Path, context: int = 0, vocabulary: int = 0) -> None:
        self.events: SimpleQueue[engine.EngineEvent] = SimpleQueue()
        sight = FolderSight(folder, sees=False)
        self.front = Front(folder, context or CONTEXT, vocabulary or VOCABULARY, self.events.put, sight)
        self.front.reader.wait_loaded()
        self._step = 0

    def open(
        self, row: int, prompt: inference.Prompt, max_tokens: int = 0, scope: bytes = b""
    ) -> engine.EngineEvent:
        command = engine.OpenEngineRow(row=row, prompt=prompt, max_tokens=max_tokens, prefix_scope=scope)
        self.front.reader.open(command)
        return self.events.get(timeout=200)

    def problem_of(self, row: int) -> Callable[[int], Problem]:
        """What is wrong with each next token of a row."""

        def problem(token: int) -> Problem:
            step = ResolvedStep(1, bytes(32), (), (), 0, (row,), (row,))
            self.front.book.deliver(step, [token], {})
            events = [self.events.get(timeout=200)]
            while not events[-1].HasField("done"):
                events.append(self.events.get(timeout=200))
            return events[0].refused.problem

        return problem

    def drafts(self, row: int, last: int, count: int) -> list[int]:
        """The first drafts of a chain behind the row's last token."""
        return self.front.book.source(row, control.DRAFT_SOURCE_LOOKUP).propose(last, count).there[:count]

    def likely(self, row: int, token: int) -> int:
        """The percentage that a step which asks gets for a guess of the row's next token, after this one."""
        self._step += 1
        step = ResolvedStep(self._step, bytes(32), (), (), 0, (row,), (row,), asks=True)
        self.front.book.deliver(step, [token], {})
        rates = {one.source: one.right for one in self.events.get(timeout=200).done.rates}
        return rates.get(control.DRAFT_SOURCE_LOOKUP, 0)

    def deliver(self, rows: dict[int, int]) -> dict[int, tuple[str, int, int]]:
        """Row -> (text, tokens, finish) after a step that brought these tokens."""
        self._step += 1
        step = ResolvedStep(self._step, bytes(32), (), (), 0, tuple(rows), tuple(rows))
        self.front.book.deliver(step, list(rows.values()), {})
        done = self.events.get(timeout=200).done
        assert done.step == self._step
        return {
            output.row: (output.delta.text, output.delta.tokens, output.finish) for output in done.outputs
        }


@pytest.fixture
def desk(folder: Path) -> Iterator[Desk]:
    made = Desk(folder)
    yield made
    made.front.stop()


def text_prompt(text: str, **fields: object) -> inference.Prompt:
    return inference.Prompt(text=text, **fields)  # type: ignore[arg-type]


def test_an_answer_is_signed_though_its_row_is_forgotten_at_once(folder: Path) -> None:
    """The gateway may evict a row before the thread that has sent its last token goes on."""
    events: SimpleQueue[engine.EngineEvent] = SimpleQueue()

    def emit(event: engine.EngineEvent) -> None:
        events.put(event)
        if event.HasField("done"):
            front.book.forget(1)

    front = Front(folder, CONTEXT, VOCABULARY, emit, FolderSight(folder, sees=False))
    front.reader.wait_loaded()
    try:
        front.reader.open(
            engine.OpenEngineRow(row=1, prompt=text_prompt("hi"), max_tokens=1, receipt=bytes(HASH_BYTES))
        )
        assert events.get(timeout=200).HasField("opened")
        front.book.deliver(ResolvedStep(1, bytes(32), (), (), 0, (1,), (1,)), [spell("x")], {})
    finally:
        front.stop()
    assert events.get(timeout=200).done.outputs[0].finish
    digests = events.get(timeout=200).digests
    assert (digests.row, digests.tokens) == (1, 1)


def test_a_row_is_opened_and_told(desk: Desk) -> None:
    messages = [inference.ChatMessage(role="user", content="hi é")]
    opened = desk.open(1, inference.Prompt(chat=inference.Chat(messages=messages))).opened
    assert (opened.row, opened.prompt_tokens, opened.params_bytes) == (1, 6, params.BLOCK)
    assert opened.max_tokens == CONTEXT - 6
    assert desk.front.book.prompt(1).tolist() == list("hi é:".encode())
    assert params.decode(desk.front.book.parameters(1)).greedy
    desk.front.book.prefilled(1)
    with pytest.raises(InvalidInput):
        desk.front.book.prompt(1)
    first, second = "é".encode()
    assert desk.deliver({1: first}) == {1: ("", 1, 0)}
    assert desk.deliver({1: second}) == {1: ("é", 2, 0)}
    assert desk.deliver({1: END}) == {1: ("", 3, inference.FINISH_REASON_STOP)}
    assert desk.deliver({1: 65}) == {}


def test_a_head_tells_what_repeats_only_where_the_deployment_speculates(desk: Desk) -> None:
    off = inference.Sampling(num_draft_tokens=0)
    for speculate in (True, False):
        desk.front.begin_epoch({}, sources=LOOKUP if speculate else ())
        drafts = [
            desk.open(row, text_prompt("abc ab", sampling=sampling)).opened.drafts
            for row, sampling in enumerate([None, off], start=1)
        ]
        assert drafts == [15 * speculate, 0]
        told = [[desk.likely(row, ord(token)) for token in "czbc"] for row in (1, 2)]
        assert told == [[51, 25, 25, 37] if speculate else [0] * 4, [0] * 4]
        for row in (1, 2):
            assert (desk.front.book.source(row, LOOKUP[0]) is not None) == (speculate and row == 1)
        if speculate:
            assert desk.drafts(1, ord("c"), 2) == list(b"zb")


def test_a_tail_that_guesses_gets_the_prompt(desk: Desk) -> None:
    off = inference.Sampling(num_draft_tokens=0)
    for mtp, sealed in ((True, False), (True, True), (False, True)):
        desk.front.begin_epoch({}, sources=[*LOOKUP, HEAD][: 1 + mtp], tail_reads=mtp, sealed=sealed)
        for row, sampling in enumerate([None, off], start=1):
            desk.open(row, text_prompt("abc ab", sampling=sampling))
            record = desk.front.book.parameters(row)
            sent = params.decode(record).prompt
            with contextlib.nullcontext() if sealed else pytest.raises(InvalidInput):
                params.parts(record)
            assert sent == (tuple(b"abc ab") if mtp and row == 1 else ())
            assert (desk.front.book.source(row, HEAD) is not None) == (mtp and row == 1)


def test_a_clients_prediction_is_guessed_first_also_where_an_answer_goes_on(desk: Desk) -> None:
    desk.front.begin_epoch({}, sources=LOOKUP)
    desk.open(1, text_prompt("abc ab", prediction="xyz!"))
    assert desk.drafts(1, ord("b"), 3) == list(b"xyz")
    resume = inference.Resume(tokens=b"xy")
    desk.open(2, text_prompt("abc ab", prediction="xyz!", resume=resume))
    assert desk.drafts(2, ord("y"), 2) == list(b"z!")
    for row, unusable in ((3, ""), (4, "x" * CONTEXT)):
        desk.open(row, text_prompt("abc ab", prediction=unusable))
        assert desk.drafts(row, ord("b"), 1) == list(b"c")


def test_the_longest_answer_is_the_requests_or_the_contexts(desk: Desk) -> None:
    assert desk.open(1, text_prompt("abc"), max_tokens=2).opened.max_tokens == 2
    assert desk.open(2, text_prompt("abc"), max_tokens=1000).opened.max_tokens == CONTEXT - 3
    assert desk.deliver({1: 65, 2: 65}) == {1: ("A", 1, 0), 2: ("A", 1, 0)}
    assert desk.deliver({1: 66, 2: 66}) == {1: ("B", 2, inference.FINISH_REASON_LENGTH), 2: ("B", 2, 0)}


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(desk: Desk) -> None:
    assert desk.open(1, text_prompt("x" * (CONTEXT - 1))).opened.max_tokens == 1
    refused = desk.open(2, text_prompt("x" * CONTEXT)).refused
    assert refused.row == 2
    assert refused.problem.reason == "CONTEXT_TOO_LONG"
    assert dict(refused.problem.metadata) == {
        "param": "prompt",
        "prompt_tokens": str(CONTEXT),
        "context": str(CONTEXT),
    }


def test_bad_prompts_are_refused(desk: Desk) -> None:
    assert desk.open(1, inference.Prompt()).refused.problem.reason == "EMPTY_PROMPT"
    hot = text_prompt("a", sampling=inference.Sampling(temperature=9))
    assert desk.open(1, hot).refused.problem.code == "INVALID_ARGUMENT"
    assert desk.open(1, text_prompt("a")).opened.row == 1
    assert desk.open(1, text_prompt("a")).refused.problem.reason == "ROW_EXISTS"


def test_an_error_that_might_quote_is_masked(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(text: str) -> list[int]:
        raise ValueError(text)

    monkeypatch.setattr(desk.front.inputs.tokenizer(), "encode_text", explode)
    problem = desk.open(1, text_prompt("marked secret")).refused.problem
    assert problem.reason == "PROMPT_UNUSABLE"
    assert "marked" not in str(problem)


def test_a_prompt_that_there_is_no_memory_to_read_is_refused_as_that(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(text: str) -> list[int]:
        raise MemoryError

    monkeypatch.setattr(desk.front.inputs.tokenizer(), "encode_text", explode)
    assert desk.open(1, text_prompt("a")).refused.problem.reason == "OUT_OF_MEMORY"


def test_discarded_forgotten_and_closed_rows_are_gone(desk: Desk) -> None:
    for row in (1, 2, 3):
        desk.open(row, text_prompt("a"))
    desk.front.discard(1)
    desk.open(4, text_prompt("a"))
    desk.front.book.forget(2)
    assert desk.deliver({1: 65, 2: 65, 3: 65}) == {3: ("A", 1, 0)}
    desk.front.close_rows()
    assert desk.deliver({3: 65, 4: 65}) == {}
    with pytest.raises(InvalidInput):
        desk.front.book.parameters(4)


def test_no_client_waits_for_what_anothers_prompt_costs(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one's prompt is read, whatever it takes, others are opened, and its own next one is not."""
    reading, done = threading.Event(), threading.Event()

    def encode(text: str) -> list[int]:
        if text == "costly":
            reading.set()
            done.wait(200)
        return [65]

    monkeypatch.setattr(desk.front.inputs.tokenizer(), "encode_text", encode)

    def command(row: int, text: str, client: bytes) -> engine.OpenEngineRow:
        return engine.OpenEngineRow(row=row, prompt=text_prompt(text), client=client)

    desk.front.reader.open(command(1, "costly", b"one"))
    assert reading.wait(200)
    for row in range(2, 6):
        desk.front.reader.open(command(row, "a", b"one"))
    for row in range(6, 10):
        desk.front.reader.open(command(row, "a", b"other"))
        assert desk.events.get(timeout=200).opened.row == row
    desk.front.discard(2)
    assert desk.events.get(timeout=200).refused.problem.reason == "DISCARDED"
    desk.front.discard(1)
    done.set()
    assert [desk.events.get(timeout=200).opened.row for _ in range(4)] == [1, 3, 4, 5]
    with pytest.raises(InvalidInput):
        desk.front.book.prompt(1)
    assert desk.front.book.prompt(3).tolist() == [65]


def test_a_schema_that_costs_too_much_is_its_senders_error(desk: Desk) -> None:
    """Its parts pass every check, and no thread of the head compiles it."""
    members = {f"p{n}": {"type": "integer", "multipleOf": 9973 - n} for n in range(128)}
    costly = json.dumps({"type": "object", "properties": members})
    problem = desk.open(1, text_prompt("a", schema=costly)).refused.problem
    assert (problem.reason, problem.code) == ("BAD_GRAMMAR", "INVALID_ARGUMENT")
    assert not desk.front.reader.stuck
    assert desk.open(2, text_prompt("a", schema='{"type": "integer"}')).opened.row == 2


def test_a_text_is_refused_if_its_tokens_are_not_the_models(folder: Path) -> None:
    """The model has fewer embeddings than its tokenizer has tokens."""
    desk = Desk(folder, vocabulary=ord("b"))
    assert desk.open(1, text_prompt("a")).opened.row == 1
    for row, prompt in enumerate((text_prompt("ab"), inference.Prompt(tokens={"ids": [ord("b")]})), start=2):
        assert desk.open(row, prompt).refused.problem.reason == "BAD_TOKEN"


def test_a_folder_without_a_tokenizer_fails_the_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    front = Front(tmp_path, CONTEXT, VOCABULARY, lambda event: None, FolderSight(tmp_path, sees=False))
    with pytest.raises(ModelError) as caught:
        front.reader.wait_loaded()
    assert caught.value.reason == "TOKENIZER_CORRUPT"


def answer(stops: list[str], max_tokens: int = 100) -> Answer:
    spelling = BytesDetokenizer(lambda token: bytes([token]), strip_space=False)
    return Answer(spelling, StopStrings(stops), frozenset({0}), max_tokens)


def tell(made: Answer, content: bytes) -> str:
    told = ""
    for token in content:
        told += made.add(token)[0]
        if made.finish:
            break
    return told


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it() -> None:
    made = answer(["<stop>", "zz"])
    assert tell(made, b"one <sto two <stop> three") == "one <sto two "
    assert made.finish == inference.FINISH_REASON_STOP
    assert made.tokens == len("one <sto two <stop>")
    last = answer(["<stop>"])
    assert [last.add(token)[1] for token in b"<stop>"] == [None] * 5 + [inference.Parsed(stop="<stop>")]


def test_withheld_text_is_told_at_the_end() -> None:
    assert tell(answer(["<stop>"]), b"one <sto\0") == "one <sto"
    cut = answer(["<stop>"], max_tokens=7)
    assert tell(cut, b"one <sto") == "one <st"
    assert cut.finish == inference.FINISH_REASON_LENGTH


def test_an_end_at_the_last_token_is_a_stop() -> None:
    made = answer([], max_tokens=2)
    assert tell(made, b"a\0") == "a"
    assert made.finish == inference.FINISH_REASON_STOP


def test_a_row_that_was_being_opened_when_its_epoch_closed_is_gone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = threading.Event()

    def close_meanwhile(text: str) -> list[int]:
        if text == "late":
            desk.front.close_rows()
            closed.set()
        return [65]

    monkeypatch.setattr(desk.front.inputs.tokenizer(), "encode_text", close_meanwhile)
    desk.front.reader.open(engine.OpenEngineRow(row=1, prompt=text_prompt("late")))
    assert closed.wait(200)
    assert desk.open(2, text_prompt("next")).opened.row == 2
    assert desk.deliver({1: 65}) == {}


@pytest.fixture
def long_desk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(f"{__name__}.CONTEXT", 400)
    made = Desk(folder)
    yield made
    made.front.stop()


def names_of(event: engine.EngineEvent) -> tuple[bytes, ...]:
    return tuple(name for _, name in split(event.opened.prefixes, event.opened.prompt_tokens))


def test_prefixes_are_named_by_scope_and_not_across(long_desk: Desk) -> None:
    begin = "a" * 100
    mine = names_of(long_desk.open(1, text_prompt(begin + "b" * 60), scope=b"me"))
    again = names_of(long_desk.open(2, text_prompt(begin + "c" * 60), scope=b"me"))
    theirs = names_of(long_desk.open(3, text_prompt(begin + "b" * 60), scope=b"you"))
    assert len(mine) == 2
    assert mine[0] == again[0]
    assert mine[1] != again[1]
    assert not set(mine) & set(theirs)
    assert names_of(long_desk.open(4, text_prompt(begin))) == ()
    long_desk.front.begin_epoch({})
    assert not set(mine) & set(names_of(long_desk.open(1, text_prompt(begin + "b" * 60), scope=b"me")))


def test_the_head_refuses_a_prefix_that_is_not_the_rows_own(long_desk: Desk) -> None:
    """A row of another scope, or with other tokens, never begins with it, whatever a gateway commands."""
    front = long_desk.front
    long_desk.open(1, text_prompt("a" * 140), scope=b"me")
    front.book.change(Keeping(1, Origin(1, 1, 128), 140, None, 0))
    for row, (text, scope) in enumerate(
        [("a" * 140, b"you"), ("a" * 70 + "b" * 70, b"me"), ("a" * 140, b""), ("a" * 65, b"me")], start=2
    ):
        long_desk.open(row, text_prompt(text), scope=scope)
    front.book.begin(Chunk(3, 64, 70, False, 0, 1))
    front.book.begin(Chunk(5, 64, 65, False, 0, 1))
    for row, start in ((2, 64), (2, 128), (3, 128), (4, 64), (5, 63), (9, 64)):
        with pytest.raises(InvalidInput) as caught:
            front.book.begin(Chunk(row, start, start + 1, False, 0, 1))
        assert caught.value.reason == "BAD_STEP"
    front.book.change(Dropping(1))
    with pytest.raises(InvalidInput):
        front.book.begin(Chunk(3, 64, 70, False, 0, 1))


def on_disk(front: Front, key: bytes = b"k" * 32) -> None:
    front.begin_epoch({})
    front.book.use_disk(StoredNames(key, lambda chain: chain))


def stored_of(desk: Desk, row: int, text: str, scope: bytes, **fields: object) -> Chain:
    """The chain that the gateway gets of a row, and, of a prompt that was asked before, every member too."""
    desk.open(1000 + row, text_prompt(text, **fields), scope=scope)
    stored = Chain.unpack(desk.open(row, text_prompt(text, **fields), scope=scope).opened.stored)
    assert params.chain_in(desk.front.book.parameters(row)) == stored
    return stored


def written_of(desk: Desk, row: int, prompt: inference.Prompt) -> int:
    """Tokens of a row that members are to write."""
    desk.open(row, prompt, scope=b"ckey")
    return params.chain_in(desk.front.book.parameters(row)).tokens


def chat_prompt(*messages: tuple[str, str], tools: int = 0) -> inference.Prompt:
    prompt = inference.Prompt()
    for role, content in messages:
        prompt.chat.messages.add(role=role, content=content)
    for number in range(tools):
        prompt.chat.tools.add(name=f"tool{number}", parameters="{}")
    return prompt


def test_a_prompt_is_written_once_it_comes_again_or_if_its_shape_says_that_it_will(folder: Path) -> None:
    """Prompts that are asked once are written as far as they have a beginning in common."""
    desk = Desk(folder, context=2000)
    on_disk(desk.front)
    common = "a" * 300
    assert written_of(desk, 1, text_prompt(common + "b" * 300)) == 0
    assert written_of(desk, 2, text_prompt(common + "c" * 300)) == 256
    assert written_of(desk, 3, text_prompt(common + "b" * 300)) == 512
    assert written_of(desk, 4, chat_prompt(("user", "d" * 600))) == 0
    middle = chat_prompt(("user", "e" * 600), ("assistant", "f"), ("user", "g"))
    assert written_of(desk, 5, middle) >= 512
    assert written_of(desk, 6, chat_prompt(("user", "h" * 600), tools=1)) >= 512
    desk.front.stop()


def test_blocks_are_named_alike_in_every_epoch_for_prompts_in_clear_alone(long_desk: Desk) -> None:
    text = "a" * 300
    assert not long_desk.open(1, text_prompt(text), scope=b"ckey").opened.stored, "without a disk"
    on_disk(long_desk.front)
    mine = stored_of(long_desk, 2, text, b"ckey")
    assert (len(mine.names), mine.tokens) == (1, 256)
    assert not stored_of(long_desk, 3, text, b"s" + bytes(32)).names, "a sealed prompt"
    assert not stored_of(long_desk, 4, text, b"").names
    assert not stored_of(long_desk, 5, "a" * 255, b"ckey").names
    scored = inference.Sampling(logprobs=1, prompt_logprobs=True)
    assert not stored_of(long_desk, 6, text, b"ckey", sampling=scored).names
    theirs = stored_of(long_desk, 7, text, b"cother")
    assert not {mine.scope, *mine.names} & {theirs.scope, *theirs.names}
    on_disk(long_desk.front)
    assert stored_of(long_desk, 2, "a" * 256 + "b" * 9, b"ckey") == mine
    on_disk(long_desk.front, b"l" * 32)
    assert stored_of(long_desk, 2, text, b"ckey") != mine


def test_the_head_recalls_a_rows_own_blocks_alone(long_desk: Desk) -> None:
    front = long_desk.front
    on_disk(front)
    mine = stored_of(long_desk, 1, "a" * 300, b"ckey")
    theirs = stored_of(long_desk, 2, "a" * 300, b"cother")
    long_desk.open(3, text_prompt("a" * 300), scope=b"s" + bytes(32))

    def recalls(number: int, row: int, chain: Chain) -> bool:
        return front.book.recalls(control.Recall(number=number, row=row, chain=chain.packed()))

    for row, chain in ((1, theirs), (2, mine), (3, mine), (9, mine), (1, Chain(mine.scope, theirs.names))):
        assert not recalls(1, row, chain)
    assert recalls(2, 1, mine)
    assert recalls(3, 1, mine)
    front.book.cancel_recall(3)
    for recall, tokens in ((1, 256), (3, 256), (2, 100)):
        with pytest.raises(InvalidInput):
            front.book.change(Restoring(1, Origin(1, 1, tokens), recall, mine.names[0]))
    assert recalls(4, 1, mine)
    front.book.change(Restoring(1, Origin(1, 1, 256), 4, mine.names[0]))
    front.book.begin(Chunk(1, 256, 260, False, 0, 1))
    with pytest.raises(InvalidInput):
        front.book.begin(Chunk(2, 256, 260, False, 0, 1))


def test_a_recall_belongs_to_the_row_that_it_was_first_for(long_desk: Desk) -> None:
    """A gateway could have another row of the same length begin with what was read for the first."""
    front = long_desk.front
    on_disk(front)
    first = stored_of(long_desk, 1, "a" * 300, b"ckey")
    second = stored_of(long_desk, 2, "b" * 300, b"ckey")
    assert front.book.recalls(control.Recall(number=1, row=1, chain=first.packed()))
    assert not front.book.recalls(control.Recall(number=1, row=2, chain=second.packed()))
    with pytest.raises(InvalidInput):
        front.book.change(Restoring(1, Origin(1, 1, 256), 1, second.names[0]))


def test_what_goes_on_into_the_next_epoch_has_other_names_there(long_desk: Desk) -> None:
    front, origins = long_desk.front, [Origin(1, 1, 128), Origin(1, 1, 64), Origin(1, 2, 64)]
    before = names_of(long_desk.open(1, text_prompt("a" * 140), scope=b"me"))
    for number, origin in enumerate(origins[:2], 1):
        front.book.change(Keeping(number, origin, 140, None, 0))
    told = front.begin_epoch({origins[0]: (), origins[2]: ()})  # the caches of the second are gone
    with pytest.raises(InvalidInput):
        front.book.begin(Chunk(1, 64, 70, False, 0, 1))
    assert list(told) == origins[:1]
    again = names_of(long_desk.open(1, text_prompt("a" * 140), scope=b"me"))
    assert b"".join(again) == told[origins[0]][0]
    assert not set(before) & set(again)
    for origin in origins[1:]:
        with pytest.raises(InvalidInput):
            front.book.change(Adopting(1, origin))
    front.book.change(Adopting(1, origins[0]))
    front.book.begin(Chunk(1, 128, 140, True, 0, 1))
    long_desk.open(2, text_prompt("a" * 140), scope=b"you")
    with pytest.raises(InvalidInput):
        front.book.begin(Chunk(2, 128, 140, True, 0, 1))


def test_a_mark_is_known_at_the_end_of_an_early_turn_in_every_later_epoch(long_desk: Desk) -> None:
    """The prompts of later turns are not named there any more."""
    front = long_desk.front
    for turn in range(1, 7):
        names_of(long_desk.open(turn, text_prompt("a" * (50 + 50 * turn)), scope=b"me"))
    names_of(long_desk.open(7, text_prompt("a" * 100 + "b" * 50), scope=b"me"))
    early, origin = 100 - OPENING, Origin(1, 6, 350)
    front.book.change(Keeping(1, origin, 350, None, 0, (early,)))
    front.book.begin(Chunk(7, early, 120, False, 0, 1))
    told = front.begin_epoch({origin: (early,)})[origin]
    named = split(told[0], 350, ends=told[1])
    assert {length for length, _ in named if length % 64} == {early, 350}
    front.book.change(Adopting(1, origin, (early,)))
    opened = long_desk.open(1, text_prompt("a" * 100 + "b" * 50), scope=b"me").opened
    assert set(split(opened.prefixes, 150, ends=opened.ends)) >= {pair for pair in named if pair[0] <= early}
    front.book.begin(Chunk(1, early, 120, False, 0, 1))


def test_only_named_lengths_of_named_rows_are_kept(long_desk: Desk) -> None:
    long_desk.open(1, text_prompt("a" * 140), scope=b"me")
    long_desk.open(2, text_prompt("a" * 140))
    for keeping in (
        Keeping(1, Origin(1, 1, 100), 140, None, 0),
        Keeping(1, Origin(1, 2, 64), 140, None, 0),
        Keeping(1, Origin(1, 7, 64), 64, None, 0),
    ):
        with pytest.raises(InvalidInput) as caught:
            long_desk.front.book.change(keeping)
        assert caught.value.reason == "BAD_STEP"


def test_an_answer_goes_on_with_its_prompts_names(long_desk: Desk) -> None:
    """Also with its last token: caches hold it if another step was under way."""
    front = long_desk.front
    long_desk.open(1, text_prompt("a" * 60), 6, scope=b"me")
    step = ResolvedStep(1, bytes(32), (), (), 0, (1,), (1,))
    for _ in range(6):
        front.book.deliver(step, [ord("b")], {})
        (output,) = long_desk.events.get(timeout=200).done.outputs
        assert bool(output.prefixes) == bool(output.finish)
    follow = long_desk.open(2, text_prompt("a" * 60 + "b" * 5 + "c"), scope=b"me")
    assert output.finish
    assert output.prefixes == follow.opened.prefixes
    front.book.change(Keeping(1, Origin(1, 1, 64), 66, 0, 0))
    front.book.begin(Chunk(2, 64, 66, True, 0, 1))
    front.book.change(Keeping(2, Origin(1, 1, 65), 66, 0, 0))
    front.book.begin(Chunk(2, 65, 66, True, 0, 2))
    answer = dict(split(output.prefixes, 66, 60, output.ends))
    assert list(answer) == [64, 65, 66]
    named = dict(split(follow.opened.prefixes, 66, ends=follow.opened.ends))
    assert [answer[length] == named[length] for length in answer] == [True, True, False]


def told_of(token: int, *top: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5, tuple((each, -1.0) for each in top))


def spelt(entries: list[inference.TokenLogprob]) -> bytes:
    return b"".join(entry.spelling for entry in entries)


def logged(stops: list[str], content: bytes, max_tokens: int = 100) -> list[tuple[str, bytes]]:
    """The output for each token: text, and the tokens that are sent with it."""
    spelling = BytesDetokenizer(lambda token: bytes([token]), strip_space=False)
    log = TokenLog(lambda token: bytes([token]))
    made = Answer(spelling, StopStrings(stops), frozenset({0}), max_tokens, log)
    found = []
    for token in content:
        text, _, entries = made.add_logged(token, told_of(token))
        found.append((text, spelt(entries)))
        if made.finish:
            break
    return found


def test_tokens_are_told_with_their_text() -> None:
    assert logged([], b"ab\0") == [("a", b"a"), ("b", b"b"), ("", b"")]
    assert logged([], "é!".encode(), max_tokens=3) == [("", b"\xc3"), ("é", b"\xa9"), ("!", b"!")]


def test_tokens_are_withheld_with_their_text() -> None:
    assert logged(["cd"], b"abcx\0") == [("a", b"a"), ("b", b"b"), ("", b""), ("cx", b"cx"), ("", b"")]
    assert logged(["cd"], b"abc\0") == [("a", b"a"), ("b", b"b"), ("", b""), ("c", b"c")]


def test_tokens_of_a_stop_string_are_not_told() -> None:
    assert logged(["bc"], b"abcd") == [("a", b"a"), ("", b""), ("", b"")]
    found = logged(["cde"], b"abcdcde")
    assert "".join(text for text, _ in found).encode() == b"".join(told for _, told in found) == b"abcd"


def test_an_answer_that_is_cut_off_tells_all_of_its_tokens() -> None:
    assert logged(["cd"], b"abc", max_tokens=3)[-1] == ("c", b"c")
    assert logged([], "é".encode(), max_tokens=1) == [("", b"\xc3")]


def test_a_row_that_asks_is_told_log_probabilities(desk: Desk) -> None:
    desk.open(1, text_prompt("a"))
    desk.open(2, text_prompt("a", sampling=inference.Sampling(logprobs=2)))
    assert desk.front.book.asking((1,), first=True) == ()
    assert desk.front.book.asking((2, 1, 2), first=True) == ((0, 2, 0, 0), (2, 2, 0, 0))
    step = ResolvedStep(1, bytes(32), (), (), 0, (1, 2), (1, 2))
    desk.front.book.deliver(step, [65, 66], {1: told_of(66, 67, END)})
    plain, asked = (one.delta for one in desk.events.get(timeout=200).done.outputs)
    assert (plain.text, list(plain.logprobs)) == ("A", [])
    (entry,) = asked.logprobs
    assert (asked.text, entry.id, entry.spelling, entry.logprob) == ("B", 66, b"B", -0.5)
    assert [(each.id, each.spelling) for each in entry.top] == [(67, b"C"), (END, b"<end>")]
    desk.front.book.forget(2)
    assert desk.front.book.asking((2,), first=True) == ()
    desk.open(3, text_prompt("a", sampling=inference.Sampling(logprobs=0)))
    desk.front.close_rows()
    assert desk.front.book.asking((3,), first=True) == ()


def test_a_row_that_asks_is_told_of_its_prompt_once(desk: Desk) -> None:
    sampling = inference.Sampling(logprobs=1, prompt_logprobs=True)
    opened = desk.open(1, text_prompt("abc", sampling=sampling), scope=b"shares").opened
    assert opened.prefixes == b"", "a prefix that is kept has no logits"
    assert params.decode(desk.front.book.parameters(1)).scored == tuple(b"abc")
    assert desk.front.book.asking((1,), first=True) == ((0, 1, 2, 0),)
    assert desk.front.book.asking((1,), first=False) == ((0, 1, 0, 0),)
    told = TokenLogprobs(-1.0, ((100, -1.0),), tuple(TokenLogprobs(-at, ((1, -0.5),)) for at in (2.0, 3.0)))
    step = ResolvedStep(1, bytes(32), (), (), 0, (1,), (1,))
    desk.front.book.deliver(step, [100], {0: told})
    first = desk.events.get(timeout=200).done
    assert (first.step, first.more) == (1, False)
    found = [(one.spelling, one.logprob, one.prompt) for one in first.outputs[0].delta.logprobs]
    assert found == [(b"a", 0.0, True), (b"b", -2.0, True), (b"c", -3.0, True), (b"d", -1.0, False)]
    desk.front.book.deliver(step, [END], {0: TokenLogprobs(-1.0, ())})
    last = desk.events.get(timeout=200).done.outputs[0]
    assert [(one.spelling, one.prompt) for one in last.delta.logprobs] == [(b"<end>", False)]
    assert last.finish == inference.FINISH_REASON_STOP


def test_outputs_that_are_large_together_come_in_parts(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (1, 2, 3)
    for row in rows:
        desk.open(row, text_prompt("a", sampling=inference.Sampling(logprobs=2)))
    step = ResolvedStep(1, bytes(32), (), (), 0, rows, rows)
    told = dict.fromkeys(range(3), told_of(66, 67, END))
    desk.front.book.deliver(step, [65] * 3, told)
    whole = desk.events.get(timeout=200).done
    assert len(whole.outputs) == 3
    monkeypatch.setattr(answers, "MAX_TOLD_BYTES", 2 * whole.outputs[0].ByteSize())
    desk.front.book.deliver(step, [65] * 3, told)
    parts = [desk.events.get(timeout=200).done for _ in range(2)]
    assert [(part.more, [one.row for one in part.outputs]) for part in parts] == [
        (True, [1, 2]),
        (False, [3]),
    ]


def test_what_is_told_of_a_prompt_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_SCORED", 6)
    sampling = inference.Sampling(logprobs=1, prompt_logprobs=True)
    refused = desk.open(1, text_prompt("abcd", sampling=sampling)).refused
    assert (refused.problem.reason, refused.problem.metadata["param"]) == ("TOO_MANY_LOGPROBS", "logprobs")
    desk.open(2, text_prompt("abc", sampling=sampling))
    monkeypatch.setattr(answers, "MAX_TOLD_BYTES", 20)
    told = TokenLogprobs(-1.0, (), (TokenLogprobs(-1.0, ()),) * 2)
    desk.front.book.deliver(ResolvedStep(1, bytes(32), (), (), 0, (2,), (2,)), [100], {0: told})
    assert desk.events.get(timeout=200).refused.problem.reason == "TOO_MANY_LOGPROBS"
    assert not desk.events.get(timeout=200).done.outputs


def test_what_comes_at_once_after_long_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row ends, and others go on: a sealed output that is larger ends the epoch."""
    desk.open(1, text_prompt("x", stop=["a" * 30]))
    desk.open(2, text_prompt("x"))
    monkeypatch.setattr(answers, "MAX_OUTPUT_BYTES", 30)
    for _ in range(25):
        assert desk.deliver({1: ord("a")})[1][0] == ""
    step = ResolvedStep(99, bytes(32), (), (), 0, (1, 2), (1, 2))
    desk.front.book.deliver(step, [ord("b")] * 2, {})
    assert desk.events.get(timeout=200).refused.problem.reason == "OUTPUT_TOO_LARGE"
    assert [(one.row, one.delta.text) for one in desk.events.get(timeout=200).done.outputs] == [(2, "b")]


def test_tokens_without_text_are_not_withheld_for_ever(folder: Path) -> None:
    """The row that brings them ends, and no epoch: a gateway takes no output that is so large."""
    without_text = VOCABULARY - 1
    desk = Desk(folder, context=1 << 16)
    desk.open(1, text_prompt("x", stop=["ab"], sampling=inference.Sampling(logprobs=1)))
    step = ResolvedStep(1, bytes(32), (), (), 0, (1,), (1,))
    token, withheld = ord("a"), 0
    while withheld < 16 * MAX_STOP_CHARACTERS:
        desk.front.book.deliver(step, [token], {0: told_of(token)})
        event = desk.events.get(timeout=200)
        if event.HasField("refused"):
            break
        (output,) = event.done.outputs
        assert (output.delta.text, len(output.held), output.finish) == ("", withheld + 1, 0)
        token, withheld = without_text, withheld + 1
    assert event.refused.problem.reason == "TOO_MANY_LOGPROBS"
    assert withheld >= MAX_STOP_CHARACTERS, "as many as may have text"
    desk.front.stop()


def test_a_repetition_penalty_takes_the_prompts_end_along(desk: Desk) -> None:
    sampling = inference.Sampling(repetition_penalty=1.5, repetition_context_size=2)
    opened = desk.open(1, text_prompt("abc", sampling=sampling)).opened
    record = desk.front.book.parameters(1)
    assert opened.params_bytes == len(record)
    assert params.decode(record).prompt_tail == (98, 99)


def test_a_bias_on_a_token_that_is_not_there_is_refused(desk: Desk) -> None:
    last = inference.Sampling(logit_bias={END: 1.0})
    assert desk.open(1, text_prompt("a", sampling=last)).opened.row == 1
    beyond = inference.Sampling(logit_bias={END + 1: 1.0})
    problem = desk.open(2, text_prompt("a", sampling=beyond)).refused.problem
    assert (problem.reason, problem.metadata["param"]) == ("BAD_SAMPLING", "logit_bias")


def test_an_answer_ends_at_the_tokens_that_were_named(desk: Desk) -> None:
    sampling = inference.Sampling(stop_token_ids=[spell("b")], min_tokens=2)
    desk.open(1, text_prompt("a", sampling=sampling))
    row = params.decode(desk.front.book.parameters(1))
    assert (row.masked_until, row.masked) == (2, tuple(sorted({spell("b"), END})))
    assert desk.deliver({1: spell("x")}) == {1: ("x", 1, 0)}
    assert desk.deliver({1: spell("b")}) == {1: ("", 2, inference.FINISH_REASON_STOP)}
    beyond = inference.Sampling(stop_token_ids=[END + 1])
    problem = desk.open(2, text_prompt("a", sampling=beyond)).refused.problem
    assert (problem.reason, problem.metadata["param"]) == ("BAD_SAMPLING", "stop_token_ids")


@pytest.mark.parametrize("name", ["min_tokens", "ignore_eos"])
def test_an_answer_that_ends_by_its_schema_cannot_go_on(desk: Desk, name: str) -> None:
    sampling = inference.Sampling(**{name: 1})  # type: ignore[arg-type]
    for schema, reason in (("", ""), ('{"type": "object"}', "BAD_SAMPLING")):
        row = 1 + bool(schema)
        problem = desk.open(row, text_prompt("a", sampling=sampling, schema=schema)).refused.problem
        assert (problem.reason, problem.metadata.get("param", "")) == (reason, name if reason else "")


def test_schemas_that_cost_too_much_are_not_tried_one_by_one(
    calling: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def costly(grammar: str) -> None:
        tried.append(grammar)
        if '"enum"' in grammar:
            raise bad_grammar("it takes too long", limit=1)

    monkeypatch.setattr(calling.front.inputs.grammars, "try_out", costly)
    chat = inference.Chat(messages=[inference.ChatMessage(role="user", content="x")], call_required=True)
    for place in range(4):
        chat.tools.add(name=f"tool{place}", parameters=json.dumps(CITY))
    assert calling.open(1, inference.Prompt(chat=chat)).opened.row == 1
    assert len(tried) == 2  # all of them, and none


def test_what_the_model_can_do_is_told(desk: Desk) -> None:
    assert desk.front.inputs.capabilities == []


CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
IMPOSSIBLE = {"type": "object", "properties": {"city": {"not": {"type": "null"}}}}


@pytest.fixture
def calling(folder: Path) -> Iterator[Desk]:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tool_parser_type"] = "json_tools"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    made = Desk(folder, 4000)
    yield made
    made.front.stop()


@pytest.mark.parametrize(
    ("schemas", "held"),
    [
        ([CITY], [True]),
        ([IMPOSSIBLE], [False]),
        ([IMPOSSIBLE, CITY, CITY], [False, True, True]),
        ([IMPOSSIBLE, *[CITY] * 8], [False] * 9),
    ],
)
def test_a_call_that_is_required_is_held_to_its_schema_where_it_can_be(
    calling: Desk, schemas: list[Any], held: list[bool]
) -> None:
    """As clients need it that read an object of this schema from the call, without `strict`."""
    assert calling.front.inputs.capabilities == ["tools"]
    chat = inference.Chat(messages=[inference.ChatMessage(role="user", content="x")], call_required=True)
    for place, schema in enumerate(schemas):
        chat.tools.add(name=f"tool{place}", parameters=json.dumps(schema))
    for place, bound in enumerate(held):
        for row, city in enumerate(("Paris", "in"), 1 + 2 * place):
            assert calling.open(row, inference.Prompt(chat=chat)).opened.row == row
            said = f'\n{{"name": "tool{place}", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
            refused = [one.reason for one in map(calling.problem_of(row), said.encode()) if one.reason]
            assert refused == (["GRAMMAR_FAILED"] if bound and city == "in" else [])
            calling.front.book.forget(row)


def test_choices_are_opened_with_their_row_and_forgotten_with_it(desk: Desk) -> None:
    command = engine.OpenEngineRow(row=1, prompt=text_prompt("hi"), max_tokens=2, choices=3)
    desk.front.reader.open(command)
    assert desk.events.get(timeout=200).opened.row == 1
    desk.front.book.prefilled(1)
    desk.front.book.forget(1)
    assert desk.deliver({1: 97, 2: 98, 3: 99}) == {2: ("b", 1, 0), 3: ("c", 1, 0)}
    command.row = 4
    desk.front.reader.open(command)
    desk.events.get(timeout=200)
    desk.front.book.forget(4)
    assert desk.deliver({4: 97, 5: 98, 6: 99}) == {}
    command.row, command.choices = 3, 2
    desk.front.reader.open(command)
    assert desk.events.get(timeout=200).refused.problem.reason == "ROW_EXISTS"


def test_a_gateway_that_opens_rows_for_ever_is_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens and steps nothing; what is open goes on, and so does opening once a row has gone."""
    monkeypatch.setattr(reader, "MAX_UNSTARTED", 4)
    for row in range(1, 5):
        assert desk.open(row, inference.Prompt(text="abc")).WhichOneof("event") == "opened"
    refused = desk.open(5, inference.Prompt(text="abc"))
    assert refused.refused.problem.reason == "TOO_MANY_ROWS"
    desk.front.book.prefilled(1)
    assert desk.open(6, inference.Prompt(text="abc")).WhichOneof("event") == "opened"


def test_prompts_that_wait_to_be_read_are_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_UNREAD_BYTES", 1000)
    refused = desk.open(1, inference.Prompt(text="a" * 1000))
    assert refused.refused.problem.reason == "TOO_MANY_ROWS"
    for row in range(2, 100):
        assert desk.open(row, inference.Prompt(text="abc")).WhichOneof("event") == "opened"
        desk.front.book.forget(row)


LONG, END_OF_IT = "one <sto é <stop> two".encode(), 18


@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize("cut", range(len(LONG)))
def test_an_answer_that_goes_on_after_a_fault_is_told_once(cut: int, logs: bool) -> None:
    """Wherever it broke: in a character, in what may be a stop string, or between."""

    def made() -> Answer:
        spelling = BytesDetokenizer(lambda token: bytes([token]), strip_space=False)
        log = TokenLog(lambda token: bytes([token])) if logs else None
        return Answer(spelling, StopStrings(["<stop>"]), frozenset({0}), 100, log)

    def add(one: Answer, token: int) -> tuple[str, bytes]:
        if not logs:
            return one.add(token)[0], b""
        text, _, entries = one.add_logged(token, told_of(token))
        return text, spelt(entries)

    whole, first, second = made(), made(), made()
    expected = [add(whole, token) for token in LONG[:END_OF_IT]]
    found = [add(first, token) for token in LONG[:cut] if not first.finish]
    resume = inference.Resume(tokens=LONG[:cut], held=first.held)
    if first.finish:
        with pytest.raises(InvalidInput, match="had ended"):
            second.resume(resume)
        return
    second.resume(resume)
    found += [add(second, token) for token in LONG[cut:END_OF_IT]]
    assert found == expected
    assert (
        (second.finish, second.tokens)
        == (inference.FINISH_REASON_STOP, END_OF_IT)
        == (whole.finish, whole.tokens)
    )


def resumed(text: str, answered: str, **fields: int) -> inference.Prompt:
    return text_prompt(text, resume=inference.Resume(tokens=answered.encode(), **fields))


def test_a_row_goes_on_with_what_was_answered(long_desk: Desk) -> None:
    """The tokens that were answered are read like a prompt's, and counted as the answer's."""
    opened = long_desk.open(1, resumed("hi", "abc" * 30, choice=2), 93, b"me").opened
    assert (opened.prompt_tokens, opened.answered, opened.max_tokens) == (92, 90, 3)
    assert (
        long_desk.front.book.prompt(1).tobytes() == np.array(list(b"hi" + b"abc" * 30), np.uint32).tobytes()
    )
    assert params.decode(long_desk.front.book.parameters(1)).position == 90
    assert [long_desk.deliver({1: 65})[1] for _ in range(3)] == [
        ("A", 91, 0),
        ("A", 92, 0),
        ("A", 93, inference.FINISH_REASON_LENGTH),
    ]
    whole = long_desk.open(2, text_prompt("hi" + "abc" * 30), scope=b"me").opened
    assert opened.prefixes == whole.prefixes


@pytest.mark.parametrize(
    "prompt",
    [
        resumed("hi", "ab", choice=8),
        text_prompt("hi", resume=inference.Resume(tokens=[VOCABULARY])),
        text_prompt("hi", resume=inference.Resume(tokens=[65], held=[inference.TokenLogprob()])),
        text_prompt("hi", resume=inference.Resume(tokens=[65, END])),
        text_prompt("hi", resume=inference.Resume(tokens=[65] * 5)),
    ],
)
def test_an_answer_that_cannot_be_is_not_gone_on_with(desk: Desk, prompt: inference.Prompt) -> None:
    assert desk.open(1, prompt, max_tokens=5).refused.problem.reason == "BAD_RESUME"


def test_of_several_answers_each_goes_on_by_itself(desk: Desk) -> None:
    desk.front.reader.open(engine.OpenEngineRow(row=1, prompt=resumed("hi", "a"), choices=2))
    assert desk.events.get(timeout=200).refused.problem.reason == "BAD_RESUME"
    sampling = inference.Sampling(temperature=1, seed=2**64 - 1)
    desk.open(2, text_prompt("hi", sampling=sampling, resume=inference.Resume(choice=2)))
    assert params.decode(desk.front.book.parameters(2)).seed == 1


def test_options_that_a_request_does_not_name_are_the_models_own(folder: Path) -> None:
    """The tail samples by them, and so do drafts: they are in the row's record, also after a fault."""
    own = {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(own))
    desk = Desk(folder)
    unnamed = sum(MODELS_OWN.values()) - MODELS_OWN["top_k"]
    sampling = inference.Sampling(temperature=1, top_k=3, unnamed=unnamed)
    for row, more in enumerate(({}, {"resume": inference.Resume(tokens=[65])}), 1):
        assert desk.open(row, text_prompt("hi", sampling=sampling, **more)).HasField("opened")
        found = params.decode(desk.front.book.parameters(row))
        assert (found.temperature, found.top_p, found.top_k, found.repetition_penalty) == (0.5, 1, 3, 1.5)
        assert found.prompt_tail == (*b"hi", *([65] if more else []))
    desk.open(3, text_prompt("hi", sampling=inference.Sampling(temperature=1)))
    found = params.decode(desk.front.book.parameters(3))
    assert (found.temperature, found.top_k, found.repetition_penalty) == (1, 0, 1), "gRPC's, as before"
    desk.front.stop()


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_reasoning_and_calls_are_told_beside_the_text_also_after_a_fault(folder: Path, cut: int) -> None:
    """An answer that goes on at another token is divided as if it had never stopped. Stop strings in its call
    are none, also after a fault."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tool_parser_type"] = "json_tools"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    said = b'a <tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call> b at c'
    tools = [inference.Tool(name="look")]
    prompt = inference.Prompt(chat=inference.Chat(tools=tools))

    def answer() -> Answer:
        stops = StopStrings(["at", "_call>"])
        sections = sections_of(tokenizer, prompt, [], stops)
        return Answer(tokenizer.detokenizer(spelt=True), stops, tokenizer.end_tokens, 99, None, sections)

    def told(one: Answer, tokens: bytes) -> tuple[str, list[str]]:
        text, calls = "", []
        for token in [*tokens]:
            piece, parsed = one.add(token)
            text += piece
            calls += [call.arguments for call in parsed.tool_calls] if parsed else []
            if one.finish:
                break
        return text, calls

    first, second = answer(), answer()
    before = told(first, said[:cut])
    second.resume(inference.Resume(tokens=said[:cut]))
    after = told(second, said[cut:])
    assert (before[0] + after[0], before[1] + after[1]) == ("a  b ", ['{"at": 1}'])
    assert second.tokens == said.rindex(b"at") + 2


def with_tools(folder: Path, parser: str) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tool_parser_type": parser}))


class Reading(Desk):
    """A front whose model calls tools."""

    def __init__(self, folder: Path) -> None:
        with_tools(folder, "glm47")
        super().__init__(folder, 1 << 16)

    def ask(self, row: int, client: bytes = b"", **fields: Any) -> None:
        chat = inference.Chat(messages=[USER], tools=[inference.Tool(name="look")], **fields)
        prompt = inference.Prompt(chat=chat)
        self.front.reader.open(engine.OpenEngineRow(row=row, prompt=prompt, client=client))
        assert self.events.get(timeout=200).opened.row == row

    def step(self, **tokens: int) -> list[control.RowOutput]:
        """The outputs of a step; rows are named `row1` and so on."""
        self._step += 1
        rows = tuple(int(name[3:]) for name in tokens)
        step = ResolvedStep(self._step, bytes(32), (), (), 0, rows, rows)
        self.front.book.deliver(step, list(tokens.values()), {})
        done = self.events.get(timeout=200).done
        assert done.step == self._step
        return list(done.outputs)

    def say(self, row: str, text: bytes) -> list[control.RowOutput]:
        return [output for token in text for output in self.step(**{row: token})]


USER = inference.ChatMessage(role="user", content="hi")
CALLED = b"<tool_call>look<arg_key>at</arg_key><arg_value>x</arg_value></tool_call>"
LOOK = inference.ToolCall(name="look", arguments='{"at": "x"}')
HOSTILE = b"<tool_call>" + b"<arg_key>" * 700 + b"</arg_key><arg_value>" * 700


@pytest.fixture
def reading(folder: Path) -> Iterator[Reading]:
    made = Reading(folder)
    yield made
    made.front.stop()


def test_a_call_is_told_with_its_last_token(reading: Reading) -> None:
    reading.ask(1)
    *before, last = reading.say("row1", b"a " + CALLED)
    assert "".join(output.delta.text for output in before) == "a "
    assert (list(last.delta.parsed.tool_calls), last.delta.tokens) == ([LOOK], len(b"a " + CALLED))
    told = [*reading.say("row1", b"b"), *reading.step(row1=END)]
    assert ("".join(one.delta.text for one in told), told[-1].finish) == ("b", inference.FINISH_REASON_STOP)


def test_what_is_no_call_is_text(reading: Reading) -> None:
    reading.ask(1)
    told = [*reading.say("row1", HOSTILE), *reading.step(row1=END)]
    assert "".join(one.delta.text for one in told) == HOSTILE.decode()
    assert not any(one.delta.parsed.tool_calls for one in told)


def test_the_one_call_of_an_answer_is_its_end(reading: Reading) -> None:
    reading.ask(1, one_call=True)
    told = reading.say("row1", CALLED)
    assert told[-1].finish == inference.FINISH_REASON_STOP
    assert list(told[-1].delta.parsed.tool_calls) == [LOOK]


def test_a_budget_ends_thoughts_and_holds_nothing_else(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<think>", "</think>"])
    backend.save(str(folder / "tokenizer.json"))
    desk = Desk(folder)
    desk.front.begin_epoch({}, sources=LOOKUP)

    def opened(row: int, budget: int, **sampling: Any) -> str:
        chat = inference.Chat(messages=[inference.ChatMessage(role="user", content="hi")])
        chat.template_arguments = json.dumps({"thinking_budget": budget})
        desk.open(row, inference.Prompt(chat=chat, sampling=inference.Sampling(**sampling)), max_tokens=20)
        return params.decode(desk.front.book.parameters(row)).grammar

    assert opened(1, 2, min_tokens=3).endswith(FREE)
    assert opened(2, 20) == "", "no answer is longer"
    assert not opened(3, 0).startswith("start: thought")
    for token in (END + 1, 65, 66):
        assert desk.deliver({1: token})[1][1] != 0
    assert desk.drafts(1, 66, 1) == [END + 2], "nothing else may come"
    assert desk.deliver({1: END + 2})[1][2] == 0
    assert desk.deliver({1: 67})[1][0] == "C"
