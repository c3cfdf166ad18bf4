"""Every figure of a run is true, and the same on every face.

One training has a late rank, checkpoints, evaluations, a NaN, a death and a second attempt, and
writes down what it did. Each face is asked once; `figures` is the one table.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from known_training import (
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
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Metric
from otel_ddp.vocabulary.words import state_word
from otlp_receiver import Receiver
from webhook import Webhook

pytestmark = pytest.mark.timed

PROGRAM = Path(__file__).parents[1] / "known_training.py"
COMMANDS = {
    "status": ("status",),
    "status.json": ("status", "--json"),
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
LATE_RANK = "rank 1 (node-0)"
_LOST = catalog.TRAINING_STRAGGLER_LOST_TIME
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
    scraped: Sequence[tuple[str, Mapping[str, Any], Any]]
    sent: Sequence[tuple[str, Mapping[str, Any], Any]]

    def exported(self, metric: Metric, share_of: float = 1.0, **labels: str) -> dict[str, Any]:
        """The last point with these labels, on both ways out."""
        return {
            "/metrics": last_of(self.scraped, metric.prometheus, labels) / share_of,
            "otlp": last_of(self.sent, metric.name, labels) / share_of,
        }

    def written(self, pattern: str, *faces: str) -> dict[str, float]:
        """What stands there in words."""
        return {f"{face} text": number(pattern, self.texts[face]) for face in faces}

    @property
    def goodputs(self) -> dict[str, Any]:
        documents = "goodput.json", "report.json", "mcp goodput"
        return {each: self.said[each]["goodput"] for each in documents}


CARDS = "card", "report card", "webhook"


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, Figure]]:
    with Webhook() as webhook, Receiver() as receiver, Node(**ENV) as node:
        node.env["OTEL_DDP_NOTIFY"] = webhook.url
        node.export_to(receiver.start_http())
        wrote = node.root / "wrote"
        wrote.mkdir()
        node.torchrun(2, str(PROGRAM), str(wrote), "0").communicate()
        card = finished(node.torchrun(2, str(PROGRAM), str(wrote), "1"))
        until(lambda: webhook.of_kind("ended"), "the message of the end")
        did = {
            each.name: [Step(*json.loads(line)) for line in each.read_text().splitlines()]
            for each in wrote.iterdir()
        }
        with pytest.MonkeyPatch.context() as here:
            for name in ("OTEL_DDP_DIR", "OTEL_DDP_HISTORY_DIR"):
                here.setenv(name, node.env[name])
            until(lambda: asked("goodput", "known").count("finished"), "the end in the history")
            until(
                lambda: all(each.ended for each in node.told().processes), "the end in the status"
            )
            texts = {face: asked(*words) for face, words in COMMANDS.items()}
            mcp = Questions(str(node.place.directory))
            said = {
                **{face: json.loads(text) for face, text in texts.items() if "json" in face},
                "mcp runs": mcp.runs(),
                "mcp verdicts": mcp.verdicts("known"),
                "mcp curves": mcp.curves(["loss", "accuracy"], "known", rank="0"),
                "mcp goodput": mcp.goodput("known"),
                "mcp compare": mcp.compare("known", "known"),
            }
        said |= {"page": node.page("run", run="known"), "page runs": node.page("runs")}
        said["page values"] = node.page("values", run="known", name="loss")
        said["page steps"] = node.page("steps", run="known")
        (message,) = webhook.of_kind("ended")
        (nan,) = webhook.of_kind("nonfinite")
        texts |= {"card": card, "message": nan["text"]}
        texts["webhook"] = f"{message['title']}\n{message['text']}"
        # Its counters follow the history within a second.
        until(
            lambda: counted_s(node.scrape()) > 0.999 * said["page"]["time"]["rank_s"],
            "the run's whole time on /metrics",
        )
        scrape = node.scrape()
        node.stop_agent()
        points = [(each.metric, each.attributes, each.value) for each in receiver.points()]
        yield dict(table(Seen(did, texts, said, scrape, points)))


def asked(*words: str) -> str:
    """What a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0
    return out.getvalue()


