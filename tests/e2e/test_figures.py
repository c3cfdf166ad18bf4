"""Every figure of a run is true, and the same on every face.

One training has a late rank, checkpoints, evaluations, a NaN, a death and a second attempt, and
writes down what it did. Each face is asked once; `figures` is the one table.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from known_training import (
    CHECKPOINT_S,
    EVAL_S,
    KILLED_AT,
    LATE,
    NAN_FROM,
    RESUMES_AT,
    STEPS,
    loss_at,
)
from node import Node, finished, until
from otel_ddp.cli import main
from otel_ddp.cli.mcp import Questions
from otel_ddp.vocabulary.words import state_word
from otlp_receiver import Receiver
from webhook import Webhook

pytestmark = pytest.mark.timed

PROGRAM = Path(__file__).parents[1] / "known_training.py"
COMMANDS = {
    "report.json": ("report", "known", "--json"),
    "report card": ("report", "known", "--card"),
    "goodput": ("goodput", "known"),
    "goodput.json": ("goodput", "known", "--json"),
    "runs": ("runs",),
    "runs.json": ("runs", "--json"),
    "compare": ("compare", "known", "known"),
    "compare.json": ("compare", "known", "known", "--json"),
}
ENV = {"OTEL_DDP_SAY": "all", "OTEL_DDP_NODE": "node-0"}
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "%": 0.01}


class Figure(NamedTuple):
    """One row of the table."""

    truth: Any
    faces: Mapping[str, Any]
    within: float = 0.0
    """Of the truth: what a machine that others share moves it by."""
    alike: float = 0.0
    """Of each other, beyond three digits."""


class Step(NamedTuple):
    """What the program wrote down of a step."""

    number: int
    began_s: float
    ended_s: float
    seconds: Mapping[str, float]

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


class Seen(NamedTuple):
    """What the program did, and what the faces say of it."""

    did: Mapping[str, Sequence[Step]]
    """By rank and attempt."""
    texts: Mapping[str, str]
    said: Mapping[str, Any]
    scraped: Callable[..., Any]
    sent: Callable[..., Any]


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, Figure]]:
    with Webhook() as webhook, Receiver() as receiver, Node(**ENV) as node:
        node.env["OTEL_DDP_NOTIFY"] = webhook.url
        node.export_to(receiver.start_http())
        wrote = node.root / "wrote"
        wrote.mkdir()
        first = node.torchrun(2, str(PROGRAM), str(wrote), "0")
        first.communicate()
        card = finished(node.torchrun(2, str(PROGRAM), str(wrote), "1"))
        until(lambda: webhook.of_kind("ended"), "the message of the end")
        did = {
            each.name: [Step(*json.loads(line)) for line in each.read_text().splitlines()]
            for each in wrote.iterdir()
        }
        with pytest.MonkeyPatch.context() as here:
            here.setenv("OTEL_DDP_HISTORY_DIR", node.env["OTEL_DDP_HISTORY_DIR"])
            until(lambda: asked("goodput", "known").count("finished"), "the end in the history")
            texts = {face: asked(*words) for face, words in COMMANDS.items()}
            mcp = Questions(str(node.place.directory))
            said = {
                **{face: json.loads(text) for face, text in texts.items() if "json" in face},
                "mcp runs": mcp.runs(),
                "mcp run": mcp.run("known"),
                "mcp verdicts": mcp.verdicts("known"),
                "mcp curves": mcp.curves(["loss", "accuracy"], "known", rank="0"),
                "mcp goodput": mcp.goodput("known"),
                "mcp compare": mcp.compare("known", "known"),
            }
        said |= {"page": node.page("run", run="known"), "page runs": node.page("runs")}
        said["page values"] = node.page("values", run="known", name="loss")
        said["page steps"] = node.page("steps", run="known")
        said["status"] = node.told().to_json()
        (message,) = webhook.of_kind("ended")
        (nan,) = webhook.of_kind("nonfinite")
        texts |= {"card": card, "status": node.shown(), "nan": nan["text"]}
        texts["webhook"] = f"{message['title']}\n{message['text']}"
        scrape = node.scrape()
        node.stop_agent()
        points = [(each.metric, each.attributes, each.value) for each in receiver.points()]
        seen = Seen(did, texts, said, only_one_in(scrape), only_one_in(points))
        yield dict(table(seen))


def asked(*words: str) -> str:
    """What a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0
    return out.getvalue()


