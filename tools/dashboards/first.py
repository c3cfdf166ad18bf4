"""The first row of the boards of one run: who holds it back, by how much, and what it learns."""

from __future__ import annotations

from tools.dashboards import panels
from tools.dashboards.board import Row
from tools.dashboards.links import of_series
from tools.dashboards.looks import ABOVE_0_IS_BAD, BAD, HOURS, STATE_WORDS, WARN, steps
from tools.dashboards.names import metric, recorded
from tools.dashboards.roles import IN_RANGE, last, training_alone
from tools.dashboards.selectors import LOGGED, RANK_0, RUN, WHOLE_RUN

_OTHERS = 'name="$name",split!="$split"'
WHOSE = "rank {{rank}} · {{node}}"


def first_row() -> Row:
    """The same as the first screen of the page."""
    return Row(
        "Who holds it back, and what it learns", [*_who(), *_tiles(), _lateness(), _learns()]
    )


def _who() -> list[panels.Panel]:
    holding = recorded("rank:training_holds_up:last", RUN)
    cost = last(metric("training.straggler.lost_time", RUN))

    def newest(name: str, *ranks: str) -> str:
        """The present value, or the last one of an ended run."""
        told = metric(name, RUN, *ranks)
        ended = training_alone(last(told), WHOLE_RUN, IN_RANGE)
        return f"max({training_alone(told, WHOLE_RUN)}) or max({ended})"

    return [
        panels.stat(
            panels.Text(
                "Slowest rank or node",
                "Who keeps the others waiting and in which phase, with what it needs longer as a "
                "share of the step. Without a rank it is all of the node.",
                "Click for its node. Of a run that has ended, Cost most says who it was.",
            ),
            panels.now(f"topk(1, {_late()})", "{{who}}{{node}} · {{phase}}"),
            unit="percentunit",
            levels=steps((0.05, WARN), (0.2, BAD)),
            named=panels.WITH_NAME,
            nothing="nobody",
            link=of_series("GPUs & nodes", "node"),
            size=(7, 3),
        ),
        panels.stat(
            panels.Text(
                "Cost most",
                "The rank for which the others have waited longest since the run was started, in "
                "GPU-hours; also of a run that has ended.",
                "What it is worth to move it to another machine. Ranks has all of them.",
            ),
            panels.now(f"topk(1, max by (node, rank) ({cost}) > 0) / 3600", WHOSE),
            unit=HOURS,
            decimals=2,
            levels=steps((1, WARN), (24, BAD)),
            named=panels.WITH_NAME,
            nothing="nobody",
            link=of_series("GPUs & nodes", "node", "rank"),
            size=(6, 3),
        ),
        panels.stat(
            panels.Text(
                "Held up by",
                "While the run stands still: who cannot go on, or has not come to where the others "
                "wait.",
                "Look at that rank: `otel-ddp stacks` on its node says in which line it is.",
            ),
            panels.now(f"topk(1, max by (node, rank) ({holding})) * 0 + 1", WHOSE),
            # Where only names are shown, what is shown for nothing is not.
            panels.now(f"absent(max({holding})) * 0", "nobody"),
            levels=ABOVE_0_IS_BAD,
            named=panels.NAME_ALONE,
            link=of_series("GPUs & nodes", "node", "rank"),
            size=(5, 3),
        ),
        panels.stat(
            panels.Text(
                "State",
                "The worst of any rank: killed, failed, finished, running, starting.",
                "Failed or killed: Checkpoints and errors, on Run, says what ended it.",
            ),
            panels.now(newest("training.state")),
            words=STATE_WORDS,
            nothing="not in this time: is the Pipeline whole?",
            size=(3, 3),
        ),
        panels.stat(
            panels.Text(
                "Step",
                "The last optimizer step that any rank finished.",
                "Compare with where you expect it to be; it must grow.",
            ),
            panels.now(newest("training.step", RANK_0)),
            decimals=0,
            size=(3, 3),
        ),
    ]


def _late() -> str:
    """Late ranks and nodes, with phase and share of the step."""
    ranks = recorded("rank:training_straggler:ratio", RUN)
    nodes = recorded("rank:training_straggler:ratio", WHOLE_RUN, 'rank=""')
    return (
        f'(label_replace(max by (node, rank, phase) ({ranks}), "who", "rank $1 · ", "rank", "(.+)")'
        f" or max by (node, phase) ({nodes}))"
    )


def step_time() -> str:
    """Of rank 0: all ranks take as long, as they wait for each other."""

    def rate(part: str) -> str:
        series = metric("training.step.duration", RUN, RANK_0, part=part)
        return f"sum({training_alone(f'rate({series}[$__rate_interval])', WHOLE_RUN)})"

    # Not one by the rate of steps: where they end, that goes to infinity.
    return f"{rate('sum')} / ({rate('count')} > 0)"


