"""How long each rank has waited for a core lately."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from otel_ddp.agent.node.processes import CoreUse
from otel_ddp.agent.reading.journals import Rank

S = 1_000_000_000
LABELS = (("run", "r"), ("rank", "1"))


def rank(pid: int = 7, start_ticks: int = 1) -> Rank:
    return Rank(LABELS, pid, start_ticks, {})


def waited(proc: Path, waited_ns: int, pid: int = 7) -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    (proc / str(pid) / "schedstat").write_text(f"123456789 {waited_ns} 42\n")


def test_the_rate_is_that_of_the_last_half_minute(tmp_path: Path) -> None:
    use = CoreUse(tmp_path)
    for at in range(100):
        # Not at all, and then a fifth of the time; looked at each second, read each other one.
        waited(tmp_path, max(at - 50, 0) * S // 5)
        use.poll([rank()], (at + 10) * S)

    assert use.waits() == {LABELS: pytest.approx(0.2)}


def test_a_process_with_the_labels_of_another_one_begins_anew(tmp_path: Path) -> None:
    use = CoreUse(tmp_path)
    for at, process in ((2, rank()), (4, rank()), (6, rank(8)), (8, rank(8))):
        waited(tmp_path, at * S, process.pid)
        use.poll([process], at * S)
        assert use.waits() == ({LABELS: 1.0} if at in (4, 8) else {})
    use.poll([], 10 * S)
    assert use.waits() == {}


def test_where_the_kernel_does_not_tell_there_is_no_rate(tmp_path: Path) -> None:
    use = CoreUse(tmp_path)
    (tmp_path / "7").mkdir()
    for at, text in ((2, None), (4, ""), (6, "no numbers"), (8, "1")):
        if text is not None:
            (tmp_path / "7" / "schedstat").write_text(text)
        use.poll([rank()], at * S)
    assert use.waits() == {}


def test_this_kernel_tells() -> None:
    use = CoreUse()
    for at in (2, 4):
        use.poll([rank(os.getpid())], at * S)
    assert use.waits() == {} or use.waits()[LABELS] >= 0
