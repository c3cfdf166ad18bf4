"""Keeps annotations that outlive a profile from ending in a later one, which ends the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import record_function

# An annotation holds a record, and its end writes through a pointer into the profile in which it
# began. Torch checks only whether any profile is on, so an annotation that began in one and ends in
# the next one writes to freed memory. A record that is dropped calls its end too: these stay.
_never_ended: list[Any] = []


class OpenAnnotations:
    """Those that began since `watch`, and have not ended."""

    def __init__(self) -> None:
        self._open: dict[int, record_function] = {}
        self._originals: tuple[Any, Any] | None = None

    def watch(self, began: Callable[[], None]) -> None:
        """Look at each annotation that begins or ends; call it when a profile has begun.

        *began* is called before one begins: loaders, DDP, optimizers and users have them, also
        where no step ends for long.
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

    def leave(self) -> None:
        """The profile is over: what is still open never ends."""
        originals, self._originals = self._originals, None
        if originals is None:
            return
        record_function.__enter__, record_function.__exit__ = originals
        for annotation in self._open.values():
            annotation.run_callbacks_on_exit = False
            _never_ended.append(annotation.record)
        self._open.clear()
