"""Links between boards that keep the selection and mostly the time range."""

from __future__ import annotations

from collections.abc import Collection, Iterator

BOARDS = ("Runs", "Run", "Ranks", "GPUs & nodes", "Compare", "Fleet", "Goodput", "Pipeline")

# The tag of all boards.
TAG = "otel-ddp"

# Boards of one run.
_SINGLE = ("Run", "Ranks")
_WHOSE = "${group:queryparam}&${job_type:queryparam}"


def uid(title: str) -> str:
    """The uid of a board, which is in its address."""
    return f"{TAG}-{title.partition(' ')[0].lower()}"


def _board(title: str) -> str:
    return f"/d/{uid(title)}?${{datasource:queryparam}}"


def to_the_others(title: str, variables: Collection[str]) -> Iterator[tuple[str, str]]:
    """Links in the head of a board; Grafana adds the time range."""
    for other in BOARDS:
        if other == title:
            continue
        kept = ["group", "job_type"]
        # A board of one run that gets "All", or several, would stay empty.
        one = other in _SINGLE and title not in _SINGLE
        if not one:
            kept.append("run")
        # Compare preselects rank 0, as all ranks of a large run would be too expensive there. Other
        # boards must not inherit that.
        if "Compare" not in (title, other) and other != "Runs":
            kept += ["node", "rank", "local_rank"]
        chosen = "&".join(f"${{{name}:queryparam}}" for name in kept if name in variables)
        run = "&var-run=${newest:percentencode}" if one and "newest" in variables else ""
        yield other, f"{_board(other)}&{chosen}{run}"


def of_table(title: str) -> tuple[str, str]:
    """From a row of the table of runs, with the same time range."""
    return (
        f"{title}, same time",
        f"{_board(title)}&{_ROW}&${{__url_time_range}}",
    )


# Of a table with the columns Started and Until.
_LIFETIME = "from=${__data.fields.Started.numeric}&to=${__data.fields.Until.numeric}"
_ROW = "var-group=${__data.fields.group}&${job_type:queryparam}&var-run=${__data.fields.run}"


def of_table_lifetime(title: str) -> tuple[str, str]:
    """The same, with the time range of the run."""
    return f"{title}, from start to end", f"{_board(title)}&{_ROW}&{_LIFETIME}"


def of_row(title: str, *labels: str) -> tuple[str, str]:
    """From a row of a table on a board of one run, by its labels."""
    chosen = "".join(f"&var-{label}=${{__data.fields.{label}}}" for label in labels)
    return (
        f"{title}: this {' and '.join(labels)}",
        f"{_board(title)}&{_WHOSE}&${{run:queryparam}}{chosen}&${{__url_time_range}}",
    )


def of_series(title: str, *labels: str) -> tuple[str, str]:
    """From a series, by its labels."""
    chosen = "".join(f"&var-{label}=${{__field.labels.{label}}}" for label in labels)
    kept = _WHOSE if "run" in labels else f"{_WHOSE}&${{run:queryparam}}"
    return (
        f"{title}: this {' and '.join(labels)}",
        f"{_board(title)}&{kept}{chosen}&${{__url_time_range}}",
    )


def of_fields(title: str, *labels: str, lifetime: bool = False) -> tuple[str, str]:
    """From a row of a table on a board without a selection of runs."""
    chosen = "".join(f"&var-{label}=${{__data.fields.{label}}}" for label in labels)
    return (
        f"{title}: this {' and '.join(labels)}",
        f"{_board(title)}{chosen}&{_LIFETIME if lifetime else '${__url_time_range}'}",
    )
