"""What tests of notifications share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from webhook import Webhook


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    """A receiver of this test's own."""
    with Webhook() as webhook:
        yield webhook
