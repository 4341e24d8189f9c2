"""What the grammars of custom tools become."""

from __future__ import annotations

import re

import pytest

from sealring.api.patterns import MAX_PATTERN, pattern_of
from sealring.mesh.errors import InvalidInput

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""As Codex sends it."""

EDIT = "*** Begin Patch\n*** Update File: a.py\n@@ def f():\n- a\n+ b\n*** End Patch"


def lark(definition: object) -> str:
    return pattern_of({"type": "grammar", "syntax": "lark", "definition": definition}, "format")


def test_codexs_grammar() -> None:
    held = re.compile(lark(PATCH))
    added = EDIT.replace("*** End", "*** Add File: b\n+x\n+\n*** End") + "\n"
    assert all(map(held.fullmatch, (EDIT, added)))
    others = (EDIT.replace("@@ ", "!! "), EDIT.replace("End", "Ende"), EDIT + "\n\n", "")
    assert not any(map(held.fullmatch, others))


@pytest.mark.parametrize(
    ("definition", "right", "wrong"),
    [
        (r'start: "a".."f"~2..3 "\x41/"? // letters', "bad bcA/", "b abcd xx"),
        (
            'start: [sign] INT\n  | word -> other\nsign: "-"\n?word.2: /no+/i\n%import common (INT, WS)',
            "-12 7 NOO",
            "-no",
        ),
        ("start: A\n%import common.DIGIT -> A", "7", "a 77"),
        ('start: "a"i.."c"i', "a B C", "d : -"),
        ('start: "b".."c"', "b c", "B a ("),
        (r'start: "+".."-"', "+ , -", "* ."),
        ('start: A // one\r\n  | "b"\r\n\r\nA: "a"\r\n', "a b", "ab"),
        ('# none\nstart: ("x" | "y")* "."', "xyx. .", "x z."),
    ],
)
def test_what_lark_says(definition: str, right: str, wrong: str) -> None:
    held = re.compile(lark(definition))
    assert all(map(held.fullmatch, right.split()))
    assert not any(map(held.fullmatch, wrong.split()))


@pytest.mark.parametrize(
    ("definition", "why"),
    [
        ('start: a\na: "(" a ")" | "x"', "comes to itself"),
        ("\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(30)) + '\nr30: "x"\nstart: r0', "characters"),
        ('%ignore " "\nstart: "x"', "%ignore"),
        ("%import common.NOTHING\nstart: NOTHING", "NOTHING"),
        ("start: (", "not closed"),
        ("start: " + "(" * 400, "brackets go deeper"),
        ("start: b", "no rule b"),
        ('begin: "x"', "no rule start"),
        ("start: %", "malformed"),
        ('start: "\\q"', "malformed"),
        ("start: /x/l", "flag l"),
        ("x" * (MAX_PATTERN + 1), "characters"),
        (None, "not a text"),
    ],
)
def test_what_is_refused(definition: object, why: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(why)) as caught:
        lark(definition)
    assert caught.value.metadata["param"] == "format.definition"


def test_other_formats() -> None:
    assert pattern_of({}, "format") == pattern_of({"type": "text"}, "format") == ""
    assert pattern_of({"type": "grammar", "syntax": "regex", "definition": "a|b"}, "format") == "^(?:a|b)$"
    with pytest.raises(InvalidInput, match="lark or regex"):
        pattern_of({"type": "grammar", "syntax": "gbnf", "definition": "a"}, "format")
