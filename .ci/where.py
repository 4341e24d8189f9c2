#!/usr/bin/env python3
"""Find the file of a subject, by the first sentences of docstrings.

.ci/where.py WORD ...    find files, classes and functions by words of their names and first sentences
.ci/where.py --write     write the table of folders into docs/where.md; --check compares it

Words that nothing has are looked for without their endings.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PAGE = Path("docs/where.md")
BEGIN, END = "<!-- made by: .ci/where.py --write -->", "<!-- end of what is made -->"
ENDINGS = re.compile(
    r"(?<=\w{3})(i[sz](e[drs]?|ing|ations?)|(at)?(ions?|e[drs]s?|ors?|ings?)|ments?|ies|ied|l?y|e?s|e)$"
)
PRODUCT = ("cli", "coordinator", "doctor", "edge", "gateway", "mesh", "node", "sealring", "bench")


def main(argv: Sequence[str]) -> int:
    match argv:
        case ["--write" | "--check" as way]:
            text = PAGE.read_text()
            made = f"{BEGIN}\n{_table()}\n{END}"
            new = re.sub(f"{BEGIN}.*{END}", lambda _: made, text, flags=re.DOTALL)
            if way == "--write":
                PAGE.write_text(new)
            elif new != text:
                sys.stdout.write(f"{PAGE} is not what the code says: run .ci/where.py --write\n")
                return 1
        case [_, *_]:
            words = [word.lower() for word in argv]
            found = _found(words) or _found([_stem(word) for word in words])
            sys.stdout.write("".join(f"{place} {name}: {said}\n" for place, name, said in found))
        case _:
            sys.stdout.write(__doc__ or "")
            return 2
    return 0


def _table() -> str:
    folders = ((file.parent, _first_sentence(_tree(file))) for file in _files() if file.name == "__init__.py")
    return "\n".join(
        ["| folder | holds |", "|---|---|", *(f"| `{one}` | {said} |" for one, said in folders if said)]
    )


def _found(words: Sequence[str]) -> list[tuple[str, str, str]]:
    return [one for one in _subjects(words) if all(word in " ".join(one[1:]).lower() for word in words)]


def _stem(word: str) -> str:
    """A word without the endings that grammar puts on it: what all its forms begin with."""
    bare = ENDINGS.sub("", word)
    return bare[:-1] if bare != word and len(bare) > 3 and bare[-1] == bare[-2] else bare  # planning, plan


def _subjects(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Places, names and first sentences in the files that have all words somewhere; files come first."""
    texts = ((file, f"{file.stem} {file.read_text()}") for file in _files())
    trees = {file: _tree(file) for file, text in texts if all(word in text.lower() for word in words)}
    for file, tree in trees.items():
        yield str(file), file.stem, _first_sentence(tree)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file}:{node.lineno}", node.name, _first_sentence(node)


def _first_sentence(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", " ".join(paragraph.split()))[0]


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--", "*.py"],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in listed.stdout.splitlines() if name.split("/")[0] in PRODUCT]
    return [Path(name) for name in names if "_pb2" not in name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
