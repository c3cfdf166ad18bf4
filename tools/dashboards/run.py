"""The board Run: how is this run doing, and is it worth going on?"""

from __future__ import annotations

from tools.dashboards import panels
from tools.dashboards import variables as v
from tools.dashboards.annotations import marks
from tools.dashboards.artifacts import artifacts
from tools.dashboards.board import Row, board
from tools.dashboards.first import first_row, step_time
from tools.dashboards.looks import (
    ABOVE_0_IS_BAD,
    ABOVE_0_IS_ODD,
    PHASE_COLOURS,
    SEVERITY_COLOURS,
)
from tools.dashboards.names import metric, recorded
from tools.dashboards.roles import last, training_alone
from tools.dashboards.selectors import (
    ALERTS_OF_RUN,
    BY_RANK,
    LINES_OF_RUN,
    LOGGED,
    RANK_0,
    RANKS_OF_RUN,
    RUN,
    RUN_BEFORE,
    WHOLE_RUN,
)

QUESTION = "How is this run doing, and is it worth going on?"

_RATE = "[$__rate_interval]"


def build() -> str:
    return board(
        "Run",
        QUESTION,
        [
            first_row(),
            Row("Overview", _overview()),
            Row("Learning", _learning()),
            Row("Speed, and where the time goes", _speed()),
            Row("Events (needs Loki)", _logs(), collapsed=True),
            Row("Memory", _memory(), collapsed=True),
            Row("Checkpoints and errors", _events(), collapsed=True),
            Row("Inputs and outputs", artifacts(), collapsed=True),
            Row("Single ranks (as selected; dear for thousands)", _ranks(), collapsed=True),
            Row("Sampled steps (needs Tempo)", _steps(), collapsed=True),
        ],
        variables=[
            v.datasource(),
            *v.of_run(),
            v.before(),
            v.name(RUN),
            v.split(RUN),
            v.traces(),
            v.logs(),
            v.service(),
            v.severity(),
        ],
        annotations=marks(one_run=True),
    )


def _overview() -> list[panels.Panel]:
    mine = f"max by (setting, value) ({last(metric('training.run.setting', RUN, RANK_0))})"
    other = metric("training.run.setting", RUN_BEFORE, RANK_0)
    before = f"max by (setting, value) ({last(other)})"
    # Under another label, to show both values in one row.
    renamed = f'label_replace({before} unless {mine}, "before", "$1", "value", "(?s)(.*)")'
    return [
        panels.listing(
            panels.Text(
                "What this run is",
                "Description, tags, environment and configuration. A long value is cut; the page "
                "and otel-ddp status --json have all of it.",
                "Two rows of one name: it was changed on the way, or by a restart.",
            ),
            panels.rows(mine, "n"),
            columns=[
                panels.Column("setting", "Setting", width=260),
                panels.Column("value", "Value"),
            ],
            hidden=["Value #n"],
            sort=("Setting", False),
            size=(12, 9),
        ),
        panels.listing(
            panels.Text(
                "What differs from $before",
                "Settings that the two runs do not have in common. The other run is the one that "
                "began before this one, within the group and the time of this page.",
                "Choose another one under Before. Nothing here: this is the first run, or all is "
                "the same.",
            ),
            panels.rows(f"{mine} unless {before}", "mine"),
            panels.rows(f"max by (setting, before) ({renamed})", "before"),
            columns=[
                panels.Column("setting", "Setting", width=260),
                panels.Column("value", "This run"),
                panels.Column("before", "The run before"),
            ],
            hidden=["Value #mine", "Value #before"],
            sort=("Setting", False),
            nothing="nothing",
            size=(12, 9),
        ),
    ]


