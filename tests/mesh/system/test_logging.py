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

from sealring.mesh.errors import ConfigError, InvalidInput, NotFound
from sealring.mesh.system.logging import (
    FileTarget,
    _exception_of,
    _frames,
    _quote_library,
    configure,
    end_with_any_thread,
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
    with pytest.raises(ConfigError) as caught:
        configure("node", level="loud")
    assert caught.value.reason == "BAD_LOG_LEVEL"


def test_context_is_bound(out: io.StringIO) -> None:
    with structlog.contextvars.bound_contextvars(request_id="r1", step=7):
        structlog.get_logger().info("stepped")
    assert (last(out)["request_id"], last(out)["step"]) == ("r1", 7)


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
    except ValueError as error:
        structlog.get_logger().error("failed", exc_info=error)
    assert ("KeyError" in last(out)["exception"]) == (how != "none")


def test_an_uncaught_error_without_a_value_is_told_by_its_kind(out: io.StringIO) -> None:
    sys.unraisablehook(SimpleNamespace(exc_type=LookupError, exc_value=None, exc_traceback=None))  # type: ignore[arg-type]
    assert last(out)["error"] == "LookupError"


def test_an_unknown_exception_is_its_type_and_frames(out: io.StringIO) -> None:
    try:
        try:
            raise KeyError(MARK)
        except KeyError as cause:
            raise ValueError(MARK) from cause
    except ValueError:
        structlog.get_logger().exception("failed")
    line = last(out)
    assert line["error"] == "ValueError"
    assert any("test_an_unknown_exception" in frame for frame in line["exception"])
    assert "KeyError" in line["exception"]
    assert MARK not in out.getvalue()


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


def test_our_errors_are_told_in_words(out: io.StringIO) -> None:
    structlog.get_logger().warning("refused", exc_info=NotFound("no node abc", hint="see nodes list"))
    line = last(out)
    assert line["error"] == "NOT_FOUND: no node abc (hint: see nodes list)"
    assert "exception" not in line


def test_of_our_error_the_foreign_cause_is_placed(out: io.StringIO) -> None:
    """Clients get an error of a model's code without its place, so the log has to name it."""
    try:
        try:
            raise KeyError(MARK)
        except KeyError as cause:
            raise NotFound("no node abc") from cause
    except NotFound as error:
        structlog.get_logger().warning("refused", exc_info=error)
    line = last(out)
    assert line["error"] == "NOT_FOUND: no node abc"
    assert line["exception"][0] == "KeyError"
    assert "test_of_our_error" in line["exception"][1]
    assert MARK not in out.getvalue()


def test_libraries_are_quoted_without_arguments(out: io.StringIO) -> None:
    logging.getLogger("grpc").warning("peer said %s\nand more", MARK)
    line = last(out)
    assert (line["library"], line["says"]) == ("grpc", "peer said %s")
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


def test_a_log_file_is_its_owners_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        configure("node", file=tmp_path / "node.log")
        (tmp_path / "node.log").rename(tmp_path / "node.log.0")
        structlog.get_logger().info("one")
    finally:
        os.umask(before)
    assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o600}


def test_a_folder_of_logs_is_for_all_to_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        configure("node", file=tmp_path / "logs" / "node.log")
    finally:
        os.umask(before)
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o755


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
    with pytest.raises(ConfigError) as caught:
        configure("node", file=tmp_path / "file" / "node.log")
    assert caught.value.reason == "BAD_LOG_FILE"


def test_a_terminal_gets_lines_for_people() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    configure("node", stream=stream)
    structlog.get_logger().info("ring up", epoch=3)
    assert "ring up" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_a_file_gets_json_though_somebody_watches(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    configure("node", stream=stream, file=tmp_path / "node.log")
    structlog.get_logger().info("ring up", epoch=3)
    assert json.loads((tmp_path / "node.log").read_text())["epoch"] == 3
    assert stream.getvalue() == ""


@pytest.mark.parametrize("fails", [True, False])
def test_a_thread_that_fails_ends_the_process_whatever_is_told_of_it(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    def report(args: Any) -> None:
        done.append(args)
        if fails:
            raise OSError

    monkeypatch.setattr(threading, "excepthook", report)
    monkeypatch.setattr(os, "_exit", done.append)
    end_with_any_thread()
    args: Any = SimpleNamespace()
    try:
        threading.excepthook(args)
    except OSError:
        assert fails
    assert done == [args, 1]


@pytest.mark.parametrize(("says", "quoted"), [("", ""), ("a\nb", "a"), ("x" * 201, "x" * 200)])
def test_a_library_is_quoted_with_one_short_line(says: str, quoted: str) -> None:
    event = {"event": says, "_record": SimpleNamespace(name="library"), "more": says}
    told = _quote_library(None, "", event)
    assert (told["event"], told["library"], told["says"]) == ("library log", "library", quoted)
    assert "more" not in told


def test_an_exception_is_found_where_one_is_told() -> None:
    error = KeyError("x")
    assert _exception_of(error) is _exception_of((KeyError, error, None)) is error
    for other in ((KeyError, error), (KeyError, "x", None), None, False):
        assert _exception_of(other) is None
    assert _exception_of(True) is None, "none is being handled"


def test_what_is_told_of_a_chain_of_causes_is_bounded() -> None:
    error = KeyError("x")
    error.__cause__ = error
    assert _frames(error) == ["KeyError"] * 20


def test_a_log_file_is_made_with_its_folders(tmp_path: Path) -> None:
    target = FileTarget(tmp_path / "a" / "b" / "log")
    target.close()
    assert (tmp_path / "a" / "b" / "log").exists()