def _mean() -> str:
    return f"avg({_of_training()})"


def _of_training() -> str:
    return training_alone(metric("training.scalar", RUN, LOGGED), WHOLE_RUN)


def _other_splits() -> str:
    """Also of an evaluator beside the training: what it logs is the validation."""
    return f"avg by (split) ({metric('training.scalar', RUN, _OTHERS)})"


def _tiles() -> list[panels.Panel]:
    spent = "run_cause:otel_ddp_run_time:sum"
    productive = last(recorded(spent, WHOLE_RUN, 'cause="productive"'))
    samples, tokens = (
        f"max({recorded(f'run:training_{each}:rate2m', WHOLE_RUN)} > 0)"
        for each in ("samples", "tokens")
    )
    beat = last(metric("training.heartbeat.timestamp", RUN))
    saved = last(metric("training.checkpoint.timestamp", RUN))

    def tile(
        title: str,
        meaning: str,
        action: str,
        *asked: panels.Query,
        unit: str,
        nothing: str = "none",
    ) -> panels.Panel:
        named = panels.WITH_NAME if asked[0].legend != "__auto" else panels.NUMBER_ALONE
        text = panels.Text(title, meaning, action)
        return panels.stat(text, *asked, unit=unit, nothing=nothing, named=named, size=(4, 4))

    return [
        tile(
            "$name",
            "What the ranks logged last under this name, in the mean.",
            "Choose another value above. The picture below shows where it is going.",
            panels.over_time(_mean()),
            unit="short",
            nothing="not logged",
        ),
        tile(
            "$name, other splits",
            "The same of every split but the chosen one: of validation.",
            "Rises while the other falls: it learns by heart.",
            panels.over_time(_other_splits(), "{{split}}"),
            unit="short",
            nothing="not logged",
        ),
        tile(
            "Step time",
            "How long a step takes; it is the same on all ranks, as they wait for each other.",
            "Longer than it was: Where the time goes, on Run, says which phase has grown.",
            panels.over_time(step_time()),
            unit="s",
        ),
        tile(
            "Throughput",
            "Samples and tokens a second, of all ranks.",
            "Falls while the step time does not: batches have become smaller.",
            panels.over_time(samples, "samples/s"),
            panels.over_time(tokens, "tokens/s"),
            unit="short",
            nothing="not known",
        ),
        tile(
            "Productive",
            "The share of all time since the run first began that was in steps which moved it on.",
            "Goodput says what the rest went to.",
            panels.now(f"sum({productive}) / sum({last(recorded(spent, WHOLE_RUN))})"),
            unit="percentunit",
            nothing="not counted",
        ),
        tile(
            "Last checkpoint",
            "How long ago: what would be lost if the run died now, or was lost when it did.",
            "Save more often where this is more than you would like to pay for again.",
            panels.now(f"max({beat}) - max({saved})"),
            unit="s",
        ),
    ]


def _lateness() -> panels.Panel:
    excess = metric("training.straggler.excess", RUN, 'phase="all"')
    # The same ranks for the whole time, so that lines do not come and go.
    latest = f"topk(5, max by (node, rank) (max_over_time({excess}[$__range:15s] @ end())))"
    return panels.lines(
        panels.Text(
            "Later than the others",
            "What the five ranks that were latest need longer than the others in the same steps, "
            "as a share of the step. Marks are verdicts.",
            "One line apart: they all wait for that rank, since then. Ranks has its hardware.",
        ),
        panels.over_time(f"max by (node, rank) ({excess}) and on (node, rank) {latest}", WHOSE),
        unit="percentunit",
        max_points=300,
        size=(12, 7),
        sort=("Max", True),
        nothing="no steps were compared",
        link=of_series("GPUs & nodes", "node", "rank"),
    )


def _learns() -> panels.Panel:
    value = _of_training()
    return panels.lines(
        panels.Text(
            "What it learns: $name",
            "The mean over the ranks with the range from the lowest to the highest one, and every "
            "other split.",
            "A jump at a mark came with what is marked. A wide range: Single ranks, on Run.",
        ),
        panels.over_time(_mean(), "mean of ranks"),
        panels.over_time(f"max({value})", "highest rank"),
        panels.over_time(f"min({value})", "lowest rank"),
        panels.over_time(_other_splits(), "{{split}}"),
        unit="short",
        max_points=300,
        band=("highest rank", "lowest rank"),
        legend=("lastNotNull", "min"),
        size=(12, 7),
        nothing="not logged",
    )
