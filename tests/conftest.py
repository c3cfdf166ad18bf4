"""The fixtures of every test: a clean process around it, and the journals that it wrote."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import leftovers
import otel_ddp
import warm
from golden import Golden
from otel_ddp import errors
from otel_ddp.agent.reading.steps import StepStream
from otel_ddp.diagnosis.steps import Step
from otel_ddp.journal import layout
from otel_ddp.journal.parser import Document, Name, ProgressRecord, Scalars, Steps
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import JournalReader
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import PHASES, STATES
from webhook import Webhook

if TYPE_CHECKING:
    from tools.stack.build import Binaries

# A receiver of a test's own has threads of gRPC, and servers are forked beside them: what gRPC does
# in a forked child can end it before it becomes the server.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_STRANGE = (
    *("OTEL_", "WANDB_", "SWANLAB_", "SLURM_", "TORCHELASTIC_", "PET_", "OMPI_", "PMI"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_"),
    "TRACEPARENT",
)


# The files that take longest start first: what starts last is what all others are waited for.
_LONGEST = (
    *("test_examples", "test_dashboards", "test_rules", "test_outages", "test_browser"),
    *("test_integrations", "test_programs", "test_agent", "test_device_cases"),
)
_LONGEST_TIMED = ("test_verdicts", "test_whole_run")
_FIRST = ("stack", "e2e", "torch", "cli", "identity", "journal")


# What takes long to import of what all tests together import. Ranks have torch alone: some tests
# look at what else is imported there.
_IMPORTED_BY_TESTS = (
    *("functorch.compile", "grpc", "networkx", "yaml"),
    *("opentelemetry.exporter.otlp.proto.grpc", "otel_ddp.agent.service", "otel_ddp.cli"),
)
_THREADS_END_S = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write the files of tests.golden anew")


def pytest_cmdline_main(config: pytest.Config) -> None:
    """Fork the processes that run tests side by side from one that has imported what they do."""
    if getattr(config.option, "tx", None):
        warm.share()
        executable = warm.python_with(*_IMPORTED_BY_TESTS).executable
        config.option.tx = [f"{each}//python={executable}" for each in config.option.tx]
        config.add_cleanup(warm.stop)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files by their folders, and leave the tests of each file in their order."""
    order = [*_LONGEST, *_LONGEST_TIMED, *_FIRST]
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        return min(
            order.index(name) if name in order else len(order) for name in (item.path.stem, folder)
        )

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the real servers before the first test: it takes longer than a test may."""
    wanted = any("binaries" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly:
        from stack import servers

        capture = session.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            # Processes that run tests side by side have no terminal: one of them builds and says
            # so, and the others wait.
            servers.prepare(lambda line: sys.stderr.write(f"{line}\n"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """What this test is told, in a file beside it."""
    update = bool(request.config.option.update)
    return Golden(request.path.with_suffix(".txt"), request.node.name, update)


@pytest.fixture(scope="session")
def binaries() -> Binaries:
    """The real collector, Prometheus and promtool."""
    from stack import servers

    return servers.binaries()


@pytest.fixture(scope="session", autouse=True)
def mark() -> Iterator[str]:
    """What every process that these tests start has among its variables, and ends with them."""
    found = f"{os.getpid()}-{time.time_ns()}"
    with leftovers.watched(found):
        os.environ[leftovers.TESTS] = found
        yield found
        warm.stop()
        del os.environ[leftovers.TESTS]


@pytest.fixture(scope="module", autouse=True)
def _nothing_runs_on(mark: str) -> Iterator[None]:
    """Made before all others of a file, and torn down after them."""
    yield
    # Some are on their way out.
    left = leftovers.wait(leftovers.TESTS, mark)
    leftovers.end(leftovers.TESTS, mark)
    assert not left, f"the tests leave processes behind: {left}"


# What an agent holds for as long as it lives, a test holds until it ends: the lock of a spool and
# of a replay, the kernel's log, and the processes that it watches.
_FOR_LIFE = ("lock", "kmsg", "anon_inode:[pidfd]")
# What the driver opens in a process that uses a device stays until the process ends.
_OF_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def open_files() -> dict[int, str]:
    """The files and processes that this process has open; what libraries keep is left out."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        # One of them was the directory itself.
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.startswith(("/", "anon_inode:[pidfd]")):
                found[int(number)] = path
    return found


def _opened_since(files: dict[int, str]) -> list[str]:
    """What is open beside these files; what libraries keep for good is closed."""
    found = []
    for number, path in open_files().items() - files.items():
        if path.startswith(_OF_DEVICES):
            continue
        if Path(path.removesuffix(" (deleted)")).name in _FOR_LIFE:
            os.close(number)
        else:
            found.append(path)
    return found


