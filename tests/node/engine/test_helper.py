"""Helper processes may be ended, stand still, or answer anything: no answer is wrong, and none is lost."""

from __future__ import annotations

import contextlib
import math
import os
import select
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from helperkit import Clock, idle, lie, packed, while_one_is_asked
from hostileimages import picture, saved
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from visionmodels import FAMILIES, write_folder

from sealring.mesh.errors import SealringError, Unavailable
from sealring.mesh.system.starting import Starts
from sealring.node.engine import helper
from sealring.node.engine.text import Arrays, RenderingProcess
from sealring.node.engine.trial import Trial
from sealring.node.engine.vision.viewing import Viewer, ViewerError, decoder_of
from sealring.node.engine.vision.waiting import Shape, Size, Waiting, arrays_of
from sealring.v1 import inference_pb2 as inference

CHAT = [{"role": "user", "content": "x"}]
FILE = saved(picture(), "PNG")
Ask = Callable[[], Any]


@contextlib.contextmanager
def template(folder: Path) -> Iterator[Ask]:
    with contextlib.closing(RenderingProcess("<{{ messages[0].content }}", {})) as made:
        yield lambda: made.render(CHAT)


@contextlib.contextmanager
def trial(folder: Path) -> Iterator[Ask]:
    made = Trial()
    made.run("start: /a/")
    yield lambda: made.run("start: /b/")
    made.close()


@contextlib.contextmanager
def processor(folder: Path) -> Iterator[Ask]:
    made = viewer(folder)
    pixels = memoryview(picture().tobytes())
    yield lambda: made.prepare(pixels, (48, 32), (48, 32), "images[0]")[1]
    made.close()


@contextlib.contextmanager
def decoder(folder: Path) -> Iterator[Ask]:
    made = decoder_of()

    def ask() -> tuple[int, int]:
        waiting = Waiting(inference.Image(data=FILE), "images[0]", made, Unprepared())
        size = waiting.decode()
        assert waiting.nbytes == 3 * size[0] * size[1]
        return size

    made.prepare()
    yield ask
    made.close()


class Unprepared:
    """The processor of who only decodes."""

    def prepare(self, pixels: memoryview, size: Size, target: Size, param: str) -> tuple[Arrays, Shape]:
        raise NotImplementedError


def viewer(folder: Path) -> Viewer:
    made = Viewer(write_folder(folder, "qwen2_vl"), FAMILIES["qwen2_vl"].numbers)
    made.placeholder = made.placeholders[0]
    return made


KINDS = {one.__name__: one for one in (template, trial, decoder, processor)}


@pytest.fixture(scope="module", params=KINDS)
def kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ask, Any]]:
    before = set(psutil.Process().children())
    with KINDS[request.param](tmp_path_factory.mktemp("model")) as ask:
        yield ask, before


@pytest.fixture
def asked(kind: tuple[Ask, Any]) -> tuple[Ask, psutil.Process, Any]:
    """A function that asks a process, the idle process, and its answer."""
    ask, before = kind
    answer = ask()
    (process,) = idle(before)
    return ask, process, answer


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells it of another process")
def test_each_process_is_confined_that_is_asked(asked: tuple[Ask, psutil.Process, Any]) -> None:
    told = Path(f"/proc/{asked[1].pid}/status").read_text()
    status = dict(line.split(":", 1) for line in told.splitlines())
    assert (status["Seccomp"].strip(), status["NoNewPrivs"].strip()) == ("2", "1")
    assert asked[1].num_fds() == 3


def test_the_first_process_of_a_kind_may_take_longer_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts("template", 0.0)
    monkeypatch.setattr(helper, "_starts_of", lambda module: starts)
    with template(tmp_path) as ask:
        ask()
    with pytest.raises(Unavailable), template(tmp_path):
        pass


