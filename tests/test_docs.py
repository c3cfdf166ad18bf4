"""The pages for people: their links lead somewhere, each is in the index, none is stale."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import yaml
from tools import docs

import otel_ddp
from otel_ddp.cli import _parse

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# These are read beside the code, not on the site.
BESIDE = [*ROOT.glob("*.md"), *(ROOT / "deploy").rglob("*.md")]
# What they tell to type is right today; the changelog's was.
COMMANDED = [page for page in [*PAGES, *BESIDE] if page.name != "CHANGELOG.md"]

# What a path on a page may begin at.
SOURCES = (ROOT, ROOT / "src", ROOT / "src" / "otel_ddp")

_PATH = re.compile(r"`([a-z_]+/[\w/.-]*(?:\.(?:py|md|yml|yaml|sh)|/))`")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
_BETWEEN = set(";|&()<>")
_LACKS = re.compile(r"expected one argument|arguments are required|needs a command")
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
    named = {(page, path) for page in COMMANDED for path in _PATH.findall(page.read_text())}

    assert named
    assert {
        f"{page.name}: {path}"
        for page, path in named
        if not any((root / path).exists() for root in (page.parent, *SOURCES))
    } == set()


def test_every_call_of_ours_in_the_python_of_a_page_is_one_with_these_arguments() -> None:
    calls = [
        node
        for page in COMMANDED
        for text in fenced("python", page.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("otel_ddp.", "run."))
    ]

    assert calls
    for call in calls:
        whose, _, name = ast.unparse(call.func).partition(".")
        function = getattr({"otel_ddp": otel_ddp, "run": object.__new__(otel_ddp.Run)}[whose], name)
        named = {each.arg: each.value for each in call.keywords if each.arg}
        inspect.signature(function).bind(*call.args, **named)


def test_every_reason_for_silence_on_the_page_of_verdicts_is_one_that_the_agent_gives() -> None:
    page = (DOCS / "diagnosis.md").read_text()
    tables = re.findall(r"^\| reason \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    reasons = [row.split("|")[1].strip() for table in tables for row in table.splitlines()]
    given = "\n".join(
        node.value
        for folder in ("diagnosis", "agent/judge")
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


def fenced(language: str, text: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)


def split(script: str) -> Iterator[list[str]]:
    """The commands of a script, as words."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        # An odd quote is no command.
        with contextlib.suppress(ValueError):
            for is_between, words in itertools.groupby(lexer, lambda word: set(word) <= _BETWEEN):
                if not is_between:
                    yield list(words)


def scripts(text: str) -> list[str]:
    return fenced("(?:ba)?sh", text)


def mentions(text: str) -> list[str]:
    """What a page names within its sentences."""
    return [each.strip("`") for each in _CODE.findall(_FENCE.sub("", text))]


def refused(words: list[str]) -> str:
    """What the command says if it does not take these words."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        _parse(words)
    return said.getvalue()


def test_nothing_advises_to_time_collectives_without_the_case_in_which_that_does_harm() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "deploy").rglob("*.y*ml")]
    # What was run on a GPU with which variables is no advice.
    for path in [*sources, *(page for page in COMMANDED if page.name != "gpu.md")]:
        # A sentence of the code, and a table of a page, is one paragraph.
        for paragraph in path.read_text().split("\n\n"):
            if "TORCH_NCCL_ENABLE_TIMING=1" in paragraph:
                assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in paragraph, (path, paragraph)


def test_every_command_of_ours_that_a_page_shows_is_one_with_these_options() -> None:
    asked = [
        (page.name, words[place + 1 :], is_whole)
        for page in COMMANDED
        for is_whole, code in ((True, scripts), (False, mentions))
        for words in itertools.chain.from_iterable(map(split, code(page.read_text())))
        for place, word in enumerate(words)
        # Not the namespace of the same name.
        if word == "otel-ddp" and words[place - 1 : place] in ([], ["--"])
        if words[-1] not in ("otel-ddp", "...", "--version")
    ]

    assert len(asked) > 100
    assert [
        (page, words, why)
        for page, words, is_whole in asked
        # A sentence may leave out arguments.
        if (why := refused(words)) and (is_whole or not _LACKS.search(why))
    ] == []


def test_every_target_of_make_that_a_page_shows_is_there() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [
        (page.name, word)
        for page in COMMANDED
        for code in (*scripts(page.read_text()), *mentions(page.read_text()))
        for words in split(code)
        if words[0] == "make"
        for word in words[1:]
        if "=" not in word
    ]

    assert len(asked) > 5
    assert [each for each in asked if each[1] not in targets] == []


def test_what_a_page_shows_as_json_or_yaml_is_that() -> None:
    texts = [page.read_text() for page in PAGES]

    assert all(json.loads(each) for text in texts for each in fenced("json", text))
    assert all(yaml.safe_load(each) for text in texts for each in fenced("yaml", text))


def test_the_page_of_calls_is_what_the_docstrings_say() -> None:
    page = (DOCS / "api.md").read_text()

    assert page == docs.api(page), "docs/api.md is stale: run `make docs`."


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 880
