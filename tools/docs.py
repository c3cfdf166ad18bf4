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
_RUN = ("log", "logs", *_RECORDING[1:])
_RUN_PROPERTIES = ("run", "group", "job_type", "identity", "url")
_ERRORS = ("OtelDdpError", "ConfigError", "MissingDependency")

_INTRODUCTION = """\
# Calls and commands

These names are public, and so are the classes of [the integrations](frameworks.md). Every other
name may change without notice."""

_SUMMARY = [
    (
        "`otel_ddp.instrument(model)`",
        "opens the run and measures the steps of this model; call it as the last line before the "
        "loop",
    ),
    (
        "`otel_ddp.instrument()`",
        "the same where a trainer builds its own model: [where the line goes](frameworks.md)",
    ),
    (
        "`otel_ddp.data(loader)`",
        "measures the waits for batches of any iterable; torch's own loader needs no call",
    ),
    ("`otel_ddp.init(...)`", "opens the run before there is a model, or without one"),
    (
        "`run.log({...}, step=, epoch=, split=)`",
        "records any number of Python, NumPy or torch scalars; it never waits for a tensor on a "
        "device. Without `step=` a value has [the step that the hooks count]"
        "(training.md#numbers-of-steps)",
    ),
    (
        '`run.phase("checkpoint", expect_s=300)`',
        "a context manager: the time counts as this phase, and a span is sent",
    ),
    ('`run.span("load", shard=3)`', "a context manager: a span is sent"),
    (
        '`run.logs("info")`',
        "records the lines of Python's `logging`, with rank and step: [logs](logs.md)",
    ),
    ('`run.event("lr drop", factor=0.1)`', "sends a log record"),
    (
        '`run.alert("loss rises", text, level="warn")`',
        "tells people: [notifications](notifications.md); it is a log record too",
    ),
    (
        '`run.artifact(path, type="model", direction="output")`',
        "names a file that came out of the run, or went into it: [artifacts](artifacts.md)",
    ),
    (
        "`run.config(mapping)`",
        "records the configuration, flat or nested; it becomes labels of `training_run_info`",
    ),
    ("`run.finish()`", "hands over the last values; an exit does the same"),
]

_SOURCES = """\
`make docs` writes the rest of this page from the docstrings of the package and from its commands.
The arguments that name a process, and their variables: [settings](settings.md#who-a-process-is)."""


def api() -> str:
    """Return docs/api.md as a whole."""
    listed = {*_OPENING, *_RECORDING, *_ERRORS, "Run", "Identity", "__version__"}
    assert listed == set(otel_ddp.__all__), sorted(listed ^ set(otel_ddp.__all__))
    return "\n\n".join(_api()) + "\n"


def _api() -> Iterator[str]:
    yield _INTRODUCTION
    yield _table(("call", "what it does"), _SUMMARY)
    yield _SOURCES
    yield "## Opening a run"
    for name in _OPENING:
        yield from _call(f"otel_ddp.{name}", getattr(otel_ddp, name))
    yield "## Recording"
    yield "Each of these uses the open run of the process. Without one it does nothing."
    for name in _RECORDING:
        yield from _call(f"otel_ddp.{name}", getattr(otel_ddp, name))
    yield "## otel_ddp.Run"
    yield _text(otel_ddp.Run)
    for name in _RUN:
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
    for name, (module, sentence) in cli.COMMANDS.items():
        parser = argparse.ArgumentParser(description=sentence, add_help=False)
        import_module(f"otel_ddp.cli.{module}").add_arguments(parser)
        description = " ".join((parser.description or "").split())
        yield f"### otel-ddp {name}"
        yield f"{description[0].upper()}{description[1:].removesuffix('.')}."
        yield _table(("option", "what it does"), _options(parser))


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


if __name__ == "__main__":
    (DOCS / "api.md").write_text(api())
    (DOCS / "json.md").write_text(json_page())
    (DOCS / "metrics.md").write_text(metrics_page())
    (DOCS / "settings.md").write_text(settings_page())
