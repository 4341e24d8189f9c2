"""What the pages name is there: files, pages, headings."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRACKED = set(
    subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
)
DATED = re.compile(r"docs/performance/\d")
"""Pages that say how it was at their time."""
PAGES = sorted(name for name in TRACKED if name.endswith(".md") and not DATED.match(name))
TOP = "bench|cli|coordinator|deploy|docs|examples|gateway|mesh|node|protos|sealring|tests"


def _headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_pages_and_headings(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if re.match(r"https?:", target):
            continue
        path, _, heading = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not heading or heading in _headings(there), target


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_exist(name: str) -> None:
    named = set(re.findall(rf"`((?:{TOP})/[\w./-]+)`", (ROOT / name).read_text("utf-8")))
    assert {one for one in named if not ((ROOT / one).exists() or (ROOT / "tests" / one).exists())} == set()


def test_the_index_leads_to_each_page() -> None:
    index = ROOT / "docs/index.md"
    linked = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", index.read_text("utf-8"))}
    assert {page.name for page in index.parent.glob("*.md")} - {index.name} <= linked


@cache
def _words(tests: bool) -> set[str]:
    """The words of the code, with or without that of tests, and the names of its files."""
    files = [name for name in TRACKED if name.endswith((".py", ".proto", ".js", ".toml", ".yml"))]
    code = [name for name in files if tests or not name.startswith(("tests/", "sealring/v1/"))]
    return {word for name in code for word in re.findall(r"\w+", name + (ROOT / name).read_text("utf-8"))}


def test_errors_that_the_page_of_symptoms_names_are_raised() -> None:
    named = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", (ROOT / "docs/trouble.md").read_text("utf-8")))
    assert named
    assert named - _words(tests=False) == set()


DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
SCREEN = 40
"""Lines of a decision at most: what was decided, because of what, measured how."""


def test_the_index_has_each_decision_once_under_its_title() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text("utf-8")
    listed = re.findall(r"^\* (\d+): \[(.+)\]\((\S+)\)$", index, re.MULTILINE)
    titles = {page: page.read_text("utf-8").partition("\n")[0] for page in DECISIONS}
    assert sorted((f"# {number}. {title}", name) for number, title, name in listed) == sorted(
        (title, page.name) for page, title in titles.items()
    )
    assert {page.name: int(page.name[:4]) for page in DECISIONS} == {name: int(n) for n, _, name in listed}


NAME = re.compile(r"\b(?:\w+_\w+|[A-Z]\w*[a-z]\w*[A-Z]\w*)\b")


def test_names_of_code_in_decisions_are_there() -> None:
    """A decision about code that is gone is changed with it, or goes."""
    gone = {
        (page.name, name)
        for page in DECISIONS
        for quoted in re.findall(r"`([^`]+)`", page.read_text("utf-8"))
        for name in NAME.findall(quoted)
        if name not in _words(tests=True)
    }
    assert gone == set()


def test_a_decision_fits_a_screen() -> None:
    assert {page.name for page in DECISIONS if len(page.read_text("utf-8").splitlines()) > SCREEN} == set()


def test_decisions_that_files_cite_are_there() -> None:
    files = [name for name in TRACKED if name.endswith((".py", ".md", ".proto")) and not DATED.match(name)]
    cited = {
        number
        for name in files
        for number in re.findall(r"decisions?[/ \n]+(?:0*)(\d+)\b", (ROOT / name).read_text("utf-8"))
    }
    assert {int(number) for number in cited} <= {int(page.name[:4]) for page in DECISIONS}


def test_the_table_of_folders_is_what_their_docstrings_say() -> None:
    checked = subprocess.run(
        [sys.executable, ".ci/where.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.stdout == ""


def test_the_list_of_settings_is_what_their_models_say() -> None:
    checked = subprocess.run(
        [sys.executable, ".ci/settings.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (checked.stdout, checked.stderr) == ("", "")


@pytest.mark.parametrize(
    ("words", "file"),
    [
        ("spake2 exchange join", "coordinator/members/joincodes.py"),
        ("row lane", "gateway/scheduler/memory.py"),
        ("clock ahead", "mesh/roster/reader.py"),
        ("option bounds", "mesh/prompt/options.py"),
        ("lora", "node/engine/adapters.py"),
        ("prefix disk sealed", "node/stored/keys.py"),
        ("rings planned anew", "coordinator/rings/moves.py"),
        ("renewing certificates", "coordinator/services/certificates.py"),
        ("quantised caches", "node/engine/caches/quantized.py"),
        ("joining codes", "cli/commands/token.py"),
        ("planning memory", "coordinator/nodes/survey.py"),
    ],
)
def test_a_subject_is_found_by_words(words: str, file: str) -> None:
    found = subprocess.run(
        [sys.executable, ".ci/where.py", *words.split()], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert file in re.split(r"[ :\n]", found.stdout)


FAULTS = re.findall(
    r"```python\n(.+?)```\n```\n(.+?)```", (ROOT / "docs/upstream.md").read_text("utf-8"), re.DOTALL
)
LENT = "from sealring.node.engine import mlx_lm_import as own; list(map(own.register, {packages}))"
"""mlx-vlm's own `__init__` wants packages that are not installed here."""


@pytest.mark.parametrize(("program", "printed"), FAULTS)
def test_a_fault_that_is_gone_round_is_still_there(program: str, printed: str) -> None:
    begin = LENT.format(packages=["mlx_vlm", "mlx_vlm.speculative", "mlx_vlm.models.deepseek_v4"])
    found = subprocess.run(
        [sys.executable, "-c", f"{begin}\n{program}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == printed, "mended upstream? docs/upstream.md says what to remove"


def test_no_entry_of_the_change_log_is_there_twice() -> None:
    beginnings = re.findall(r"^- .{40}", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert [one for one in set(beginnings) if beginnings.count(one) > 1] == []
