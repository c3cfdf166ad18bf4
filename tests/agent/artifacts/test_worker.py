"""What becomes of artifacts: read, stored, tried again, given up, and gone on with."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_ddp.agent.artifacts import work_file, work_list, worker
from otel_ddp.agent.artifacts.artifact import (
    COMPLETE,
    INCOMPLETE,
    LEFT_OUT,
    WAITING,
    Artifact,
    Told,
)
from otel_ddp.agent.artifacts.choose_sink import sink_of
from otel_ddp.agent.artifacts.directory_sink import DirectorySink
from otel_ddp.agent.artifacts.pace import CHUNK_BYTES, Pace, Stopped
from otel_ddp.agent.artifacts.sink import CannotStore, Sink
from otel_ddp.agent.artifacts.work_list import MOST_SHOWN, WorkList
from otel_ddp.agent.artifacts.worker import READ_AGAIN_S, STORE_AGAIN_S, Worker, plain
from otel_ddp.agent.ledger import Labels

RANK: Labels = (("group", "g"), ("run", "r"), ("rank", "0"))
FAST = 1 << 40
_KEYS = [
    *("key", "told", "state", "size", "digest", "stored_uri", "problem", "attempts", "began_ns"),
    "done_ns",
]


class Bench:
    """One agent after the other, without their threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 0.0
        self.sink: Sink | None = None
        self.numbers = iter(range(10_000))
        self.new_agent()

    def new_agent(self) -> None:
        self.work = WorkList(self.folder / "artifacts.json", clock=lambda: self.now_s)
        self.pace = Pace(FAST)
        sink = self.sink
        make = None if sink is None else lambda: sink
        self.worker = Worker(self.work, self.pace, None, make)

    def store_in(self, sink: Sink) -> None:
        self.sink = sink
        self.new_agent()

    def told(self, path: Path | str, **more: Any) -> Artifact:
        uri = f"file://{path}" if isinstance(path, Path) else path
        given = {"name": "model", "type": "file", "direction": "output", "uri": uri, **more}
        said = Told(
            *(RANK, "", *given.values(), time.time_ns() + next(self.numbers)), 7, "", "", {}
        )
        artifact = Artifact(f"j/{next(self.numbers)}", said)
        self.work.add(artifact)
        self.work.keep()
        return artifact

    def go_on(self) -> None:
        while (artifact := self.work.next()) is not None:
            self.worker.work_on(artifact)

    def go_on_until_it_ends(self) -> None:
        with pytest.raises(Stopped):
            self.go_on()

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.go_on()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    path.write_bytes(b"".join(bytes([n]) * CHUNK_BYTES for n in range(3)) + b"end")
    return path


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def test_an_artifact_is_read_and_told_of_once(bench: Bench, saved: Path) -> None:
    artifact = bench.told(saved)

    bench.go_on()

    assert (artifact.state, artifact.size) == (COMPLETE, saved.stat().st_size)
    assert artifact.digest == digest(saved)
    assert bench.work.flush_done() == [artifact]
    assert bench.work.flush_done() == []
    assert not bench.work.waiting()


