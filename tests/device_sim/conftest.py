"""The device of these tests, built before the first of them."""

from __future__ import annotations

import pytest

from device_sim import sim


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    try:
        sim.library()
    except sim.NoCompiler as lacking:
        pytest.skip(str(lacking))