def counted_s(points: Any) -> float:
    """Of the time of a run's ranks, by all causes."""
    return sum(value for name, _, value in points if name == catalog.OTEL_DDP_RUN_TIME.prometheus)


def last_of(points: Any, metric: str, labels: Mapping[str, str]) -> float:
    has = [value for name, of, value in points if name == metric and labels.items() <= of.items()]
    return float(has[-1])


def number(pattern: str, text: str) -> float:
    """The first number that stands there, with its unit."""
    figure = r"(-?[\d.]+|NaN) ?(us|ms|s|min|%)?(?: (\d+) s)?(?![\w.])"
    found = re.search(pattern.replace("#", figure), text)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found[1]) * UNITS.get(found[2], 1.0) + float(found[3] or 0.0)


def value_of(rows: Any, name: str) -> Any:
    return next(each for each in rows if each["name"] == name)


# -- the table


def table(seen: Seen) -> Iterator[tuple[str, Figure]]:
    yield from of_the_run(seen)
    yield from of_values(seen)
    yield from of_verdicts(seen)
    yield from of_time(seen)


def of_the_run(seen: Seen) -> Iterator[tuple[str, Figure]]:
    texts, said, goodputs = seen.texts, seen.said, seen.goodputs
    report, page = said["report.json"]["run"], said["page"]
    newest = {each["rank"]: each for each in said["status.json"]["processes"]}[0]
    (run,), (row,) = said["runs.json"]["runs"], said["page runs"]["runs"]
    (asked,) = said["mcp runs"]["runs"]
    documents = {"status": newest, "page runs": row, "runs": run, "mcp": asked}
    exported = seen.exported(catalog.TRAINING_STATE, rank="0")
    state = {
        **{face: each["state"] for face, each in documents.items()},
        **{face: each["attempts"][-1]["state"] for face, each in goodputs.items()},
        **{face: state_word(int(each)) for face, each in exported.items()},
        "page": page["state"],
        "report": report["state"],
        "mcp verdicts": said["mcp verdicts"]["state"],
        "card": texts["card"].partition("g/known ")[2].split()[0],
        "webhook": texts["webhook"].split()[2],
    }
    yield "state", Figure("finished", state)
    last = {
        **{face: each["step"] for face, each in documents.items()},
        **{face: each["attempts"][-1]["last_step"] for face, each in goodputs.items()},
        **seen.written("the last is step #", "card", "webhook"),
        **seen.exported(catalog.TRAINING_STEP, rank="0"),
        "page": page["step"],
        "report": report["last_step"],
    }
    columns = said["page steps"]["columns"]
    yield "last step", Figure(STEPS - 1, {**last, "page steps": columns["x"][-1]})
    yield "first step", Figure(0, {"page steps": columns["first"][0]})
    steps = {
        "report": report["steps"],
        **seen.written("steps +#", "report card"),
        "page": sum(said["page steps"]["columns"]["steps"]) / 2,
        "compare": sum(said["compare.json"]["steps"][0].values()),
    }
    yield "steps", Figure(STEPS, steps)
    lasted = {
        "page": (page["seen_ns"] - page["began_ns"]) / 1e9,
        "report": report["duration_s"],
        "runs": (run["ended_ns"] - run["began_ns"]) / 1e9,
        **seen.written("finished after #", *CARDS),
    }
    ended_s = max(each[-1].ended_s for each in seen.did.values())
    yield "duration", Figure(ended_s - seen.did["0-0"][0].began_s, lasted, 0.05, alike=0.03)
    attempts = {
        **{face: len(each["attempts"]) for face, each in goodputs.items()},
        **seen.written("in # attempts", "report card"),
        **seen.exported(catalog.OTEL_DDP_RUN_ATTEMPTS),
        "page": len(page["time"]["attempts"]),
    }
    yield "attempts", Figure(2, attempts)


