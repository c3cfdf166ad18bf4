"""Writes the generated pages of docs/; the tests fail where they are stale."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.json_page import json_page
from tools.metrics_page import metrics_page
from tools.settings_page import settings_page

import otel_ddp
from otel_ddp import cli

DOCS = Path(__file__).parents[1] / "docs"

_OPENING = ("instrument", "uninstrument", "data", "init", "current")
_RECORDING = ("log", "phase", "span", "event", "alert", "artifact", "config", "finish")
_RUN_PROPERTIES = ("run", "group", "job_type", "identity", "url")
# Options that say the same in every command.
_SHARED = ("`--json`", "`--dir`")
_ERRORS = ("OtelDdpError", "ConfigError", "MissingDependency")


def api(page: str) -> str:
    """The page with each call, error and command; what stands before them stays."""
    listed = {*_OPENING, *_RECORDING, *_ERRORS, "Run", "Identity", "__version__"}
    assert listed == set(otel_ddp.__all__), sorted(listed ^ set(otel_ddp.__all__))
    written, heading, _ = page.partition("## Opening a run\n")
    assert heading
    return written + "\n\n".join(_api()) + "\n"


def _api() -> Iterator[str]:
    yield "## Opening a run"
    for name in _OPENING:
        yield from _call(f"otel_ddp.{name}", getattr(otel_ddp, name))
    yield "## Recording"
    named = ", ".join(f"`otel_ddp.{name}`" for name in _RECORDING)
    yield (
        f"{named} take the arguments of the methods of the same name below. They use the open run "
        "of the process, and do nothing without one."
    )
    yield "## otel_ddp.Run"
    yield _text(otel_ddp.Run)
    for name in _RECORDING:
        yield from _call(f"run.{name}", getattr(otel_ddp.Run, name))
    yield "### Properties"
    yield _table(
        ("property", "what it is"),
        [(f"`run.{name}`", _text(getattr(otel_ddp.Run, name))) for name in _RUN_PROPERTIES],
    )
    yield "## Errors"
    yield _table(
        ("error", "what it means"),
        [(f"`otel_ddp.{name}`", _text(getattr(otel_ddp, name))) for name in _ERRORS],
    )
    yield "## Commands"
    yield (
        "`--json` prints the same for programs. `--dir` names the directory of journals and "
        "agent, by default `OTEL_DDP_DIR`, else one on tmpfs."
    )
    for name, (module, sentence) in cli.COMMANDS.items():
        parser = argparse.ArgumentParser(description=sentence, add_help=False)
        import_module(f"otel_ddp.cli.{module}").add_arguments(parser)
        description = " ".join((parser.description or "").split())
        yield f"### otel-ddp {name}"
        yield f"{description[0].upper()}{description[1:].removesuffix('.')}."
        options = _options(parser)
        if own := [each for each in options if each[0] not in _SHARED]:
            yield _table(("option", "what it does"), own)
        if shared := [name for name, _ in options if name in _SHARED]:
            yield f"Also {' and '.join(shared)}."


def _call(name: str, function: Callable[..., Any]) -> Iterator[str]:
    signature = inspect.signature(function)
    words = list(_arguments([p for p in signature.parameters.values() if p.name != "self"]))
    result = str(signature.return_annotation).replace("contextlib.", "")
    # What a function under `contextlib.contextmanager` is annotated with is not what it returns.
    result = result.replace("Iterator[None]", "AbstractContextManager[None]")
    line = f"{name}({', '.join(words)}) -> {result}"
    if len(line) > 100:
        line = "\n".join([f"{name}(", *(f"    {each}," for each in words), f") -> {result}"])
    yield f"### {name}"
    yield f"```text\n{line}\n```"
    yield _text(function)


def _arguments(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Each as it is written in a call's signature, with the marks between the kinds of them."""
    before = None
    for each in parameters:
        if before is each.POSITIONAL_ONLY and each.kind is not each.POSITIONAL_ONLY:
            yield "/"
        if each.kind is each.KEYWORD_ONLY and before not in (
            each.KEYWORD_ONLY,
            each.VAR_POSITIONAL,
        ):
            yield "*"
        yield _unquoted(str(each))
        before = each.kind


def _unquoted(signature: str) -> str:
    """With annotations as they stand in the source, not as the strings that Python keeps."""
    # Python puts double quotes around an annotation with quotes of its own.
    signature = re.sub(r': "([^"]*)"', lambda found: ": " + found[1].replace("'", '"'), signature)
    return re.sub(r"((?:^|: )'([^']*)')", lambda found: found[1].replace("'", ""), signature)


def _options(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    return [
        (
            ", ".join(f"`{each}`" for each in action.option_strings) or f"`{action.metavar}`",
            (action.help or "") % {"default": action.default},
        )
        for action in parser._actions
        if action.help != argparse.SUPPRESS
    ]


def _text(documented: object) -> str:
    return (inspect.getdoc(documented) or "").strip()


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    cells = [head, ("---", "---"), *rows]
    return "\n".join(f"| {' | '.join(' '.join(each.split()) for each in row)} |" for row in cells)


PAGES = {"api": api, "json": json_page, "metrics": metrics_page, "settings": settings_page}

if __name__ == "__main__":
    for name, generated in PAGES.items():
        path = DOCS / f"{name}.md"
        path.write_text(generated(path.read_text()))