def only_one_in(points: Sequence[tuple[str, Mapping[str, Any], Any]]) -> Callable[..., Any]:
    """Asks for the last point of a metric with these labels."""

    def last(metric: str, **labels: str) -> Any:
        found = [
            value for name, has, value in points if name == metric and labels.items() <= has.items()
        ]
        return found[-1]

    return last


def number(pattern: str, text: str) -> float:
    """The first number that stands there, with its unit."""
    found = re.search(pattern.replace("#", r"(-?[\d.]+|NaN) ?(us|ms|s|min|%)?(?![\w.])"), text)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found[1]) * UNITS.get(found[2], 1.0)


def value_of(rows: Any, name: str) -> Any:
    return next(each for each in rows if each["name"] == name)


def verdict_of(rows: Any, kind: str) -> Any:
    (found,) = (each for each in rows if each["kind"] == kind)
    return found


# -- the table


def table(seen: Seen) -> Iterator[tuple[str, Figure]]:
    yield from of_the_run(seen)
    yield from of_values(seen)
    yield from of_verdicts(seen)
    yield from of_time(seen)


def of_the_run(seen: Seen) -> Iterator[tuple[str, Figure]]:
    texts, said = seen.texts, seen.said
    report, page = said["report.json"], said["page"]
    newest = {each["rank"]: each for each in said["status"]["processes"]}
    (run,), (row,) = said["runs.json"]["runs"], said["page runs"]["runs"]
    state = {
        "status": newest[0]["state"],
        "page": page["state"],
        "page runs": row["state"],
        "report": report["run"]["state"],
        "runs": run["state"],
        "mcp": said["mcp verdicts"]["state"],
        "goodput": said["goodput.json"]["goodput"]["attempts"][-1]["state"],
        "card": re.search(r"g/known (\w+) after", texts["card"])[1],  # type: ignore[index]
        "webhook": texts["webhook"].split()[2],
        "/metrics": state_word(int(seen.scraped("training_state", rank="0"))),
        "otlp": state_word(int(seen.sent("training.state", rank="0"))),
    }
    yield "state", Figure("finished", state)
    last = {
        "status": newest[0]["step"],
        "page": page["ranks"][0]["step"],
        "page runs": row["step"],
        "report": report["run"]["last_step"],
        "runs": run["step"],
        "mcp": said["mcp runs"]["runs"][0]["step"],
        "goodput": said["goodput.json"]["goodput"]["attempts"][-1]["last_step"],
        "card": number("the last is step #", texts["card"]),
        "webhook": number("the last is step #", texts["webhook"]),
        "/metrics": seen.scraped("training_step", rank="0"),
        "otlp": seen.sent("training.step", rank="0"),
    }
    yield "last step", Figure(STEPS - 1, last)
    steps = {
        "report": report["run"]["steps"],
        "report card": number("steps +#", texts["report card"]),
        "page": sum(said["page steps"]["columns"]["steps"]) / 2,
        "compare": sum(said["compare.json"]["steps"][0].values()),
    }
    yield "steps", Figure(STEPS, steps)
    ended_s = max(each[-1].ended_s for each in seen.did.values())
    lasted = {
        "page": (page["seen_ns"] - page["began_ns"]) / 1e9,
        "report": report["run"]["duration_s"],
        "runs": (run["ended_ns"] - run["began_ns"]) / 1e9,
        "report card": number("finished after #", texts["report card"]),
        "card": number("finished after #", texts["card"]),
        "webhook": number("finished after #", texts["webhook"].splitlines()[0]),
        "its card": number("finished after #", texts["webhook"].splitlines()[1]),
    }
    yield "duration", Figure(ended_s - seen.did["0-0"][0].began_s, lasted, 0.05, alike=0.03)
    attempts = {
        "goodput": len(said["goodput.json"]["goodput"]["attempts"]),
        "report": len(report["goodput"]["attempts"]),
        "report card": number("in # attempts", texts["report card"]),
        "page": len(page["time"]["attempts"]),
        "mcp": len(said["mcp goodput"]["goodput"]["attempts"]),
        "/metrics": seen.scraped("otel_ddp_run_attempts_total"),
        "otlp": seen.sent("otel_ddp.run.attempts"),
    }
    yield "attempts", Figure(2, attempts)


