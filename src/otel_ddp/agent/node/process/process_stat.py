"""Reads /proc/<pid>/stat of a process."""

from __future__ import annotations

from typing import NamedTuple

from otel_ddp.agent.node.kernel_files import KernelFiles, number


class ProcessStat(NamedTuple):
    """Times in ticks; `children_*` are of the children that it has waited for."""

    alive: bool
    """False for a zombie: only its exit status is left, for its parent to read."""
    parent: int
    start: int
    user: int
    system: int
    children_user: int
    children_system: int
    threads: int | None
    virtual_bytes: int | None
    resident_pages: int | None


def read_process_stat(files: KernelFiles, proc: str, pid: int) -> ProcessStat | None:
    """The fields of a process; None if there is no such process."""
    text = files.text(f"{proc}/{pid}/stat", "stat")
    if not text:
        return None
    # The name in parentheses may contain anything, even parentheses.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 22:
        files.leave_out("stat", "the line of a process is too short")
        return None
    parent, start = number(fields[1]), number(fields[19])
    times = [number(field) for field in fields[11:15]]
    user, system, children_user, children_system = times
    if (
        parent is None
        or start is None
        or user is None
        or system is None
        or children_user is None
        or children_system is None
    ):
        files.leave_out("stat", "the line of a process has words where numbers belong")
        return None
    return ProcessStat(
        alive=fields[0] not in ("Z", "X", "x"),
        parent=parent,
        start=start,
        user=user,
        system=system,
        children_user=children_user,
        children_system=children_system,
        threads=number(fields[17]),
        virtual_bytes=number(fields[20]),
        resident_pages=number(fields[21]),
    )
