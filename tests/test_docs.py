"""What the pages name is there: files, pages, headings."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRACKED = set(
    subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
)
DATED = re.compile(r"docs/(decisions/|performance/\d)")
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