def of_values(seen: Seen) -> Iterator[tuple[str, Figure]]:
    texts, said = seen.texts, seen.said
    report, page = said["report.json"]["values"], said["page"]["summary"]
    newest = next(e for e in reversed(said["status"]["processes"]) if e["rank"] == 0)
    curves, scalar = said["mcp curves"]["curves"], "training_scalar"
    loss = {"rank": "0", "name": "loss"}
    compared = {
        face: value_of(said[face]["rows"], "loss") for face in ("compare.json", "mcp compare")
    }
    cards = ("card", "report card", "webhook")
    documents = {"report": report, "page": page, "status": newest["summary"]}
    best = {
        **{face: value_of(rows, "loss")["min"]["value"] for face, rows in documents.items()},
        **{face: number("loss +best #", texts[face]) for face in cards},
        **{face: row["best"][0] for face, row in compared.items()},
        "mcp": value_of(curves, "loss")["min"],
        "/metrics": seen.scraped("training_scalar_best", **loss),
        "otlp": seen.sent("training.scalar.best", **loss),
    }
    yield "best loss", Figure(loss_at(360), best)
    at = {
        **{face: value_of(rows, "loss")["min"]["step"] for face, rows in documents.items()},
        **{face: number("loss +best .* at step #,", texts[face]) for face in cards},
        "/metrics": seen.scraped("training_scalar_best_step", **loss),
    }
    yield "step of the best loss", Figure(360, at)
    # JSON has no NaN.
    nulls = {
        **{face: value_of(rows, "loss")["last"]["value"] for face, rows in documents.items()},
        **{face: row["last"][0] for face, row in compared.items()},
        "runs": value_of(said["runs.json"]["runs"][0]["values"], "loss")["last"],
        "mcp": value_of(curves, "loss")["last"],
        "page values": said["page values"]["series"][0]["columns"]["last"][-1],
    }
    yield "last loss in JSON", Figure(None, {k: nan_of(each) for k, each in nulls.items()})
    lasts = {
        **{face: number("loss +best .*, last #", texts[face]) for face in cards},
        "status": number("  loss #", texts["status"]),
        "runs": number("  loss #", texts["runs"]),
        "compare": number(r"\nloss .* #  +0.5  +0.5\n", texts["compare"]),
        "/metrics": seen.scraped(scalar, **loss),
        "otlp": seen.sent("training.scalar", **loss),
    }
    yield "last loss", Figure("nan", {face: str(each) for face, each in lasts.items()})
    nonfinite = {
        "mcp": value_of(curves, "loss")["not_finite"],
        "page": sum(said["page values"]["series"][0]["columns"]["not_finite"]),
        "/metrics": seen.scraped("training_nonfinite_total", **loss),
        "otlp": seen.sent("training.nonfinite", **loss),
    }
    yield "values that are NaN", Figure(STEPS - NAN_FROM, nonfinite)
    accuracy = {
        **{face: value_of(rows, "accuracy")["last"]["value"] for face, rows in documents.items()},
        **{face: number(r"accuracy \(val\) +best .*, last #", texts[face]) for face in cards},
        "status text": number(r"accuracy \(val\) #", texts["status"]),
        "runs": number(r"accuracy \(val\) #", texts["runs"]),
        "mcp": value_of(curves, "accuracy")["last"],
        "/metrics": seen.scraped(scalar, rank="0", name="accuracy"),
        "otlp": seen.sent("training.scalar", rank="0", name="accuracy"),
    }
    yield "last accuracy", Figure(0.399, accuracy)


def nan_of(found: Any) -> Any:
    return None if isinstance(found, float) and math.isnan(found) else found


