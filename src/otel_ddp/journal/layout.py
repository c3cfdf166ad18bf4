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
# Files beside a journal: the agent's request to the process, and the answer of the process.
ASK_SUFFIX = ".ask"
ANSWER_SUFFIX = ".answer"
# The file with the answer to a request for a profile.
PROFILE_SUFFIX = ".profile"
MOST_PROFILED_STEPS = 50
COMPANION_SUFFIXES = (".taken", ".ask", ".answer", ".answer.half", ".profile", ".profile.half")

# The fixed part of the head, without its checksum.
FIXED = Struct("<8sIIQQQQQQQQQQQQqq16s")
FIXED_CRC = Struct("<I")

# The writer's position in each area. Each is a single word, written only by the writer.
RING_POSITION = 256
DEFINITIONS_POSITION = 264
LATEST_POSITION = 272

# The progress of the process: offsets of single words, each written with one store.
PHASE = 512
PHASE_NAME = 520
STEP = 528
EXPECT_MS = 536
STATE = 544
# The five words above, from PHASE on.
PROGRESS = Struct("<QQQQQ")
# 1 while otel_ddp launches an event or a copy on the device, which blocks if the launch queue is
# full.
IN_MARK = 560
# PHASE and STATE hold a code (from this bit on) and its time in one word, so that a reader gets
# both atomically.
CODE_SHIFT = 56
WORD_VALUE = (1 << CODE_SHIFT) - 1
REASON = 1024
REASON_HEAD = Struct("<II")
REASON_BYTES = 2048

# checksum, total size (a multiple of 8), type, flags, sequence number
RECORD = Struct("<IIHHI")
PAD, SCALARS, SPAN, EVENT, END, STEPS, DEVICE_STEPS = 0, 16, 17, 18, 19, 20, 21
IDENTITY, NAME, COUNTER, HISTOGRAM, CONFIG, FACTS = 1, 2, 3, 4, 5, 6

# a record of values, after its head: number of values, time, step, epoch; then ids, then values
SCALARS_HEAD = Struct("<IIqqd")
NAME_HEAD = Struct("<IHH")
# size of the copied record, its complement, the record's ring position
LATEST_HEAD = Struct("<IIQ")

# The file in which the reader stores its progress: position, sequence number of the next record,
# number of lost records, checksum.
TAKEN = Struct("<QQQI")

# Words of STEPS and DEVICE_STEPS records: a code in the high byte, a time or a number below. The
# code of a phase, as in PHASE, means that the phase begins. OF_BUFFERS distinguishes a wait for
# buffers from one for gradients.
OF_BUFFERS = 0x40
# STEPS_BEGAN: the time at which the first step begins. STEP_ENDED: the time at which a step ends.
STEPS_BEGAN, STEP_ENDED = 0x80, 0x81
# All words below describe the step that ends next. STEP_NUMBER: its number, the same on all ranks.
# STEP_GC: nanoseconds of garbage collection. STEP_SKIPPED: a scaler has skipped it.
STEP_NUMBER, STEP_GC, STEP_SKIPPED = 0x82, 0x83, 0x84
# How often the device's memory allocator emptied its cache during the step, and tried again.
STEP_RETRIES = 0x85
# The tokens of the step, or its samples if it has no tokens.
STEP_WORK = 0x86
# The number by which the user logs the step, if one was logged and differs from STEP_NUMBER.
STEP_LOGGED = 0x87
# STEP_PACED: a phase code (bits 48 and up) and the nanoseconds of that phase in which the device
# was bound by its host. STEP_LAG: nanoseconds from the host's end of the step to the device's end.
STEP_PACED, PACED_SHIFT = 0x88, 48
STEP_LAG = 0x89
# A person had requested a profile, so torch's profiler was on during the step.
STEP_PROFILED = 0x8A
# A call to a process group. Bits 40 and up: the number of the call's name; bits 32 and up: the part
# of the time since the previous call in which the thread did not run, in 256ths; below: the time
# since the start of the step, in units of 256 ns. STEP_CALLS: the same share for the rest of the
# step, and the number of calls; if it is missing, the step's calls were not recorded.
STEP_CALL, CALL_SHIFT, CALL_IDLE_SHIFT, CALL_UNIT_SHIFT = 0x8B, 40, 32, 8
STEP_CALLS = 0x8C
# Sums per name of a call, written in a few steps only: the number of the name as in STEP_CALL, and
# below it the number of calls, or of bytes. Several words with the same name add up.
STEP_CALL_COUNT, STEP_CALL_BYTES = 0x8D, 0x8E

