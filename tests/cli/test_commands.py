"""What the command says of itself."""

from __future__ import annotations

import pytest

from otel_ddp.cli import main


def test_the_name_alone_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])

    # A script that lost its arguments must see that it failed.
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(f"\n    {name} " in said for name in ("status", "top", "run", "doctor", "demo"))
