"""The format of a journal: where each byte lies. See docs/internals/journal.md."""

from __future__ import annotations

import re
import zlib
from hashlib import blake2s
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from otel_ddp import files

MAGIC = b"OTELDDPJ"
VERSION = 1
HEAD_BYTES = 4096
SUFFIX = ".journal"
TAKEN_SUFFIX = ".taken"
# Also beside it: the question to a process that hangs, and the answer.
ASK_SUFFIX = ".ask"
ANSWER_SUFFIX = ".answer"
# What became of a question for a profile.
PROFILE_SUFFIX = ".profile"
MOST_PROFILED_STEPS = 50
COMPANION_SUFFIXES = (
    *(TAKEN_SUFFIX, ASK_SUFFIX, ANSWER_SUFFIX, f"{ANSWER_SUFFIX}.half"),
    *(PROFILE_SUFFIX, f"{PROFILE_SUFFIX}.half"),
)

# The fixed part of the head; its last word is the checksum of the words before it.
FIXED = Struct("<8sIIQQQQQQQQQQQQqq16s")
FIXED_CRC = Struct("<I")

# The writer's position in each area: one word each, which only the writer changes.
RING_POSITION = 256
DEFINITIONS_POSITION = 264
LATEST_POSITION = 272

# The progress of the process: each is a word of its own, written with one store.
PHASE = 512
PHASE_NAME = 520
STEP = 528
EXPECT_MS = 536
STATE = 544
# All of them, from PHASE on.
PROGRESS = Struct("<QQQQQ")
# 1 while we launch an event or a copy on the device: with a full launch queue that waits.
IN_MARK = 560
# A code shares a word with its time, so that a reader always sees both together.
CODE_SHIFT = 56
WORD_VALUE = (1 << CODE_SHIFT) - 1
REASON = 1024
REASON_HEAD = Struct("<II")
REASON_BYTES = 2048

# checksum, whole size (a multiple of 8), type, flags, running number
RECORD = Struct("<IIHHI")
PAD, SCALARS, SPAN, EVENT, END, STEPS, DEVICE_STEPS = 0, 16, 17, 18, 19, 20, 21
IDENTITY, NAME, COUNTER, HISTOGRAM, CONFIG, FACTS = 1, 2, 3, 4, 5, 6

# after the record's head: how many values, time, step, epoch; then the ids, then the values
SCALARS_HEAD = Struct("<IIqqd")
NAME_HEAD = Struct("<IHH")
# size of what follows, its complement, the ring position that the copied record belongs to
LATEST_HEAD = Struct("<IIQ")

# The reader's own file: position, running number of the next record, records lost so far.
TAKEN = Struct("<QQQI")

# The words of STEPS and DEVICE_STEPS records: a code above, a time or a number below. The code of a
# phase, as in PHASE, says that it begins at this time. A wait for buffers differs from one for
# gradients.
OF_BUFFERS = 0x40
# Steps begin at this time; a step ended at this time.
STEPS_BEGAN, STEP_ENDED = 0x80, 0x81
# Of the step that ends next: its number, the same on all ranks; nanoseconds of garbage collection;
# and that it left the weights as they were.
STEP_NUMBER, STEP_GC, STEP_SKIPPED = 0x82, 0x83, 0x84
# Of the step that ends next: the allocator had to empty its cache this often.
STEP_RETRIES = 0x85
# Of the step that ends next: the tokens it worked on, or the samples where there are none.
STEP_WORK = 0x86
# Of the step that ends next: under which number the user logs it, where one was logged or that is
# another one.
STEP_LOGGED = 0x87
# Of the device's step that ends next: a phase, from this bit on, and for how many nanoseconds of it
# the device kept up with the host; and how long after the host it reached this end.
STEP_PACED, PACED_SHIFT = 0x88, 48
STEP_LAG = 0x89
# Of the step that ends next: torch's profiler was on, as a person had asked.
STEP_PROFILED = 0x8A
# Of the step that ends next, one behind the other: this rank has called a process group. From the
# first of these bits on the number of the name that says which call it was; from the second one on
# in how many 256ths of the time since the call before the thread did not run; below that the time
# since the step began, without so many of its bits in nanoseconds. Then the same share for the rest
# of the step, and how many calls there were: without that word they are not known.
STEP_CALL, CALL_SHIFT, CALL_IDLE_SHIFT, CALL_UNIT_SHIFT = 0x8B, 40, 32, 8
STEP_CALLS = 0x8C

