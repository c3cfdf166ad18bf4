"""Stands in for the hooks of torch.cuda.graphs, which torch calls for graphs of CUDA alone."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Any

from torch.utils.hooks import RemovableHandle

NAMES = ("capture_start", "capture_end", "replay_start", "replay_end")


class GraphHooks:
    """By the part of the name that tells them apart, as in `register_graph_replay_end_hook`."""

    def __init__(self) -> None:
        self._hooks = {name: OrderedDict[int, Any]() for name in NAMES}

    def register(self, name: str, hook: Any) -> RemovableHandle:
        hooks = self._hooks[name]
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def run(self, name: str, graph: Any) -> None:
        for hook in list(self._hooks[name].values()):
            # As torch does: a hook that raises does not break the program.
            with suppress(Exception):
                hook(graph)