def of_verdicts(seen: Seen) -> Iterator[tuple[str, Figure]]:
    texts, said = seen.texts, seen.said
    mcp = said["mcp verdicts"]
    told = {
        "status": [*said["status"]["verdicts"], *said["status"]["past"]],
        "page": said["page"]["verdicts"],
        "report": said["report.json"]["verdicts"],
        "mcp": [*mcp["open"], *mcp["past"]],
    }
    sentences = ("card", "report card", "webhook", "status")
    kept = ("page", "report", "mcp")
    nan = {face: verdict_of(rows, "nonfinite") for face, rows in told.items()}
    became = {
        **{face: each["step"] for face, each in nan.items()},
        **{f"{face} since": nan[face]["since_step"] for face in kept},
        **{f"{face} text": number("NaN at step # on rank 0", texts[face]) for face in sentences},
        "message": number("NaN at step # on rank 0", texts["nan"]),
    }
    yield "step of the first NaN", Figure(NAN_FROM, became)
    death = {face: verdict_of(rows, "death") for face, rows in told.items()}
    died = {
        **{face: each["step"] for face, each in death.items()},
        **{f"{face} since": death[face]["since_step"] for face in kept},
        **{
            f"{face} text": number("rank 1 .* killed in .* at step #,", texts[face])
            for face in sentences
        },
    }
    # It had logged the step before.
    yield "step of the death", Figure(KILLED_AT - 1, died)
    late = {face: verdict_of(rows, "straggler") for face, rows in told.items()}
    yield (
        "late rank",
        Figure(["1", "data"], {f: [e["who"]["rank"], e["phase"]] for f, e in late.items()}),
    )
    since = {face: late[face]["since_step"] for face in kept}
    yield "first late step", Figure(LATE[0], since, within=0.05)
    own, other = seen.did["1-0"], seen.did["0-0"]
    for moment, number_of in (("since_ns", LATE[0]), ("until_ns", LATE[-1])):
        yield (
            f"late {moment}",
            Figure(
                other[number_of].ended_s - other[0].began_s,
                {face: each[moment] / 1e9 - other[0].began_s for face, each in late.items()},
                # A rank that has recovered may be a little late by the load of the machine.
                within=0.25,
            ),
        )
    slept_s = sum(each.seconds.get("late", 0.0) for each in own)
    spent = (
        said["goodput.json"]["goodput"],
        said["report.json"]["goodput"],
        said["mcp goodput"]["goodput"],
    )
    cost = {
        **{face: each["evidence"]["lost_s"] for face, each in late.items()},
        **{f"{face} text": number("cost the others # in total", texts[face]) for face in sentences},
        **{f"goodput {at}": each["seconds"]["late_rank"] for at, each in enumerate(spent)},
        **{f"late of {at}": each["late"]["rank 1 (node-0)"] for at, each in enumerate(spent)},
        "goodput text": number("# +waiting for a late rank", texts["goodput"]),
        "page time": dict(said["page"]["time"]["late"])["rank 1 (node-0)"],
        "/metrics": seen.scraped("training_straggler_lost_time_seconds_total", rank="1"),
        "/metrics of the run": seen.scraped("otel_ddp_run_time_seconds_total", cause="late_rank"),
        "otlp": seen.sent("training.straggler.lost_time", rank="1"),
    }
    yield "cost of the late rank", Figure(slept_s, cost, within=0.25)
    share = {
        **{face: each["evidence"]["excess"] for face, each in late.items()},
        **{
            f"{face} text": number("late in data, by # of a step", texts[face])
            for face in sentences
        },
    }
    step_s = sum(other[at].took_s for at in LATE)
    yield "lateness of a step", Figure(slept_s / step_s, share, within=0.25, alike=0.02)


