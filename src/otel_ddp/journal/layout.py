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
# Suffixes of two files beside a journal: the fifo through which the agent asks the process for its
# stacks, and the file with the answer.
ASK_SUFFIX = ".ask"
ANSWER_SUFFIX = ".answer"
# The file with the answer to a request for a profile.
PROFILE_SUFFIX = ".profile"
MOST_PROFILED_STEPS = 50
COMPANION_SUFFIXES = (".taken", ".ask", ".answer", ".answer.half", ".profile", ".profile.half")

# The part of a journal's head that never changes, without its checksum.
FIXED = Struct("<8sIIQQQQQQQQQQQQqq16s")
FIXED_CRC = Struct("<I")

# Offsets of the words that say how far each area is written. Only the writer changes them.
RING_POSITION = 256
DEFINITIONS_POSITION = 264
LATEST_POSITION = 272

# Offsets of the words with the progress of the process. Each word is written with a single store,
# so a reader never sees half of it.
PHASE = 512
PHASE_NAME = 520
STEP = 528
EXPECT_MS = 536
STATE = 544
# Unpacks the five words from PHASE to STATE.
PROGRESS = Struct("<QQQQQ")
# Offset of a word that is 1 while otel_ddp launches an event or a copy on the device. The launch
# blocks while the device's launch queue is full; the word shows that this is where a thread hangs.
IN_MARK = 560
# The words PHASE and STATE consist of a code (this bit and up) and of the time at which it began
# (the bits below), so that a reader always gets a code with its own time.
CODE_SHIFT = 56
WORD_VALUE = (1 << CODE_SHIFT) - 1
REASON = 1024
REASON_HEAD = Struct("<II")
REASON_BYTES = 2048

# The head of a record: checksum, size of the whole record (a multiple of 8), type, flags, sequence
# number.
RECORD = Struct("<IIHHI")
PAD, SCALARS, SPAN, EVENT, END, STEPS, DEVICE_STEPS = 0, 16, 17, 18, 19, 20, 21
IDENTITY, NAME, COUNTER, HISTOGRAM, CONFIG, FACTS = 1, 2, 3, 4, 5, 6

# What follows the head in a SCALARS record: number of values, a reserved field, time, step, epoch.
# Then come the numbers of the values' names, and then the values.
SCALARS_HEAD = Struct("<IIqqd")
NAME_HEAD = Struct("<IHH")
# What precedes each record in the area of latest values: the record's size, the complement of the
# size, and the position of the same record in the ring.
LATEST_HEAD = Struct("<IIQ")

# The content of the file `.taken`, in which the agent stores how far it has read a journal:
# position in the ring, sequence number of the next record, number of lost records, checksum.
TAKEN = Struct("<QQQI")

# STEPS and DEVICE_STEPS records consist of words: a code in the high byte, below it a time or a
# number. If the code is a phase, as in PHASE, this phase begins at this time. The bit OF_BUFFERS in
# the code of a wait for other ranks means that it is a wait for buffers, not for gradients.
OF_BUFFERS = 0x40
# STEPS_BEGAN: the first step begins at this time. STEP_ENDED: a step ends at this time.
STEPS_BEGAN, STEP_ENDED = 0x80, 0x81
# All codes below describe the step that the next STEP_ENDED ends. STEP_NUMBER: the step's number,
# the same on all ranks. STEP_GC: nanoseconds of garbage collection. STEP_SKIPPED: the gradient
# scaler has skipped the optimizer's step.
STEP_NUMBER, STEP_GC, STEP_SKIPPED = 0x82, 0x83, 0x84
# How often, in this step, the device's memory allocator found no memory, emptied its cache, and
# tried again.
STEP_RETRIES = 0x85
# How many tokens the step has processed; the number of samples if no tokens are reported.
STEP_WORK = 0x86
# The number that the program uses for the step. Written only if the program has logged values with
# this number, or if it differs from STEP_NUMBER.
STEP_LOGGED = 0x87
# STEP_PACED: a phase code (bits 48 and up), and for how many nanoseconds of this phase the device
# was limited by its host. STEP_LAG: how many nanoseconds after the host the device ended the step.
STEP_PACED, PACED_SHIFT = 0x88, 48
STEP_LAG = 0x89
# The step was recorded by torch's profiler, since a person had requested a profile.
STEP_PROFILED = 0x8A
# STEP_CALL: a call to a process group. Bits 40 and up: the number of the call's name. Bits 32 to
# 39: the share of the time since the previous call in which the thread did not run, in 256ths. The
# bits below: the time of the call since the start of the step, in units of 256 ns. STEP_CALLS: the
# same share for the time after the last call (bits 32 to 39), and the number of calls. If
# STEP_CALLS is missing, the calls of this step were not recorded.
STEP_CALL, CALL_SHIFT, CALL_IDLE_SHIFT, CALL_UNIT_SHIFT = 0x8B, 40, 32, 8
STEP_CALLS = 0x8C
# Written in a few steps only: a sum over all calls with one name. The number of the name is in the
# same bits as in STEP_CALL; below it is the number of calls, or of bytes. Add up the words with the
# same name.
STEP_CALL_COUNT, STEP_CALL_BYTES = 0x8D, 0x8E

