"""A journal and its reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_ddp.journal.layout import SMALLEST_FILE
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.writer import JournalWriter


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[JournalWriter]:
    made = JournalWriter(tmp_path, SMALLEST_FILE, {"run": "r"})
    yield made
    made.close()


@pytest.fixture
def reader(writer: JournalWriter) -> Iterator[JournalReader]:
    made = JournalReader(writer.path)
    yield made
    made.close()