def of_values(seen: Seen) -> Iterator[tuple[str, Figure]]:
    said, loss = seen.said, {"rank": "0", "name": "loss"}
    newest = next(e for e in reversed(said["status.json"]["processes"]) if e["rank"] == 0)
    rows = {
        "report": said["report.json"]["values"],
        "page": said["page"]["summary"],
        "status": newest["summary"],
    }
    losses = {face: value_of(each, "loss") for face, each in rows.items()}
    compared = {f: value_of(said[f]["rows"], "loss") for f in ("compare.json", "mcp compare")}
    curves = {name: value_of(said["mcp curves"]["curves"], name) for name in ("loss", "accuracy")}
    best = {
        **{face: each["min"]["value"] for face, each in losses.items()},
        **{face: each["best"][0] for face, each in compared.items()},
        **seen.written("loss +best #", *CARDS),
        **seen.exported(catalog.TRAINING_SCALAR_BEST, **loss),
        "mcp": curves["loss"]["min"],
    }
    yield "best loss", Figure(loss_at(360), best)
    at = {
        **{face: each["min"]["step"] for face, each in losses.items()},
        **seen.written("loss +best .* at step #,", *CARDS),
        **seen.exported(catalog.TRAINING_SCALAR_BEST_STEP, **loss),
    }
    yield "step of the best loss", Figure(360, at)
    columns = said["page values"]["series"][0]["columns"]
    # JSON has no NaN.
    null = {
        **{face: each["last"]["value"] for face, each in losses.items()},
        "compare": compared["compare.json"]["last"][0],
        "runs": value_of(said["runs.json"]["runs"][0]["values"], "loss")["last"],
        "mcp": curves["loss"]["last"],
        "page values": columns["last"][-1],
    }
    yield "last loss in JSON", Figure(None, null)
    last = {
        **seen.written("loss +best .*, last #", *CARDS),
        **seen.written("  loss #", "status", "runs"),
        **seen.written(r"\nloss .* #  +0.5  +0.5\n", "compare"),
        **seen.exported(catalog.TRAINING_SCALAR, **loss),
    }
    yield "last loss", Figure("nan", {face: str(each) for face, each in last.items()})
    nonfinite = {
        "mcp": curves["loss"]["not_finite"],
        "page": sum(columns["not_finite"]),
        **seen.exported(catalog.TRAINING_NONFINITE, **loss),
    }
    yield "values that are NaN", Figure(STEPS - NAN_FROM, nonfinite)
    accuracy = {
        **{face: value_of(each, "accuracy")["last"]["value"] for face, each in rows.items()},
        **seen.written(r"accuracy \(val\) +best .*, last #", *CARDS),
        **seen.written(r"accuracy \(val\) #", "status", "runs"),
        **seen.exported(catalog.TRAINING_SCALAR, rank="0", name="accuracy"),
        "mcp": curves["accuracy"]["last"],
    }
    yield "last accuracy", Figure(0.399, accuracy)


def of_verdicts(seen: Seen) -> Iterator[tuple[str, Figure]]:
    said, own, other = seen.said, seen.did["1-0"], seen.did["0-0"]
    told = {
        "status": [*said["status.json"]["verdicts"], *said["status.json"]["past"]],
        "page": said["page"]["verdicts"],
        "report": said["report.json"]["verdicts"],
        "mcp": [*said["mcp verdicts"]["open"], *said["mcp verdicts"]["past"]],
    }
    sentences = (*CARDS, "status")

    def of(kind: str) -> dict[str, Any]:
        return {face: next(v for v in rows if v["kind"] == kind) for face, rows in told.items()}

    def began(kind: str) -> dict[str, Any]:
        return {f"{f} since": v["since_step"] for f, v in of(kind).items() if f != "status"}

    became = {
        **{face: each["step"] for face, each in of("nonfinite").items()},
        **began("nonfinite"),
        **seen.written("NaN at step # on rank 0", "message", *sentences),
    }
    yield "step of the first NaN", Figure(NAN_FROM, became)
    died = {
        **{face: each["step"] for face, each in of("death").items()},
        **began("death"),
        **seen.written("rank 1 .* killed in .* after step #:", *sentences),
    }
    # The last one that had ended.
    yield "step of the death", Figure(KILLED_AT - 1, died)
    late = of("straggler")
    named = {face: [each["who"]["rank"], each["phase"]] for face, each in late.items()}
    yield "late rank", Figure(["1", "data"], named)
    yield "first late step", Figure(LATE[0], began("straggler"), within=0.05)
    for moment, at in (("since_ns", LATE[0]), ("until_ns", LATE[-1])):
        true_s = other[at].ended_s - other[0].began_s
        moments = {face: each[moment] / 1e9 - other[0].began_s for face, each in late.items()}
        # A rank that has recovered may be a little late by the load of the machine.
        yield f"late {moment}", Figure(true_s, moments, within=0.25)
    cost = {
        **{face: each["evidence"]["lost_s"] for face, each in late.items()},
        **seen.written("cost the others # in total", *sentences),
        **{face: each["seconds"]["late_rank"] for face, each in seen.goodputs.items()},
        **{f"{face} by whom": each["late"][LATE_RANK] for face, each in seen.goodputs.items()},
        **seen.written("# +waiting for a late rank", "goodput"),
        **seen.exported(catalog.OTEL_DDP_RUN_TIME, cause="late_rank"),
        **{f"verdict's {face}": each for face, each in seen.exported(_LOST, rank="1").items()},
        "page time": said["page"]["time"]["late"][LATE_RANK],
    }
    slept_s = sum(each.seconds.get("late", 0.0) for each in own)
    yield "cost of the late rank", Figure(slept_s, cost, within=0.25)
    share = {
        **{face: each["evidence"]["excess"] for face, each in late.items()},
        **seen.written("late in data, by # of a step", *sentences),
    }
    took_s = sum(other[at].took_s for at in LATE)
    yield "lateness of a step", Figure(slept_s / took_s, share, within=0.25, alike=0.02)