SMALLEST_FILE = 128 * 1024
LARGEST_FILE = 1024 * 1024 * 1024
# The least size of the definitions area: even the smallest journal needs this much.
_LEAST_DEFINITIONS = 32 * 1024

NO_STEP = -(2**63)
LARGEST_RECORD = 60_000
# The most values in one record, chosen so that the record fits into the smallest ring.
MOST_VALUES = 1000


class Areas(NamedTuple):
    """Offset and size of each area of a journal."""

    definitions: tuple[int, int]
    totals: tuple[int, int]
    latest: tuple[int, int]
    ring: tuple[int, int]


def areas(file_bytes: int) -> Areas:
    """The areas of a file of this size: definitions and latest values get an eighth each."""
    eighth = file_bytes // 8 // 4096 * 4096
    totals_bytes = max(4096, eighth // 16 // 4096 * 4096)
    definitions = (HEAD_BYTES, max(eighth, _LEAST_DEFINITIONS))
    totals = (HEAD_BYTES + definitions[1], totals_bytes)
    latest = (totals[0] + totals[1], eighth)
    start = latest[0] + latest[1]
    return Areas(definitions, totals, latest, (start, (file_bytes - start) // 8 * 8))


def padded(size: int) -> int:
    """The size, rounded up to a multiple of eight: records start only at such positions."""
    return (size + 7) & ~7


def largest_record(ring_bytes: int) -> int:
    """The largest allowed size of a record in a ring of this size."""
    return min(LARGEST_RECORD, ring_bytes // 4)


def checksum(body: bytes | memoryview, position: int) -> int:
    """The checksum of a record. Its seed is the record's position, which grows with each lap of the
    ring, so a record of an earlier lap at the same place has another checksum."""
    return zlib.crc32(body, position & 0xFFFFFFFF)


def read_taken(path: Path) -> tuple[int, int, int] | None:
    """The content of a `.taken` file; None if it is missing or damaged."""
    try:
        # Training processes call this function too, so it must not block, even if the path is a
        # fifo.
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
    """The name of a step's trace. All ranks share it, since they count the same steps."""
    return f"step/{step}"


def is_of_step(trace: str) -> bool:
    """Whether this is the trace of a step, which has spans of all ranks."""
    return trace.startswith("step/")


def trace_by_id(trace_id: str) -> str:
    """The name of a trace whose hexadecimal id is given: a process's own trace, or the user's."""
    return f"id/{trace_id}"


def trace_id(run: str, trace: str) -> bytes:
    """The id of a trace: the id in its name, or else a digest of the names of run and trace."""
    known = _KNOWN_ID.fullmatch(trace)
    return bytes.fromhex(known[1]) if known else _digest(f"{run}/{trace}", 16)


def first_span_id(run: str, trace: str) -> bytes:
    """The id of the root span of a step's trace; all nodes derive the same id."""
    return _digest(f"{run}/{trace}/first", 8)


def _digest(text: str, size: int) -> bytes:
    return blake2s(text.encode("utf-8", "replace"), digest_size=size).digest()
