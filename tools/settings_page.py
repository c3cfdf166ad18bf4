"""Writes docs/settings.md: the settings with the text below each, and the variables of others."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import Field, fields
from typing import Any

from otel_ddp import settings
from otel_ddp.identity.identity import VARIABLES

# Read by `identity`, in the place of an argument of `init`.
IDENTITY = {
    "group": "`group`: what ties several processes or runs of one experiment together.",
    "run": "`run`: the name of this launch, the same on all its ranks. By default the launcher's. "
    "A resumed run that has the same name again goes on as the same run.",
    "job_type": "`job_type`: the role of this process; `train`.",
    "project": "`project`: the `service.name` of what is exported.",
    "name": "`name`: what people call the run; in its info.",
    "description": "`description`: what the run is about, in 1,000 characters at most; in its "
    "info.",
    "tags": "`tags`: words with commas between them, in code a list as well; in its info, sorted.",
    "global_rank": "`global_rank`, counted from 0.",
    "local_rank": "`local_rank`: the number on its node.",
    "world_size": "`world_size`: how many ranks there are.",
    "node_rank": "The number of this node among the run's.",
}

# Of settings.STANDARD, in its order.
STANDARD = (
    "Where one signal goes; used as it is.",
    "How one signal is sent.",
    "How long one export of a signal may take.",
    "`name=value,name=value`, sent along: a token, say. Only a collector that an endpoint names "
    "gets them.",
    "`none` or `gzip`; by default `gzip` to other machines, and `none` on this one.",
    "`true`: gRPC to an address without a scheme is not encrypted.",
    "A file: whom to trust, instead of the system's authorities.",
    "A file: the certificate that we show.",
    "A file: its key.",
    "`none`: this signal is not exported. `/metrics` is served all the same.",
    "The launcher's span, as W3C Trace Context writes it: the run's span is below it.",
    "`service.name`; the project, or `otel-ddp`.",
    "`key=value,key=value`: further attributes of the resource; they win over ours.",
)

_INTRODUCTION = """\
# Settings

An argument wins over the variable, the variable over the default. Variables are read
when `init` or `instrument` is called and when the agent starts, not at import. This page
is generated from `src/otel_ddp/settings.py` by `make docs`.
"""

_WRONG = """
A value that means nothing stops `init` with a sentence. Where a standard variable
(`OTEL_*`, not `OTEL_DDP_*`) holds it, it may be meant for others: then it counts as
unset, and one rank of a node says so. An address or a file that cannot be used has no
default: what would be sent waits on disk.

## Who a process is

Of several variables the first that is set counts, an argument of `init` before them, and
what torchrun, Slurm, MPI and their like set after them. `RANK` without `WORLD_SIZE` is a
rank of an unknown number: its run waits for a process group, for a minute at most.
"""

_OTHERS = """
## Variables of other trackers

Who comes from SwanLab or W&B may leave them set. Those that name something are above.

| variable | what it says |
|---|---|
| `SWANLAB_MODE`, `WANDB_MODE`, `WANDB_DISABLED` | No effect: they are often set to switch the \
other tracker off. `OTEL_DDP_AGENT=offline` keeps all on disk, `OTEL_SDK_DISABLED=true` switches \
us off. |
| `SWANLAB_RESUME`, `WANDB_RESUME` | No effect, and none is needed: a run goes on where its name \
comes again. |"""

_EXPORT = """
## Export

Standard variables, read when the agent starts. A signal's own wins over the general one,
in the first table or here.
"""


def settings_page() -> str:
    """Return docs/settings.md as a whole."""
    texts = _texts()
    rows = (
        f"| `{each.metadata['variable']}` | {_default(each)} | {texts[each.name]} |"
        for each in fields(settings.Settings)
    )
    identity = ((VARIABLES[name], meaning) for name, meaning in IDENTITY.items())
    lines = [
        _INTRODUCTION,
        *("| variable | default | what it does |", "|---|---|---|", *rows),
        *(_WRONG, *_table(identity)),
        _OTHERS,
        *(_EXPORT, *_table(zip(settings.STANDARD, STANDARD, strict=True))),
    ]
    return "\n".join(lines) + "\n"


def _texts() -> dict[str, str]:
    """The text below each field, as one line."""
    (record,) = ast.parse(inspect.getsource(settings.Settings)).body
    assert isinstance(record, ast.ClassDef)
    return {
        each.target.id: " ".join(text.value.value.split())
        for each, text in zip(record.body, record.body[1:], strict=False)
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _table(rows: Iterable[tuple[tuple[str, ...], str]]) -> Iterator[str]:
    yield from ("| variable | what it says |", "|---|---|")
    for names, meaning in rows:
        yield f"| {', '.join(f'`{name}`' for name in names)} | {meaning} |"


def _default(setting: Field[Any]) -> str:
    default = setting.default
    if isinstance(default, bool):
        text = str(default).lower()
    elif isinstance(default, frozenset):
        text = ",".join(sorted(default))
    elif isinstance(default, float):
        standard = not setting.metadata["variable"].startswith("OTEL_DDP_")
        text = f"{default * 1000 if standard else default:g}"
    elif setting.name.endswith("_bytes"):
        text = f"{default // settings.MIB}M"
    else:
        text = str(default or "") if default != () else ""
    return f"`{text}`" if text else ""