def test_what_is_remembered_of_large_directories_does_not_add_up(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_MOST_KNOWN_PARTS", 4)
    for number in range(3):
        folder = tmp_path / f"data{number}"
        folder.mkdir()
        for name in "abc":
            (folder / name).write_text(name)
        bench.told(folder, name=folder.name)

    bench.go_on()

    assert [each.state for each in bench.work.shown()] == [COMPLETE] * 3
    assert sum(len(each.parts) for each in bench.worker._known.values()) == 3


def test_a_file_that_comes_late_is_found_and_one_that_never_comes_is_given_up(
    bench: Bench, tmp_path: Path, saved: Path
) -> None:
    late, never = tmp_path / "late", tmp_path / "never"
    one, other = bench.told(late, name="late"), bench.told(never, name="never")

    bench.go_on()
    assert (one.state, other.state) == (WAITING, WAITING)
    saved.rename(late)
    for seconds in READ_AGAIN_S:
        bench.wait(seconds)

    assert one.state == COMPLETE
    assert (other.state, other.size, other.digest) == (INCOMPLETE, None, "")
    assert "no such file" in other.problem


def test_the_next_agent_goes_on_with_what_waits_and_shows_what_was_done(
    bench: Bench, saved: Path
) -> None:
    bench.told(saved, name="done")
    bench.go_on()
    waiting = bench.told(saved, name="waiting")

    bench.new_agent()
    # The record is read once more, as its position was not committed.
    assert not bench.work.add(waiting)
    assert [each.told.name for each in bench.work.shown()] == ["done"]
    bench.go_on()

    assert [each.told.name for each in bench.work.shown()] == ["done", "waiting"]
    assert {each.digest for each in bench.work.shown()} == {digest(saved)}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'[{"key": 1}]', b"[" * 100_000, b"\xff", b'{"told": []}']
)
def test_a_damaged_work_file_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "artifacts.json").write_bytes(content)

    assert work_file.read(tmp_path / "artifacts.json") == []


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.sampled_from(_KEYS), inner),
    max_leaves=12,
)


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(_JSON, max_size=3), changed=st.dictionaries(st.sampled_from(_KEYS), _JSON))
def test_a_work_file_of_any_content_harms_nobody(rows: list[Any], changed: dict[str, Any]) -> None:
    said = Told(RANK, "", "model", "file", "output", "file:///a", 1, None, "", "", {})
    whole = json.loads(json.dumps(Artifact("j/1", said).to_json()))
    with tempfile.NamedTemporaryFile("w") as file:
        json.dump([*rows, {**whole, **changed}, whole], file)
        file.flush()

        found = work_file.read(Path(file.name))

    assert found[-1] == Artifact("j/1", said)
    # What was read can be written again, and can be labels.
    json.dumps([each.to_json() for each in found]).encode()
    for each in found:
        "".join((*each.told.labels[0], each.told.name, each.uri, each.digest)).encode()


def test_the_next_file_under_the_same_name_is_read_in_place_of_the_one_before(
    bench: Bench, saved: Path
) -> None:
    first, second = bench.told(saved), bench.told(saved)

    bench.go_on()

    assert first.state == INCOMPLETE
    assert "next one" in first.problem
    assert second.state == COMPLETE
    assert bench.work.shown() == [second]


def test_only_so_many_wait_and_only_so_many_are_shown(
    bench: Bench, saved: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_list, "MOST_WAITING", 120)
    told = [bench.told(saved, name=f"model-{n}") for n in range(122)]

    bench.go_on()

    assert told[-1].state == LEFT_OUT
    assert bench.work.outcomes() == {COMPLETE: 120, INCOMPLETE: 0, LEFT_OUT: 2}
    assert caplog.text.count("name a directory rather than each of its files") == 1
    assert len(bench.work.shown()) == MOST_SHOWN


def test_an_agent_that_stops_has_written_down_what_it_has_done(bench: Bench, saved: Path) -> None:
    told = [bench.told(saved, name=f"model-{n}") for n in range(3)]
    bench.go_on()
    bench.new_agent()

    assert [each.state for each in told] == [COMPLETE] * 3
    assert bench.work.waiting() == 0
    assert len(bench.work.shown()) == 3


def test_what_is_done_is_forgotten_with_its_rank(bench: Bench, saved: Path) -> None:
    bench.told(saved)
    bench.go_on()

    bench.work.forget({RANK}, linger_s=0.0)
    assert len(bench.work.shown()) == 1
    bench.work.forget((), linger_s=3600.0)
    assert len(bench.work.shown()) == 1
    bench.work.forget((), linger_s=0.0)
    assert bench.work.shown() == []


# -- stores


class Memory:
    """What was stored, whichever store it is."""

    def __init__(self, sink: Sink, root: str) -> None:
        self.sink, self._root = sink, root
        self._files = fsspec.url_to_fs(root)[0]

    def names(self) -> list[str]:
        root = self._files._strip_protocol(self._root)
        return sorted(str(each).removeprefix(root) for each in self._files.find(root))

    def content(self, name: str) -> bytes:
        return bytes(self._files.cat_file(f"{self._files._strip_protocol(self._root)}{name}"))


