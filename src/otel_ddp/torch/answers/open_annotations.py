"""Keeps annotations that outlive a profile from ending in a later one, which ends the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import profiler as torch_profiler
from torch.autograd.profiler import record_function

# What every user of torch's profiler comes through, also those of emit_nvtx.
_ENTRANCES = ("_prepare_profiler", "_enable_profiler")

# An annotation holds a record, and its end writes through a pointer into the profile in which it
# began. Torch checks only whether any profile is on, so an annotation that began in one and ends in
# the next one writes to freed memory. A record that is dropped calls its end too: these stay.
_never_ended: list[Any] = []


class OpenAnnotations:
    """Those that began since `watch`, and have not ended; and the ways into torch's profiler."""

    def __init__(self) -> None:
        self._open: dict[int, record_function] = {}
        self._originals: tuple[Any, Any] | None = None
        self._entrances: dict[str, Callable[..., Any]] = {}

    def watch(self, began: Callable[[], None], give_way: Callable[[], None]) -> None:
        """Look at each annotation that begins or ends; call it when a profile has begun.

        *began* is called before one begins: loaders, DDP, optimizers and users have them, also
        where no step ends for long. *give_way*: before the program itself profiles, since torch has
        one profiler at a time and would raise there.
        """
        enter, leave = self._originals = record_function.__enter__, record_function.__exit__
        opened = self._open

        def entered(annotation: record_function) -> Any:
            began()
            found = enter(annotation)
            opened[id(annotation)] = annotation
            return found

        def left(annotation: record_function, *why: Any) -> Any:
            opened.pop(id(annotation), None)
            return leave(annotation, *why)

        record_function.__enter__, record_function.__exit__ = entered, left
        for name in _ENTRANCES:
            original = getattr(torch_profiler, name, None)
            if original is not None:
                self._entrances[name] = original
                setattr(torch_profiler, name, _entrance(original, give_way))

    def leave(self) -> None:
        """The profile is over: what is still open never ends."""
        entrances, self._entrances = self._entrances, {}
        for name, original in entrances.items():
            setattr(torch_profiler, name, original)
        originals, self._originals = self._originals, None
        if originals is None:
            return
        record_function.__enter__, record_function.__exit__ = originals
        for annotation in self._open.values():
            annotation.run_callbacks_on_exit = False
            _never_ended.append(annotation.record)
        self._open.clear()


def _entrance(original: Callable[..., Any], give_way: Callable[[], None]) -> Callable[..., Any]:
    def entrance(*args: Any, **kwargs: Any) -> Any:
        give_way()
        return original(*args, **kwargs)

    return entrance