def _learning() -> list[panels.Panel]:
    any_split = 'name="$name"'
    y = metric("training.scalar", RUN, any_split, RANK_0)
    x = metric("training.scalar.step", RUN, any_split, RANK_0)
    rate = metric("training.scalar", RUN, 'name="learning_rate"', RANK_0)
    norm = metric("training.scalar", RUN, 'name=~".*grad_norm.*"', RANK_0)
    best = "name, split, direction"
    falls, grows = (
        f"last_over_time({metric('training.scalar.best', RUN, RANK_0, way)}[$__range])"
        for way in ('direction="min"', 'direction="max"')
    )
    step = metric("training.scalar.best.step", RUN, RANK_0)
    return [
        panels.against(
            panels.Text(
                "$name against step",
                "What rank 0 logged under this name, every split of it, at the step it belongs to. "
                "After a restart from a checkpoint the later attempt is shown.",
                "Training falls and validation rises: it learns by heart. Compare puts runs "
                "beside each other.",
            ),
            panels.points(f"max by (split) ({x})", "x"),
            panels.points(f"avg by (split) ({y})", "y"),
            transformations=matrix("split"),
            size=(12, 9),
        ),
        panels.lines(
            panels.Text(
                "Learning rate",
                "The learning rate of the first group of parameters.",
                "Is it the schedule that you meant?",
            ),
            panels.over_time(f"avg by (name) ({rate})", "{{name}}"),
            unit="short",
            size=(6, 9),
            legend=("lastNotNull",),
        ),
        panels.lines(
            panels.Text(
                "Gradient norm",
                "Norm of all gradients as the optimizer gets them, on a logarithmic scale.",
                "Peaks before a rise of the loss: lower the learning rate, or clip.",
            ),
            panels.over_time(f"avg by (name) ({norm})", "{{name}}"),
            unit="sci",
            decimals=2,
            log=True,
            size=(6, 9),
        ),
        panels.listing(
            panels.Text(
                "Values that were no numbers",
                "How many logged values were NaN or infinite, over all ranks. They appear in no "
                "curve.",
                "More than one for each rank: stop, go back to a checkpoint, look at the learning "
                "rate and the data.",
            ),
            panels.rows(
                "sum by (name, split) "
                f"(max by ({BY_RANK}, name, split) ({metric('training.nonfinite', RUN)})) > 0",
                "n",
            ),
            columns=[
                panels.Column("name"),
                panels.Column("split"),
                panels.Column("Value #n", "Values", decimals=0, levels=ABOVE_0_IS_BAD),
            ],
            sort=("Values", True),
            size=(8, 6),
        ),
        panels.listing(
            panels.Text(
                "Best values",
                "The lowest value of what should fall, the highest of what should grow: by the "
                "name, or as the script says. Over all attempts that one agent has seen.",
                "Far below the present step: it learns no more, and there is the checkpoint to "
                "keep.",
            ),
            panels.rows(f"min by ({best}) ({falls}) or max by ({best}) ({grows})", "best"),
            panels.rows(f"max by ({best}) (last_over_time({step}[$__range]))", "step"),
            columns=[
                panels.Column("name"),
                panels.Column("split"),
                panels.Column("direction"),
                panels.Column("Value #best", "Best", "short"),
                panels.Column("Value #step", "At step", decimals=0),
            ],
            size=(16, 6),
        ),
    ]


def matrix(column: str) -> list[tuple[str, dict[str, object]]]:
    """Joins the tables x and y to one column for each curve over an ascending x."""
    return [
        ("merge", {}),
        (
            "organize",
            {"excludeByName": {"Time": True}, "renameByName": {"Value #x": "x", "Value #y": "y"}},
        ),
        ("sortBy", {"fields": {}, "sort": [{"field": "x"}]}),
        (
            "groupingToMatrix",
            {"columnField": column, "emptyValue": "null", "rowField": "x", "valueField": "y"},
        ),
    ]


def _seconds_per_step() -> str:
    """By phase: over all ranks if that is recorded, else of rank 0."""
    all_ranks = recorded("run_phase:training_phase_time:avg2m", WHOLE_RUN)
    of_rank_0 = training_alone(metric("training.phase.step_time", RUN, RANK_0), WHOLE_RUN)
    return f"max by (phase) ({all_ranks}) or max by (phase) ({of_rank_0})"


def _clock() -> panels.Panel:
    """Which clock the times of the phases are by."""
    host, device = (
        f"max by (clock) (last_over_time({metric('training.phase.time', RUN, each)}[$__range]))"
        for each in ('clock="host"', 'clock="device"')
    )
    return panels.stat(
        panels.Text(
            "Clock",
            "By which clock work and phases are: the device's where it is known, else the host's.",
            "host, though there are GPUs: Pipeline says why, under what is not measured.",
        ),
        panels.now(f"({device} > 0) or ({host} unless on () ({device} > 0))", "{{clock}}"),
        named=panels.NAME_ALONE,
        size=(3, 8),
    )


