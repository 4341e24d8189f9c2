from __future__ import annotations

import enum
import io
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from refusals import refused

from sealring.mesh.errors import ConfigError, InvalidInput, NotFound
from sealring.mesh.system.logging import (
    configure,
    redact,
)

MARK = "the eagle lands at noon"


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks


@pytest.fixture
def out() -> io.StringIO:
    stream = io.StringIO()
    configure("node", stream=stream)
    return stream


def last(stream: io.StringIO) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(stream.getvalue().splitlines()[-1])
    return line


def test_lines_are_json_with_component_level_and_time(out: io.StringIO) -> None:
    structlog.get_logger().info("ring up", epoch=3, layers=[0, 4])
    line = last(out)
    assert (line["component"], line["level"], line["event"]) == ("node", "info", "ring up")
    assert line["epoch"] == 3
    assert line["layers"] == [0, 4]
    assert line["timestamp"].endswith("Z")


def test_warnings_of_libraries_are_logged(out: io.StringIO) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        configure("node", stream=out)
        warnings.warn("an old way", UserWarning, stacklevel=1)
    assert last(out)["level"] == "warning"


def test_levels_and_bad_level(out: io.StringIO) -> None:
    structlog.get_logger().debug("quiet")
    assert out.getvalue() == ""
    with refused("BAD_LOG_LEVEL", ConfigError):
        configure("node", level="loud")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": MARK},
        {"user_text": MARK},
        {"messages": [MARK]},
        {"reply": MARK.encode()},
        {"details": {"content": MARK, "inner": {"token": MARK}}},
        {"request": InvalidInput},
        {"thing": object()},
        {"error": ValueError(MARK)},
        {"parts": [MARK.encode(), bytearray(MARK.encode())]},
        {"token_id": 4711},
    ],
)
def test_content_never_gets_out(out: io.StringIO, fields: dict[str, Any]) -> None:
    structlog.get_logger().warning("seen", **fields)
    assert MARK not in out.getvalue()
    assert "4711" not in out.getvalue()


