"""Run: the object that users hold. It records values in the journal of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

from otel_ddp import errors, settings
from otel_ddp.errors import ConfigError
from otel_ddp.identity import addresses, identity, run_names
from otel_ddp.identity.identity import Choice, Identity
from otel_ddp.journal import layout, place
from otel_ddp.recording import agent_start, spans, values
from otel_ddp.recording.progress import Progress
from otel_ddp.recording.recorder import Recorder
from otel_ddp.run import announcements, current_run, opening
from otel_ddp.run.current_run import Action, Ending
from otel_ddp.run.opening import LeadSearch, Task
from otel_ddp.torch import models, process_group
from otel_ddp.vocabulary import catalog

T = TypeVar("T")

# Arguments of `init` that a second call may extend.
_ADDED_LATER = ("config", "best")
# For this long after the start, look for the agent's address at the second, shorter interval: an
# agent that was just started has none yet.
_AGENT_STARTS_NS, _ASK_AGAIN_NS = 15_000_000_000, 500_000_000


class Origin(NamedTuple):
    """How a run was created: by which arguments of `init`, and in what kind of process."""

    arguments: dict[str, Any]
    joins: bool = False
    """Whether another process has opened the run, so that this process only joins it."""
    task: Task | None = None
    """The task of a process pool for which this run was opened, if any."""
    forked: bool = False
    """Whether the run came into this process by fork."""


class Records:
    """The objects of an open run."""

    def __init__(
        self, conf: settings.Settings, recorder: Recorder, process: Identity, exported: bool | None
    ) -> None:
        self.conf = conf
        self.recorder = recorder
        self.progress = Progress(recorder)
        self.place = place.Place(recorder.writer.path.parent)
        # Whether this process's series are exported from the node; None: its rank is not known yet.
        self.exported = exported
        # Whether the journal has the final identity.
        self.settled = process.settled
        # Whether the address of the run's page was printed.
        self.said_where = False


class Run:
    """This process's part of a launch, as returned by `otel_ddp.init` and `instrument`."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._identity: Identity | None = None
        self._choice = Choice("all")
        # False at first, also in a child: a run that came by pickle or fork opens when first used.
        self._opened = False
        self._records: Records | None = None
        self._ending = Ending()
        self._lead = LeadSearch()
        # Whether this run was opened automatically: the program has not called `init` or
        # `instrument` yet.
        self.was_automatic: bool = False
        # State and reason with which the program ended its run in a tracker (W&B, ...), if it did.
        self.tracker_outcome: tuple[str, str] | None = None
        # Name of a value -> direction in which it improves, as chosen by the user.
        self._best: dict[str, str] = {}

    # -- opening

    def open(self) -> None:
        """Read the settings and create the journal. May raise."""
        self._opened = True
        asked = self._origin.arguments
        strategy, config = asked.get("strategy"), asked.get("config")
        self._best = opening.directions(asked.get("best"))
        conf = settings.read()
        self._choice = Choice(conf.strategy if strategy is None else strategy)
        process = self._identity = self._resolve(asked)
        if conf.disabled:
            return
        if lacking := place.missing_calls():
            if not process.local_rank:
                announcements.nothing_is_recorded(lacking)
            return
        self._lead = LeadSearch(conf)
        process = self._identity = self._ask_group(process)
        announcements.doubts(conf, process)
        records = self._open_journal(conf, process)
        if records is None:
            return
        if conf.offline and self._speaks_for_all():
            announcements.where_it_is_kept(conf)
        if records.settled:
            self._announce(records)
        self._check_agent(records.recorder.writer.created_ns)
        records.place.wake_agent()
        if config is not None:
            self.config(config)

    def _open_journal(self, conf: settings.Settings, process: Identity) -> Records | None:
        exported = self._choice.exports(process)
        # Read this first, as it may fail: a journal created before would stay without an end.
        of_run = spans.run_facts(os.environ)
        writer = opening.open_journal(conf, self._identity_record(exported))
        if writer is None:
            return None
        recorder = Recorder(writer, self._check_agent)
        records = self._records = Records(conf, recorder, process, exported)
        recorder.run_span = of_run
        errors.count_failure = self._count_failures
        self._count_failures(0.0)
        recorder.documents.facts(
            {
                **opening.program_facts(),
                "had_run": current_run.had_one(),
                "terms": place.agent_digest(os.environ, offline=conf.offline),
                "sample_steps": conf.sample_steps,
                "span": recorder.run_span,
                **({"best": self._best.copy()} if self._best else {}),
                **self._lead.facts(),
            }
        )
        return records

    def _identity_record(self, exported: bool | None) -> dict[str, Any]:
        return {
            **self.identity.to_dict(),
            "strategy": self._choice.text,
            "exported": bool(exported),
        }

    def _announce(self, records: Records) -> None:
        """Let children join this run, and warn if the strategy needs an unknown rank."""
        run_names.hand_down(self.identity.run, self.identity.group)
        if records.exported is None:
            announcements.exports_are_unknown(self._choice)

    def _speaks_for_all(self) -> bool:
        """Whether this process prints the messages that concern all ranks."""
        if opening.in_pool_worker() and run_names.parent_has_run():
            return False
        return not self.identity.global_rank and not self.identity.local_rank

    @errors.contained(default=False)
    def _say_where_to_look(self, records: Records) -> bool:
        """Print the address of the run's page; True if the agent has none yet: try again later."""
        conf = records.conf
        is_wanted = conf.say != "nothing" and conf.agent != "off" and records.settled
        if records.said_where or not is_wanted or not self._speaks_for_all():
            return False
        if text := announcements.where_to_look(records.place, self.run):
            # Set this first: a signal handler that interrupts the printing must not repeat it.
            records.said_where = True
            announcements.say(text)
        return not records.said_where

    def _ready(self) -> Records | None:
        """The objects of the open run; None if this process records nothing."""
        if not self._opened:
            if opening.in_data_worker():
                return None
            self._join()
        records = self._records
        if records is not None and not records.settled:
            self._settle(records)
        return records

    @errors.contained()
    def _join(self) -> None:
        current_run.join(self)

    # -- identity

    @property
    def opened(self) -> bool:
        """Whether this run was opened, or has ended without ever being opened."""
        return self._opened

    @property
    def identity(self) -> Identity:
        """The identity of this process: its run, group, node and ranks."""
        if self._identity is None:
            self._identity = self._resolve(self._origin.arguments)
        return self._identity

    def _resolve(self, arguments: Mapping[str, Any]) -> Identity:
        origin = self._origin
        return identity.resolve(
            **arguments,
            joins=origin.joins,
            in_task=origin.task is not None,
            # A child of os.fork has its parent's environment: no launcher has set variables for it.
            in_spawned_child=True if origin.forked and origin.joins else None,
        )

    @property
    def group(self) -> str:
        """The name of the experiment that this run belongs to, which may have several runs."""
        return self.identity.group

    @property
    def run(self) -> str:
        """The name of this launch, the same on all its ranks."""
        return self.identity.run

    @property
    def job_type(self) -> str:
        """The role of this process."""
        return self.identity.job_type

    # -- what a script records

    def log(
        self,
        metrics: Mapping[str, Any],
        *,
        step: int | None = None,
        epoch: float | None = None,
        split: str | None = None,
    ) -> None:
        """Record numbers: `run.log({"loss": loss, "lr": lr}, step=step)`."""
        records = self._ready()
        if records is None:
            return
        if records.settled:
            # Shadow this method, so that further calls of `log` go directly to the recorder.
            vars(self)["log"] = records.recorder.log
        elif records.exported is None:
            # Warn at this first value, as the rank is unknown and may stay so.
            announcements.exports_are_unknown(self._choice)
        records.recorder.log(metrics, step=step, epoch=epoch, split=split)

    def log_beside(
        self,
        metrics: Mapping[str, Any],
        step: Any = None,
        epoch: float | None = None,
        split: str | None = None,
    ) -> None:
        """Record numbers that a program logs to a tracker, whose steps are not training steps."""
        if (records := self._ready()) is not None:
            records.recorder.log_beside(metrics, step, epoch, split)

    def resume_from(self, done: int) -> None:
        """Continue the count of steps after the *done* steps of earlier processes."""
        if (records := self._ready()) is not None:
            records.recorder.steps.resume_from(done)

    def _log_by_run(self) -> None:
        """Send calls of `log` to this run again, instead of directly to its recorder."""
        vars(self).pop("log", None)

    def config(self, mapping: T) -> T:
        """Record the configuration of this run, flat or nested; returns *mapping* unchanged."""
        self._config(mapping)
        return mapping

    @errors.contained()
    def _config(self, mapping: Any) -> None:
        records = self._ready()
        if records is None:
            return
        recorder = records.recorder
        content = values.flat(mapping)
        if not content:
            if not isinstance(mapping, Mapping):
                text = f"config expects a mapping, got {type(mapping).__name__}"
                recorder.totals.refuse("value", "config", text)
            return
        if left_out := recorder.documents.config(content):
            first = values.shown(left_out[0])
            text = f"settings found no room: {len(left_out)}, from {first} on"
            recorder.totals.refuse("value", "config", f"{text} (OTEL_DDP_JOURNAL_BYTES)")
        if len(content) == values.MOST_SETTINGS:
            text = f"of a configuration {values.MOST_SETTINGS} settings are recorded at most"
            recorder.totals.refuse("value", "settings", f"{text}, so what follows is left out")

    def phase(
        self, name: str, *, expect_s: float | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Mark what this process does: `with run.phase("checkpoint"): save()`.

        *expect_s* is the expected duration: no stall is reported before 1.5 times this duration.
        """
        return self._around(name, {}, phase=True, expect_s=expect_s)

    def span(self, name: str, /, **attributes: Any) -> contextlib.AbstractContextManager[None]:
        """Record how long something takes: `with run.span("load", shard=3): ...`."""
        return self._around(name, attributes)

    @contextlib.contextmanager
    def _around(
        self, name: Any, attributes: Mapping[str, Any], phase: bool = False, expect_s: Any = None
    ) -> Iterator[None]:
        entered = self._enter(name, phase, expect_s)
        try:
            yield
        except BaseException as raised:
            self._leave(entered, attributes, raised)
            raise
        self._leave(entered, attributes, None)

    @errors.contained()
    def _enter(self, name: Any, phase: bool, expect_s: Any) -> spans.OpenSpan | None:
        records = self._ready()
        if records is None:
            return None
        # Pass the run's name only if spans are exported: otherwise this span would become the
        # parent of the user's OpenTelemetry spans, but would be missing in their traces.
        run = self.identity.run if records.settled and records.exported else ""
        try:
            return spans.OpenSpan(records.progress, name, run, phase=phase, expect_s=expect_s)
        except values.Refused as why:
            records.recorder.totals.refuse("name", "span", f"a span was not recorded: {why}")
            return None

    @errors.contained()
    def _leave(
        self,
        entered: spans.OpenSpan | None,
        attributes: Mapping[str, Any],
        raised: BaseException | None,
    ) -> None:
        if entered is not None:
            records = self._records
            # If the process has forked inside the span, only the parent process records the span.
            is_here = records is not None and records.progress is entered.progress
            entered.leave(attributes, raised, is_here)

    def event(self, name: str, /, **attributes: Any) -> None:
        """Record that something happened: `run.event("lr drop", factor=0.1)`."""
        self._record("event", spans.record_event, name, attributes)

    @errors.contained()
    def _record(self, what: str, act: Callable[..., None], *given: Any) -> None:
        records = self._ready()
        if records is None:
            return
        try:
            act(records.recorder, *given)
        except values.Refused as why:
            records.recorder.totals.refuse("name", what, f"an {what} was not recorded: {why}")

    def alert(
        self, title: str, text: str = "", level: Literal["info", "warn", "error"] = "info"
    ) -> None:
        """Send people a message: `run.alert("loss rises", f"{loss:.3f}", "warn")`.

        The node's agent sends it as a log record, and to the addresses in `OTEL_DDP_NOTIFY`.
        """
        self._record("alert", spans.record_alert, title, text, level)

    @errors.contained()
    def ended_by(self, error: BaseException) -> None:
        """Record the exception that ends this run, with its stack trace."""
        records = self._records
        # Leave SystemExit out: a program that calls sys.exit has printed the reason itself.
        if records is not None and not isinstance(error, SystemExit):
            spans.record_exception(records.recorder, error)

    def artifact(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        type: str = "file",
        direction: Literal["output", "input"] = "output",
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a file or directory as an output or input of this run.

        Call `run.artifact("out/model.pt", name="model", type="model")` when the file is written.
        The node's agent reads size and digest, and stores a copy if `OTEL_DDP_ARTIFACTS` is set. It
        does not read an address such as `s3://bucket/data`. *name* is by default the last part of
        the path.
        """
        self._record("artifact", spans.record_artifact, path, name, type, direction, metadata)

    # -- measuring

    @errors.contained()
    def describe(self, model: Any) -> None:
        """Record the class of the model."""
        records = self._ready()
        if records is None:
            return
        records.recorder.documents.facts(models.describe(model))

    @errors.contained()
    def watch(self, model: Any = None, **options: Any) -> None:
        """Measure the steps of this model, or of discovered models if it is None."""
        records = self._ready()
        if records is None:
            return
        if not models.can_measure(model):
            return
        _record_backend(records.recorder)
        process = self.identity
        options.update(
            every=records.conf.sample_steps,
            overhead=records.conf.overhead,
            leads=not process.global_rank,
            settle=self._settle_by_hooks,
        )
        # Imported only now: this module needs a torch that is new enough.
        from otel_ddp.torch import measure

        measure.start(model, records.progress, self.describe, **options)
        # A signal handler may have ended the run meanwhile: then take the hooks off again.
        if self._records is not records:
            _unwatch(records.progress)

    @errors.contained()
    def unwatch(self) -> None:
        """Stop measuring steps, and take every hook off."""
        if self._records is not None:
            _unwatch(self._records.progress)

    # -- rank, run and lead from the process group: hooks and `log` look for them repeatedly, as the
    # program may create the group late

    def _ask_group(self, process: Identity) -> Identity:
        if not process_group.is_up():
            return process
        facts = process_group.facts(process, seeks_lead=self._lead.is_sought)
        if facts is None:
            return process
        has_synced = self._records is not None and self._records.recorder.steps.have_ended
        self._lead.take(facts, has_synced=has_synced)
        if self._records is not None:
            self._records.recorder.documents.facts(self._lead.facts())
        return identity.settle(process, facts)

    @errors.contained(default=True)
    def _settle_by_hooks(self) -> bool:
        """Read rank, run name and lead during training; True once all three are final."""
        records = self._records
        if records is None:
            return True
        self._look_again(records)
        _record_backend(records.recorder)
        is_known = records.settled and (not self.identity.may_have_others or process_group.is_up())
        return is_known and (not self._lead.is_sought or records.recorder.steps.have_ended)

    def _look_again(self, records: Records) -> None:
        """Ask the process group for what is not final yet: rank, run name and lead."""
        if not records.settled or self.identity.may_have_others:
            self._settle(records)
        is_due = self._lead.is_due(has_synced=records.recorder.steps.have_ended)
        if is_due and self.identity.may_have_other_nodes:
            self._ask_group(self.identity)

    @errors.contained()
    def _settle(self, records: Records) -> None:
        """Ask the process group for this process's rank and run, if the group exists by now."""
        if not self.identity.settled or self.identity.may_have_others:
            process = self._ask_group(self.identity)
            if process == self._identity:
                return
        else:
            process = self.identity
        self._change_identity(records, process)

    def _change_identity(self, records: Records, process: Identity) -> None:
        if process != self._identity:
            self._identity = process
            records.settled = False
            self._log_by_run()
        records.exported = self._choice.exports(process)
        written = records.recorder.documents.identity(self._identity_record(records.exported))
        # None: a signal handler has interrupted another write, so the next call writes it.
        if written is None:
            return
        records.settled = self.identity.settled
        if records.settled:
            self._announce(records)
            records.place.wake_agent()

    # -- every few seconds

    @errors.contained()
    def _check_agent(self, now: int) -> None:
        """Restart a missing agent, among other checks.

        There is no thread for this: every few seconds, `log` or the end of a step calls it.
        """
        records = self._records
        if records is None:
            return
        recorder, conf = records.recorder, records.conf
        recorder.gate.check_due_ns = now + agent_start.CHECK_EVERY_NS
        recorder.poll_copies()
        self._look_again(records)
        if conf.starts_agent:
            agent_start.ensure_agent(records.place)
        is_new = now - recorder.writer.created_ns < _AGENT_STARTS_NS
        if self._say_where_to_look(records) and is_new:
            recorder.gate.check_due_ns = now + _ASK_AGAIN_NS
        if (
            self._speaks_for_all()
            and recorder.writer.overwrites_unread()
            and not records.place.agent_is_alive()
        ):
            announcements.journal_is_full(conf.agent)

    def _count_failures(self, more: float = 1.0) -> None:
        if self._records is not None:
            self._records.recorder.totals.count(catalog.OTEL_DDP_HOOK_ERRORS, more)

    # -- the end

    @property
    def is_closed(self) -> bool:
        """Whether this run records nothing any more, or never did."""
        return self._opened and self._records is None

    def finish(self, state: str = "finished", *, reason: str = "") -> None:
        """End this run; wait at most 0.25 s until the agent has read the last values."""
        if state not in ("finished", "failed"):
            raise ConfigError(f'state must be "finished" or "failed", got {state!r}.')
        self.close(state, str(reason))

    @errors.contained()
    def close(self, state: str, reason: str) -> None:
        """Like `finish`, without checks; also called if the process ends without `finish`."""
        self._opened = True
        records = self._records
        if records is None:
            current_run.release(self)
            return
        # If a signal handler has interrupted a write of this thread, end the run after the write.
        if records.progress.defer(partial(self.close, state, reason), state):
            current_run.release(self)
            return
        self._ending.run(
            lambda: self._records is None, lambda: self._end_actions(state, reason, records)
        )

    def _end_actions(self, state: str, reason: str, records: Records) -> list[Action]:
        recorder, progress = records.recorder, records.progress
        actions: list[Action] = [] if records.settled else [partial(self._settle, records)]
        actions += [
            partial(_unwatch, progress),
            partial(recorder.poll_copies, wait=True),
        ]
        if reason:
            actions.append(partial(recorder.documents.reason, reason))
        content = {"state": state, "time": time.time_ns()}
        # Write the progress before the end record: who reads the latter finds final progress.
        actions += [
            partial(progress.end_run, state),
            partial(recorder.documents.append, layout.END, content),
            partial(self._wait_for_agent, records),
        ]
        if records.conf.say != "nothing" and self._speaks_for_all():
            # Show the card before `recorder.close`: while our lock is held, the agent does not
            # delete the journal, which the card is made from.
            actions.append(partial(self._show_card, records, state))
        release = partial(current_run.release, self)
        return [*actions, recorder.close, records.place.wake_agent, release, self.go_silent]

    @errors.contained()
    def _show_card(self, records: Records, state: str) -> None:
        # Imported here, as only one rank shows the card, and the import would delay every start.
        from otel_ddp.run import end_card

        conf, look = records.conf, []
        name = shlex.quote(f"{self.group}/{self.run}" if self.group else self.run)
        if base := addresses.page(records.place):
            look.append(addresses.page_of_run(base, self.run))
        if conf.agent != "off":
            # Print commands, too, as the agent and its address are gone some minutes after the run.
            look += [f"otel-ddp open {name}", f"otel-ddp report {name}"]
        journal = records.recorder.writer.path
        end_card.show(journal, records.place, state, always=conf.say == "all", look=look)

    def _wait_for_agent(self, records: Records) -> None:
        if records.conf.starts_agent:
            agent_start.ensure_agent(records.place)
        if records.conf.agent != "off":
            agent_start.wait_for_agent(records.place, records.recorder.writer)
        self._say_where_to_look(records)

    def go_silent(self) -> None:
        """Record nothing from now on."""
        self._opened = True
        self._log_by_run()
        self._records = None

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # `sys.exit(0)` is a normal end.
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close("finished", "")
        else:
            self.ended_by(error)
            self.close("failed", values.error_line(error))

    # -- a second `init`, which may rename a run that was opened automatically

    def opened_again(self, arguments: Mapping[str, Any]) -> None:
        """A second `init` may add to `config` and `best`; warn of other arguments that differ."""
        if self.was_automatic:
            self._take_names(arguments)
        process = self.identity
        for name, value in arguments.items():
            if value is None or name in _ADDED_LATER:
                continue
            if name == "strategy":
                known, asked = self._choice.text, Choice(value).text
            else:
                known = getattr(process, name)
                asked = identity.normal(name, value)
            if asked != known:
                announcements.comes_too_late(name, known, asked)
        if arguments["config"] is not None:
            self.config(arguments["config"])
        added = opening.directions(arguments["best"])
        if added and (records := self._ready()) is not None:
            self._best |= added
            records.recorder.documents.facts({"best": self._best.copy()})

    def _take_names(self, arguments: Mapping[str, Any]) -> None:
        """Apply the arguments to this run, which was opened automatically."""
        named = {k: v for k, v in arguments.items() if v is not None and k not in _ADDED_LATER}
        records = self._ready()
        if not named or records is None:
            return
        asked, before = self._origin.arguments | named, self.identity
        # Invalid arguments raise here, before anything has changed.
        choice = Choice(named["strategy"]) if "strategy" in named else self._choice
        process = self._resolve(asked)
        if "run" not in named:
            # Keep the run's generated name: resolving again would generate another one.
            kept = {name: getattr(before, name) for name in ("run", "run_from", "proposal")}
            process = dataclasses.replace(process, **kept)
        self.was_automatic = False
        self._origin, self._choice = self._origin._replace(arguments=asked), choice
        self._change_identity(records, self._ask_group(process))

    # -- child processes, forks and tasks of pools

    def with_arguments(self, arguments: Mapping[str, Any]) -> Run:
        """Add arguments of `init` to this run, which is not opened yet.

        A forked child drops its parent's arguments, so that it behaves like a spawned child, which
        has none.
        """
        origin = self._origin
        own = {} if origin.forked else origin.arguments
        asked = own | {k: v for k, v in arguments.items() if v is not None}
        self._origin = origin._replace(arguments=asked, joins=origin.joins and not origin.forked)
        self._identity = None
        return self

    def is_over(self, task: Task | None, arguments: Mapping[str, Any]) -> bool:
        """Whether this run belongs to a previous task of a pool's worker."""
        before = self._origin.task
        if task is None or before is None:
            return False
        if task.number != before.number:
            return True
        # A second call from the same line is made either by a loop within one call of the user's
        # function, or by the next of several calls in one task. Only the latter gets another run.
        # Its arguments differ. Catch errors, as comparing users' values may raise.
        same = errors.attempt(lambda: bool(arguments == self._origin.arguments), False)
        return task.calls == before.calls and not same

    def enter_fork(self) -> bool:
        """In a forked child, drop the parent's state; True if the child can join this run.

        The parent's journal is mapped here, too, but the child must not write to it. Locks are
        replaced: a thread of the parent may have held one, and does not exist here to release it.
        """
        records, self._records = self._records, None
        joinable = not self._opened or records is not None
        if joinable:
            if self._opened:
                self._origin = Origin(self._for_a_child(), joins=True, forked=True)
            self._identity = None
            self._origin = self._origin._replace(task=None)
        self._log_by_run()
        if records is not None:
            records.recorder.disown(partial(Run.log, self))
        self._ending, self._lead = Ending(), LeadSearch()
        self._opened = not joinable
        return joinable

    def __reduce__(self) -> tuple[Callable[..., Run], tuple[dict[str, Any]]]:
        """A run pickled into a child process joins the same launch there at its first use."""
        arguments = self._for_a_child()
        # Leave out functions, which may not be picklable.
        return (_attach, ({k: v for k, v in arguments.items() if not callable(v)},))

    def _for_a_child(self) -> dict[str, Any]:
        """The arguments with which a child process joins this run: no ranks, no configuration."""
        stays = ("config", "global_rank", "local_rank", "world_size")
        own = self._origin.arguments.items()
        arguments = {key: value for key, value in own if key not in stays}
        return {**arguments, "run": self.run, "group": self.group}


def silent() -> Run:
    """A run that records nothing."""
    found = Run(Origin({}))
    found.go_silent()
    return found


def _attach(arguments: dict[str, Any]) -> Run:
    """Unpickle a run: return this process's run; if it has none, one that joins the other."""
    attached: Run = current_run.attach(Run(Origin(arguments, joins=True)))
    return attached


@errors.contained()
def _unwatch(progress: Progress) -> None:
    if "otel_ddp.torch.measure" in sys.modules:
        from otel_ddp.torch import measure

        measure.stop(progress)


def _record_backend(recorder: Recorder) -> None:
    if backend := process_group.backend():
        recorder.documents.facts({"backend": backend})
