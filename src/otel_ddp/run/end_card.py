"""Prints the result of a run on stderr of its first rank, without waiting for anything.

The rank reads its own journal, and the last status that the node's agent has written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from otel_ddp import errors
from otel_ddp.history.card import card_of, lines
from otel_ddp.history.terminal import when
from otel_ddp.journal.parser import Unreadable
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.survey import Survey, last_of_agent, of_run
from otel_ddp.journal.values import extremes_of
from otel_ddp.run.announcements import say
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS, STATES

# Shorter runs print nothing, as they are mostly tests, or parts of a sweep of thousands of runs.
SHORTEST_S = 10.0


@errors.contained()
def show(
    journal: Path,
    place: Place,
    state: str,
    *,
    always: bool,
    look: list[str],
    now_ns: Callable[[], int] = time.time_ns,
) -> None:
    """Print the card of an ended run, if it has a step.

    Call it last: closing the reader also releases this process's lock on its journal (a POSIX
    lock), and then the agent considers the process dead.
    """
    try:
        reader = JournalReader(journal)
    except Unreadable:
        return
    try:
        status, process = last_of_agent(place), ProcessState.read(reader, STATES[state])
        # Take the earliest start, as the run may have begun with an earlier attempt.
        of_run = [each.started_ns for each in status.processes if each.of_run == process.of_run]
        lasted_s = (now_ns() - min([reader.created_ns, *filter(None, of_run)])) / 1e9
        if not (always or lasted_s >= SHORTEST_S):
            return
        sentences = [*_sentences(status, process.of_run)]
        known = {each.journal: each.summary for each in status.processes}
        extremes = extremes_of(known.get(journal.name))
        found = card_of(reader, state, lasted_s, extremes, sentences, look)
        if found is not None:
            say("\n".join(lines(found)) + "\n")
    finally:
        reader.close()


def _sentences(status: Survey, of: tuple[str, str]) -> Iterator[str]:
    """The verdicts of this run, open ones first."""
    for each in (*status.verdicts, *status.past):
        if of_run(each["who"]) == of and each.get("kind") not in HARMLESS_VERDICTS:
            yield when(each, time.time_ns()) + str(each.get("sentence"))
