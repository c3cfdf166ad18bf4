"""Records when this rank calls process groups, in measured steps, through torch's hooks."""

from __future__ import annotations

import atexit
import ctypes
import json
import sys
from collections import Counter
from collections.abc import Callable
from hashlib import blake2s
from operator import attrgetter
from threading import get_ident
from time import thread_time_ns
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from otel_ddp import errors
from otel_ddp.journal import layout
from otel_ddp.recording.progress import Progress
from otel_ddp.torch.collectives import world
from otel_ddp.torch.inspection import outward
from otel_ddp.torch.steps.open_step import outside_of_backward
from otel_ddp.torch.steps.stream_waits import StreamWaits
from otel_ddp.vocabulary.words import PHASE_CODE, phase_word

# The id of our hooks in torch; hooks of other programs have other ids.
_HOOK = 0x07E1_DD90
_SHIFT = layout.CALL_SHIFT
# Calls of longer steps are not recorded, as a journal word has few bits for the time in the step.
_LONGEST_NS = 1 << layout.CALL_IDLE_SHIFT + layout.CALL_UNIT_SHIFT
_UNIT, _IDLE_SHIFT = layout.CALL_UNIT_SHIFT, layout.CALL_IDLE_SHIFT
_CALL, _CALLS = layout.STEP_CALL << layout.CODE_SHIFT, layout.STEP_CALLS << layout.CODE_SHIFT
_COUNT, _BYTES = (
    code << layout.CODE_SHIFT for code in (layout.STEP_CALL_COUNT, layout.STEP_CALL_BYTES)
)
_MOST_BYTES = (1 << _SHIFT) - 1
# Idle shares are stored in units of 1/_WHOLE.
_WHOLE = 1 << _SHIFT - _IDLE_SHIFT
# Limit of recorded calls per step, as a step may contain an evaluation with any number of calls.
_MOST_CALLS = 10_000
# Estimated cost of recording one call, nearly all of it in torch: with 180 calls a step, even an
# empty hook takes 20 us per call. The budget multiplies it by a factor: first 1.5, then measured.
_EACH_NS = 14_000
# Estimated cost of reading the sizes of a call's tensors.
_SIZES_NS = 4_000
# Limit of recorded calls per second, over all ranks. At this rate they cost the lead (the agent
# that judges the run) 2 MB/s and an eighth of a core.
_MOST_OF_ALL = 250_000
# A rank defines at most one call per so many bytes of its journal's area for definitions.
_ROOM_BYTES = 1024
# Reads a call's operation and root rank: 2 us.
_known_of = attrgetter("name.value", "root")
_PEERS = ("send", "recv")
_MESH = "mesh_"
# Limit of mesh dimensions with their own series; all other groups share the series `_OTHER`.
_MOST_DIMENSIONS, _OTHER, _LONGEST = 16, "other", 60
# Three texts of a group: name and digest of its ranks; mesh dimension; label in series.
_Group = tuple[str, str, str]
# A thread may be inside a call to a process group if its stack has a function of one of these
# modules, or if its innermost function uses one of the names in `_CALLED`.
_CALLERS = ("torch.distributed", "torch._ops", "torch.nn", "torch.autograd", "torch._functorch")
_CALLED = frozenset(
    {
        *("allgather", "allgather_coalesced", "_allgather_base", "allreduce", "alltoall"),
        *("allreduce_coalesced", "alltoall_base", "barrier", "broadcast", "gather", "recv"),
        *("monitored_barrier", "recv_anysource", "reduce", "reduce_scatter", "send", "scatter"),
        *("_reduce_scatter_base", "all_gather_single", "reduce_scatter_single"),
    }
)


