"""The head's front with a model that sees: a prompt's tokens, its pictures and its names."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from hostileimages import BAD, HOSTILE, picture, saved
from visionmodels import FAMILIES, tokenizer, write_folder, write_model

from sealring.mesh.ring import (
    KEY_BYTES,
    NO_CHAIN,
    Chain,
    Dropping,
    Keeping,
    Origin,
    ResolvedStep,
    clear_scope,
)
from sealring.node.engine import params
from sealring.node.engine.text import Front, StoredNames
from sealring.node.engine.vision.viewing import FolderSight
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

SPECIAL = FAMILIES["gemma3"].special
ROW = SPECIAL.index("<image_soft_token>")
ONE, OTHER = saved(picture(), "PNG"), saved(picture().rotate(180), "JPEG")


class Desk:
    """A front and what it says."""

    def __init__(self, folder: Path, *, sees: bool = True, **options: int) -> None:
        self.events: SimpleQueue[engine.EngineEvent] = SimpleQueue()
        sight = FolderSight(folder, sees=sees)
        self.front = Front(folder, 4096, 1000, self.events.put, sight, **options)
        self.front.reader.wait_loaded()
        self._rows = 0

    def drafts(self, row: int, last: int, count: int) -> list[int]:
        """The first drafts of a chain behind the row's last token."""
        return self.front.book.source(row, control.DRAFT_SOURCE_LOOKUP).propose(last, count).there[:count]

    def open(
        self,
        *files: bytes,
        said: str = "what is it?",
        at: int = 0,
        scope: bytes = b"",
        answered: Sequence[int] = (),
        **options: float,
    ) -> engine.EngineEvent:
        self._rows += 1
        images = [inference.Image(data=file, at=at) for file in files]
        message = inference.ChatMessage(role="user", content=said, images=images)
        prompt = inference.Prompt(chat=inference.Chat(messages=[message]))
        prompt.sampling.MergeFrom(inference.Sampling(**options))
        if answered:
            prompt.resume.tokens.extend(answered)
        self.front.reader.open(engine.OpenEngineRow(row=self._rows, prompt=prompt, prefix_scope=scope))
        return self.events.get(timeout=200)

    def put(self, row: int, client: bytes, *files: bytes, said: str = "x") -> None:
        """A prompt of a client, whose event comes later."""
        images = [inference.Image(data=file) for file in files]
        message = inference.ChatMessage(role="user", content=said, images=images)
        prompt = inference.Prompt(chat=inference.Chat(messages=[message]))
        self.front.reader.open(engine.OpenEngineRow(row=row, prompt=prompt, client=client))

    def refusal_of(self, *files: bytes) -> str:
        return self.open(*files).refused.problem.reason


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    made = Desk(write_folder(tmp_path_factory.mktemp("gemma3"), "gemma3"))
    yield made
    made.front.stop()


def test_a_prompt_has_the_tokens_of_its_images(desk: Desk) -> None:
    opened = desk.open(ONE, OTHER).opened
    shown = "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n"
    turn = f"<bos><start_of_turn>user\n{shown * 2}what is it?<end_of_turn>\n<start_of_turn>model\n"
    ids = tokenizer(SPECIAL).encode(turn, add_special_tokens=False).ids
    assert desk.front.book.prompt(opened.row).tolist() == ids
    assert opened.prompt_tokens == len(ids)
    first, second = desk.front.book.pictures(opened.row)
    assert [*first.places, *second.places] == [place for place, token in enumerate(ids) if token == ROW]
    assert first.source.take()["pixel_values"].shape == (1, 3, 112, 112)
    assert first.end <= second.start
    spans = [(span.begin, span.end) for span in opened.unbroken]
    assert spans == [(first.start, first.end), (second.start, second.end)]


def test_members_learn_the_sizes_of_images_where_positions_have_three_dimensions(
    desk: Desk, tmp_path: Path
) -> None:
    seeing = Desk(write_folder(tmp_path, "qwen2_5_vl"))
    row = seeing.open(ONE, OTHER).opened.row
    grids, pictures = params.grids_in(seeing.front.book.parameters(row)), seeing.front.book.pictures(row)
    seeing.front.stop()
    assert [(grid.begin, grid.tokens) for grid in grids] == [
        (one.places[0], len(one.places)) for one in pictures
    ]
    assert len({(grid.height, grid.width) for grid in grids}) == 1 < grids[0].width
    other = desk.open(ONE).opened.row
    assert params.grids_in(desk.front.book.parameters(other)) == ()


def test_pictures_go_once_they_are_prefilled_or_nobody_wants_them(desk: Desk) -> None:
    row = desk.open(ONE).opened.row
    desk.front.book.prefilled(row)
    assert desk.front.book.pictures(row) == ()
    row = desk.open(ONE).opened.row
    desk.front.book.forget(row)
    assert desk.front.book.pictures(row) == ()


