#!/usr/bin/env python3
"""Find sentences in docstrings, comments and pages that a stranger has to read twice.

    .ci/prose.py [--most N] [FILE or FOLDER ...]    default: every tracked .py, .md and .proto file

Prints `PLACE: rule: text` for each finding and exits with 1 when there are more than N (default 0). A rule is
an approximation: rewrite the sentence when the finding is right, and the rule when it is not. The aim is
plain English. A docstring begins with a noun or a verb, and the subject comes first. Things have the
field's name (queue, chunk, retry, timeout). A sentence has one relative clause.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MOST_WORDS = 38
MOST_RELATIVES = 3

_OPENINGS = re.compile(
    r"(Of|Who|Whoever|Whom|Whose|Whatever|The same|That|So many|As many|Such|Since|Where|Lest|To whom"
    r"|With whom|By what|For whom|In which)\b"
)
_PHRASES = {
    name: re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    for name, pattern in {
        "'so many' for a number": r"\bso (many|much|long|often)\b(?! as\b| that\b)",
        "'told' for a message": r"\b(is|are|was|were|be|been|has|have|had) told\b|\btells? of\b",
        "'who' for a thing": r"\bwho(ever)? (asks|calls|reads|waits|keeps|holds|listens|connects|sends|owns|"
        r"knows|has|is|are|may)\b",
        "'there is none'": r"\b(that|which) (is|are) none\b|\bwhere (it|they) (is|are) (not )?there\b",
        "archaic word": r"\b(lest|whence|thereof|therein|hitherto|thence)\b",
        "vague 'come'": r"\bcomes? (by|of|to be|out of it)\b",
        "subject after a 'what' clause": r"(?:^|\. )What (?!is |are |it |happens|to )[^.]{25,} "
        r"(is|are|has|have|goes|go)\b",
    }.items()
}
_RELATIVES = re.compile(r"\b(that|which|who|whose|whom|where)\b")
_WORD = re.compile(r"\S*[A-Za-z]\S*")  # figures are no words
_SENTENCE_END = re.compile(r"(?<=[.;:?!])\s+(?=[A-Z`*\[])")
_LIST_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s", re.MULTILINE)
_UNREAD = re.compile(r"^sealring/v1/|_pb2")  # generated


class Finding(NamedTuple):
    """A sentence to rewrite; `line` is 1-based."""

    path: Path
    line: int
    rule: str
    text: str


def findings(path: Path) -> list[Finding]:
    """The sentences of a Python, Markdown or .proto file that break a rule; raises OSError, SyntaxError."""
    text = path.read_text()
    pieces = _READERS[path.suffix](text)
    return [
        Finding(path, line, rule, " ".join(said.split())[:110])
        for line, piece, is_docstring in pieces
        for rule, said in _broken(piece, is_docstring)
    ]


def _broken(text: str, is_docstring: bool) -> Iterator[tuple[str, str]]:
    if is_docstring and (found := _OPENINGS.match(text.strip())):
        yield f"begins with '{found[1]}'", text
    for name, pattern in _PHRASES.items():
        for hit in pattern.finditer(text):
            yield name, text[max(0, hit.start() - 40) : hit.end() + 50]
    for sentence in _sentences(text):
        words, relatives = len(_WORD.findall(sentence)), len(_RELATIVES.findall(sentence))
        if words > MOST_WORDS:
            yield f"{words} words in a sentence", sentence
        elif relatives > MOST_RELATIVES:
            yield f"{relatives} relative clauses", sentence


def _sentences(text: str) -> Iterator[str]:
    for item in _LIST_ITEM.split(text):
        for paragraph in re.split(r"\n\s*\n", item):
            if not paragraph.lstrip().startswith("|"):
                yield from _SENTENCE_END.split(" ".join(paragraph.split()))


def _of_python(source: str) -> Iterator[tuple[int, str, bool]]:
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():  # a docstring, or one behind an attribute
            match statement:
                case ast.Expr(ast.Constant(str(said))):
                    yield statement.lineno, inspect.cleandoc(said), True
    for line, comment in _comments(source):
        yield line, comment, False


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments with their first line; comment lines that follow each other are one text."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        said = token.string.lstrip("#! ")
        if said.startswith(("noqa", "type:")):
            continue
        if block and token.start[0] == last + 1 and not token.line[: token.start[1]].strip():
            block.append(said)
        else:
            if block:
                yield first, "\n".join(block)
            block, first = [said], token.start[0]
        last = token.start[0]
    if block:
        yield first, "\n".join(block)


def _of_page(text: str) -> Iterator[tuple[int, str, bool]]:
    text = re.sub(r"```.*?```", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        if paragraph.strip() and not paragraph.lstrip().startswith(("|", "<!--", "#")):
            yield line + len(paragraph) - len(paragraph.lstrip("\n")), paragraph, False
        line += paragraph.count("\n")


def _of_protocol(text: str) -> Iterator[tuple[int, str, bool]]:
    """Comments of a .proto file: those that fill lines as one text, and those behind a field."""
    for found in re.finditer(r"(?:^[ \t]*//.*\n)+|//.*$", text, re.MULTILINE):
        said = re.sub(r"^[ \t]*//[ \t]?", "", found[0], flags=re.MULTILINE)
        yield text.count("\n", 0, found.start()) + 1, said, True


_READERS = {".py": _of_python, ".md": _of_page, ".proto": _of_protocol}


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--", "*.py", "*.md", "*.proto"],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(name) for name in listed.stdout.splitlines()]


def _chosen(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths or _tracked():
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in _READERS and file.is_file() and not _UNREAD.search(str(file)):
                yield file


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--most", type=int, default=0, help="findings that are allowed")
    parser.add_argument("paths", nargs="*", type=Path)
    options = parser.parse_args(argv)
    found = [one for path in _chosen(options.paths) for one in findings(path)]
    if len(found) <= options.most:
        return 0
    for one in found:
        sys.stdout.write(f"{one.path}:{one.line}: {one.rule}: {one.text}\n")
    sys.stdout.write(f"{len(found)} sentences to rewrite, {options.most} allowed\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
