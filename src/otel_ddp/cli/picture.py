"""Draws the state of a node for a terminal of any size: runs, their ranks, values and GPUs."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from otel_ddp import shown
from otel_ddp.cli.command import cell, dated, marked
from otel_ddp.history.terminal import aligned
from otel_ddp.history.verdicts import named_ranks
from otel_ddp.journal.process_state import ProcessState, world_of
from otel_ddp.journal.survey import Survey, of_run
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS, NOT_HEARD

# The sentence to show if no agent runs, by the value of OTEL_DDP_AGENT.
NO_AGENT = {
    "auto": "none runs: a training process starts one",
    "external": "OTEL_DDP_AGENT=external, but none runs: start `otel-ddp agent` on this node",
    "offline": "none runs: a training process starts one, which sends nothing "
    "(OTEL_DDP_AGENT=offline)",
    "off": "OTEL_DDP_AGENT=off: journals are written, but nothing is exported",
}
# A table has at most _MOST_ROWS rows if the height is unlimited. If the height is limited, the
# tables share it, but a table may have _FEWEST_ROWS rows in any case.
_MOST_ROWS, _FEWEST_ROWS = 20, 3
# The lines of a limited height that no table gets: headings, a verdict, values and the agent.
_BESIDE_TABLES = 12
_MOST_VALUES, _MOST_PAST = 8, 3
_BAR = 10


class Line(NamedTuple):
    """A line of text and its style. The text can be understood without the style."""

    text: str
    style: Literal["", "bold", "trouble", "dim"] = ""


def picture(
    found: Survey,
    now_ns: int,
    *,
    agent: str = "auto",
    named: bool = True,
    columns: int | None = None,
    rows: int | None = None,
) -> list[Line]:
    """The state of a node as lines for a terminal of *columns* and *rows*; None means unlimited.

    *agent*: the value of OTEL_DDP_AGENT. *named*: True if only one directory of journals was read,
    False if all directories of the user were searched.
    """
    runs: dict[tuple[str, str], list[ProcessState]] = {}
    # Runs come in the order of their first processes, but ended runs come last.
    for process in found.processes:
        runs.setdefault(process.of_run, []).append(process)
    ended = {of for of, processes in runs.items() if all(each.ended for each in processes)}
    drawn = sorted(runs, key=lambda of: of in ended)
    if rows is not None:
        drawn = [of for of in drawn if of not in ended] or drawn[-1:]
    with_gpus = [each for each in found.agents if each["alive"] and each.get("gpus")]
    tables = max(len(drawn) + len(with_gpus), 1)
    most = _MOST_ROWS if rows is None else max((rows - _BESIDE_TABLES) // tables, _FEWEST_ROWS)
    lines = [*_remarks(found, agent)]
    if not runs:
        lines.append(Line("no runs" if named else "no runs of this user"))
    for of in drawn:
        lines += [Line("")] if lines else []
        lines += _run(found, of, runs[of], now_ns, columns, most, fits=rows is not None)
    if more := len(runs) - len(drawn):
        lines += [Line(""), Line(f"ended runs that `otel-ddp status` shows: {more}", "dim")]
    for each in found.agents:
        if each["alive"]:
            lines += _gpus(each, columns, most)
    if agents := [*_agents(found)]:
        lines += [Line(""), *agents]
    return [part for line in lines for part in _wrapped(line, columns)][:rows]


def _wrapped(line: Line, columns: int | None) -> Iterator[Line]:
    """The line, wrapped with an indent."""
    if columns is None or len(line.text) <= columns:
        yield line
        return
    indent = " " * (len(line.text) - len(line.text.lstrip()) + 2)
    for text in textwrap.wrap(line.text, columns, subsequent_indent=indent):
        yield line._replace(text=text)


# -- agents


def _agents(found: Survey) -> Iterator[Line]:
    for each in found.agents:
        if not each["alive"]:
            continue
        pid, version = cell(each.get("pid"), "?"), cell(each.get("version"), "?")
        if each.get("starting") is True:
            yield Line(f"agent     pid {pid} is starting")
            continue
        yield Line(f"agent     pid {pid}, version {version}")
        yield Line(f"endpoint  {cell(each.get('scrape'), 'none')}")
        yield Line(f"export    {cell(each.get('export'), 'unknown')}")
        if notify := cell(each.get("notify")):
            yield Line(f"notify    {notify}")


def _remarks(found: Survey, agent: str) -> Iterator[Line]:
    """The first lines of the picture: problems of agents and journals."""
    without_agent = list(unserved(found)) if agent in ("auto", "offline") else []
    yield from (Line(f"agent     {sentence}", "trouble") for sentence in without_agent)
    if not without_agent and not any(each["alive"] for each in found.agents):
        yield Line(f"agent     {NO_AGENT[agent]}")
    for each in found.agents:
        if each["alive"] and (remark := cell(each.get("remark"))):
            yield Line(f"note      {remark}")
    yield from (Line(f"note      {cell(why)}") for why in found.unreadable)


def unserved(found: Survey) -> Iterator[str]:
    """A sentence for each directory of journals with processes but without an agent."""
    for each in found.unserved:
        count, directory = each["processes"], cell(each["directory"])
        processes = f"{count} processes run" if count > 1 else "a process runs"
        if last_line := cell(each["agent_log"]):
            why = f"{directory}/agent.log ends with: {last_line}"
        else:
            why = "the training's first lines of output may say why"
        yield (
            f"{processes}, but no agent has started (which is right after OTEL_DDP_AGENT=off); "
            f"{why}; try `otel-ddp agent --dir {shlex.quote(directory)}`"
        )


# -- one run


def _run(
    found: Survey,
    run: tuple[str, str],
    processes: list[ProcessState],
    now_ns: int,
    columns: int | None,
    most: int,
    *,
    fits: bool,
) -> Iterator[Line]:
    """The lines on one run: open verdicts, values, ranks, and past verdicts."""
    verdicts = [each for each in found.verdicts if of_run(each["who"]) == run]
    trouble = [each for each in verdicts if each.get("kind") not in HARMLESS_VERDICTS]
    alive = [each for each in found.agents if each["alive"]]
    yield Line(heading(run, processes), "bold")
    for verdict in verdicts:
        yield Line(f"  {marked(verdict, now_ns)}", "trouble" if verdict in trouble else "")
    # The reasons why late ranks of this run cannot be detected.
    unknown = [cell(each.get("why"), "?") for each in found.insufficient if of_run(each) == run]
    looks = any(not each.get("starting") and not each.get("stopped") for each in alive)
    if looks and not (trouble or all(each.ended for each in processes)):
        yield Line("  nothing is wrong so far" if unknown else "  nothing is wrong")
    yield from (Line(f"  stragglers: {why}") for why in unknown)
    # Which steps are sampled differs a little between ranks: it is enough to show one rank.
    if (one := next((each for each in processes if each.measuring), None)) is not None:
        yield Line(f"  rank {cell(one.rank, '?')} {cell(one.measuring)}")
    if missing := next(filter(None, (each.not_measured for each in processes)), ""):
        yield Line(f"  not measured: {cell(missing)}")
    if values := _values(processes):
        yield Line(f"  {values}")
    late = {rank for each in trouble for rank in named_ranks(each)}
    yield from ranks(processes, now_ns, late, columns=columns, most=most)
    for link in found.links:
        if of_run(link) == run:
            yield Line(f"  {cell(link.get('sentence'), '?')}")
    past = [
        Line(f"  - {dated(each, now_ns)}")
        for each in found.past
        if of_run(each["who"]) == run and each.get("since_ns") and each.get("until_ns")
    ]
    yield from past[-_MOST_PAST:] if fits else past


def heading(run: tuple[str, str], processes: list[ProcessState]) -> str:
    """Name, group and size of a run; also the role of its processes if they share one role."""
    group, name = (cell(each) for each in run)
    roles = {cell(each.job_type) for each in processes}
    parts = (group and f"group {group}", *(roles if len(roles) == 1 else ()))
    return ", ".join((f"run {name or '?'}", *filter(None, parts), _of_world(processes)))


def _of_world(processes: list[ProcessState]) -> str:
    """The world size, and how many of its ranks are known here."""
    world = world_of(processes)
    if world is None:
        return "world ?"
    here = {
        each.rank
        for each in processes
        if each.world_size in (None, world) and each.rank is not None
    }
    if len(here) == world:
        return f"world {world}"
    nodes = {each.node for each in processes}
    return f"{len(here)} of {world} ranks {'here' if len(nodes) == 1 else 'known here'}"


def _values(processes: Iterable[ProcessState]) -> str:
    """The last logged values of one process: the newest process of the lowest rank that logged any.

    Values that have a best value come first.
    """
    having = (each for each in processes if each.summary)
    first = min(
        having,
        key=lambda one: (one.ended, one.rank is None, one.rank, -one.started_ns),
        default=None,
    )
    words = []
    rows = [] if first is None or first.summary is None else first.summary
    for each in sorted(rows, key=lambda row: not row.get("direction")):
        name = shown.name(cell(each.get("name"), "?"), cell(each.get("split")))
        words.append(f"{name} {shown.logged(each.get('last'))}")
    more = len(words) - _MOST_VALUES
    return "  ".join(words[:_MOST_VALUES] + [f"and {more} more"] * (more > 0))


# -- ranks

# Right-aligned columns.
_RIGHT = {"rank", "step time", "step", "since", "pid"}
# If a table is too wide, its columns are dropped in this order.
_RANKS_GO = ("pid", "local", "job_type", "node", "since", "state", "step time", "step")


def ranks(
    processes: Collection[ProcessState],
    now_ns: int,
    late: Collection[str] = (),
    *,
    columns: int | None = None,
    most: int = _MOST_ROWS,
) -> Iterator[Line]:
    """One row for each process, sorted by rank.

    If there is no room for all processes, the worst ones are shown, and come first. *late*: the
    ranks of open verdicts.
    """
    # The sort is stable: several processes of one rank, from its attempts, stay in their order.
    drawn = sorted(processes, key=lambda one: (one.rank is None, one.rank or 0))
    left_out: list[ProcessState] = []
    if len(drawn) > most:
        drawn.sort(key=lambda one: _order(one, late))
        drawn, left_out = drawn[: most - 1], drawn[most - 1 :]
    rows = [_rank(each, late, now_ns) for each in drawn]
    if len({each.job_type for each in processes}) == 1:
        rows = [{**row, "job_type": ""} for row in rows]
    head, *texts = _table(rows, columns, _RANKS_GO, _RIGHT)
    yield Line(head, "bold")
    for each, text in zip(drawn, texts, strict=True):
        yield Line(text, "dim" if each.ended else "trouble" if str(each.rank) in late else "")
    if left_out:
        states = Counter(cell(each.state, "?") for each in left_out).most_common()
        counts = ", ".join(f"{count:,} {state}" for state, count in states)
        of_one = f"all {states[0][0]}"
        yield Line(f"  and {len(left_out):,} more ranks, {counts if len(states) > 1 else of_one}")


def _order(one: ProcessState, late: Collection[str]) -> tuple[Any, ...]:
    """Sort key: late, failed and silent ranks first, then those that wait least for the others."""
    return (
        str(one.rank) not in late,
        one.state not in ("failed", "killed"),
        one.state != NOT_HEARD,
        one.ended,
        1.0 if one.wait_ratio is None else one.wait_ratio,
    )


def _rank(each: ProcessState, late: Collection[str], now_ns: int) -> dict[str, str]:
    # How long the phase has lasted is known only up to the last reading of the journal, if the
    # process is alive.
    until_ns = now_ns if each.ended or each.state == NOT_HEARD else each.read_ns or now_ns
    remarks = (
        cell(each.reason),
        "ended without a report" if each.state == "killed" else "",
        f"{each.lost} records lost" if each.lost else "",
        "" if each.settled or each.ended else "waits for its process group",
    )
    return {
        "rank": ("!" if str(each.rank) in late else "") + cell(each.rank, "?"),
        "job_type": cell(each.job_type, "-"),
        "local": cell(each.local_rank, "?"),
        "node": cell(each.node, "?"),
        "waits": "-" if each.wait_ratio is None else _bar(each.wait_ratio),
        "step time": shown.seconds(each.step_s),
        "state": cell(each.state, "?"),
        "step": cell(each.step, "-"),
        "phase": cell(each.phase, "-"),
        "since": shown.seconds(max(0.0, (until_ns - each.phase_since_ns) / 1e9)),
        "pid": cell(each.pid, "?"),
        "": " ".join(filter(None, remarks)),
    }


def _bar(ratio: float) -> str:
    """A bar for the share of time that a rank waits."""
    ratio = min(ratio, 1.0)
    return f"{'█' * round(ratio * _BAR):░<{_BAR}} {ratio:>4.0%}"


def _table(
    rows: Sequence[Mapping[str, str]],
    columns: int | None,
    go_first: Sequence[str],
    right: Collection[str] = (),
) -> Iterator[str]:
    """The lines of a table, without empty columns, and without columns that do not fit."""
    heads = [head for head in rows[0] if any(row[head] not in ("", "-") for row in rows)]
    widths = {head: max(len(head), *(len(row[head]) for row in rows)) for head in heads}
    for head in go_first:
        if columns is not None and sum(widths.values()) + 2 * len(widths) > columns:
            widths.pop(head, None)
    cells = [tuple(row[head] for head in widths) for row in rows]
    # Cut lines that are still too long: a wrapped row would be hard to read.
    return (f"  {line}"[:columns] for line in aligned([tuple(widths), *cells], right))


# -- GPUs

# If no more than this share of a GPU's memory is used, the GPU counts as unused: the driver itself
# may take as much.
_IDLE_SHARE = 0.05
_WIDEST_CELL = 60
_GPUS_GO = ("name", "power", "temp")
# The agent's remark on a missing GPU driver begins with these words. It is not shown if the node
# has no GPUs.
_NO_DRIVER = "There is no NVIDIA driver"


def _gpus(agent: Mapping[str, Any], columns: int | None, most: int) -> Iterator[Line]:
    """The GPUs of one agent, and remarks on them."""
    gpus = agent.get("gpus", ())
    remarks = [cell(each) for each in agent.get("gpu_remarks", ())]
    if not gpus:
        remarks = [each for each in remarks if not each.startswith(_NO_DRIVER)]
    if not gpus and not remarks:
        return
    yield Line("")
    driver = cell(agent.get("gpu_driver"))
    heading = ", ".join(filter(None, (f"GPUs of {cell(agent.get('node'), '?')}", driver)))
    yield Line(heading, "bold")
    if gpus:
        runs = {each.get("labels", {}).get("run") for each in gpus} - {None}
        drawn = gpus if len(gpus) <= most else gpus[: most - 1]
        head, *texts = _table([_gpu(each, len(runs) > 1) for each in drawn], columns, _GPUS_GO)
        yield Line(head, "bold")
        yield from map(Line, texts)
        if len(drawn) < len(gpus):
            yield Line(f"  and {len(gpus) - len(drawn)} more GPUs")
    yield from (Line(f"  ! {each}", "trouble") for each in remarks)


def _gpu(each: Mapping[str, Any], several_runs: bool) -> dict[str, str]:
    celsius = each.get("temperature_c")
    row = {
        "gpu": cell(each.get("index"), "?"),
        "name": cell(each.get("name"), "?"),
        "rank": _gpu_user(each, several_runs),
        "busy": shown.share(each.get("busy_ratio")),
        "memory": _share(each.get("used_bytes"), each.get("limit_bytes"), 1 << 30, "GiB", 1),
        "power": _share(each.get("power_w"), each.get("power_limit_w"), 1, "W", 0),
        "temp": "-" if celsius is None else f"{celsius:.0f} °C",
        "throttled by": ", ".join(map(cell, each.get("throttled", ()))) or "-",
    }
    return {head: text[:_WIDEST_CELL] for head, text in row.items()}


def _gpu_user(gpu: Mapping[str, Any], several_runs: bool) -> str:
    """Who uses a GPU: a rank, as in `3`, or `3 of run x` if there are several runs; or `free`..."""
    labels = gpu.get("labels", {})
    run = cell(labels.get("run"), "?")
    if rank := cell(labels.get("rank")):
        return f"{rank} of run {run}" if several_runs else rank
    if "run" in labels:
        return f"shared by run {run}"
    # No single run uses the GPU, but several runs or other processes may. In a container, the
    # driver may hide these processes and report only how much memory is used.
    used, limit = gpu.get("used_bytes"), gpu.get("limit_bytes")
    held = used is not None and limit is not None and used > _IDLE_SHARE * limit
    if held or gpu.get("processes"):
        return "others"
    # If the used memory is unknown, hidden processes may use the GPU, so it is not called free.
    return "no rank" if used is None else "free"


def _share(part: float | None, total: float | None, unit: int, name: str, digits: int) -> str:
    """`60.0/80.0 GiB`, or only one of the numbers if the other is unknown."""
    used, most = ("-" if value is None else f"{value / unit:.{digits}f}" for value in (part, total))
    if used == most == "-":
        return "-"
    return f"{used} {name}" if most == "-" else f"{used}/{most} {name}"
