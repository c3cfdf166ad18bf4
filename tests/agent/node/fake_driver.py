"""A GPU driver of which a test decides what its devices answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from otel_ddp.agent.node.gpu.nvml import Device, User
from otel_ddp.agent.node.gpu.nvml_questions import Question
from otel_ddp.agent.node.source import Measurement
from otel_ddp.vocabulary import catalog

POWER = Measurement(catalog.HW_POWER, 300.0)
LIMIT = Measurement(catalog.OTEL_DDP_GPU_POWER_LIMIT, 700.0)


class FakeDriver:
    """Devices that answer as a test has them answer."""

    def __init__(self, *devices: Device) -> None:
        self.silent: list[str] = []
        self.found: Any = list(devices)
        """An error is raised instead, here and below."""
        self.opening: Exception | None = None
        self.answers: dict[tuple[str, str], Any] = {}
        """By UUID and question; what is not here answers well."""
        self.tried = self.opened = self.closed = 0
        self.asked: Counter[tuple[str, str]] = Counter()

    def open(self) -> str:
        self.tried += 1
        _answer(self.opening)
        assert self.opened == self.closed, "opened twice"
        self.opened += 1
        return "driver 999.1"

    def close(self) -> None:
        assert self.opened == self.closed + 1, "closed what is not open"
        self.closed += 1

    def devices(self) -> Sequence[Device]:
        return list(_answer(self.found))

    def questions(self, device: Device) -> Sequence[Question]:
        return [
            Question(name, lambda name=name: self._measurements(device, name))
            for name in ("power", "limit")
        ]

    def _measurements(self, device: Device, name: str) -> Iterable[Measurement]:
        usual = {"power": [POWER], "limit": [LIMIT]}.get(name, [])
        return list(self._asked(device, name, usual))

    def users(self, device: Device) -> Sequence[User]:
        return list(self._asked(device, "users", ()))

    def _asked(self, device: Device, name: str, usual: Any) -> Any:
        assert self.opened == self.closed + 1, "asked while closed"
        self.asked[device.uuid, name] += 1
        return _answer(self.answers.get((device.uuid, name), usual))


def _answer(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer() if callable(answer) else answer