def test_prefixes_are_those_of_the_same_images(desk: Desk) -> None:
    scope = clear_scope("tenant")
    names = [desk.open(*files, scope=scope, said="x" * 300).opened.prefixes for files in ((ONE,), (OTHER,))]
    assert names[0] == desk.open(ONE, scope=scope, said="x" * 300).opened.prefixes
    assert names[0]
    pairs = zip(*(np.frombuffer(each, "V16") for each in names), strict=True)
    assert not any(mine == other for mine, other in pairs)


def test_blocks_on_disk_are_those_of_the_same_images(desk: Desk) -> None:
    seen: list[Chain] = []

    def held(chain: Chain) -> Chain:
        seen.append(chain)
        return NO_CHAIN

    desk.front.book.use_disk(StoredNames(bytes(KEY_BYTES), held))
    for file in (ONE, OTHER, ONE):
        desk.open(file, scope=clear_scope("tenant"), said="x" * 600)
    one, other, again = (chain.names for chain in seen)
    assert one == again
    assert not set(one) & set(other)


def test_what_is_said_again_is_counted_without_images(desk: Desk) -> None:
    opened = desk.open(ONE, repetition_penalty=1.5, repetition_context_size=4000).opened
    record = params.decode(desk.front.book.parameters(opened.row))
    assert ROW not in record.prompt_tail
    assert len(record.prompt_tail) == opened.prompt_tokens - 18


def test_a_lane_hears_only_of_sources_that_guess_for_each_of_its_rows(desk: Desk) -> None:
    """All rows of a step have drafts of one source, and a draft model guesses for none with an image."""
    sources = [control.DRAFT_SOURCE_LOOKUP, control.DRAFT_SOURCE_MODEL]
    desk.front.begin_epoch({}, sources=sources)
    sees, blind = desk.open(ONE).opened.row, desk.open().opened.row

    def told(*rows: int) -> list[control.DraftSource.ValueType]:
        desk.front.book.deliver(
            ResolvedStep(1, bytes(32), (), (), 0, rows, rows, asks=True), [9] * len(rows), {}
        )
        return [one.source for one in desk.events.get(timeout=200).done.rates]

    assert [told(blind), told(sees, blind)] == [sources, sources[:1]]


def test_nothing_of_an_image_is_guessed(desk: Desk) -> None:
    """The prompt's last tokens are there once more, with an image behind them."""
    desk.front.begin_epoch({}, sources=[control.DRAFT_SOURCE_LOOKUP, control.DRAFT_SOURCE_MODEL])
    row = desk.open(ONE, said="model", at=5).opened.row  # then a line break, as at the end
    last = int(desk.front.book.prompt(row)[-1])
    assert desk.front.book.source(row, control.DRAFT_SOURCE_MODEL) is None
    assert desk.drafts(row, last, 8) != [last] * 8
    assert not {ROW, SPECIAL.index("<start_of_image>")} & {*desk.drafts(row, last, 8)}


def test_scores_of_a_prompt_are_of_all_its_tokens(desk: Desk) -> None:
    opened = desk.open(ONE, logprobs=1, prompt_logprobs=True).opened
    assert len(params.decode(desk.front.book.parameters(opened.row)).scored) == opened.prompt_tokens


def test_a_bad_image_is_refused_and_the_next_prompt_is_read(desk: Desk) -> None:
    refused = desk.open(ONE, HOSTILE["a page"][1]()).refused.problem
    assert (refused.reason, refused.metadata["param"]) == (BAD, "messages[0].images[1]")
    assert desk.open(ONE).opened.prompt_tokens


def test_others_are_read_while_an_image_takes_long(desk: Desk) -> None:
    """Also a prompt that is long."""
    assert desk.open(ONE).opened.prompt_tokens
    children = psutil.Process().children()
    (reader,) = (one for one in children if "sealring.node.engine.vision.processor" in one.cmdline())
    reader.suspend()
    desk.put(1001, b"one", ONE)
    desk.put(1002, b"other", said="x" * 300_000)
    desk.put(1003, b"third")
    events = [desk.events.get(timeout=200) for _ in range(2)]
    reader.resume()
    events.append(desk.events.get(timeout=200))
    assert {event.opened.row or event.refused.row for event in events[:2]} == {1002, 1003}
    assert events[2].opened.row == 1001