def test_harmless_fields_stay() -> None:
    class Kind(enum.Enum):
        A = "a"

    event = {
        "event": "x",
        "prompt_tokens": 5,
        "token_id": "abc",
        "key_type": "software",
        "path": Path("/tmp/x"),
        "kind": Kind.A,
        "member": None,
        "data": b"12",
        "many": list(range(99)),
        "long": "y" * 600,
    }
    plain = redact(None, "info", event)
    assert plain["prompt_tokens"] == 5
    assert (plain["token_id"], plain["key_type"]) == ("abc", "software")
    assert (plain["path"], plain["kind"], plain["member"]) == ("/tmp/x", "a", None)
    assert (plain["data"], plain["many"], len(plain["long"])) == ("<2 bytes>", "<99 items>", 503)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("y" * 500, "y" * 500),
        ("y" * 501, "y" * 500 + "..."),
        (list(range(8)), list(range(8))),
        (set(range(9)), "<9 items>"),
        (memoryview(b"123"), "<3 bytes>"),
        (ValueError(MARK), "ValueError"),
        (OSError(28, MARK), "OSError errno 28"),
        (OSError(MARK), "OSError"),
        (RuntimeError(f"[{MARK}] {MARK}"), "RuntimeError"),
        (RuntimeError("[METAL] failed (2)\n" + MARK), "RuntimeError: [METAL] failed (2)"),
        (RuntimeError("[metal::malloc] too large"), "RuntimeError: [metal::malloc] too large"),
        (RuntimeError("[Gather::eval_gpu] no such type"), "RuntimeError: [Gather::eval_gpu] no such type"),
        (ValueError(f"[METAL] {MARK}"), "ValueError"),
        (NotFound("no node", hint="look"), "NOT_FOUND: no node (hint: look)"),
        (NotFound("n" * 600), "NOT_FOUND: " + "n" * 489),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 1}}}),
        ({"a": {"b": {"c": {}}}}, {"a": {"b": {"c": "<dict>"}}}),
        ([[[1]]], [[[1]]]),
        ([[[[1]]]], [[["<list>"]]]),
        ({"a": {"key": MARK, 7: [MARK.encode()]}}, {"a": {"7": [f"<{len(MARK)} bytes>"]}}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_shown_in_short(value: object, shown: object) -> None:
    assert redact(None, "info", {"seen": value}) == {"seen": shown}


@pytest.mark.parametrize("how", ["context", "cause", "none"])
def test_what_an_error_came_of_is_told_unless_it_was_hidden(out: io.StringIO, how: str) -> None:
    try:
        try:
            raise KeyError(MARK)
        except KeyError as first:
            if how == "context":
                raise ValueError(MARK)  # noqa: B904
            raise ValueError(MARK) from (first if how == "cause" else None)
    except ValueError:
        structlog.get_logger().exception("failed")
    line = last(out)
    assert line["error"] == "ValueError"
    assert any("test_what_an_error_came_of" in frame for frame in line["exception"])
    assert ("KeyError" in line["exception"]) == (how != "none")
    assert MARK not in out.getvalue()


def test_an_uncaught_error_without_a_value_is_told_by_its_kind(out: io.StringIO) -> None:
    sys.unraisablehook(SimpleNamespace(exc_type=LookupError, exc_value=None, exc_traceback=None))  # type: ignore[arg-type]
    assert last(out)["error"] == "LookupError"


def test_deep_frames_are_all_there(out: io.StringIO) -> None:
    def dive(depth: int) -> None:
        if not depth:
            raise RuntimeError(MARK)
        dive(depth - 1)

    try:
        dive(30)
    except RuntimeError as error:
        structlog.get_logger().error("failed", exc_info=error, exception=[MARK.encode()])
    line = last(out)
    assert len(line["exception"]) == 11
    assert line["exception"][-1].endswith(" dive")
    assert MARK not in out.getvalue()


@pytest.mark.parametrize("caused", [True, False])
def test_our_errors_are_told_in_words_and_a_foreign_cause_is_placed(out: io.StringIO, caused: bool) -> None:
    """Clients get an error of a model's code without its place, so the log has to name it."""
    try:
        try:
            raise KeyError(MARK)
        except KeyError as cause:
            raise NotFound("no node abc", hint="look") from (cause if caused else None)
    except NotFound as error:
        structlog.get_logger().warning("refused", exc_info=error)
    line = last(out)
    assert line["error"] == "NOT_FOUND: no node abc (hint: look)"
    assert ("exception" in line) == caused
    if caused:
        assert line["exception"][0] == "KeyError"
        assert "test_our_errors" in line["exception"][1]
    assert MARK not in out.getvalue()


@pytest.mark.parametrize(
    ("says", "quoted"),
    [("peer said %s\nand more", "peer said %s"), ("%s", "%s"), ("%s" + "x" * 199, "%s" + "x" * 198)],
)
def test_libraries_are_quoted_with_one_short_line_without_arguments(
    out: io.StringIO, says: str, quoted: str
) -> None:
    logging.getLogger("grpc").warning(says, MARK)
    line = last(out)
    assert (line["event"], line["library"], line["says"]) == ("library log", "grpc", quoted)
    assert MARK not in out.getvalue()


def test_uncaught_exceptions_are_logged_without_their_message(out: io.StringIO) -> None:
    def fail() -> None:
        raise RuntimeError(MARK)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert last(out)["error"] == "RuntimeError"
    sys.excepthook(RuntimeError, RuntimeError(MARK), None)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert len(out.getvalue().splitlines()) == 2
    assert MARK not in out.getvalue()


def test_configuring_twice_logs_once(out: io.StringIO) -> None:
    again = io.StringIO()
    configure("node", stream=again)
    logging.getLogger("lib").error("once")
    assert len(again.getvalue().splitlines()) == 1
    assert out.getvalue() == ""


def test_a_logger_that_was_used_before_follows_the_new_configuration(out: io.StringIO) -> None:
    log, again = structlog.get_logger(), io.StringIO()
    log.info("once")
    configure("gateway", level="debug", stream=again)
    log.debug("twice")
    assert (last(again)["component"], last(again)["event"]) == ("gateway", "twice")


def test_a_dead_stream_does_not_stop_the_process() -> None:
    stream = io.StringIO()
    configure("node", stream=stream)
    stream.close()
    structlog.get_logger().info("into the void")


def _finalizer(error: BaseException) -> None:
    sys.unraisablehook(SimpleNamespace(exc_type=type(error), exc_value=error, exc_traceback=None))


def _task(error: BaseException) -> None:
    logging.getLogger("asyncio").error("Task exception was never retrieved", exc_info=error)


@pytest.mark.parametrize("happens", [_finalizer, _task])
def test_what_is_logged_while_a_line_is_written_blocks_nothing(
    happens: Callable[[BaseException], None],
) -> None:
    class Stream(io.StringIO):
        def write(self, text: str, /) -> int:
            if "outer" in text:
                happens(RuntimeError(MARK))
            return super().write(text)

    stream = Stream()
    configure("node", stream=stream)
    thread = threading.Thread(target=structlog.get_logger().info, args=("outer",), daemon=True)
    thread.start()
    thread.join(200)
    assert not thread.is_alive()
    assert [json.loads(line).get("error") for line in stream.getvalue().splitlines()] == [
        "RuntimeError",
        None,
    ]


@pytest.mark.parametrize("report", ["threading.excepthook", "fail"])
def test_an_error_that_a_thread_did_not_catch_ends_the_process(report: str) -> None:
    """Also if nothing can be said of it."""
    program = f"""
import threading, time
from sealring.mesh.system.logging import end_with_any_thread
def fail(*args):
    raise MemoryError
threading.excepthook = {report}
end_with_any_thread()
threading.Thread(target=fail, daemon=True).start()
time.sleep(200)
"""
    assert (
        subprocess.run([sys.executable, "-c", program], check=False, stderr=subprocess.DEVNULL).returncode
        == 1
    )


def test_a_file_that_cannot_be_opened_again_is_tried_with_every_line(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "node.log"
    configure("node", file=file)
    file.parent.rename(tmp_path / "moved")
    structlog.get_logger().info("lost")
    structlog.get_logger().info("lost as well")
    file.parent.mkdir()
    for event in ("one", "two", "three"):
        structlog.get_logger().info(event)
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["one", "two", "three"]


def test_a_log_file_is_its_owners_whatever_the_umask_and_its_folder_for_all_to_read(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "node.log"
    before = os.umask(0)
    try:
        configure("node", file=file)
        file.rename(file.with_name("node.log.0"))
        structlog.get_logger().info("one")
    finally:
        os.umask(before)
    assert {one.stat().st_mode & 0o777 for one in file.parent.iterdir()} == {0o600}
    assert file.parent.stat().st_mode & 0o777 == 0o755


def test_a_rotated_file_is_opened_again(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "node.log"
    configure("node", file=file)
    structlog.get_logger().info("one")
    file.rename(tmp_path / "node.log.0")
    structlog.get_logger().info("two")
    structlog.get_logger().info("three")
    assert '"one"' in (tmp_path / "node.log.0").read_text()
    assert len(file.read_text().splitlines()) == 2


def test_a_log_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("BAD_LOG_FILE", ConfigError):
        configure("node", file=tmp_path / "file" / "node.log")


@pytest.mark.parametrize("to_file", [False, True])
def test_a_terminal_gets_lines_for_people_and_a_file_gets_json(tmp_path: Path, to_file: bool) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream, file = Terminal(), tmp_path / "node.log"
    configure("node", stream=stream, file=file if to_file else None)
    structlog.get_logger().info("ring up", epoch=3)
    if to_file:
        assert (json.loads(file.read_text())["epoch"], stream.getvalue()) == (3, "")
    else:
        assert "ring up" in stream.getvalue()
        assert not stream.getvalue().startswith("{")


def test_what_is_told_of_a_chain_of_causes_is_bounded(out: io.StringIO) -> None:
    error = KeyError("x")
    error.__cause__ = error
    structlog.get_logger().error("failed", exc_info=error)
    assert last(out)["exception"] == ["KeyError"] * 20
