from __future__ import annotations

import io
import json
import re
import sys
import time
from typing import Any

import pytest

from sealring.cli.terminal.output import (
    clear_screen,
    enum_word,
    moment,
    plain,
    print_data,
    print_json,
    print_table,
    progress,
    say,
    until,
)
from sealring.mesh.units import size
from sealring.v1 import admin_pb2, inference_pb2, membership_pb2


def test_messages_become_plain_data() -> None:
    deployment = admin_pb2.Deployment(
        plan=admin_pb2.DeploymentPlan(spec=admin_pb2.DeploymentSpec(name="demo", split=[4, 5])),
        rings=[admin_pb2.RingStatus(ring="r", phase=membership_pb2.RING_PHASE_SERVING)],
        created=1 << 40,
    )
    shown = plain(deployment)
    assert shown["plan"]["spec"]["split"] == [4, 5]
    assert shown["rings"][0]["phase"] == "serving"
    assert shown["created"] == 1 << 40
    assert "profile" not in shown["plan"]
    json.dumps(shown)


def test_bytes_maps_and_options() -> None:
    names = [chr(ord("a") + number) for number in range(26)]
    entry = admin_pb2.AuditEntry(details=dict.fromkeys(names, "x"), hash=b"\x00\xff")
    assert list(plain(entry)["details"]) == names, "in one order"
    assert plain(entry)["hash"] == "AP8="
    assert "seed" not in plain(inference_pb2.Sampling())
    assert plain(inference_pb2.Sampling(seed=0))["seed"] == 0


def test_enums_are_words() -> None:
    descriptor = admin_pb2.NodeState.DESCRIPTOR
    assert enum_word(descriptor, admin_pb2.NODE_STATE_DRAINING) == "draining"
    assert enum_word(descriptor, 99) == "99"


def test_tables_are_data_and_survive_anything(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "number"], [["a\x1b[31m[bold]b", 1], ["", 2.5], [None, 3]], title="t")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[bold]" in shown
    assert "2.50" in shown
    print_table(["name"], [])
    assert "(none)" in capsys.readouterr().err


def test_json_is_utf8_and_alone(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": "é"})
    assert capsys.readouterr().out == '{\n  "a": "é"\n}\n'


def test_messages_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    say("hello\x07")
    with progress("one") as shown:
        shown.update("two")
        shown.update("two")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "hello?\none\ntwo\n"


def test_sizes_and_moments() -> None:
    assert [size(count) for count in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3072.0 GiB",
    ]
    assert moment(0) == ""
    assert moment(1_700_000_000).startswith("2023-11-1")
    for absurd in (1 << 62, 1 << 64, 10**12):
        assert moment(absurd) == f"{absurd} s"


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (0.4, "in 1 second"),
        (119, "in 119 seconds"),
        (59 * 60, "in 59 minutes"),
        (90_000, "in 25 hours"),
        (30 * 86_400, "in 30 days"),
        (10 * 31_557_600, "in 10 years"),
        (10**12, "in 31688 years"),
    ],
)
def test_people_read_how_long_it_is_until_something_ends(left: float, said: str) -> None:
    assert until(1_800_000_000, 1_800_000_000 - left) == said


def test_moments_are_local_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        assert moment(1_800_000_000) == "2027-01-15 13:30:00"
        assert until(1_800_000_000, 1_800_000_000) == "2027-01-15 13:30:00", "it has ended"
    finally:
        monkeypatch.undo()
        time.tzset()
    assert until(0, 1.0) == ""


HOSTILE = "a\x1b[2J\x9b31m\x7f\u202eb\ud800"


@pytest.mark.parametrize("show", [print_data, say, lambda text: print_table(["name"], [[text]], title=text)])
def test_what_others_say_steers_no_terminal(show: Any, capsys: pytest.CaptureFixture[str]) -> None:
    show(HOSTILE)
    captured = capsys.readouterr()
    shown = (captured.out + captured.err).replace("\n", "")
    assert shown.startswith("a?[2J?31m??b?")
    assert shown.isprintable()


def test_a_title_is_text_and_no_markup_and_one_line_however_narrow_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(["name", "n"], [["x", 1], ["", 22]], title="ring [red]r[/nothing], and more of it")
    assert capsys.readouterr().out == "ring [red]r[/nothing], and more of it\nname   n\nx      1\n-     22\n"
    print_table(["name", "n"], [["x", "y"], ["", 22]])
    assert capsys.readouterr().out == "name  n\nx     y\n-     22\n", "words stand on the left"


def test_json_shows_what_does_not_print_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": HOSTILE})
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"a": HOSTILE}
    assert shown.replace("\n", "").isprintable()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_at_a_terminal_a_table_fits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, value in (("COLUMNS", "12"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    print_table(["name", "n"], [["x" * 12, 1]], title="a title")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert [line.rstrip() for line in shown.splitlines()] == [
        *("a title", "name       n", "xxxxxxxxx  1", "xxx")
    ]
    clear_screen()
    assert terminal.getvalue().endswith("\x1b[H\x1b[2J")


def test_at_a_terminal_what_is_waited_for_is_one_line_that_steers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "rich", None)  # as the command hides it
    with pytest.raises(KeyboardInterrupt), progress("one") as shown:
        shown.update(HOSTILE)
        raise KeyboardInterrupt
    text = terminal.getvalue()
    assert "a?[2J?31m??b?" in text
    assert "\x1b[2J" not in text
    assert text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K") or "\x1b[?25h" in text, "the cursor is back"
    shown.close()
    assert terminal.getvalue() == text
    assert sys.modules.get("rich", ...) is not None, "what is needed is hidden no more"


def test_the_clock_of_a_wait_goes_on_though_its_share_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress("one") as shown:
        shown.update("demo: 100 %, compiling its steps")
        (task,) = shown._bars.tasks  # noqa: SLF001
        assert (task.completed, task.finished_time) == (99, None)