def test_what_a_process_was_asked_that_is_killed_is_asked_again(
    asked: tuple[Ask, psutil.Process, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, process, answer = asked
    process.suspend()  # so that it does not answer before
    assert while_one_is_asked(monkeypatch, ask, process.kill) == answer


def test_what_a_process_was_asked_that_stands_still_is_asked_again(
    asked: tuple[Ask, psutil.Process, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, process, answer = asked
    clock = Clock(monkeypatch)
    process.suspend()
    assert (
        while_one_is_asked(monkeypatch, ask, lambda: setattr(clock, "ahead", helper.WALL_SECONDS)) == answer
    )


def test_what_no_process_answers_is_nobodys_fault_and_the_next_question_is_answered(
    asked: tuple[Ask, psutil.Process, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """503, which clients repeat, and never 400."""

    def late(*_: Any) -> None:
        raise TimeoutError

    ask, _, answer = asked
    with monkeypatch.context() as patched:
        patched.setattr(helper, "wait_for", late)
        with pytest.raises(Unavailable) as caught:
            ask()
    assert (caught.value.reason, bool(caught.value.hint)) == ("NO_ANSWER", True)
    assert ask() == answer


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
TRUE: dict[str, tuple[dict[str, Any], bytes | None]] = {
    "template": ({}, b"<x"),
    "trial": ({}, None),
    "decoder": ({"size": [48, 32]}, bytes(3 * 48 * 32)),
    "processor": (
        {
            **{"text": "<image>", "rows": 1, "before": 0, "behind": 0, "tokens": 1},
            "arrays": [["pixel_values", "<f4", [2, 3]], ["image_grid_thw", "<i8", [1, 3]]],
        },
        bytes(48),
    ),
}
"""What each kind may answer."""

OTHERS = (
    "bad",
    "failed",
    "large",
    "refused",
    "corrupt",
    "error",
    "ended",
    "lost",
    "not_begun",
    "data",
)
FIRST = {"processor": {"placeholders": ["<image>"], "row_tokens": [1], "identity": "0"}}


@st.composite
def lies(draw: st.DrawFn, kind: str) -> bytes:
    true, data = TRUE[kind]
    answer: Any = dict(true)
    for _ in range(draw(st.integers(0, 2))):
        answer[draw(st.sampled_from([*true, *OTHERS]))] = draw(JSON)
    if "arrays" in true and draw(st.booleans()):
        answer["arrays"] = draw(st.lists(st.tuples(JSON, st.sampled_from(["<f4", "|O", "<M8[s]", 1]), JSON)))
    if draw(st.integers(0, 9)) == 0:
        answer = draw(JSON)
    if isinstance(answer, dict) and data is not None and draw(st.booleans()):
        return packed(answer, data[: draw(st.integers(0, len(data)))])
    return packed(answer, data if isinstance(answer, dict) else None)


@contextlib.contextmanager
def lied_viewer(folder: Path) -> Iterator[Ask]:
    made = Viewer(folder, {1: "<image>"})
    try:
        yield lambda: made.prepare(memoryview(b""), (1, 1), (1, 1), "images[0]")
    finally:
        made.close()


@contextlib.contextmanager
def lied_trial(folder: Path) -> Iterator[Ask]:
    made = Trial()
    yield lambda: made.run("start: /b/")
    made.close()


LIED = {"template": template, "decoder": decoder, "processor": lied_viewer, "trial": lied_trial}


@pytest.mark.parametrize("name", LIED)
@given(data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_a_process_answers_is_checked_before_it_is_used(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    """A process that was taken over says anything: it is a sound answer, or an error of the tree."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        said = data.draw(lies(name))
        lie(monkeypatch, tmp_path, packed(FIRST.get(name, {})), said)
        with contextlib.suppress(SealringError), LIED[name](tmp_path) as ask:
            ask()


@pytest.mark.parametrize("name", LIED)
@pytest.mark.parametrize(
    "said",
    [
        b"[" * 100_000 + b"\n",
        b'{"bad": "' + b"x" * (20 << 20) + b'"}\n',
        b'{"data": 99999999999999}\n',
        b'{"data": "9"}\n',
        b"[]\n",
        b'{"error": "' + b"x" * 9000 + b'", "bad": 1, "calls": 1, "arrays": 1, "size": 1}\n',
    ],
    ids=["nested", "an error of 20 MB", "endless data", "data of a text", "a list", "a long error"],
)
def test_what_is_no_answer_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: bytes
) -> None:
    lie(monkeypatch, tmp_path, packed(FIRST.get(name, {})), said)
    with pytest.raises(SealringError) as caught, LIED[name](tmp_path) as ask:
        ask()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "first",
    [{}, {"placeholders": "x"}, FIRST["processor"] | {"row_tokens": ["1"]}, {"failed": "x" * 999}],
)
def test_what_a_processor_says_of_itself_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: dict[str, Any]
) -> None:
    lie(monkeypatch, tmp_path, packed(first), packed({}))
    with pytest.raises(ViewerError):
        Viewer(tmp_path, {1: "<image>"})


def test_a_fork_that_somebody_ended_is_not_the_grammars_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie(monkeypatch, tmp_path, packed({}), packed({"lost": True}))
    with pytest.raises(Unavailable), lied_trial(tmp_path) as ask:
        ask()


def test_a_process_that_answers_byte_by_byte_has_its_limits_all_the_same() -> None:
    """There is always something to read of it."""
    reading, writing = os.pipe()
    os.write(writing, b"x")
    for until, memory, error in ((0.0, sys.maxsize, TimeoutError), (math.inf, 0, helper.OverLimitsError)):
        with pytest.raises(error):
            helper.wait_for(reading, select.POLLIN, until, os.getpid(), memory)
    helper.wait_for(reading, select.POLLIN, math.inf, os.getpid(), sys.maxsize)
    os.close(reading)
    os.close(writing)


def test_the_numbers_of_a_shape_are_not_multiplied_unless_they_are_few() -> None:
    """The product of a line of digits takes the engine's lock for seconds."""

    class Long(list[int]):
        def __iter__(self) -> Iterator[int]:
            pytest.fail("it was gone through")

    with pytest.raises(ValueError, match=r"\A\Z"):
        arrays_of({"arrays": [("x", "<f4", Long([9] * 99))], "data": memoryview(b"")}, (1, 1))


def test_on_macos_memory_counts_that_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident bytes fall while a process grows there, once the system compresses its pages."""

    class Library:
        def proc_pid_rusage(self, process: int, flavor: int, found: Any) -> int:
            assert flavor == 0
            struct.pack_into("=16x10Q", found, 0, 1, 2, 3, 4, 5, 6, 1 << 20, 1 << 30, 9, 10)
            return 0 if process == 7 else -1

    monkeypatch.setattr(helper.sys, "platform", "darwin")
    monkeypatch.setattr(helper.ctypes, "CDLL", lambda path: Library())
    assert helper.memory_of(7) == 1 << 30
    assert helper.memory_of(8) == 0