def test_one_clients_images_are_read_between_those_of_another(desk: Desk) -> None:
    """A client that shows many, or costly ones, holds up others for one of them, and has all of them read.

    Neither client has shown any before: whose turn it is depends on the time that each has taken.
    """
    assert desk.open(ONE).opened.prompt_tokens
    children = psutil.Process().children()
    (reader,) = (one for one in children if "sealring.node.engine.vision.processor" in one.cmdline())
    reader.suspend()
    desk.put(1101, b"many", *[saved(picture(40 + number), "PNG") for number in range(4)])
    desk.put(1102, b"many", ONE)
    desk.put(1103, b"few", ONE)
    reader.resume()
    events = [desk.events.get(timeout=200) for _ in range(3)]
    assert [event.opened.row for event in events] == [1103, 1101, 1102]
    assert len(desk.front.book.pictures(1101)) == 4
    assert {tuple(one.source.take()) for one in desk.front.book.pictures(1101)} == {("pixel_values",)}


def test_a_prompt_that_is_replayed_shows_its_images_again(desk: Desk) -> None:
    scope = clear_scope("tenant")
    opened = desk.open(ONE, scope=scope).opened
    first = desk.front.book.pictures(opened.row)[0]
    again = desk.open(ONE, scope=scope, answered=[40, 41]).opened
    assert again.prompt_tokens == opened.prompt_tokens + 2
    assert again.prefixes == opened.prefixes
    (shown,) = desk.front.book.pictures(again.row)
    assert (shown.start, shown.end, shown.digest) == (first.start, first.end, first.digest)
    assert np.array_equal(shown.source.take()["pixel_values"], first.source.take()["pixel_values"])


def test_images_in_a_kept_prefix_are_not_decoded_again(desk: Desk) -> None:
    """A turn shows the images of the turn before, and a new one. Once nothing is kept, all are decoded."""
    scope, images = clear_scope("agent"), [ONE, OTHER]

    def waiting(*files: bytes) -> list[bool]:
        """Whether each image waits as its file."""
        row = desk.open(*files, said="x" * 200, at=30, scope=scope).opened.row
        sizes = [each.nbytes - each.places.nbytes for each in desk.front.book.pictures(row)]
        return [size == len(file) for size, file in zip(sizes, files, strict=True)]

    first = desk.open(*images, said="x" * 200, at=30, scope=scope).opened
    ends = [span.end for span in first.unbroken]
    assert waiting(*images) == [False, False]
    for kept, number in ((128, 1), (64, 2)):
        assert ends[0] < 64
        assert (ends[1] <= kept) == (kept == 128)
        desk.front.book.change(Keeping(number, Origin(1, first.row, kept), kept, None, 0))
        assert waiting(*images) == [True, kept == 128]
        desk.front.book.change(Dropping(number))
    assert waiting(*images) == [False, False]


def test_a_prompt_with_too_many_tokens_is_refused(desk: Desk) -> None:
    assert desk.refusal_of(*[saved(picture(8, 8), "PNG")] * 100) == ""
    assert desk.open(ONE, said="x" * 4090).refused.problem.reason == "CONTEXT_TOO_LONG"


def test_images_that_wait_to_be_prefilled_are_bounded(tmp_path: Path) -> None:
    desk = Desk(write_folder(tmp_path, "gemma3"), picture_bytes=2 * (112 * 112 * 3 * 4 + 16 * 8))
    row = desk.open(ONE).opened.row
    assert desk.refusal_of(ONE) == ""
    assert desk.refusal_of(ONE) == "TOO_MANY_ROWS"
    assert desk.open().opened.prompt_tokens
    desk.front.book.prefilled(row)
    assert desk.refusal_of(ONE) == ""
    desk.front.stop()


def test_a_model_that_sees_says_so(desk: Desk) -> None:
    assert desk.front.inputs.capabilities == ["vision"]


def test_a_model_without_a_tower_refuses_images_by_name(tmp_path: Path) -> None:
    made = Desk(write_folder(tmp_path, "gemma3"), sees=False)
    assert made.front.inputs.capabilities == []
    assert not made.front.inputs.vision_not_installed
    assert made.refusal_of(ONE) == "MODEL_CANNOT_SEE"
    assert made.open().opened.prompt_tokens
    made.front.stop()


def test_where_mlx_vlm_lacks_an_image_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path)
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    made = Desk(folder, sees=False)
    assert made.front.inputs.vision_not_installed
    refused = made.open(ONE).refused.problem
    made.front.stop()
    assert refused.reason == "VISION_NOT_INSTALLED"
    assert "pipx inject sealring mlx-vlm" in refused.hint


def test_a_template_that_knows_no_images_makes_the_model_blind(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "gemma3")
    (folder / "chat_template.jinja").write_text("{% for one in messages %}{{ one['content'] }}{% endfor %}")
    made = Desk(folder)
    assert made.front.inputs.capabilities == []
    assert made.refusal_of(ONE) == "MODEL_CANNOT_SEE"
    made.front.stop()


def test_a_folder_without_a_processor_makes_the_model_blind(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "gemma3")
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Nothing"}))
    made = Desk(folder)
    assert made.front.inputs.capabilities == []
    assert made.refusal_of(ONE) == "MODEL_CANNOT_SEE"
    made.front.stop()
