"""`python -m bench`: what is shown and written of a benchmark, here of one that measures nothing."""

import dataclasses
import json
import signal

import pytest

from bench import __main__ as command
from bench import everything, frame
from bench.verdict import Check
from sealring.cli.terminal.exit_codes import CHECK_FAILED


@pytest.fixture(autouse=True)
def signals():
    """Handlers of signals as they were before a test; the command replaces those that end it."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def example(monkeypatch):
    """Puts a benchmark in place of all: it measures the number of its option, and its target is 2."""
    found = frame.Benchmark(
        "ring",
        "an example",
        lambda parser: parser.add_argument("--value", type=float, default=3.0),
        lambda options: {"value": options.value},
        lambda result: [frame.Table("out", ["value"], [[result["value"]]])],
        lambda result: [Check("value", [result["value"]], 2.0, at_least=True)],
        quick=("--value", "5"),
    )
    return lambda **changed: monkeypatch.setattr(
        frame, "find", lambda name: dataclasses.replace(found, **changed)
    )


def test_a_table_and_the_verdict_of_each_target_are_shown(example, capsys):
    example()
    assert command.main(["ring"]) == 0
    done = capsys.readouterr()
    assert "ring: an example" in done.err
    assert done.out.startswith("out\n")
    titles, verdict = done.out.splitlines()[-3:-1]
    assert titles.split() == ["target", "worst", "wanted", "rounds", "verdict"]
    assert verdict.split() == ["value", "3", ">=", "2", "1", "open"]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--quick"], "5.00"),
        (["--quick", "--value", "4"], "4.00"),
        (["--value", "2.5", "--times", "3"], "met"),
    ],
)
def test_options_of_the_command_and_of_the_benchmark_are_mixed(example, capsys, options, shown):
    example()
    assert command.main(["ring", *options]) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["ring", "--times", "0"], ["ring", "--times", "1" * 99], ["nothing"], ["all", "--json", "x"]]
)
def test_bad_options_are_refused(words):
    with pytest.raises(SystemExit) as caught:
        command.main(words)
    assert caught.value.code not in (0, None)


def test_measurements_are_printed_or_written(example, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    example()
    command.main(["ring", "--json", "-"])
    assert json.loads(capsys.readouterr().out)["data"] == {"value": 3.0}
    command.main(["ring", "--json", str(tmp_path / "one.json"), "--png", str(tmp_path / "one.png")])
    command.main(["ring", "--out", str(tmp_path / "all")])
    for file in (tmp_path / "one.json", tmp_path / "all" / "ring.json"):
        assert json.loads(file.read_text())["data"] == {"value": 3.0}
    assert (tmp_path / "one.png").is_file()
    assert (tmp_path / "all" / "ring.png").is_file()


def test_a_target_that_is_missed_fails_nothing(example, capsys):
    example()
    assert command.main(["ring", "--value", "1"]) == 0
    assert "missed" in capsys.readouterr().out


def test_benchmarks_are_listed_by_themselves(capsys):
    assert command.main([]) == 0
    shown = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in shown[1:]] == list(frame.MODULES)


@pytest.mark.parametrize("good", [True, False])
def test_all_of_them_fail_the_command_if_one_did(capsys, monkeypatch, tmp_path, good):
    outcomes = [
        everything.Outcome("one", "done", 1.0, 60.0),
        everything.Outcome("two", "done" if good else "failed", 2.0, 60.0),
    ]
    monkeypatch.setattr(everything, "run_all", lambda *, quick, out, say: outcomes if quick else [])
    status = command.main(["all", "--quick", "--out", str(tmp_path)])
    done = capsys.readouterr()
    assert "3 s altogether" in done.out
    assert (status, "failed: two" in done.err) == ((0, False) if good else (CHECK_FAILED, True))