SMALLEST_FILE = 128 * 1024
# No journal is larger: what claims to be is damaged, and no reader asks for its bytes.
LARGEST_FILE = 1024 * 1024 * 1024
# A small file needs as much room for definitions as a large one.
_LEAST_DEFINITIONS = 32 * 1024

NO_STEP = -(2**63)
LARGEST_RECORD = 60_000
# Of one record, which the smallest ring takes.
MOST_VALUES = 1000


class Areas(NamedTuple):
    """Offset and size of each area of a journal of one size."""

    definitions: tuple[int, int]
    totals: tuple[int, int]
    latest: tuple[int, int]
    ring: tuple[int, int]


def areas(file_bytes: int) -> Areas:
    """How a file of this size is divided: an eighth each to definitions and latest values."""
    eighth = file_bytes // 8 // 4096 * 4096
    totals_bytes = max(4096, eighth // 16 // 4096 * 4096)
    definitions = (HEAD_BYTES, max(eighth, _LEAST_DEFINITIONS))
    totals = (HEAD_BYTES + definitions[1], totals_bytes)
    latest = (totals[0] + totals[1], eighth)
    start = latest[0] + latest[1]
    return Areas(definitions, totals, latest, (start, (file_bytes - start) // 8 * 8))


def padded(size: int) -> int:
    """The next multiple of eight. Every record starts on one."""
    return (size + 7) & ~7


def largest_record(ring_bytes: int) -> int:
    """The size of the largest record in a ring of this size."""
    return min(LARGEST_RECORD, ring_bytes // 4)


def checksum(body: bytes | memoryview, position: int) -> int:
    """The checksum, seeded with the position: a record of an earlier lap does not match."""
    return zlib.crc32(body, position & 0xFFFFFFFF)


def read_taken(path: Path) -> tuple[int, int, int] | None:
    """The content of a `.taken` file; None if there is no whole one."""
    try:
        # A training process calls this too: not even a fifo in its place may block it.
        content = files.read_own(path, TAKEN.size)
    except OSError:
        return None
    if len(content) < TAKEN.size:
        return None
    position, expected, lost, crc = TAKEN.unpack(content)
    if crc != checksum(content[:-4], 0) or position % 8:
        return None
    return position, expected, lost


# -- traces: each process and the agent derive the ids from a name alike

_KNOWN_ID = re.compile("id/([0-9a-f]{32})")


def trace_of_step(step: int) -> str:
    """The trace of a step of all ranks: their hooks count alike."""
    return f"step/{step}"


def is_of_step(trace: str) -> bool:
    """Whether all ranks have spans in this trace."""
    return trace.startswith("step/")


def trace_by_id(trace_id: str) -> str:
    """The trace with this id, in hexadecimal digits: a process's own, or one of the user's."""
    return f"id/{trace_id}"


def trace_id(run: str, trace: str) -> bytes:
    """The id of a trace of a run."""
    known = _KNOWN_ID.fullmatch(trace)
    return bytes.fromhex(known[1]) if known else _digest(f"{run}/{trace}", 16)


def first_span_id(run: str, trace: str) -> bytes:
    """The id of the span above those of all ranks, in the trace of a step."""
    return _digest(f"{run}/{trace}/first", 8)


def _digest(text: str, size: int) -> bytes:
    return blake2s(text.encode("utf-8", "replace"), digest_size=size).digest()
