"""The row of the board Run on the inputs and outputs of a run."""

from __future__ import annotations

from tools.dashboards.names import metric
from tools.dashboards.panels import Column, Panel, Text, graph, listing, rows
from tools.dashboards.selectors import RUN

_TOLD = "training.artifact.timestamp"
# The run that wrote an input may have ended long ago.
_BEFORE = "30d"


def artifacts() -> list[Panel]:
    each = "direction, name, type, digest, uri"

    def last(name: str) -> str:
        return f"max by ({each}) (last_over_time({metric(name, RUN)}[$__range]))"

    return [
        listing(
            Text(
                "Inputs and outputs",
                "What the script has named by run.artifact(), as the agent has read it.",
                "No digest: the log record of this artifact says why. The same digest is the same "
                "content, under whatever name.",
            ),
            rows(f"{last(_TOLD)} * 1000", "told"),
            rows(last("training.artifact.size"), "size"),
            rows(last("training.artifact.step"), "step"),
            columns=[
                Column("direction", width=100),
                Column("name"),
                Column("type", width=90),
                Column("Value #size", "Size", "bytes", width=90),
                Column("Value #step", "At step", decimals=0, width=95),
                Column("Value #told", "When", "dateTimeAsIso", width=165),
                # The longest columns last.
                Column("uri", "Where"),
                Column("digest"),
            ],
            sort=("When", True),
            size=(14, 9),
        ),
        graph(
            Text(
                "Where from, where to",
                "The run between its inputs and outputs, and the runs of the last 30 days that "
                "have written the former or read the latter: by their digest, or by the address "
                "where there is none. Of each name the newest, and those of these other runs.",
                "A run that you do not expect: the input is another one than you meant.",
            ),
            _nodes(),
            _edges(),
            nothing="none",
            size=(10, 9),
        ),
    ]


def _this(direction: str) -> str:
    """Artifacts of this run, with the label `of` that identifies their content."""
    told = metric(_TOLD, RUN, f'direction="{direction}"')
    return _by_content(f"last_over_time({told}[$__range])")


def _drawn(direction: str) -> str:
    """The newest artifact of each name: a long run has hundreds of checkpoints."""
    this = _this(direction)
    other_way = "input" if direction == "output" else "output"
    newest = f"topk by (name) (1, {this})"
    return f"({newest} or {this} and on (of) {_others(other_way)})"


def _others(direction: str) -> str:
    """Artifacts of other runs that this run reads or writes in turn."""
    told = metric(_TOLD, 'run!="$run"', f'direction="{direction}"')
    other_way = "input" if direction == "output" else "output"
    theirs = f"max by (run, direction, of) ({_by_content(f'last_over_time({told}[{_BEFORE}])')})"
    return f"({theirs} and on (of) {_this(other_way)})"


def _by_content(expr: str) -> str:
    return _labelled(_labelled(expr, "of", "uri", "$1"), "of", "digest", "$1")


def _labelled(expr: str, label: str, of: str, text: str) -> str:
    return f'label_replace({expr}, "{label}", "{text}", "{of}", "(.+)")'


def _runs(expr: str, what: str) -> str:
    named = _labelled(f"group by (run) ({expr})", "id", "run", "run $1")
    return _labelled(_labelled(named, "title", "run", "$1"), "subtitle", "run", what)


def _nodes() -> str:
    this = f"({_drawn('input')} or {_drawn('output')})"
    files = _labelled(_labelled(this, "id", "of", "$1"), "title", "name", "$1")
    files = _labelled(_labelled(files, "subtitle", "type", "$1"), "detail__uri", "uri", "$1")
    parts = (
        f"group by (id, title, subtitle, detail__uri) ({files})",
        _runs(this, "this run"),
        _runs(_others("output"), "wrote it"),
        _runs(_others("input"), "read it"),
    )
    # A run that has read and written is one node. The last node is shown alone: without any node,
    # Grafana shows "An unexpected error happened".
    none = 'label_replace(vector(0), "id", "none", "", "")'
    none = f'label_replace({none}, "title", "no files are named", "", "")'
    return f"({' or on (id) '.join(parts)}) or on () {none}"


def _edges() -> str:
    def arrows(expr: str, source: str, target: str) -> str:
        ends = _labelled(expr, "run_id", "run", "run $1")
        ends = _labelled(_labelled(ends, "source", source, "$1"), "target", target, "$1")
        return f'label_join(group by (source, target) ({ends}), "id", " to ", "source", "target")'

    written = f"{_drawn('output')} or {_others('output')}"
    read = f"{_drawn('input')} or {_others('input')}"
    return f"{arrows(written, 'run_id', 'of')} or {arrows(read, 'of', 'run_id')}"