def of_time(seen: Seen) -> Iterator[tuple[str, Figure]]:
    texts, said = seen.texts, seen.said
    goodput, page = said["goodput.json"]["goodput"], said["page"]["time"]
    causes = {each["name"]: each for each in page["causes"]}
    # A process begins before its first step does.
    whole = [*seen.did["0-0"][1:RESUMES_AT], *seen.did["0-1"][1:]]
    report = said["report.json"]["time"]
    means = {
        "report": report["steps_s"] / STEPS,
        "report card": number("steps .*mean #", texts["report card"]),
        "page": weighted(said["page steps"]["columns"]),
    }
    yield "mean of a step", Figure(mean_of(whole), means, within=0.05)
    of_attempt = {
        "card": number("steps .*mean #", texts["card"]),
        "webhook": number("steps .*mean #", texts["webhook"]),
        "/metrics": seen.scraped("training_step_duration_seconds_sum", rank="0")
        / seen.scraped("training_step_duration_seconds_count", rank="0"),
    }
    mean_s = mean_of(seen.did["0-1"][1:])
    yield "mean of a step of the attempt", Figure(mean_s, of_attempt, within=0.05)
    for word, cause, text in (
        ("checkpoint", "checkpoint", "saving checkpoints"),
        ("eval", "evaluation", "evaluation"),
    ):
        slept_s = sum(each.seconds.get(word, 0.0) for steps in seen.did.values() for each in steps)
        assert slept_s > 4 * (CHECKPOINT_S if word == "checkpoint" else 2 * EVAL_S) * 0.99
        spent = {
            "goodput": goodput["seconds"][cause],
            "goodput text": number(f"# +{text}", texts["goodput"]),
            "mcp": said["mcp goodput"]["goodput"]["seconds"][cause],
            "page": causes[cause]["spent_s"],
            "report": 2 * report["phases_s"][word],
            "/metrics": seen.scraped("otel_ddp_run_time_seconds_total", cause=cause),
            "otlp": seen.sent("otel_ddp.run.time", cause=cause),
        }
        yield cause, Figure(slept_s, spent, within=0.05, alike=0.01)
    twice = sum(each.number >= RESUMES_AT for each in seen.did["0-0"])
    repeated = {
        "goodput": goodput["attempts"][-1]["repeated_steps"],
        "goodput text": number(rf"\n2 .*  {RESUMES_AT} +\d+ +#", texts["goodput"]),
        "page": page["attempts"][-1]["repeated_steps"],
        "report": said["report.json"]["goodput"]["attempts"][-1]["repeated_steps"],
        "mcp": said["mcp goodput"]["goodput"]["attempts"][-1]["repeated_steps"],
    }
    # The last quarter of a second before a death may be missing.
    yield "steps done twice", Figure(twice, repeated, within=0.15)
    share = {
        "goodput": goodput["share"],
        "goodput text": number("known: # of", texts["goodput"]),
        "mcp": said["mcp goodput"]["goodput"]["share"],
        "report": said["report.json"]["goodput"]["share"],
        "report card": number("goodput +# of", texts["report card"]),
        "page": causes["productive"]["share"],
        "/metrics": seen.scraped("otel_ddp_run_time_seconds_total", cause="productive")
        / page["rank_s"],
        "otlp": seen.sent("otel_ddp.run.time", cause="productive") / page["rank_s"],
    }
    yield "productive share", Figure(goodput["seconds"]["productive"] / goodput["rank_s"], share)


def mean_of(steps: Sequence[Step]) -> float:
    return sum(each.took_s for each in steps) / len(steps)


def weighted(columns: Mapping[str, Sequence[float]]) -> float:
    pairs = zip(columns["steps"], columns["step_s"], strict=True)
    return sum(steps * s for steps, s in pairs) / sum(columns["steps"])


# -- what holds


def test_every_figure_is_true_and_the_same_on_every_face(figures: dict[str, Figure]) -> None:
    wrong = {}
    for name, (truth, faces, within, alike) in figures.items():
        first = next(iter(faces.values()))
        for face, found in faces.items():
            if not (is_near(found, truth, within) and is_near(found, first, alike)):
                wrong[f"{name}: {face}"] = f"{found} (truth {truth}, first {first})"
    assert wrong == {}


def is_near(found: Any, expected: Any, share: float) -> bool:
    if type(expected) not in (int, float) or type(found) not in (int, float):
        return bool(found == expected)
    # Counts are exact.
    rounded = 0.0 if float(found).is_integer() and float(expected).is_integer() else 0.006
    return abs(found - expected) <= max(share, rounded) * abs(expected)