def _speed() -> list[panels.Panel]:
    return [
        panels.lines(
            panels.Text(
                "Where the time goes",
                "Seconds of a step in each phase: the mean over all ranks where the rules record "
                "it, "
                "else of rank 0.",
                "data: more loader workers. comm_wait: a slow rank or the network, see Ranks. "
                "other: what the script does between the phases.",
            ),
            panels.over_time(_seconds_per_step(), "{{phase}}"),
            unit="s",
            stacked=True,
            colours=PHASE_COLOURS,
            minimum=0,
            size=(21, 8),
            legend=("mean", "lastNotNull"),
        ),
        _clock(),
        panels.lines(
            panels.Text(
                "Step and work",
                "Length of a step on rank 0, and the work of the slowest, the 99th percentile and "
                "the median rank: a step without its waiting.",
                "A gap between slowest and median is what balancing would gain.",
            ),
            panels.over_time(step_time(), "step"),
            panels.over_time(f"max({recorded('run:training_work:max2m', WHOLE_RUN)})", "slowest"),
            panels.over_time(
                f"max({recorded('run:training_work:p99_2m', WHOLE_RUN)})", "99th percentile"
            ),
            panels.over_time(f"max({recorded('run:training_work:median2m', WHOLE_RUN)})", "median"),
            unit="s",
            minimum=0,
            band=("slowest", "median"),
        ),
        panels.lines(
            panels.Text(
                "Efficiency",
                "Samples a second of a rank, beside what a rank of $before did in the median of "
                "the last 30 days: 1 is no loss. MFU: of what the devices could compute at best.",
                "Falls with more ranks: see who waits for whom, and whether gradients are "
                "exchanged while backward runs. MFU below a third: see where the time goes.",
            ),
            panels.over_time(_scaling(), "beside $before"),
            panels.over_time(f"max({recorded('run:training_mfu:ratio2m', WHOLE_RUN)})", "MFU"),
            unit="percentunit",
            minimum=0,
            nothing="no samples known, or no other run to compare with: choose Before",
        ),
    ]


def _scaling() -> str:
    name = "run:training_rank_samples:rate2m"
    before = recorded(name, 'run="$before"')
    # That run may be long over; asked for once, not at each moment.
    typical = f"max(quantile_over_time(0.5, {before}[30d] @ end()))"
    other = recorded(name, WHOLE_RUN, 'run!="$before"')
    return f"max({other}) / on () {typical}"


# Who said it and when in the training, then the line, then the stack trace if there is one.
_LINE = (
    "{{if .rank}}rank {{.rank}} {{end}}{{if .step}}step {{.step}} {{end}}{{__line__}}"
    "{{if .exception_stacktrace}}\n{{.exception_stacktrace}}{{end}}"
)


def _logs() -> list[panels.Panel]:
    alerts = f"{{{ALERTS_OF_RUN}}}[$__range]"
    fired = f'{{alertstate="firing",{ALERTS_OF_RUN}}}[$__range]'
    began = f"last_over_time(ALERTS_FOR_STATE{alerts})"
    known = f"{began} and ignoring (alertstate) last_over_time(ALERTS{fired})"
    return [
        panels.log_bars(
            panels.Text(
                "Events by severity",
                "How many events there were. Marks are alerts, verdicts and restarts.",
                "Drag over a burst to see its events below.",
            ),
            f"sum by (detected_level) (count_over_time({LINES_OF_RUN} [$__auto]))",
            "{{detected_level}}",
            SEVERITY_COLOURS,
            size=(14, 7),
        ),
        panels.listing(
            panels.Text(
                "Alerts of this run",
                "What has fired, and since when. An alert comes from Prometheus and is no line "
                "of the log.",
                "Each has a runbook of its name in docs/runbooks.",
            ),
            panels.rows(f"max by (alertname, severity, node, rank) ({known}) * 1000", "since"),
            columns=[
                panels.Column("alertname", "Alert"),
                panels.Column("severity", "Severity", width=110),
                panels.Column("node", width=90),
                panels.Column("rank", width=75),
                panels.Column("Value #since", "Since", "dateTimeAsIso"),
            ],
            sort=("Since", True),
            size=(10, 7),
        ),
        panels.log_lines(
            panels.Text(
                "Verdicts, checkpoints and events",
                "What the script recorded as an event, saved checkpoints, the exception that "
                "ended a rank, and the agents' verdicts.",
                "Choose ranks and severity above. A click on a line shows its attributes and "
                "trace.",
            ),
            f"{LINES_OF_RUN} | line_format `{_LINE}`",
        ),
    ]


