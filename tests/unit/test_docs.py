"""The documentation hangs together: links lead somewhere, pages are in the menu, generated pages are current."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("bench/*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the anchors that headings get."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_page_that_is_there(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)} links to {target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_page_opens_with_its_title(page: Path) -> None:
    first = page.read_text("utf-8").lstrip().splitlines()[0]
    assert first.startswith(("# ", "--8<--")), f"{name_of(page)} begins with '{first}'"


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text("utf-8")
    missing = [name for page in sorted(DOCS.rglob("*.md")) if (name := str(page.relative_to(DOCS))) not in menu]
    assert not missing, f"add {missing} to 'nav' in mkdocs.yml"


def test_every_decision_says_what_it_costs_and_when_to_look_again() -> None:
    listed = (DOCS / "decisions" / "README.md").read_text("utf-8")
    for page in sorted((DOCS / "decisions").glob("0*.md")):
        text = page.read_text("utf-8")
        for part in ("**Context.**", "**Choice.**", "**What it costs.**", "**Look again**"):
            assert part in text, f"{name_of(page)} lacks {part}"
        assert page.name in listed, f"docs/decisions/README.md does not list {page.name}"
        assert len(text.splitlines()) <= 60, f"{name_of(page)} is longer than a page"


def test_tests_that_failure_modes_name_are_there() -> None:
    rows = re.findall(r"^\| F\d+ .*$", (DOCS / "reference" / "failure-modes.md").read_text("utf-8"), re.MULTILINE)
    assert rows
    for row in rows:
        folder = ""
        for name in re.findall(r"`((?:tests/\S+/)?test_\w+\.py)`", row):
            folder = name.rpartition("/")[0] or folder
            assert (ROOT / folder / name.rpartition("/")[2]).exists(), f"{name} of: {row[:40]}"


def test_the_command_line_reference_is_current() -> None:
    location = importlib.util.spec_from_file_location("cli_reference", ROOT / "tools" / "cli_reference.py")
    assert location is not None
    assert location.loader is not None
    tool = importlib.util.module_from_spec(location)
    location.loader.exec_module(tool)
    assert tool.PAGE.read_text("utf-8") == tool.page(), "run: python tools/cli_reference.py"
