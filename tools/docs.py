"""Writes the generated pages of docs/; tests fail if they are stale."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from tools.json_page import json_page
from tools.tables import metrics_page, settings_page

import otel_ddp
from otel_ddp import cli

DOCS = Path(__file__).parents[1] / "docs"

_OPENING = ("init", "instrument", "uninstrument", "data", "current")
_RECORDING = ("log", "phase", "span", "event", "alert", "artifact", "config", "finish")
_RUN_PROPERTIES = ("run", "group", "job_type", "identity")
_ERRORS = ("OtelDdpError", "ConfigError", "MissingDependency")


def api(page: str) -> str:
    """The page with each call, error and command after its written introduction."""
    listed = {*_OPENING, *_RECORDING, *_ERRORS, "Run", "Identity", "__version__"}
    assert listed == set(otel_ddp.__all__), sorted(listed ^ set(otel_ddp.__all__))
    written, heading, _ = page.partition("## Opening a run\n")
    assert heading
    return written + "\n\n".join(_api()) + "\n"


def _api() -> Iterator[str]:
    yield "## Opening a run"
    for name in _OPENING:
        yield from _call(f"otel_ddp.{name}", getattr(otel_ddp, name))
    yield "## otel_ddp.Run"
    yield (
        f"{_text(otel_ddp.Run)} Each method is also a function, as in `otel_ddp.log(...)`: it uses "
        "the open run of the process, and does nothing without one."
    )
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
        "`--help` describes the arguments. `--json` prints [JSON](json.md). `--dir` is the "
        "directory of journals and agent, by default `OTEL_DDP_DIR`."
    )
    yield _table(("command", "arguments", "what it does"), _commands())


def _commands() -> Iterator[tuple[str, ...]]:
    for name, (module, sentence) in cli.COMMANDS.items():
        parser = argparse.ArgumentParser(add_help=False)
        import_module(f"otel_ddp.cli.{module}").add_arguments(parser)
        arguments = (
            each.option_strings[0] if each.option_strings else str(each.metavar)
            for each in parser._actions
            if each.help != argparse.SUPPRESS
        )
        shown = " ".join(f"`{each}`" for each in arguments).replace("|", "\\|")
        yield f"`otel-ddp {name}`", shown, sentence


def _call(name: str, function: Callable[..., Any]) -> Iterator[str]:
    signature = inspect.signature(function)
    words = list(_arguments([p for p in signature.parameters.values() if p.name != "self"]))
    if function is otel_ddp.instrument:
        words = list(_collapsed(words))
    result = str(signature.return_annotation).replace("contextlib.", "")
    # The annotation of a function under `contextlib.contextmanager` is not its result.
    result = result.replace("Iterator[None]", "AbstractContextManager[None]")
    line = f"{name}({', '.join(words)}) -> {result}"
    if len(line) > 100:
        line = "\n".join([f"{name}(", *(f"    {each}," for each in words), f") -> {result}"])
    yield f"### {name}"
    yield f"```text\n{line}\n```"
    yield _text(function)


def _arguments(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """The parameters of a signature, with `/` and `*`."""
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


def _collapsed(words: list[str]) -> Iterator[str]:
    """The arguments of `instrument`, with `...` for those that `init` has too."""
    of_init = set(inspect.signature(otel_ddp.init).parameters) - {"strategy"}
    for is_shared, each in groupby(words, lambda word: word.partition(":")[0] in of_init):
        yield from ["..."] if is_shared else each


def _unquoted(signature: str) -> str:
    """The signature with annotations as in the source, not as strings."""
    # Double quotes are around annotations that contain quotes.
    signature = re.sub(r': "([^"]*)"', lambda found: ": " + found[1].replace("'", '"'), signature)
    return re.sub(r"((?:^|: )'([^']*)')", lambda found: found[1].replace("'", ""), signature)


def _text(documented: object) -> str:
    return (inspect.getdoc(documented) or "").strip()


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(' '.join(each.split()) for each in row)} |" for row in cells)


PAGES = {"api": api, "json": json_page, "metrics": metrics_page, "settings": settings_page}

if __name__ == "__main__":
    for name, generated in PAGES.items():
        path = DOCS / f"{name}.md"
        path.write_text(generated(path.read_text()))
