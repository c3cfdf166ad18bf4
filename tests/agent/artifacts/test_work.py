"""What becomes of artifacts: read, stored, tried again, given up, and gone on with."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import pytest

from otel_ddp.agent.artifacts import work
from otel_ddp.agent.artifacts.content import CHUNK_BYTES, Pace, Stopped
from otel_ddp.agent.artifacts.store import CannotStore, Store, plain
from otel_ddp.agent.artifacts.work import (
    COMPLETE,
    INCOMPLETE,
    LEFT_OUT,
    MOST_SHOWN,
    READ_AGAIN_S,
    STORE_AGAIN_S,
    WAITING,
    Artifact,
    Told,
    Worker,
    WorkList,
)
from otel_ddp.agent.ledger import Labels

RANK: Labels = (("group", "g"), ("run", "r"), ("rank", "0"))
FAST = 1 << 40


class Bench:
    """One agent after the other, without their threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 0.0
        self.store: Store | None = None
        self.numbers = iter(range(10_000))
        self.new_agent()

    def new_agent(self) -> None:
        self.work = WorkList(self.folder / "artifacts.json", clock=lambda: self.now_s)
        self.pace = Pace(FAST)
        store = self.store
        make = None if store is None else lambda: store
        self.worker = Worker(self.work, self.pace, None, make)

    def store_in(self, store: Store) -> None:
        self.store = store
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
        while isinstance(artifact := self.work.next(), Artifact):
            self.worker.work_on(artifact)
        self.work.keep()

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
    bench.work.add(waiting)
    assert bench.work.waiting() == 1
    assert [each.told.name for each in bench.work.shown()] == ["done"]
    bench.go_on()

    assert [each.told.name for each in bench.work.shown()] == ["done", "waiting"]
    assert {each.digest for each in bench.work.shown()} == {digest(saved)}


def test_a_work_file_that_makes_no_sense_is_none(tmp_path: Path) -> None:
    for content in (b"{", b'[1, {"key": 1}, {"told": []}]', b"[" * 100_000, b"\xff"):
        (tmp_path / "artifacts.json").write_bytes(content)

        assert WorkList(tmp_path / "artifacts.json").outcomes() == {}


def test_the_next_file_under_the_same_name_is_read_in_place_of_the_one_before(
    bench: Bench, saved: Path
) -> None:
    first, second = bench.told(saved), bench.told(saved)

    # Also where it came while the first one was read.
    bench.worker.work_on(first)
    bench.go_on()

    assert first.state == INCOMPLETE
    assert "next one" in first.problem
    assert second.state == COMPLETE
    assert bench.work.flush_done() == [first, second]
    assert bench.work.shown() == [second]


def test_only_so_many_wait_and_only_so_many_are_shown(
    bench: Bench, saved: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "MOST_WAITING", 120)
    saved.write_bytes(b"short")
    told = [bench.told(saved, name=f"model-{n}") for n in range(122)]

    bench.go_on()

    assert told[-1].state == LEFT_OUT
    assert bench.work.outcomes() == {COMPLETE: 120, INCOMPLETE: 0, LEFT_OUT: 2}
    assert caplog.text.count("name a directory rather than each of its files") == 1
    assert len(bench.work.shown()) == MOST_SHOWN


# -- stores