SMALLEST_FILE = 128 * 1024
LARGEST_FILE = 1024 * 1024 * 1024
# Even a small file needs this much room for definitions.
_LEAST_DEFINITIONS = 32 * 1024

NO_STEP = -(2**63)
LARGEST_RECORD = 60_000
# Limit of values in one record, which then fits into the smallest ring.
MOST_VALUES = 1000


class Areas(NamedTuple):
    """Offset and size of each area of a journal."""

    definitions: tuple[int, int]
    totals: tuple[int, int]
    latest: tuple[int, int]
    ring: tuple[int, int]


def areas(file_bytes: int) -> Areas:
    """The division of a file: an eighth each for definitions and latest values."""
    eighth = file_bytes // 8 // 4096 * 4096
    totals_bytes = max(4096, eighth // 16 // 4096 * 4096)
    definitions = (HEAD_BYTES, max(eighth, _LEAST_DEFINITIONS))
    totals = (HEAD_BYTES + definitions[1], totals_bytes)
    latest = (totals[0] + totals[1], eighth)
    start = latest[0] + latest[1]
    return Areas(definitions, totals, latest, (start, (file_bytes - start) // 8 * 8))


def padded(size: int) -> int:
    """The size rounded up to a multiple of eight, as every record starts at such a position."""
    return (size + 7) & ~7


def largest_record(ring_bytes: int) -> int:
    """The size of the largest record in a ring of this size."""
    return min(LARGEST_RECORD, ring_bytes // 4)


def checksum(body: bytes | memoryview, position: int) -> int:
    """The checksum of a record. The position is its seed, so that old records do not match."""
    return zlib.crc32(body, position & 0xFFFFFFFF)


def read_taken(path: Path) -> tuple[int, int, int] | None:
    """The content of a `.taken` file; None if it is missing or damaged."""
    try:
        # A training process calls this, too, so this must not block, even if the path is a fifo.
        content = files.read_own(path, TAKEN.size)
    except OSError:
        return None
    if len(content) < TAKEN.size:
        return None
    position, expected, lost, crc = TAKEN.unpack(content)
    if crc != checksum(content[:-4], 0) or position % 8:
        return None
    return position, expected, lost


# -- traces: the processes of a run and the agent derive equal ids from a name

_KNOWN_ID = re.compile("id/([0-9a-f]{32})")


def trace_of_step(step: int) -> str:
    """The name of a step's trace, which all ranks share, as their hooks count the same steps."""
    return f"step/{step}"


def is_of_step(trace: str) -> bool:
    """Whether all ranks have spans in this trace."""
    return trace.startswith("step/")


def trace_by_id(trace_id: str) -> str:
    """The name of the trace with this hexadecimal id: a process's own trace, or a user's."""
    return f"id/{trace_id}"


def trace_id(run: str, trace: str) -> bytes:
    """The id of a trace, derived from the run's name and the name of the trace."""
    known = _KNOWN_ID.fullmatch(trace)
    return bytes.fromhex(known[1]) if known else _digest(f"{run}/{trace}", 16)


def first_span_id(run: str, trace: str) -> bytes:
    """The id of the root span in the trace of a step."""
    return _digest(f"{run}/{trace}/first", 8)


def _digest(text: str, size: int) -> bytes:
    return blake2s(text.encode("utf-8", "replace"), digest_size=size).digest()
