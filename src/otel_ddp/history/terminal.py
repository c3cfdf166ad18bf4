"""Times and the end of a run, in words that can do nothing to a terminal."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp import shown
from otel_ddp.vocabulary.words import shown_phase

_MOST_VALUES, _MOST_SENTENCES = 5, 4
_WIDTH = 100
_LEAST_SHARE = 0.005
_MENTION = re.compile(r"[@<!](?=[\w@!#&/])")


def shown_time(time_ns: int, now_ns: int) -> str:
    """The time of day here, with the date where that is another one."""
    at, now = time.localtime(time_ns / 1e9), time.localtime(now_ns / 1e9)
    same_day = (at.tm_year, at.tm_yday) == (now.tm_year, now.tm_yday)
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", at)


def when(verdict: Mapping[str, Any], now_ns: int) -> str:
    """What stands before a verdict's sentence, as an agent's file describes it.

    `since 16:45:10: ` while it holds, `16:45:10 to 16:47:02: ` later, `16:45:10: ` for a death.
    """
    since, until = (
        shown_time(at_ns, now_ns) if isinstance(at_ns, int) and 0 < at_ns < 2**63 else ""
        for at_ns in (verdict.get("since_ns"), verdict.get("until_ns"))
    )
    if not since:
        return ""
    if verdict.get("kind") == "death":
        return f"{since}: "
    return f"{since} to {until}: " if until else f"since {since}: "


def where_to_look(led_by: str) -> str:
    """What each view says on a node of a run that the agent of another node leads."""
    return f"all ranks of this run are shown on {printable(led_by)}" if led_by else ""


def printable(words: str, *, most: int = 1000) -> str:
    """One line: ESC and newlines are written out."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in words[:most]
    )


def without_mentions(words: str) -> str:
    """Breaks up mentions: `@everyone` of Discord, `<!channel>` of Slack, `@user` of GitHub.

    GitHub notifies whoever an @ names, even if the @ is escaped.
    """
    return _MENTION.sub("\\g<0>\u200b", words)


def aligned(rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> Iterator[str]:
    """The lines of a table, whose first row holds the heads. *right*: those of numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            text.rjust(width) if head in right else text.ljust(width)
            for text, width, head in zip(row, widths, rows[0], strict=True)
        )
        yield "  ".join(cells).rstrip()


# -- the card of a run, in twenty lines or fewer


class CardValue(NamedTuple):
    """A logged value at the end."""

    name: str
    split: str
    last: float | None
    best: float | None = None
    best_step: int | None = None


class Card(NamedTuple):
    """What is known at the end of a run; what is not known is empty."""

    title: str
    state: str
    duration_s: float | None
    reason: str = ""
    where: str = ""
    """On how many ranks and nodes."""
    steps: int = 0
    step_s: float | None = None
    phases_s: Mapping[str, float] = {}
    """Of one rank, or of all on average."""
    goodput: str = ""
    """What moved the run on, of all its time."""
    of_rank: str = ""
    """Whose phases these are, if they are not those of all."""
    values: Sequence[CardValue] = ()
    sentences: Sequence[str] = ()
    """Verdicts."""
    gpus: Sequence[str] = ()
    cost: str = ""
    look: Sequence[str] = ()
    """Where there is more to see."""


def lines(card: Card) -> Iterator[str]:
    """Twenty lines at most."""
    took = "" if card.duration_s is None else f" after {shown.seconds(card.duration_s)}"
    yield _cut(f"otel_ddp: {card.title} {card.state}{took}{_after(', ', card.where)}")
    if card.reason:
        yield _row("reason", card.reason)
    if card.steps:
        each = "" if card.step_s is None else f", {shown.seconds(card.step_s)} each"
        yield _row("steps", f"{card.steps}{each}")
    if time := "  ".join(_time(card.phases_s)):
        yield _row("time", f"{time}{_after('  of ', card.of_rank)}")
    if card.goodput:
        yield _row("goodput", card.goodput)
    for value in card.values[:_MOST_VALUES]:
        yield _row(shown.name(value.name, value.split), _value(value))
    if (more := len(card.values) - _MOST_VALUES) > 0:
        yield _row("", f"and {more} more values")
    for sentence in card.sentences[:_MOST_SENTENCES]:
        yield _row("!", sentence)
    if (more := len(card.sentences) - _MOST_SENTENCES) > 0:
        yield _row("", f"and {more} more findings")
    for gpu in card.gpus[:2]:
        yield _row("gpus", gpu)
    if card.cost:
        yield _row("telemetry", card.cost)
    for words in card.look[:3]:
        yield _row("look", words)


def _time(phases_s: Mapping[str, float]) -> Iterator[str]:
    total_s = sum(phases_s.values())
    for word, seconds in sorted(phases_s.items(), key=lambda item: -item[1]):
        if total_s and seconds >= _LEAST_SHARE * total_s:
            yield f"{shown_phase(word)} {shown.share(seconds / total_s)}"


def _value(value: CardValue) -> str:
    step = "" if value.best_step is None else f" at step {value.best_step}"
    best = "" if value.best is None else f"best {shown.number(value.best)}{step}, "
    return f"{best}last {shown.number(value.last)}"


def _row(head: str, words: str) -> str:
    return _cut(f"  {printable(head):<18} {words}", 4 * _WIDTH if head == "!" else 2 * _WIDTH)


def _cut(words: str, most: int = 2 * _WIDTH) -> str:
    clean = printable(words)
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"


def _after(before: str, words: str) -> str:
    return f"{before}{words}" if words else ""
