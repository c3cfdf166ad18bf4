"""A device for tests: it carries out, in order and in its own time, what the host has queued.

Tensors stay on the CPU, and arithmetic is done at once; what is queued is how long it would take.
The device's moments are worked out from what it was given and when, as soon as they can be known,
and not taken from when the machine wakes a thread: its durations are exact on a busy machine, too.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

NAME = "standin"
# As many kernels as CUDA lets a host launch ahead, about.
LAUNCH_QUEUE = 1024
# As many collectives as torch's recorder remembers.
RING = int(os.environ.get("TORCH_FR_BUFFER_SIZE", "2000"))

_Act = Callable[[float], float | None]
"""Gets the moment at which it begins on its stream, and returns the one at which it is done.

None: that cannot be known yet. Then it is called again, with the same moment.
"""


class Event:
    """What `torch.cuda.Event` offers to those that never wait for the device."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at_s: float | None = None

    def record(self, stream: Stream) -> None:
        """Let the stream pass this event once it has done all that it was given before."""
        self._at_s = None
        stream.queue(self._pass)

    def _pass(self, now_s: float) -> float:
        self._at_s = now_s
        return now_s

    def query(self) -> bool:
        """Whether the device has passed it."""
        return self._at_s is not None and self._at_s <= time.monotonic()

    def elapsed_time(self, end: Event) -> float:
        """The milliseconds of the device between two events."""
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        assert self._at_s is not None
        assert end._at_s is not None
        return (end._at_s - self._at_s) * 1000

    def synchronize(self) -> None:
        """Not for those that watch: this would wait for the device."""
        raise AssertionError("this would have waited for the device")

    def then(self, now_s: float) -> float | None:
        """When a stream goes on that waits for this event from this moment on."""
        return None if self._at_s is None else max(now_s, self._at_s)


class _Launched(NamedTuple):
    """Kernels that are launched, and when the device works on them."""

    last: int
    """The number of the last one, counted since the first launch on this stream."""
    kernels: int
    began_s: float
    ended_s: float

    def done_s(self, number: int) -> float:
        """When the device is done with the kernel of this number: each takes as long."""
        share = 1 - (self.last - number) / self.kernels
        return self.began_s + share * (self.ended_s - self.began_s)