def of_time(seen: Seen) -> Iterator[tuple[str, Figure]]:
    said, goodputs, page = seen.said, seen.goodputs, seen.said["page"]["time"]
    report, columns = said["report.json"]["time"], said["page steps"]["columns"]
    of_page = zip(columns["steps"], columns["step_s"], strict=True)
    means = {
        "report": report["steps_s"] / STEPS,
        **seen.written("steps .*mean #", "report card"),
        "page": sum(steps * s for steps, s in of_page) / sum(columns["steps"]),
    }
    # A process begins before its first step does.
    whole = [*seen.did["0-0"][1:RESUMES_AT], *seen.did["0-1"][1:]]
    yield "mean of a step", Figure(mean_of(whole), means, within=0.05)
    of_attempt = seen.written("steps .*mean #", "card", "webhook")
    second = seen.did["0-1"][1:]
    # Its first step is one of them, which takes the longer the busier the machine is.
    yield "mean of a step of the attempt", Figure(mean_of(second), of_attempt, within=0.15)
    for word, cause, text in (
        ("checkpoint", "checkpoint", "saving checkpoints"),
        ("eval", "evaluation", "evaluation"),
    ):
        spent = {
            **{face: each["seconds"][cause] for face, each in goodputs.items()},
            **seen.written(f"# +{text}", "goodput"),
            **seen.exported(catalog.OTEL_DDP_RUN_TIME, cause=cause),
            "page": page["seconds"][cause],
            "report": 2 * report["phases_s"][word],
        }
        slept_s = sum(each.seconds.get(word, 0.0) for steps in seen.did.values() for each in steps)
        yield cause, Figure(slept_s, spent, within=0.05, alike=0.01)
    repeated = {
        **{face: each["attempts"][-1]["repeated_steps"] for face, each in goodputs.items()},
        **seen.written(rf"\n2 .*  {RESUMES_AT} +\d+ +#", "goodput"),
        "page": page["attempts"][-1]["repeated_steps"],
    }
    # The last quarter of a second before a death may be missing.
    twice = sum(each.number >= RESUMES_AT for each in seen.did["0-0"])
    yield "steps done twice", Figure(twice, repeated, within=0.15)
    share = {
        **{face: each["share"] for face, each in goodputs.items()},
        **seen.written("known: # of", "goodput"),
        **seen.written("goodput +# of", "report card"),
        **seen.exported(catalog.OTEL_DDP_RUN_TIME, page["rank_s"], cause="productive"),
        "page": page["share"],
    }
    # All of it is held against the clock by the rows above.
    yield "productive share", Figure(page["seconds"]["productive"] / page["rank_s"], share)


def mean_of(steps: Sequence[Step]) -> float:
    return sum(each.took_s for each in steps) / len(steps)


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