@pytest.fixture(params=["directory", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    where = "file://" if request.param == "directory" else "memory:/"
    yield Store(f"{where}{tmp_path}/store", "agent")
    fsspec.filesystem("memory").store.clear()


def names(store: Store) -> list[str]:
    """Of all that was stored, whichever store it is."""
    return sorted(each.removeprefix(store._root) for each in store._files.find(store._root))


def content(store: Store, name: str) -> bytes:
    return bytes(store._files.cat_file(f"{store._root}{name}"))


def test_a_copy_of_an_output_is_stored_once_under_its_digest(
    bench: Bench, saved: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.store_in(store)
    output = bench.told(saved)
    given = bench.told(saved, name="data", direction="input")

    bench.go_on()

    key = f"r/model/{digest(saved)[:16]}/model.pt"
    assert names(store) == [f"/{key}"]
    assert content(store, f"/{key}") == saved.read_bytes()
    assert output.uri == store.uri(key)
    assert given.uri == given.told.uri

    monkeypatch.setattr(store, "put", None)
    again = bench.told(saved)
    bench.go_on()
    assert again.uri == output.uri


def test_the_list_of_a_directory_is_stored_last_and_has_its_digest(
    bench: Bench, tmp_path: Path, store: Store
) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "inner").mkdir(parents=True)
    for name in ("rank 0", "rank_1", "inner/rank_2"):
        (folder / name).write_text(name)
    (folder / "link").symlink_to("rank_1")
    bench.store_in(store)
    artifact = bench.told(folder)

    bench.go_on()

    base = f"/r/model/{artifact.digest[:16]}"
    files = [f"{base}/{name}" for name in ("inner/rank_2", "rank 0", "rank_1")]
    assert names(store) == sorted([f"{base}.sha256", *files])
    assert sha256(content(store, f"{base}.sha256")).hexdigest() == artifact.digest


def test_an_upload_that_was_broken_off_is_begun_anew(
    bench: Bench, saved: Path, store: Store
) -> None:
    folder = f"/r/model/{digest(saved)[:16]}"
    left, of_another = f"{folder}/.model.pt.1{store._part_of_ours}", f"{folder}/.model.pt.1.2.part"
    store._files.makedirs(f"{store._root}{folder}")
    store._files.pipe({f"{store._root}{name}": b"half" for name in (left, of_another)})
    bench.store_in(store)
    bench.told(saved)

    bench.go_on()

    assert names(store) == [of_another, f"{folder}/model.pt"]
    assert content(store, f"{folder}/model.pt") == saved.read_bytes()


def test_nothing_has_a_final_name_before_it_is_whole_and_no_part_is_shared(
    store: Store,
) -> None:
    during: list[str] = []

    def meanwhile() -> Iterator[bytes]:
        yield b"who"
        store.put("model/one", iter([b"whole"]))
        during.extend(names(store))
        yield b"le"

    def broken_off() -> Iterator[bytes]:
        yield b"half"
        raise Stopped

    store.put("model/one", meanwhile())
    with pytest.raises(Stopped):
        store.put("model/two", broken_off())

    # The part of the other one had another name, and none can be guessed.
    assert [name.startswith("/model/.one.") for name in during] in ([True, False], [False])
    assert names(store) == ["/model/one"]
    assert content(store, "/model/one") == b"whole"


def test_a_store_that_is_away_is_asked_again(bench: Bench, saved: Path, tmp_path: Path) -> None:
    # It does not take anything as long as this file is there.
    (tmp_path / "store").write_text("no directory")
    bench.store_in(Store(str(tmp_path / "store"), "agent"))
    late, never = bench.told(saved), bench.told(saved, name="never")

    bench.go_on()
    assert {each.state for each in (late, never)} == {WAITING}
    for seconds in STORE_AGAIN_S[:-1]:
        bench.wait(seconds)
    late.attempts -= 1
    bench.wait(STORE_AGAIN_S[-1])
    (tmp_path / "store").unlink()
    bench.wait(STORE_AGAIN_S[-1])

    assert (late.state, late.stored_uri.partition("/r/")[0]) == (
        COMPLETE,
        f"file://{tmp_path}/store",
    )
    assert (never.state, never.digest) == (INCOMPLETE, digest(saved))
    assert "not stored" in never.problem


def test_a_file_that_changes_while_it_is_stored_is_read_again(
    bench: Bench, saved: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, put = saved.stat().st_size, store.put

    def changed(key: str, content: Iterable[bytes]) -> None:
        # Of the same size, and in the same file.
        saved.write_bytes(b"2" * size)
        put(key, content)

    bench.store_in(store)
    monkeypatch.setattr(store, "put", changed)
    artifact = bench.told(saved)

    bench.go_on()
    assert artifact.state == WAITING
    assert names(store) == []
    bench.wait(READ_AGAIN_S[0])

    (stored,) = names(store)
    assert content(store, stored) == b"2" * size
    assert artifact.digest == digest(saved)


def test_an_address_that_nothing_knows_is_said_and_not_asked_again() -> None:
    with pytest.raises(CannotStore, match="OTEL_DDP_ARTIFACTS") as why:
        Store("nothing-like-it://me:secret@bucket", "agent")

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