class Stream:
    """One queue of work."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._changed = device.changed
        # What cannot be timed yet: when it was launched, what it is, how many kernels, which part.
        self._untimed: deque[tuple[float, _Act, int, str]] = deque()
        self._timed: deque[_Launched] = deque()
        self._now_s = 0.0  # when all is done that is timed
        self._kernels = self._kernels_timed = 0
        self.part = ""
        """What the host launches now, as the program calls it."""
        self.idle_s: Counter[str] = Counter()
        """How long there was nothing to do, by the part that was launched next."""

    def queue(self, act: _Act, kernels: int = 1) -> None:
        """Launch it; while the launch queue is full, the host waits."""
        with self._changed:
            self._untimed.append((time.monotonic(), act, kernels, self.part))
            self._kernels += kernels
            self._device.advance()
        self._wait(self._kernels - LAUNCH_QUEUE)

    def launch(self, seconds: float, kernels: int = 1) -> None:
        """Launch kernels that take so long together."""
        self.queue(lambda began_s: began_s + seconds, kernels)

    def wait_event(self, event: Event) -> None:
        """Do what is queued after this only once the event is passed. The host goes on."""
        self.queue(event.then)

    def synchronize(self) -> None:
        """Wait, as the host, until all is done that was queued."""
        self._wait(self._kernels)

    @property
    def left_s(self) -> float:
        """How long the device has yet to work on what is timed."""
        return max(0.0, self._now_s - time.monotonic())

    def advance(self) -> bool:
        """Time what can be timed; whether there was any."""
        any_timed = False
        while self._untimed:
            launched_s, act, kernels, part = self._untimed[0]
            began_s = max(self._now_s, launched_s)
            ended_s = act(began_s)
            if ended_s is None:
                break
            any_timed = True
            self._untimed.popleft()
            self.idle_s[part] += began_s - self._now_s
            self._now_s = ended_s
            self._kernels_timed += kernels
            self._timed.append(_Launched(self._kernels_timed, kernels, began_s, ended_s))
        return any_timed

    def _wait(self, number: int) -> None:
        """Wait until the device is done with the kernel of this number."""
        with self._changed:
            self._changed.wait_for(lambda: self._kernels_timed >= number)
            while self._timed and self._timed[0].last < number:
                self._timed.popleft()
            done_s = self._timed[0].done_s(number) if self._timed else 0.0
        while (left_s := done_s - time.monotonic()) > 0:
            time.sleep(left_s)


class Device:
    """What `torch.cuda` offers: one stream that computes, and one beside it for the network."""

    Event = Event

    def __init__(self) -> None:
        self.transfer_s = 0.0
        """How long a collective takes once the last rank has come to it."""
        self.changed = threading.Condition()
        self.compute, self._network = Stream(self), Stream(self)
        self.collectives: deque[Collective] = deque(maxlen=RING)
        """The last that were launched, the oldest first."""
        self.heard_late_s = 0.0
        """By how much collectives took longer for being heard of too late: on a busy machine."""
        self._to_meet: SimpleQueue[Collective] = SimpleQueue()

    def current_stream(self, index: int | None = None) -> Stream:
        """The one that computes."""
        return self.compute

    def is_current_stream_capturing(self) -> bool:
        """There are no graphs."""
        return False

    def join(self, group: dist.ProcessGroupGloo) -> None:
        """Meet the devices of the other ranks, in a process group that is used for nothing else."""
        threading.Thread(target=self._meet, args=(group,), daemon=True).start()

    def collective(self, op: str, sizes: list[list[int]]) -> Event:
        """Queue a collective behind what is launched so far, as NCCL does; the host goes on.

        What the ranks tell each other is when they have come, and no tensors.
        """
        number = self.collectives[-1].number + 1 if self.collectives else 1
        launched = Collective(number, op, sizes, self._to_meet, self.transfer_s)
        self.collectives.append(launched)
        ready, done = Event(), Event()
        ready.record(self.compute)
        self._network.wait_event(ready)
        self._network.queue(launched)
        done.record(self._network)
        return done

    def wait_after_backward(self, done: Event) -> None:
        """Let what computes wait for this event once backward is over."""
        Variable._execution_engine.queue_callback(partial(self.compute.wait_event, done))

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Queue the all-reduce of a bucket."""
        done = self.collective("all_reduce", [list(bucket.buffer().shape)])
        if bucket.is_last():
            # DDP queues its finaliser right after this. There it makes the stream that computes
            # wait for the one of the network.
            self.wait_after_backward(done)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def advance(self) -> None:
        """Time what can be timed: one stream may wait for the other."""
        while self._network.advance() | self.compute.advance():
            self.changed.notify_all()

    def _meet(self, group: dist.ProcessGroupGloo) -> None:
        while True:
            collective = self._to_meet.get()
            last_s = torch.tensor([collective.came_s], dtype=torch.float64)
            group.allreduce([last_s], dist.ReduceOp.MAX).wait()
            with self.changed:
                self.heard_late_s += collective.met(float(last_s))
                self.advance()


class Collective:
    """Takes some time once the last rank has come to it."""

    def __init__(
        self,
        number: int,
        op: str,
        sizes: list[list[int]],
        to_meet: SimpleQueue[Collective],
        transfer_s: float,
    ) -> None:
        self.number, self.op, self.sizes = number, op, sizes
        self.launched_ns = time.time_ns()
        self.came_s: float | None = None
        """When the device comes to it: on time.monotonic, as soon as that is known."""
        self.done_s: float | None = None
        """When the device is done with it."""
        self._to_meet, self._transfer_s = to_meet, transfer_s

    def __call__(self, came_s: float) -> float | None:
        """See _Act."""
        if self.came_s is None:
            self.came_s = came_s
            self._to_meet.put(self)
        return self.done_s

    def met(self, last_s: float) -> float:
        """All ranks have said when they came; by how much it takes longer for being said late."""
        # No moment of a device is over before it is known: a host may have asked for it.
        self.done_s = max(last_s + self._transfer_s, time.monotonic())
        return self.done_s - last_s - self._transfer_s


class _OnDevice(nn.Parameter):
    """A parameter of the CPU that says it is on the device."""

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)


def install() -> Device:
    """Let torch know a device of this name, once a process: `torch.standin` is its module."""
    device = Device()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device)
    return device


def move(model: nn.Module) -> None:
    """Put the parameters of a model on the device."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, _OnDevice(parameter.data))


def exchange(device: Device, bucket):  # type: ignore[no-untyped-def]
    """Hook of DDP for `register_comm_hook(device, ...)`, which reads no annotations."""
    return device.exchange(bucket)