def threads() -> set[threading.Thread]:
    """All but the one that tqdm keeps for good: torch's compiler shows bars where it can."""
    return {each for each in threading.enumerate() if type(each).__name__ != "TMonitor"}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher around the test, no failure of ours hidden, nothing of it left behind."""
    found = dict(os.environ)
    for name in found:
        if name.startswith(_STRANGE):
            del os.environ[name]
    # A slow machine makes a run long enough for it.
    os.environ["OTEL_DDP_SAY"] = "nothing"
    # Steps of tests are short. Tests of the budget set it.
    os.environ["OTEL_DDP_OVERHEAD"] = "all"
    monkeypatch.setattr(errors, "raise_failures", True)
    monkeypatch.setattr(errors, "failures", {})
    monkeypatch.setattr(errors, "warned", set())
    monkeypatch.setattr(errors, "count_failure", None)
    before = threads()
    files = open_files()
    # A command that a test calls may leave others, as its process would end. A later test's process
    # must not die of what Python ignores, such as a pipe that nobody reads.
    handlers = {number: signal.getsignal(number) for number in signal.Signals}
    yield
    # Only where the test imported it: some tests look at what is imported.
    api = sys.modules.get("otel_ddp.run.api")
    if api is not None:
        api.finish()
    # A test that leaves a span in the middle leaves it around the next test's.
    users = sys.modules.get("opentelemetry.context")
    if users is not None:
        users.attach(users.Context())
    os.environ.clear()
    os.environ.update(found)
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
    # What ends by itself is not left behind; a thread that is only about to run cannot be joined.
    deadline = time.monotonic() + _THREADS_END_S
    while (left := threads() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"the test leaves threads behind: {left}"
    while (forgotten := _opened_since(files)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not forgotten, f"the test leaves files open: {forgotten}"


class Journal:
    """One process's journal, read from its beginning."""

    def __init__(self, path: Path) -> None:
        reader = JournalReader(path)
        try:
            self.records = reader.read()
            while more := reader.read():
                self.records += more
            self.pid, self.identity = reader.pid, reader.identity
            self.config, self.facts, self.names = reader.config, reader.facts, reader.names
            self.lost, self.unreadable = reader.lost, reader.unreadable
            self.created_ns = reader.created_ns
            self.all_totals = reader.totals()
            progress = reader.progress()
            assert progress is not None
            self.progress: ProgressRecord = progress
            self.reason = reader.reason()
        finally:
            reader.close()

    @property
    def state(self) -> str:
        return next(word for word, code in STATES.items() if code == self.progress.state)

    @property
    def phase(self) -> str:
        number = self.progress.phase_name
        words = {code: word for word, code in PHASES.items()}
        return self.names[number].text if number else words[self.progress.phase]

    @property
    def calls(self) -> list[Scalars]:
        """What each call of `log` recorded."""
        return [each for each in self.records if isinstance(each, Scalars)]

    @property
    def steps(self) -> list[Step]:
        """The steps, put together again."""
        stream = StepStream(self.created_ns, self.names)
        pieces = [each for each in self.records if isinstance(each, Steps)]
        return [step for piece in pieces for step in stream.feed(piece)]

    @property
    def logged(self) -> list[tuple[Name, float, int | None]]:
        """Each value with its name and step, in the order in which they were written."""
        return [
            (self.names[number], value, call.step)
            for call in self.calls
            for number, value in zip(call.names, call.values, strict=True)
        ]

    @property
    def points(self) -> list[tuple[str, float]]:
        """Name and value, in the order in which they were written."""
        return [(name.text, value) for name, value, _ in self.logged]

    @property
    def curves(self) -> dict[str, dict[int | None, float]]:
        """The last value of each step, by name."""
        found: dict[str, dict[int | None, float]] = {}
        for name, value, step in self.logged:
            found.setdefault(name.text, {})[step] = value
        return found

    def steps_of(self, text: str) -> list[int | None]:
        """The steps of all values of this name."""
        return [step for name, _, step in self.logged if name.text == text]

    @property
    def values(self) -> dict[str, float]:
        """The last value of each name."""
        return dict(self.points)

    def splits(self) -> dict[str, str]:
        return {name.text: name.split for name in self.names.values()}

    def _documents(self, kind: int) -> list[dict[str, Any]]:
        documents = [each for each in self.records if isinstance(each, Document)]
        return [each.content for each in documents if each.kind == kind]

    @property
    def spans(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self._documents(layout.SPAN)}

    @property
    def span_names(self) -> list[str]:
        """In the order in which they ended."""
        return [each["name"] for each in self._documents(layout.SPAN)]

    @property
    def events(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self._documents(layout.EVENT)}

    @property
    def totals(self) -> dict[str, float]:
        """All counters: by their name, and the values of their attributes after it."""
        return {
            "/".join((total.metric, *total.attributes.values())): total.values[0]
            for total in self.all_totals
        }

    def total(self, metric: catalog.Metric, /, **attributes: str) -> float:
        """A counter, 0 where nothing was counted."""
        return sum(
            total.values[0]
            for total in self.all_totals
            if total.metric == metric.name and attributes.items() <= total.attributes.items()
        )

    def histogram(self, metric: catalog.Metric) -> tuple[float, ...]:
        """The sum, then the counts of the buckets."""
        (found,) = (total.values for total in self.all_totals if total.metric == metric.name)
        return found


class Here(Place):
    """A meeting place of the test's own."""

    def read(self) -> list[Journal]:
        return [Journal(path) for path in self.journals()]

    def only(self) -> Journal:
        (journal,) = self.read()
        return journal


@pytest.fixture
def place() -> Iterator[Here]:
    """Where the runs of this test write, without an agent."""
    memory = Path("/dev/shm")
    path = tempfile.mkdtemp(prefix="otel_ddp-test-", dir=memory if memory.is_dir() else None)
    os.environ.update(OTEL_DDP_DIR=path, OTEL_DDP_AGENT="off")
    yield Here(Path(path))
    shutil.rmtree(path)


@pytest.fixture
def run(place: Here) -> Iterator[otel_ddp.Run]:
    """A run that is open during the test."""
    opened = otel_ddp.init()
    yield opened
    opened.finish()


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """A process group in which this process is alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone() -> Iterator[None]:
    """The same, during the test."""
    with group_of_one():
        yield


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    """A receiver of notifications, of this test's own."""
    with Webhook() as found:
        yield found


@pytest.fixture(scope="session")
def device_sim() -> None:
    """The asynchronous device of the tests, built before the first of them."""
    from device_sim import sim

    try:
        sim.library()
    except sim.NoCompiler as lacking:
        pytest.skip(str(lacking))
