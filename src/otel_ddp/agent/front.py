"""Shows the state of an agent: in its file, at its endpoint, and on its page."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from otel_ddp import __version__, files
from otel_ddp.agent.export.exporter import Exporter
from otel_ddp.agent.judge import answers
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.node_watch import NodeWatch
from otel_ddp.agent.notify.notifier import Notifier
from otel_ddp.journal import process_state
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import Survey
from otel_ddp.settings import Settings

if TYPE_CHECKING:
    from otel_ddp.agent.serve.endpoint import Endpoint

log = logging.getLogger("otel_ddp.agent")

_STATUS_EVERY_S = 5.0


class Front:
    """Shows one agent's state. The endpoint's threads call `state` while the agent's loop runs."""

    def __init__(
        self,
        place: Place,
        conf: Settings,
        node: str,
        watch: NodeWatch,
        exporter: Exporter,
        notifier: Notifier,
    ) -> None:
        self._place = place
        self._conf = conf
        self._node = node
        self._watch = watch
        self._exporter = exporter
        self._notifier = notifier
        self._endpoint: Endpoint | None = None
        self._written: tuple[float, bytes] = (0.0, b"")
        # The states of processes on other nodes, as in the last written file.
        self._remote: list[ProcessState] = []
        self.started_ns = time.time_ns()
        self.moved_at = time.monotonic()
        """When the agent's loop began its current round, on the monotonic clock."""
        self.remarks: dict[str, str] = {}
        """Sentences that `otel-ddp status` shows; the key is the topic, e.g. `variables`."""

    def threads(self) -> list[KeptThread]:
        """All threads of the agent."""
        own = [] if self._endpoint is None else [self._endpoint.thread]
        more = (*self._exporter.threads(), *self._notifier.threads())
        return [*own, *self._watch.threads(), *more]

    def serve(self) -> None:
        """Open the endpoint; if that fails, a remark says why."""
        from otel_ddp.agent.serve.endpoint import Endpoint
        from otel_ddp.agent.serve.server import NoToken, find_token
        from otel_ddp.history.page.app import App

        host, port = self._conf.scrape_host, self._conf.scrape_port
        histories = self._watch.histories
        page = App(
            histories.directory,
            ours=True,
            disk_hangs=histories.disk.hangs,
            live=self.state,
            ask_stacks=self._ask_stacks,
        )
        try:
            self._endpoint = Endpoint(
                self._watch.ledger,
                host,
                port,
                page,
                idle_s=lambda: time.monotonic() - self.moved_at,
                token=find_token(self._conf.scrape_token_file, host),
                problems=self._problems,
            )
        except NoToken as why:
            self.remarks["endpoint"] = f"no scrape endpoint: {why}"
        except OSError as error:
            self.remarks["endpoint"] = (
                f"no scrape endpoint: {host} cannot be bound ({error.strerror}): set "
                "OTEL_EXPORTER_PROMETHEUS_HOST to an address of this machine, or to 0.0.0.0"
            )
        if self._endpoint is None:
            log.warning("%s", self.remarks["endpoint"])
            return
        self._endpoint.start()
        if port and self._endpoint.port != port:
            self.remarks["endpoint"] = f"port {port} is taken, so {self._endpoint.port} is used"

    def stop(self) -> None:
        """Close the endpoint."""
        if self._endpoint is not None:
            self._endpoint.stop()

    @property
    def url(self) -> str | None:
        return None if self._endpoint is None else self._endpoint.url

    def _ask_stacks(self, group: str, run: str, rank: str) -> list[dict[str, Any]]:
        """For the page: the stacks of the run's processes on this node, or of the one rank.

        *rank*: the only rank to ask, which may be on another node; empty for all on this node.
        """
        ranks = [int(rank)] if rank.isdecimal() else None
        found = [
            each.to_json()
            for each in answers.ask(self._place.journals(), ranks)
            if (each.group or "", each.run) == (group, run)
        ]
        return found or [
            row for each in ranks or () for row in self._watch.links.ask_stacks(group, run, each)
        ]

    def _problems(self) -> list[str]:
        """Sentences for /healthz: on threads that do not run, and on failing histories."""
        found = [*(thread.problem for thread in self.threads()), self._watch.histories.remark()]
        return list(filter(None, found))

    def state(self) -> Survey:
        """The current state, for the agent's file and the page."""
        watch, judge = self._watch, self._watch.judge
        processes = process_state.table(watch.journals.describe(), self._remote)
        return Survey(
            agents=[self._describe()],
            processes=processes,
            verdicts=judge.verdicts(),
            past=judge.past(),
            insufficient=judge.insufficient(),
            links=watch.links.describe(),
            unreadable=watch.journals.unreadable(),
        )

    def _describe(self) -> dict[str, Any]:
        """Describe this agent and the devices of its node."""
        watch = self._watch
        return {
            "pid": os.getpid(),
            "pid_here": os.getpid(),
            "alive": True,
            "directory": str(self._place.directory),
            "version": __version__,
            "node": self._node,
            "started_ns": self.started_ns,
            "scrape": self.url,
            "export": self._exporter.describe(),
            "notify": self._notifier.describe(),
            "history": watch.histories.describe(),
            "remark": "; ".join([*self.remarks.values(), *self._problems()]),
            **watch.sampling.describe(),
        }

    def write_file(self) -> None:
        """Write the agent's file if it has changed, and every few seconds as a heartbeat."""
        self._remote = self._watch.links.remote_states()
        content = json.dumps(self.state().to_json()).encode()
        written_at, written = self._written
        now = time.monotonic()
        unchanged = content == written and self._place.agent_file.exists()
        if unchanged and now - written_at < _STATUS_EVERY_S:
            return
        try:
            files.replace(self._place.agent_file, content)
        except OSError:
            return  # the tmpfs is full: `status` shows an old state
        self._written = now, content
