"""What a machine may run short of, for tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """No thread can be started meanwhile: there is no room for its stack."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)
