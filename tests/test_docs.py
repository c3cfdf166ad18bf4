"""The pages for people: their links lead somewhere, each is in the index, none is stale."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools import docs

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# These are read beside the code, not on the site.
BESIDE = [*ROOT.glob("*.md"), *(ROOT / "deploy").rglob("*.md")]

# What a path on a page may begin at.
SOURCES = (ROOT, ROOT / "src", ROOT / "src" / "otel_ddp")

_PATH = re.compile(r"`([a-z_]+/[\w/.-]*(?:\.(?:py|md|yml|yaml|sh)|/))`")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def links(text: str) -> list[str]:
    return _LINK.findall(_CODE.sub("", _FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """Those that a code forge and the site give to headings."""
    found: dict[str, int] = {}
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found[slug] = found.get(slug, 0) + 1
    return {f"{slug}-{n}" if n else slug for slug, count in found.items() for n in range(count)}


def faults(page: Path, text: str) -> Iterator[str]:
    """Which links of a page lead nowhere, or not from the site."""
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"https?://", link):
            continue
        if not target.exists():
            yield f"{link}: there is no such file"
        elif page.is_relative_to(DOCS) and target.is_dir():
            yield f"{link}: the site has no page for a folder"
        elif page.is_relative_to(DOCS) and target.suffix == ".md" and target not in PAGES:
            yield f"{link}: the site has no page from outside of docs"
        elif anchor and anchor not in anchors(text if target == page else target.read_text()):
            yield f"{link}: that page has no such heading"


def test_every_link_of_every_page_leads_somewhere() -> None:
    found = {
        page.relative_to(ROOT).as_posix(): list(faults(page, page.read_text()))
        for page in [*PAGES, *BESIDE]
    }

    assert {page: wrong for page, wrong in found.items() if wrong} == {}


def test_the_index_lists_every_page_once_for_people_and_once_for_the_site() -> None:
    text = (DOCS / "index.md").read_text()
    pages = sorted(page.relative_to(DOCS).as_posix() for page in PAGES if page.name != "index.md")
    trees = "\n".join(re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL))

    listed = re.findall(r"^- .*?(?=^- |^$|\Z)", text, re.MULTILINE | re.DOTALL)

    assert sorted(link for item in listed for link in links(item)) == pages
    assert sorted(f"{line}.md" for line in trees.splitlines() if line[:1] not in ("", ":")) == pages


def test_every_file_and_folder_that_a_page_names_is_there() -> None:
    named = {
        (page, path)
        for page in [*PAGES, *BESIDE]
        if page.name != "CHANGELOG.md"
        for path in _PATH.findall(page.read_text())
    }

    assert named
    assert {
        f"{page.name}: {path}"
        for page, path in named
        if not any((root / path).exists() for root in (page.parent, *SOURCES))
    } == set()


def test_every_reason_for_silence_on_the_page_of_verdicts_is_one_that_the_agent_gives() -> None:
    page = (DOCS / "diagnosis.md").read_text()
    tables = re.findall(r"^\| reason \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    reasons = [row.split("|")[1].strip() for table in tables for row in table.splitlines()]
    given = "\n".join(
        node.value
        for folder in ("diagnosis", "agent/verdicts")
        for file in (ROOT / "src" / "otel_ddp" / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )

    assert len(reasons) > 10
    assert {
        reason
        for reason in reasons
        # Three dots stand for a number, a name or a list.
        if not all(part.strip(" ,") in given for part in reason.split("..."))
    } == set()


def test_the_page_of_calls_is_what_the_docstrings_say() -> None:
    assert (DOCS / "api.md").read_text() == docs.api(), "docs/api.md is stale: run `make docs`."


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900