class GroupCalls:
    """One per process. Writes a journal word when this rank arrives at a call to a process group.

    In few steps it also sums up calls and bytes. With tensors on a device it does only this, since
    the device arrives at a collective later than the host calls it.

    Torch keeps its hooks in a map without a lock. So hooks are put on and taken off between two
    steps, on the training thread, while no other thread can be reading this map.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._words: list[int] = []
        self._hooks = WeakKeyDictionary[Any, Callable[[Any], None]]()
        # The groups whose hooks are on; and whether `_at_exit` is registered.
        self._on = WeakSet[Any]()
        self._exit_registered = False
        self.on_device = False
        """Whether tensors are on a device."""
        self.waits: StreamWaits | None = None
        """Marks the device's waits, which otherwise count as work; None if this is not needed."""
        # Whether calls and bytes of this step are summed up; and the bytes per kind of call so far.
        self._adds_up = False
        self._bytes = Counter[int]()
        self._dimensions = set[str]()
        # Limit of recorded calls in this step; 0: no calls are recorded.
        self._most = 0
        # Whether all calls of this step so far have been recorded; and when the step began.
        self._complete, self._began_ns = False, 0
        # Wall and thread time at the last call, or at the beginning of the step.
        self._last_ns = self._last_cpu_ns = 0
        self._have_been = False
        self._left = progress.recorder.writer.areas.definitions[1] // _ROOM_BYTES
        self._given_up = False
        # The number of calls in the last recorded step, and of ranks in the largest group.
        self._count = self._ranks = 0

    # -- between steps

    @property
    def noted(self) -> bool:
        """Whether calls are recorded in measured steps; False before the end of the first one."""
        return self._have_been and not (self._given_up or self.on_device)

    @property
    def waits_seen(self) -> bool:
        """Whether the device's waits are marked in measured steps."""
        return self.waits is not None and not self._given_up

    def least_every(self, step_ns: int) -> int:
        """The smallest power of two for `every` at which calls do not overload the run's lead.

        It is above 1 only with very many ranks or calls.
        """
        most = _MOST_OF_ALL * max(step_ns, 1)
        return 1 << (self._count * self._ranks * 10**9 // most).bit_length()

    def step_ended(self, now: int) -> int:
        """Write the calls of the step that ends now; returns the estimated cost of recording, in
        ns."""
        words, count = self._words, len(self._words)
        took_ns = count * _EACH_NS
        if self._complete and now - self._began_ns < _LONGEST_NS:
            pending = self._progress.phases.pending
            if not self.on_device:
                pending += words
                pending.append(_CALLS | self._idle(now) | count)
                self._have_been, self._count = True, count
            if self._adds_up:
                pending += self._sums()
        if self._adds_up:
            self._adds_up = False
            self._bytes.clear()
            took_ns += count * _SIZES_NS
        if self.waits is not None:
            took_ns += self.waits.step_ended()
        words.clear()
        self._complete, self._most = False, 0
        return took_ns

    def _sums(self) -> list[int]:
        """The words with the number and the bytes of each call in this step."""
        # Begin with a word that names no call, so that readers also count a step without calls.
        found = [_COUNT]
        for call, count in Counter(word >> _SHIFT << _SHIFT for word in self._words).items():
            name, left = call - _CALL, self._bytes[call]
            found.append(_COUNT | name | count)
            while left:
                found.append(_BYTES | name | min(left, _MOST_BYTES))
                left -= min(left, _MOST_BYTES)
        return found

    def begin(self, now: int, measured: bool, adds_up: bool = False) -> None:
        """A step begins. *adds_up*: whether to sum up its calls and bytes."""
        try:
            waits = self.waits
            if waits is not None:
                waits.switch(measured and not self._given_up)
            hooks = adds_up or not self.on_device or (waits is not None and waits.has_calls)
            if not measured or self._given_up or not hooks:
                self._take_off()
            elif self._put_on() and (adds_up or not self.on_device):
                self._complete, self._began_ns, self._adds_up = True, now, adds_up
                self._last_ns, self._last_cpu_ns = now, thread_time_ns()
                self._most = _MOST_CALLS
        except errors.ANY_ERROR:
            self._given_up = True
            errors.record_failure("hooks of process groups")

    def give_up(self) -> None:
        """Stop recording calls, and take the hooks off."""
        self.leave_to_parent()
        errors.attempt(self._take_off, None)
        if not self._on:
            self._exit_registered = False
            atexit.unregister(self._at_exit)

    def leave_to_parent(self) -> None:
        """In a forked child: record nothing, and don't touch torch's map of hooks."""
        self._given_up, self._most = True, 0
        if self.waits is not None:
            self.waits.take_off()

    def _at_exit(self) -> None:
        """Take hooks off: torch frees groups after Python has ended, but their hooks need
        Python."""
        self.give_up()
        for group in self._on:
            # The hook of this group could not be taken off, as another thread may be in a call.
            # Leak the group, so that torch never frees the hook.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _put_on(self) -> bool:
        """Put hooks on all groups of several ranks; False without groups, or if impossible now."""
        table = world()
        members = getattr(table, "pg_group_ranks", {})
        groups = [e for e in list(getattr(table, "pg_names", ())) if len(members.get(e, ())) != 1]
        new = [each for each in groups if each not in self._on]
        if not all(hasattr(each, "register_pre_hook") and each in members for each in new):
            # An older PyTorch, or a group of another library, whose ranks are unknown.
            self._given_up = True
            return False
        if new and _may_be_in_call():
            return False
        if new and not self._exit_registered:
            self._exit_registered = True
            atexit.register(self._at_exit)
        for group in new:
            hook = self._hooks.get(group)
            if hook is None:
                name, ranks = table.pg_names[group], list(members[group])
                whole = len(ranks) == len(members.get(table.default_pg, ()))
                hook = self._hooks[group] = self._hook(name, group, ranks, whole)
            self._ranks = max(self._ranks, len(members[group]))
            group.register_pre_hook(_HOOK, hook)
            if self.waits is not None:
                group.register_post_hook(_HOOK, self.waits.call_ended)
            self._on.add(group)
        return bool(groups)

    def _take_off(self) -> None:
        if self._on and not _may_be_in_call():
            for group in self._on:
                group.unregister_pre_hook(_HOOK)
                if self.waits is not None:
                    group.unregister_post_hook(_HOOK)
            self._on.clear()

    # -- hot path: the hook runs at each call to a process group in a measured step

    def _hook(self, name: Any, group: Any, ranks: list[int], whole: bool) -> Callable[[Any], None]:
        """Create a group's hook. It must not refer to the group: that would be a reference cycle.

        *whole*: whether all ranks are members of the group.
        """
        key = f"{name}:{blake2s(repr(ranks).encode(), digest_size=4).hexdigest()}"
        described = str(getattr(group, "group_desc", ""))
        dimension = described.removeprefix(_MESH) if described.startswith(_MESH) else ""
        of_group = key, dimension, self._label(dimension, described, whole)
        words, progress, known_of = self._words, self._progress, _known_of
        opened, clock = progress.phases.opened, progress.phases.clock
        known, note = dict[Any, int](), words.append

        def called(call: Any) -> None:
            try:
                if self.waits is not None:
                    self.waits.call_began(call)
                    if not self._adds_up:
                        return
                if len(words) >= self._most:
                    # Drop the calls of this step, as ranks cannot be compared by a part of them.
                    self._complete = False
                    return
                now = clock()
                # Ignore other threads, except autograd's: with a device, backward runs in those.
                if get_ident() != progress.thread and (not self.on_device or outside_of_backward()):
                    return
                what = known_of(call), opened[-1].code
                word = known.get(what) or self._define(of_group, ranks, call, what[1])
                if not word:
                    return
                known[what] = word
                if self.on_device:
                    note(word)
                else:
                    note(word + self._idle(now) + (now - self._began_ns >> _UNIT))
                if self._adds_up:
                    self._bytes[word] += max(map(_bytes, (call.input_tensors, call.output_tensors)))
            except errors.ANY_ERROR:
                self._complete = False
                errors.record_failure("a call to a process group")
                # This is a failure of our own: if a signal handler had raised, `record_failure`
                # would have raised its exception again.
                self._given_up = True

        return called

    def _idle(self, now: int) -> int:
        """The bits for the share of the time since the last call that this thread was idle."""
        cpu_ns = thread_time_ns()
        took_ns, ran_ns = now - self._last_ns, cpu_ns - self._last_cpu_ns
        self._last_ns, self._last_cpu_ns = now, cpu_ns
        if ran_ns >= took_ns:
            return 0
        return min((took_ns - ran_ns) * _WHOLE // took_ns, _WHOLE - 1) << _IDLE_SHIFT

    def _label(self, dimension: str, described: str, whole: bool) -> str:
        """The label of this group in series."""
        found = dimension or ("world" if whole else described[:_LONGEST])
        if found in ("", "undefined"):
            return _OTHER
        if len(self._dimensions) < _MOST_DIMENSIONS:
            self._dimensions.add(found)
        return found if found in self._dimensions else _OTHER

    def _define(self, of_group: _Group, ranks: list[int], call: Any, code: int) -> int:
        """Define a call in the journal; returns its word without the time, or 0 if there is no
        room."""
        op, peer = call.name.name.lower(), -1
        if op in _PEERS and 0 <= call.root < len(ranks):
            peer = ranks[call.root]
        tensors = (*call.input_tensors, *call.output_tensors)
        self.on_device |= any(each.device.type != "cpu" for each in tensors)
        key, dimension, label = of_group
        content = [key, dimension, op, peer, phase_word(code & PHASE_CODE), label]
        number = 0
        if self._left and not self._given_up:
            self._left -= 1
            number = self._progress.recorder.names.of_text(json.dumps(content))
        if 0 < number < 1 << (layout.CODE_SHIFT - _SHIFT):
            return _CALL | number << _SHIFT
        self._complete, self._most = False, 0
        return 0


def _bytes(tensors: list[Any]) -> int:
    return sum([each.numel() * each.element_size() for each in tensors])


def _may_be_in_call() -> bool:
    """Whether any thread may be inside a call to a process group.

    It may if its stack has a function of torch that makes such calls, or if its innermost function
    names one, or if our hook runs there. On this thread, a signal handler may have interrupted our
    hook. No thread can enter a call meanwhile, as torch holds the GIL while it changes the map.
    """
    own = get_ident()
    for thread, frame in sys._current_frames().items():
        around = outward(frame)
        if any(_is_hook(each) for each in around):
            return True
        if thread != own and (
            not _CALLED.isdisjoint(frame.f_code.co_names)
            or any(str(each.f_globals.get("__name__")).startswith(_CALLERS) for each in around)
        ):
            return True
    return False


def _is_hook(frame: FrameType) -> bool:
    return frame.f_code.co_name == "called" and frame.f_globals is globals()
