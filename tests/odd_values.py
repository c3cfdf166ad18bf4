"""Values that a program may log, and that are awkward to ask anything."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

waited: list[str] = []


class Rude:
    """Every question is answered with an exception of its own kind."""

    def _raise(self, *_: Any) -> Any:
        raise ZeroDivisionError("rude")

    __float__ = __repr__ = __str__ = __eq__ = __bool__ = __len__ = __iter__ = _raise

    def __hash__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


class DeviceTensor(torch.Tensor):  # type: ignore[misc,name-defined]
    """A tensor that says it lies on a device, and fails whoever would wait for that device."""

    @property
    def device(self) -> Any:
        return torch.device(getattr(self, "where", "cuda:0"))

    def detach(self) -> Any:
        # What the copy engine does with it, the device does in its own time.
        return self.as_subclass(torch.Tensor).detach()

    def _waits(self, *_: Any) -> Any:
        # Kept as well as raised: some questions may fail without anyone noticing.
        waited.append("this would have waited for the device")
        raise AssertionError(waited[-1])

    item = tolist = cpu = numpy = __float__ = __int__ = __index__ = __bool__ = _waits
    __add__ = __radd__ = __sub__ = __lt__ = __repr__ = __str__ = _waits


def on_device(value: Any = 1.0, where: str = "cuda:0", dtype: Any = None) -> Any:
    tensor = torch.tensor(value, dtype=dtype).as_subclass(DeviceTensor)
    tensor.where = where
    return tensor
