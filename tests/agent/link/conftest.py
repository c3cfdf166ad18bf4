"""Links of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent.link import linked


@pytest.fixture
def links() -> Iterator[linked.Links]:
    with linked.links() as made:
        yield made