def _memory() -> list[panels.Panel]:
    def most(name: str) -> str:
        return f"max({metric(name, RANKS_OF_RUN)})"

    def times(name: str) -> str:
        series = metric(name, RANKS_OF_RUN)
        # Pushed and scraped, a series comes twice.
        return f"sum(max by ({BY_RANK}) (increase({series}{_RATE})))"

    return [
        panels.lines(
            panels.Text(
                "GPU memory of the fullest rank",
                "What tensors occupy, the most they ever did, what PyTorch's allocator holds, "
                "what it may hold, and what the GPU has.",
                "Peak near the limit: a longer batch will not fit. Held far above occupied: "
                "fragmented, try the allocator's expandable segments.",
            ),
            panels.over_time(most("training.device.memory.allocated"), "tensors"),
            panels.over_time(most("training.device.memory.peak"), "peak"),
            panels.over_time(most("training.device.memory.reserved"), "held by PyTorch"),
            panels.over_time(
                f"min({metric('training.device.memory.limit', RUN)})", "PyTorch may hold"
            ),
            panels.over_time(f"min({metric('hw.gpu.memory.limit', RANKS_OF_RUN)})", "smallest GPU"),
            unit="bytes",
            minimum=0,
            nothing="not measured",
        ),
        panels.lines(
            panels.Text(
                "Out of memory",
                "How often the allocator had to empty its cache, and how often memory ran out.",
                "Retries cost time: lower the batch, or checkpoint activations.",
            ),
            panels.over_time(times("training.device.memory.alloc_retries"), "retries"),
            panels.over_time(times("training.ooms"), "out of memory"),
            unit="short",
            levels=ABOVE_0_IS_ODD,
            nothing="not measured",
        ),
    ]


def _events() -> list[panels.Panel]:
    def most(name: str, *by: str) -> str:
        labels = ", ".join(by)
        return f"sum by ({labels}) (max by ({BY_RANK}, {labels}) ({metric(name, RUN)})) > 0"

    held = "training.checkpoint.duration"
    held_s = metric(held, RUN, RANK_0, part="sum")
    saves = metric(held, RUN, RANK_0, part="count")
    lengths = metric("training.step.duration", RUN, RANK_0, part="bucket")
    # A bound of 1 is "1" where it was pushed and "1.0" where it was scraped.
    of_length = f'label_replace(rate({lengths}{_RATE}), "le", "$1", "le", "(.*)[.]0")'
    return [
        panels.lines(
            panels.Text(
                "Held up by a checkpoint",
                "How long rank 0 was held up by each save, in the mean.",
                "Longer than it was: storage. Save in the background, or less often.",
            ),
            panels.over_time(
                f"sum(rate({held_s}{_RATE})) / (sum(rate({saves}{_RATE})) > 0)", "rank 0"
            ),
            unit="s",
            minimum=0,
            size=(8, 7),
        ),
        panels.bucket_heatmap(
            panels.Text(
                "Lengths of steps",
                "How the steps of rank 0 are spread over lengths.",
                "A second band: something that every so many steps has more to do. The traces "
                "of slow steps say what.",
            ),
            panels.over_time(f"sum by (le) (max by ({BY_RANK}, le) ({of_length}))", "{{le}}"),
            unit="s",
            size=(8, 7),
        ),
        panels.listing(
            panels.Text(
                "What ended ranks",
                "Exceptions that ended training on a rank, by class; and what ended the rank that "
                "was first.",
                "The log of that rank has the traceback; the first one is the cause, the others "
                "follow.",
            ),
            panels.rows(most("training.deaths", "cause", "node", "rank"), "first"),
            panels.rows(most("training.exceptions", "error_type", "node", "rank"), "n"),
            columns=[
                panels.Column("cause", "First, by", width=110),
                panels.Column("error_type", "Exception"),
                panels.Column("node", width=90),
                panels.Column("rank", width=75),
                panels.Column("Value #n", "Times", levels=ABOVE_0_IS_BAD, width=85),
            ],
            hidden=("Value #first",),
            sort=("First, by", True),
            size=(8, 7),
        ),
        panels.listing(
            panels.Text(
                "Skipped steps",
                "Optimizer steps that left the weights as they were, by reason. All ranks skip "
                "together.",
                "A few after a change of the loss scale are usual; a growing number is not.",
            ),
            panels.rows(f"max by (reason) ({metric('training.steps.skipped', RUN)}) > 0", "n"),
            columns=[
                panels.Column("reason", "Reason"),
                panels.Column("Value #n", "Steps", levels=ABOVE_0_IS_ODD),
            ],
            size=(8, 7),
        ),
    ]


def _ranks() -> list[panels.Panel]:
    whose = "rank {{rank}} · {{node}}"
    value = metric("training.scalar", RANKS_OF_RUN, LOGGED)
    return [
        panels.lines(
            panels.Text(
                "$name by rank",
                "The logged value of each selected rank.",
                "One rank apart: its data are different, or its weights are no longer the same.",
            ),
            panels.over_time(f"max by (node, rank) ({value})", whose),
            unit="short",
        ),
    ]


def _steps() -> list[panels.Panel]:
    return [
        panels.traces(
            panels.Text(
                "Sampled steps",
                "One step in a hundred, and each slow one; `reason` says why it was kept.",
                "Open one: all ranks share its trace, with their phases below each other.",
            ),
            '{ name = "step" && span.run = "$run"'
            ' && span.node =~ "$node" && span.rank =~ "$rank" }',
        )
    ]