@pytest.fixture(params=["directory", "memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Memory]:
    if request.param == "directory":
        where = f"file://{tmp_path}/store"
        yield Memory(sink_of(where, "agent"), where)
        return
    if request.param == "local":
        # The same by way of fsspec, which writes into the file at once.
        where = f"local://{tmp_path}/store"
        yield Memory(sink_of(where, "agent"), where)
        return
    where = f"memory://{tmp_path.name}"
    yield Memory(sink_of(where, "agent"), where)
    fsspec.filesystem("memory").store.clear()


def test_a_copy_of_an_output_is_stored_under_its_digest(
    bench: Bench, saved: Path, store: Memory
) -> None:
    bench.store_in(store.sink)
    output = bench.told(saved)
    given = bench.told(saved, name="data", direction="input")

    bench.go_on()

    key = f"r/model/{digest(saved)[:16]}/model.pt"
    assert store.names() == [f"/{key}"]
    assert store.content(f"/{key}") == saved.read_bytes()
    assert output.uri == store.sink.uri(key)
    assert given.uri == given.told.uri


def test_the_list_of_a_directory_is_stored_last_and_has_its_digest(
    bench: Bench, tmp_path: Path, store: Memory
) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "inner").mkdir(parents=True)
    for name in ("rank 0", "rank_1", "inner/rank_2"):
        (folder / name).write_text(name)
    (folder / "link").symlink_to("rank_1")
    bench.store_in(store.sink)
    artifact = bench.told(folder)

    bench.go_on()

    base = f"/r/model/{artifact.digest[:16]}"
    files = [f"{base}/{name}" for name in ("inner/rank_2", "rank 0", "rank_1")]
    assert store.names() == sorted([f"{base}.sha256", *files])
    assert sha256(store.content(f"{base}.sha256")).hexdigest() == artifact.digest


def test_an_upload_that_was_broken_off_goes_on_where_it_ended(
    bench: Bench, saved: Path, tmp_path: Path
) -> None:
    sink = Counting(tmp_path / "store", "agent")
    bench.store_in(sink)
    artifact = bench.told(saved)
    # All of it is read once for the digest; then the agent ends before the third chunk.
    sink.most = 2
    bench.go_on_until_it_ends()
    assert artifact.state == WAITING
    assert [each.name.startswith(".") for each in sink.files()] == [True]

    sink.most = 100
    bench.new_agent()
    bench.go_on()

    (stored,) = sink.files()
    assert stored.read_bytes() == saved.read_bytes()
    assert sink.written == saved.stat().st_size


def test_what_a_broken_upload_left_damaged_is_removed_and_stored_anew(
    bench: Bench, saved: Path, tmp_path: Path
) -> None:
    bench.store_in(DirectorySink(tmp_path / "store", "agent"))
    artifact = bench.told(saved)
    folder = tmp_path / "store/r/model" / digest(saved)[:16]
    folder.mkdir(parents=True)
    (folder / ".model.pt.agent.part").write_bytes(bytes(CHUNK_BYTES) + b"not this")

    bench.go_on()
    assert "damaged" in artifact.problem
    bench.wait(STORE_AGAIN_S[0])

    assert artifact.state == COMPLETE
    (stored,) = folder.iterdir()
    assert stored.read_bytes() == saved.read_bytes()


def test_two_agents_of_one_name_do_not_write_into_one_part(tmp_path: Path) -> None:
    sinks = [DirectorySink(tmp_path, "of two containers") for _ in range(2)]
    first = sinks[0].upload("model/one")
    first.write(b"whole")

    with pytest.raises(CannotStore, match="another agent stores it"):
        sinks[1].upload("model/one")

    first.commit()
    assert (tmp_path / "model" / "one").read_bytes() == b"whole"
    sinks[1].upload("model/one").discard()


class Counting(DirectorySink):
    """A directory that sees what is written to it, and ends the agent at some point."""

    def __init__(self, folder: Path, agent: str) -> None:
        super().__init__(folder, agent)
        self.folder = folder
        self.most = 100
        self.written = 0
        self.before_upload: Callable[[], object] = lambda: None

    def upload(self, key: str) -> Any:
        self.before_upload()
        made = super().upload(key)
        write = made.write

        def counted(chunk: bytes) -> None:
            if self.most == 0:
                raise Stopped
            self.most -= 1
            self.written += len(chunk)
            write(chunk)

        made.write = counted  # type: ignore[method-assign]
        return made

    def files(self) -> list[Path]:
        return [each for each in self.folder.rglob("*") if each.is_file()]


def test_a_store_that_is_away_is_asked_again_and_the_artifact_shown_meanwhile(
    bench: Bench, saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("no directory")
    bench.store_in(sink_of(str(tmp_path / "store"), "agent"))
    artifact = bench.told(saved)

    bench.go_on()
    assert artifact.state == WAITING
    assert [(each.digest, each.uri) for each in bench.work.shown()] == [
        (digest(saved), artifact.told.uri)
    ]
    (tmp_path / "store").unlink()
    bench.wait(STORE_AGAIN_S[0])

    assert artifact.state == COMPLETE
    assert artifact.uri.startswith(f"file://{tmp_path}/store/")


def test_a_store_that_never_comes_is_given_up_and_what_is_known_stays(
    bench: Bench, saved: Path, tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("no directory")
    bench.store_in(sink_of(str(tmp_path / "store"), "agent"))
    artifact = bench.told(saved)

    bench.go_on()
    for seconds in STORE_AGAIN_S:
        bench.wait(seconds)

    assert (artifact.state, artifact.digest) == (INCOMPLETE, digest(saved))
    assert "not stored" in artifact.problem


def test_nothing_that_is_half_done_has_a_final_name(store: Memory) -> None:
    key = "r/model/1/model.pt"
    upload = store.sink.upload(key)
    upload.write(b"half")

    assert store.sink.size(key) is None
    upload.leave()

    assert store.sink.size(key) is None
    again = store.sink.upload(key)
    again.discard()
    assert store.names() == []


def test_a_file_that_changes_while_it_is_stored_is_read_again(
    bench: Bench, saved: Path, tmp_path: Path
) -> None:
    size = saved.stat().st_size
    sink = Counting(tmp_path / "store", "agent")
    # Of the same size, and in the same file.
    sink.before_upload = lambda: saved.write_bytes(b"2" * size)
    bench.store_in(sink)
    artifact = bench.told(saved)

    bench.go_on()
    assert artifact.state == WAITING
    assert sink.files() == []
    sink.before_upload = lambda: None
    bench.wait(READ_AGAIN_S[0])

    (stored,) = sink.files()
    assert stored.read_bytes() == b"2" * size
    assert artifact.digest == digest(saved) == digest(stored)


def test_an_address_that_nothing_knows_is_said_and_not_asked_again(
    bench: Bench, saved: Path
) -> None:
    with pytest.raises(CannotStore, match="OTEL_DDP_ARTIFACTS") as why:
        sink_of("nothing-like-it://me:secret@bucket", "agent")

    assert not why.value.again
    assert "secret" not in str(why.value)


def test_no_part_of_a_name_leads_out_of_the_store() -> None:
    for word in ("..", ".", "", "a/../b", "/etc", b"\xff", "x" * 300, "ü" * 200, "a\nb"):
        part = plain(word)

        assert part
        assert part.strip(".")
        assert len(part) <= 120
        assert "/" not in part
        assert part.isascii()
        assert part.isprintable()
    assert plain("epoch=1 step=20.ckpt") == "epoch=1 step=20.ckpt"


def test_the_thread_has_the_lowest_priority_and_ends(bench: Bench, saved: Path) -> None:
    artifact = bench.told(saved)
    bench.worker.thread.keep_running()
    deadline = time.monotonic() + 60
    while artifact.state == WAITING and time.monotonic() < deadline:
        bench.worker.thread.keep_running()
    (_,) = (each for each in os.listdir("/proc/self/task") if nice_of(each) == 19)
    bench.worker.stop()

    assert artifact.state == COMPLETE
    assert not bench.worker.thread.is_alive()
    assert nice_of(str(os.getpid())) != 19


def nice_of(thread: str) -> int:
    return os.getpriority(os.PRIO_PROCESS, int(thread))
