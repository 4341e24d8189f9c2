"""The log of a child's standard error: events and places, and nothing that could hold a prompt."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from sealring.node.daemon.childlog import ChildLog


async def logged(*parts: bytes) -> list[dict[str, Any]]:
    """What is logged of what comes in such parts."""
    stream = asyncio.StreamReader()
    with capture_logs() as logs:
        following = asyncio.create_task(ChildLog("engine", 7).follow(stream))
        for part in parts:
            stream.feed_data(part)
            await asyncio.sleep(0)
        stream.feed_eof()
        async with asyncio.timeout(200):
            await following
    assert all(entry.pop("child") == "engine" and entry.pop("child_pid") == 7 for entry in logs)
    return [dict(entry) for entry in logs]


def said(text: str, level: str = "warning", **more: Any) -> dict[str, Any]:
    return {"event": "child_log", "log_level": level, "said": text, **more}


def unknown(lines: int) -> dict[str, Any]:
    return {"event": "child_lines_not_logged", "log_level": "warning", "lines": lines}


async def test_lines_are_found_however_they_come() -> None:
    place = b'  File "a.py", line 3, in main'
    text = place + b"\r\nsecret\n\n" + place + b"\n  \nanother secret\nValueError: secret"
    expected = [said('File "a.py", line 3, in main')] * 2 + [said("ValueError"), unknown(2)]
    for size in (1, 7, len(text)):
        assert await logged(*(text[at : at + size] for at in range(0, len(text), size))) == expected
    assert await logged(b"") == []


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"event": "up", "level": "debug", "prompt": "secret"}, said("up", "debug")),
        ({"event": "up", "level": "critical"}, said("up", "info")),
        ({"event": "x" * 201}, said("x" * 200, "info")),
        ({"event": "up", "error": "BAD_STEP: secret"}, said("up", "info", error="BAD_STEP")),
        ({"event": "up", "error": "OSError errno 5"}, said("up", "info", error="OSError errno 5")),
        (
            {
                "event": "up",
                "error": "RuntimeError: [METAL] failed",
                "exception": ["[x] secret"],
            },
            said("up", "info", error="RuntimeError: [METAL] failed", exception=[]),
        ),
        ({"event": "up", "error": "a secret", "exception": "secret"}, said("up", "info")),
        ({"event": "up", "error": 5}, said("up", "info")),
        (
            {"event": "up", "exception": ["KeyError", "a secret", 5, "  /a.py:3 main", "  secret at 3"]},
            said("up", "info", exception=["KeyError", "  /a.py:3 main"]),
        ),
        ({"event": "up", "exception": ["E"] * 21}, said("up", "info", exception=["E"] * 20)),
        ({"event": 5}, unknown(1)),
        ({"prompt": "secret"}, unknown(1)),
    ],
)
async def test_of_an_entry_only_what_cannot_hold_content_is_kept(
    entry: dict[str, Any], told: dict[str, Any]
) -> None:
    assert await logged(json.dumps(entry).encode() + b"\n") == [told]


@pytest.mark.parametrize("line", [b"{secret", b"[" * 9000, b'"secret"', b"{" + b'"a":{' * 5000, b"\xff\xfe"])
async def test_other_lines_are_counted_and_no_more(line: bytes) -> None:
    assert await logged(line + b"\n", line) == [unknown(2)]


TIMEOUT = (
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
)
ENDED = "libc++abi: terminating due to uncaught exception of type std::runtime_error"


@pytest.mark.parametrize(
    "line",
    [
        TIMEOUT,
        f"{ENDED}: {TIMEOUT}",
        ENDED,
        "libc++abi: terminating",
        f"RuntimeError: {TIMEOUT}",
        f"2026-11-24 10:00:00.123 python3.14[4242:1f03] {TIMEOUT}",
        "  what():  [metal::load_device] No Metal device available",
        "[metal::malloc] Attempting to allocate 9 bytes, more than the maximum buffer size of 8 bytes.",
        "[malloc] Unable to allocate 8589934592 bytes.",
        "[load_safetensors] Failed to open file /models/a.safetensors",
        "[ring] Rank 1 accepting",
        "[Compile::eval_cpu] Failed to compile function CompiledSigmoid: no g++",
        "objc[4242]: Class MTLThing is implemented in both /usr/lib/a.dylib (0x1) and b.dylib (0x2).",
        "dyld[4242]: Library not loaded: @rpath/libmlx.dylib",
        "-[_MTLCommandBuffer addCompletedHandler:]:1011: failed assertion `handler provided after commit'",
        "Fatal Python error: Segmentation fault",
    ],
)
async def test_what_mlx_and_macos_say_is_kept(line: str) -> None:
    assert await logged(line.encode() + b"\n") == [said(line.strip())]


@pytest.mark.parametrize(
    "line",
    [
        "UserWarning-like: could not read 'why does [METAL] fail on my Mac?'",
        "[prompt] secret",
        "[metallic secret] secret",
        "objc[4242]: secret",
        "libc++",
    ],
)
async def test_what_may_quote_a_prompt_is_not(line: str) -> None:
    assert await logged(line.encode() + b"\n") == [unknown(1)]


async def test_of_a_sentence_of_mlx_the_line_is_kept() -> None:
    assert await logged(b"RuntimeError: [metal::Device] Unable to build metal library\n") == [
        said("RuntimeError: [metal::Device] Unable to build metal library")
    ]
    assert await logged(b"ValueError: [metal] secret\n") == [said("ValueError")]


async def test_a_line_is_cut_before_it_is_looked_at() -> None:
    """One byte more, and what is left of it is no JSON."""
    fits = json.dumps({"event": "up", "more": "x" * 8165}).encode()
    assert len(fits) == 8192
    assert await logged(fits + b"\n") == [said("up", "info")]
    assert await logged(fits[:-2] + b'x"}\n', b"[ring] connecting") == [said("[ring] connecting"), unknown(1)]
