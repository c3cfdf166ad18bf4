"""A device that works off what the host launches as the test says, with the names of torch.cuda."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any


class FakeDevice:
    """Its clock is that of the host, which the test moves."""

    def __init__(self, late: bool = False) -> None:
        self.host_ms = 0.0
        self.busy_until_ms = 0.0  # when it will have done all that was launched
        self.late = late  # whether it is still busy with all of it
        self.capturing = False
        self.broken = ""  # the one call that fails
        self.during: Callable[[str], None] = lambda call: None  # called in each call
        self.made = 0
        self.recorded: list[Any] = []
        self._waiting: list[Any] = []
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                device.made += 1
                self.is_timed = enable_timing

            def record(self, stream: Any) -> None:
                assert not device.capturing, "the graph would record it again and again"
                device._called("record")
                self.stream = stream
                device.recorded.append(self)
                self.at_ms = max(device.busy_until_ms, device.host_ms)
                self.waits = device.late
                if device.late:
                    device._waiting.append(self)

            def query(self) -> bool:
                assert not device.capturing, "a query spoils the graph"
                device._called("query")
                return self.is_done()

            def is_done(self) -> bool:
                return device.host_ms >= self.at_ms and not self.waits

            def elapsed_time(self, end: Any) -> float:
                assert self.is_timed
                device._called("elapsed_time")
                if not (self.is_done() and end.is_done()):
                    raise RuntimeError("Both events must be completed")
                return float(end.at_ms - self.at_ms)

            def synchronize(self) -> None:
                device.synchronize()

        self.Event = Event

    def _called(self, call: str) -> None:
        self.during(call)
        if self.broken == call:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def interrupt(self, interrupted: str) -> None:
        """Send a signal in the middle of the next such call."""

        def during(call: str) -> None:
            if call == interrupted:
                self.during = lambda _: None
                signal.raise_signal(signal.SIGUSR1)

        self.during = during

    def launch(self, host_ms: float, device_ms: float) -> None:
        """The host launches for so long; the device needs so long for it."""
        began_ms = max(self.busy_until_ms, self.host_ms)
        self.host_ms += host_ms
        # The last of it is launched at the end.
        self.busy_until_ms = max(began_ms + device_ms, self.host_ms if device_ms else 0.0)

    def finish_all(self) -> None:
        """It has done what was launched by now."""
        self.host_ms = max(self.host_ms, self.busy_until_ms)
        for event in self._waiting:
            event.waits = False

    def current_stream(self, index: Any) -> str:
        return f"the stream of {index}"

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def synchronize(self, *_: Any) -> None:
        raise AssertionError("this would have waited for the device")
