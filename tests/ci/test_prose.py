"""`.ci/prose.py`: which sentences it finds, which it leaves alone."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "prose.py"
spec = importlib.util.spec_from_file_location("prose", SCRIPT)
prose = importlib.util.module_from_spec(spec)
sys.modules["prose"] = prose
spec.loader.exec_module(prose)

LONG = " ".join(["word"] * (prose.MOST_WORDS + 1))


@pytest.fixture
def rules(tmp_path):
    """Writes a text to a file of the given name and returns the line and the rule of each finding."""

    def look(name, text):
        file = tmp_path / name
        file.write_text(text)
        return [(one.line, one.rule) for one in prose.findings(file)]

    return look


@pytest.mark.parametrize(
    ("docstring", "rule"),
    [
        ("Of its next chunk.", "begins with 'Of'"),
        ("A round took so long.", "'so many' for a number"),
        ("The tail is told of the row.", "'told' for a message"),
        ("The carrier who waits.", "'who' for a thing"),
        ("A file that is none.", "'there is none'"),
        ("A row, lest it be lost.", "archaic word"),
        (LONG, f"{prose.MOST_WORDS + 1} words in a sentence"),
        ("A row that has a lane which has a step that has a record, whose key is new.", "4 relative clauses"),
    ],
)
def test_a_docstring_that_breaks_a_rule_is_found(rules, docstring, rule):
    assert rules("x.py", f'def f():\n    """{docstring}"""\n') == [(2, rule)]
    assert rules("x.py", f'LIMIT = 1\n"""{docstring}"""\n') == [(2, rule)]


@pytest.mark.parametrize(
    "docstring",
    [
        "Length of the next chunk.",
        "Runs so long as rows run.",
        "\n\n".join(["A row waits."] * 30),
        "- One\n" * 40,
    ],
)
def test_plain_docstrings_are_left_alone(rules, docstring):
    assert rules("x.py", f'"""{docstring}"""\n') == []


def test_comments_of_a_protocol_are_read(rules):
    text = "message M {\n  // A row is told\n  // so.\n  uint32 rows = 1; // so many\n}\n"
    assert rules("x.proto", text) == [(2, "'told' for a message"), (4, "'so many' for a number")]


def test_comments_are_read_as_the_block_that_they_are(rules):
    half = " ".join(["word"] * (prose.MOST_WORDS // 2 + 1))
    (found,) = rules("x.py", f"x = 1\n# {half}\n# {half}\ny = 2\n")
    assert found == (2, f"{2 * (prose.MOST_WORDS // 2 + 1)} words in a sentence")
    assert rules("x.py", f"x = 1  # {half}\ny = 2  # {half}\n") == []
    assert rules("x.py", "x = 1  # noqa: the tail is told\n") == []


def test_pages_are_read_without_code_and_tables(rules):
    page = f"# Title\n\n```\n{LONG}\n```\n\n| {LONG} |\n\nThe gateway is told.\n\n* short\n* {LONG}\n"
    assert rules("x.md", page) == [
        (9, "'told' for a message"),
        (11, f"{prose.MOST_WORDS + 1} words in a sentence"),
    ]


def test_more_findings_than_allowed_fail(tmp_path, capsys):
    file = tmp_path / "x.md"
    file.write_text("The gateway is told.\n")
    assert prose.main([str(file)]) == 1
    assert f"{file}:1: 'told'" in capsys.readouterr().out
    assert prose.main(["--most", "1", str(file)]) == 0
    assert capsys.readouterr().out == ""
