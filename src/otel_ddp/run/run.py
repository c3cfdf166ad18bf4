"""Run: the object that users hold. It writes what they log into this process's journal."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, cast

from otel_ddp import catalog, settings
from otel_ddp.errors import ConfigError, containment
from otel_ddp.identity import boards, identity, page_address, pool_tasks
from otel_ddp.identity.identity import Identity
from otel_ddp.identity.strategy import Choice
from otel_ddp.journal import agent_environment, layout, place, system_requirements
from otel_ddp.recording import agent_start, values
from otel_ddp.recording.progress import Progress
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.spans import run_facts
from otel_ddp.run import announcements, current_run, end_card, log_lines, opening, rank_handles
from otel_ddp.run.ending import Act, Ending
from otel_ddp.run.rank_handles import RankHandles
from otel_ddp.run.statements import Statements
from otel_ddp.run.where_to_look import ASK_AGAIN_NS, WhereToLook

# The arguments of `init` that a later call may add to, and those that say nothing of the identity.
_ADDED_LATER = ("config", "parallel", "best")
_NOT_OF_IDENTITY = ("strategy", "config", "best")


class Run(Statements):
    """The part of one process in one launch. `otel_ddp.init` and `instrument` return it."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        joins: bool = False,
        task: pool_tasks.Task | None = None,
    ) -> None:
        """*joins*: another process has opened this run. *task*: its pool's task."""
        super().__init__()
        self._arguments = dict(arguments)
        self._joins = joins
        self._forked = False
        self._task = task
        self._identity: Identity | None = None
        self._recorder: Recorder | None = None
        self._progress: Progress | None = None
        self._place: place.Place | None = None
        self._ending = Ending()
        self._where_to_look = WhereToLook()
        self._settled = False
        # A run that came into a child by pickle or by fork opens itself at its first use. So does a
        # handle by which a process logs for another rank.
        self._opened = False
        # Whether it was opened for a program that had not asked for it, and may do so yet.
        self.was_unasked = False
        # For a handle: the run of the process that uses it. For a run: the handles of its ranks.
        self._logs_for: Run | None = None
        self._ranks = RankHandles[Run]()

    def with_arguments(self, arguments: Mapping[str, Any]) -> Run:
        """This run, not opened yet, with the arguments of `init` on top of its own.

        In a forked child the arguments of `init` alone count. A spawned child that has only its
        variables begins in the same way.
        """
        own, self._joins = ({}, False) if self._forked else (self._arguments, self._joins)
        self._arguments = own | {k: v for k, v in arguments.items() if v is not None}
        self._identity = None
        return self

    def is_over(self, task: pool_tasks.Task | None, arguments: Mapping[str, Any]) -> bool:
        """Whether this is the run of a pool's task, and its worker does another task by now."""
        if task is None or self._task is None:
            return False
        # Comparing values of the user may raise.
        same = containment.attempt(lambda: bool(arguments == self._arguments), False)
        return task.follows(self._task, same)

    def brought_by_fork(self) -> bool:
        """Drops the parent's state in a forked child; true if the child can join this run.

        The parent's journal is mapped here too, and the child must write nothing into it. Locks
        are new: a thread of the parent may have held one, and that thread is not here.
        """
        # The child may use any of these handles.
        for each in self._ranks.all():
            each.brought_by_fork()
        joinable = not self._opened or self._recorder is not None
        if joinable and (self._opened or self._logs_for is not None):
            self._arguments, self._joins, self._forked = self._for_a_child(), True, True
        if joinable:
            self._identity = self._task = self._logs_for = None
        self._ranks = RankHandles()
        self._log_by_run()
        if self._recorder is not None:
            self._recorder.disown(partial(Run.log, self))
        self._recorder = self._progress = self._place = None
        if self._log_lines is not None:
            # Not its end: that would wait for the parent's lock.
            self._log_lines.detach()
            self._log_lines = None
        self._ending = Ending()
        self._opened, self._settled = not joinable, not joinable
        return joinable

    # -- opening

    def opened_again(self, arguments: Mapping[str, Any]) -> None:
        """A second `init` adds configuration and where best values lie; a warning names others."""
        if self.was_unasked:
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
        if added and (recorder := self._ready()) is not None:
            self._best |= added
            recorder.facts({"best": self._best.copy()})

    def _take_names(self, arguments: Mapping[str, Any]) -> None:
        """What the program says of a run that was opened before it did so holds from here on."""
        named = {k: v for k, v in arguments.items() if v is not None and k not in _ADDED_LATER}
        recorder = self._ready()
        if not named or recorder is None:
            return
        asked, before = self._arguments | named, self.identity
        # Mistakes raise here, before anything is changed.
        choice = Choice(named["strategy"]) if "strategy" in named else self._choice
        process = self._resolve({k: v for k, v in asked.items() if k not in _NOT_OF_IDENTITY})
        if "run" not in named:
            process = process.within_run_of(before)
        self.was_unasked = False
        self._arguments, self._choice = asked, choice
        self._change_identity(recorder, self._ask_group(process))

    def open(self) -> None:
        """Reads the environment as it is now and starts the journal. Strict: this may raise."""
        self._opened = True
        if self._logs_for is not None and self._logs_for._ready() is None:
            self._settled = True
            return
        asked = dict(self._arguments)
        strategy, config = asked.pop("strategy", None), asked.pop("config", None)
        self._best = opening.directions(asked.pop("best", None))
        conf = self._settings = settings.read()
        self._choice = Choice(conf.strategy if strategy is None else strategy)
        if self._logs_for is not None:
            self._choice = self._logs_for._choice
        process = self._identity = self._resolve(asked)
        if conf.disabled:
            self._settled = True
            return
        if lacking := system_requirements.missing():
            self._settled = True
            if not process.local_rank:
                announcements.nothing_is_recorded(lacking)
            return
        process = self._identity = self._ask_group(process)
        self._exported = self._exports(process)
        self._settled = process.settled
        announcements.doubts(conf, process)
        size = conf.journal_bytes
        if self._logs_for is not None:
            size = min(size, rank_handles.JOURNAL_BYTES)
        # Before there is a journal: one that is left without a state shows no end.
        of_run = run_facts(os.environ)
        writer = opening.open_journal(conf, size, self._identity_record())
        if writer is None:
            return
        self._place = place.Place(writer.path.parent)
        recorder = self._recorder = Recorder(writer, conf)
        self._progress = Progress(recorder)
        recorder.run_span = of_run
        recorder.on_first_value = self._progress.mark_running
        recorder.check_agent = self._check_agent
        if self._logs_for is None:
            containment.count_failure = self._count_failures
            self._count_failures(0.0)
        recorder.facts(
            {
                **opening.program_facts(),
                **({} if self._logs_for is None else {"proxy": True}),
                "terms": agent_environment.digest(os.environ, offline=conf.offline),
                "sample_steps": conf.sample_steps,
                "span": recorder.run_span,
                **({"best": self._best.copy()} if self._best else {}),
                **({"baseline": conf.baseline} if conf.baseline else {}),
            }
        )
        if self._speaks_for_all():
            announcements.where_it_is_kept(conf, writer.ring_bytes)
        if self._settled:
            self._announce()
        self._check_agent(writer.created_ns)
        self._place.wake_agent()
        if config is not None:
            self.config(config)
        if conf.logs and self._logs_for is None:
            self._hook_logs(log_lines.asked(conf.logs))

    def _exports(self, process: Identity) -> bool | None:
        # Values for other ranks are exported where the process's own values are.
        return self._choice.exports(process) if self._logs_for is None else self._logs_for._exported

    def _identity_record(self) -> dict[str, Any]:
        return {
            **self.identity.to_dict(),
            "strategy": self._choice.text,
            "exported": bool(self._exported),
            "settled": self.identity.settled,
        }

    def _announce(self) -> None:
        """Let children join this run, and say what its rank means for the strategy."""
        identity.hand_down(self.identity.run, self.identity.group)
        if self._exported is None:
            announcements.exports_are_unknown(self._choice)
        announcements.main_is_elsewhere(self._choice, self.identity)

    def _speaks_for_all(self) -> bool:
        """Whether this process says what holds for all ranks."""
        if self._logs_for is not None or (pool_tasks.in_worker() and identity.parent_has_run()):
            return False
        return not self.identity.global_rank and not self.identity.local_rank

    def _says_where_to_look(self) -> bool:
        wanted = self._settings.say != "nothing" and self._settings.agent != "off"
        return wanted and self._settled and self._speaks_for_all()

    def _ask_group(self, process: Identity) -> Identity:
        if self._logs_for is not None:
            # This handle follows the run of its process, which asks by itself.
            self._logs_for._ready()
            found = identity.of_rank(self._logs_for.identity, **self._arguments)
            return process if found == process else found
        if not opening.group_is_up():
            return process
        from otel_ddp.torch import process_group

        facts = process_group.facts(process.proposal, agree=process.wants_agreement)
        if facts is None:
            return process
        if "global_rank" in process.given and process.global_rank != facts.global_rank:
            announcements.rank_differs(process, facts)
        return identity.settle(process, facts)

    @containment.contained(default=True)
    def _settle_by_hooks(self) -> bool:
        """Asks the process group while training goes on; true once nothing is left to ask."""
        recorder = self._recorder
        if recorder is None:
            return True
        if not self._settled or self.identity.may_have_others:
            self._settle(recorder)
        _record_backend(recorder)
        if self._log_lines is not None:
            self._log_lines.attach(started=True)
        return self._settled and (not self.identity.may_have_others or opening.group_is_up())

    @containment.contained()
    def _settle(self, recorder: Recorder) -> None:
        """Asks the process group for this rank and run, if it is up by now."""
        if not self.identity.settled or self.identity.may_have_others:
            process = self._ask_group(self.identity)
            if process == self._identity:
                return
        else:
            process = self.identity
        self._change_identity(recorder, process)

    def _change_identity(self, recorder: Recorder, process: Identity) -> None:
        if process != self._identity:
            self._identity = process
            self._settled = False
            self._log_by_run()
        self._exported = self._exports(process)
        written = recorder.identity(self._identity_record())
        # A signal handler came in the middle of a record: the next call writes the identity.
        if written is None:
            return
        if not written:
            announcements.identity_found_no_room()
        self._settled = self.identity.settled
        if self._settled:
            self._announce()
            if self._place is not None:
                self._place.wake_agent()

    def _ready(self) -> Recorder | None:
        """The recorder; None if this process records nothing."""
        if not self._opened:
            if opening.in_data_worker():
                return None
            self._join()
        recorder = self._recorder
        if recorder is not None and not self._settled:
            self._settle(recorder)
        return recorder

    @containment.contained()
    def _join(self) -> None:
        current_run.join(self)

    # -- what it is

    @property
    def opened(self) -> bool:
        """Whether this run was opened, or never will be."""
        return self._opened

    @property
    def logs_for_another_rank(self) -> bool:
        """Whether this is a handle that `for_rank` has returned."""
        return self._logs_for is not None

    @property
    def identity(self) -> Identity:
        """The identity of this process: its run, group, node and ranks."""
        if self._identity is None:
            arguments = {k: v for k, v in self._arguments.items() if k not in _NOT_OF_IDENTITY}
            self._identity = self._resolve(arguments)
        return self._identity

    def agreed_identity(self) -> Identity:
        """The identity on which the ranks agree, also that of a run which was not opened."""
        return self._ask_group(self.identity)

    def _resolve(self, arguments: Mapping[str, Any]) -> Identity:
        if self._logs_for is not None:
            return identity.of_rank(self._logs_for.identity, **arguments)
        return identity.resolve(
            **arguments,
            joins=self._joins,
            in_task=self._task is not None,
            # A child of os.fork has its parent's variables too, and none of a launcher's own.
            in_spawned_child=True if self._forked and self._joins else None,
        )

    @property
    def group(self) -> str:
        """What ties several processes or runs of one experiment together."""
        return self.identity.group

    @property
    def run(self) -> str:
        """The name of this launch, the same on all its ranks."""
        return self.identity.run

    @property
    def job_type(self) -> str:
        """The role of this process."""
        return self.identity.job_type

    @property
    def url(self) -> str:
        """The board of this run, where `OTEL_DDP_GRAFANA_URL` names a Grafana; else empty."""
        grafana = settings.read().grafana_url
        return boards.address(grafana, "Run", {"group": self.group, "run": self.run})

    # -- what is measured

    @containment.contained()
    def describe(self, model: Any) -> None:
        """Record which model this run trains."""
        recorder = self._ready()
        if recorder is None:
            return
        from otel_ddp.torch import wrappers

        recorder.facts(wrappers.describe(model))

    @containment.contained()
    def watch(self, model: Any = None, **options: Any) -> None:
        """Measure the steps that train this model, or models that are found if none is given."""
        recorder, progress = self._ready(), self._progress
        if recorder is None or progress is None:
            return
        from otel_ddp.torch import measure

        if not measure.can_measure(model):
            return
        _record_backend(recorder)
        process = self.identity
        options.update(
            every=self._settings.sample_steps,
            leads=not process.global_rank,
            speaks=not process.local_rank,
            settle=self._settle_by_hooks,
        )
        measure.start(model, progress, self.describe, **options)
        # A signal handler may have ended the run in the meantime.
        if self._progress is not progress:
            self._unwatch(progress)

    @containment.contained()
    def unwatch(self) -> None:
        """Take every hook off again."""
        if self._progress is not None:
            self._unwatch(self._progress)

    @containment.contained()
    def _unwatch(self, progress: Progress) -> None:
        if "otel_ddp.torch.measure" in sys.modules:
            from otel_ddp.torch import measure

            measure.stop(progress)

    # -- other ranks

    def for_rank(
        self, global_rank: int, *, job_type: str | None = None, local_rank: int | None = None
    ) -> Run:
        """A handle to log for another rank, whose numbers come by a queue, for example.

        `run.for_rank(3, job_type="worker").log({"loss": loss})` has the labels of that rank. Each
        rank has one handle, which ends with this run. A child that gets a handle is that rank.
        """
        found = self._for_rank(global_rank, job_type, local_rank)
        if found is None:
            found = Run({})
            found.go_silent()
        return found

    @containment.contained()
    def _for_rank(self, global_rank: Any, job_type: Any, local_rank: Any) -> Run | None:
        if self._logs_for is not None:
            return self._logs_for._for_rank(global_rank, job_type, local_rank)
        if self.is_closed:
            return None
        process = self.identity
        try:
            other = identity.of_rank(process, global_rank, job_type, local_rank)
        except ConfigError as error:
            containment.warn_once("for_rank", "Nothing is recorded by for_rank: %s", error)
            return None
        key = other.global_rank, other.job_type
        if key == (process.global_rank, process.job_type):
            return self

        def make() -> Run:
            made = Run({"global_rank": global_rank, "job_type": job_type, "local_rank": local_rank})
            made._logs_for = self
            return made

        return self._ranks.handle(key, make)

    @property
    def is_closed(self) -> bool:
        """Whether this run has ended, or never records anything."""
        return self._opened and self._recorder is None

    # -- the end

    def finish(self, state: str = "finished", *, reason: str = "") -> None:
        """End this run; wait at most 0.25 s until the agent has read the last values."""
        if state not in ("finished", "failed"):
            raise ConfigError(f'state must be "finished" or "failed", got {state!r}.')
        self.close(state, str(reason))

    @containment.contained()
    def close(self, state: str, reason: str) -> None:
        """Does what `finish` does; also called when the process ends without it."""
        self._opened = True
        recorder, progress, where = self._recorder, self._progress, self._place
        if recorder is None or progress is None or where is None:
            current_run.release(self)
            return
        # A signal handler may end the run in the middle of what its own thread records.
        if progress.defer(partial(self.close, state, reason), state):
            current_run.release(self)
            return
        self._ending.run(
            lambda: self._recorder is None,
            lambda: self._acts_at_end(state, reason, recorder, progress, where),
        )

    def _acts_at_end(
        self,
        state: str,
        reason: str,
        recorder: Recorder,
        progress: Progress,
        where: place.Place,
    ) -> list[Act]:
        acts: list[Act] = [partial(each.close, state, "") for each in self._ranks.all()]
        if not self._settled:
            acts.append(partial(self._settle, recorder))
        acts += [self._unhook_logs, partial(self._unwatch, progress), recorder.drain_copies]
        if reason:
            acts.append(partial(recorder.reason, reason))
        content = {"state": state, "time": time.time_ns()}
        # In this order: a reader of the end record finds the final progress.
        acts += [partial(progress.end_run, state), partial(recorder.append, layout.END, content)]
        # The agent reads what this process logged for other ranks later: the process goes on.
        if self._logs_for is None:
            acts.append(partial(self._wait_for_agent, recorder, where))
        if self._settings.say != "nothing" and self._speaks_for_all():
            # While our lock is held, the agent does not delete what the card is made of.
            acts.append(partial(self._show_card, recorder, where, state))
        release = partial(current_run.release, self)
        return [*acts, recorder.close, where.wake_agent, release, self.go_silent]

    def _show_card(self, recorder: Recorder, where: place.Place, state: str) -> None:
        conf = self._settings
        kept = conf.agent != "off" and conf.history_bytes
        name = f"{self.group}/{self.run}" if self.group else self.run
        look = [f"otel-ddp report {shlex.quote(name)}"] if kept else []
        if base := page_address.base(where):
            look.insert(0, page_address.of_run(base, self.run))
        end_card.show(recorder.writer.path, where, state, always=conf.say == "all", look=look)

    def _wait_for_agent(self, recorder: Recorder, where: place.Place) -> None:
        if announcements.journal_was_removed(recorder.writer):
            return
        if self._settings.starts_agent:
            agent_start.ensure_agent(where)
        if self._settings.agent != "off":
            agent_start.wait_for_agent(where, recorder.writer)
        if self._says_where_to_look():
            self._where_to_look.say(where, self.run)

    def go_silent(self) -> None:
        """Record nothing from here on."""
        self._opened = True
        self._log_by_run()
        self._recorder = self._progress = None
        self._settled = True

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A program may well leave through sys.exit(0).
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close("finished", "")
        else:
            self.ended_by(error)
            self.close("failed", values.error_line(error))

    def __reduce__(self) -> tuple[Callable[..., Run], tuple[dict[str, Any]]]:
        """Pickled into a child process, a run joins the same launch there at its first use."""
        arguments = self._for_a_child()
        # Functions may not be picklable.
        return (_attach, ({k: v for k, v in arguments.items() if not callable(v)},))

    def _for_a_child(self) -> dict[str, Any]:
        """The arguments by which a child joins this run, without the parent's ranks and config."""
        if self._logs_for is not None:
            return {**self._logs_for._for_a_child(), **self._arguments}
        own = ("config", "global_rank", "local_rank", "world_size", "parallel")
        arguments = {key: value for key, value in self._arguments.items() if key not in own}
        return {**arguments, "run": self.run, "group": self.group}

    def __repr__(self) -> str:
        process = self.identity
        return f"<otel_ddp.Run {process.run!r} rank {process.label_rank} of {process.world_size}>"

    # -- every few seconds

    @containment.contained()
    def _check_agent(self, now: int) -> None:
        """Every few seconds, from a call that logs or after a step: restarts a missing agent.

        We have no thread.
        """
        recorder = self._recorder
        if recorder is None or self._place is None:
            return
        recorder.check_due_ns = now + agent_start.CHECK_EVERY_NS
        recorder.poll_copies()
        if self._log_lines is not None:
            self._log_lines.attach(started=recorder.step >= 0)
        if self.identity.may_have_others:
            self._settle(recorder)
        if announcements.journal_was_removed(recorder.writer):
            return
        if self._settings.starts_agent:
            agent_start.ensure_agent(self._place)
        if not self._where_to_look.said and self._says_where_to_look():
            self._where_to_look.say(self._place, self.run)
            if self._where_to_look.may_know_soon:
                recorder.check_due_ns = min(recorder.check_due_ns, now + ASK_AGAIN_NS)
        if (
            self._speaks_for_all()
            and recorder.writer.overwrites_unread()
            and not self._place.agent_is_alive()
        ):
            announcements.journal_is_full(self._settings.agent)

    def _count_failures(self, more: float = 1.0) -> None:
        if self._recorder is not None:
            self._recorder.count(catalog.OTEL_DDP_HOOK_ERRORS, more)


def _attach(arguments: dict[str, Any]) -> Run:
    """Makes the run of an unpickled one."""
    return cast("Run", current_run.attach(partial(Run, arguments, joins=True)))


def _record_backend(recorder: Recorder) -> None:
    from otel_ddp.torch import process_group

    if backend := process_group.backend():
        recorder.facts({"backend": backend})
