"""Numbers for people: what Python writes, and that the page writes the same."""

from __future__ import annotations

import math
from importlib import resources

from otel_ddp import shown
from stack.browser import chromium

WRITTEN: dict[str, dict[float, str]] = {
    "seconds": {
        0.0: "0 s",
        1.5e-9: "1.5 ns",
        1.234e-7: "123 ns",
        9.994e-7: "999 ns",
        9.996e-7: "1 us",
        9.996e-4: "1 ms",
        0.0201: "20.1 ms",
        0.9994: "999 ms",
        0.9996: "1 s",
        -1.234: "-1.23 s",
        119.4: "119 s",
        119.5: "2 min",
        533.0: "8 min 53 s",
        -533.0: "-8 min 53 s",
        3599.4: "59 min 59 s",
        3599.5: "1 h",
        5400.0: "1 h 30 min",
        11_900.0: "3 h 18 min",
        86_369.0: "23 h 59 min",
        86_370.0: "1 d",
        172_800.0: "2 d",
        1e8: "1157 d 10 h",
    },
    "share": {
        0.0: "0 %",
        1e-9: "0 %",
        0.0041: "0.41 %",
        0.3214: "32.1 %",
        1.0: "100 %",
        12.34: "1234 %",
    },
    "size": {0.0: "0 B", 999.4: "999 B", 999.6: "1 kB", 8.16e10: "81.6 GB", 5e15: "5000 TB"},
    "number": {
        0.0: "0",
        -3.0: "-3",
        123_456_789.0: "123456789",
        1e20: "1e20",
        0.25: "0.25",
        2.345678: "2.3457",
        99_999.4: "99999",
        123_456.7: "123457",
        0.00012345678: "0.00012346",
        -1.2345678e-5: "-1.2346e-5",
        2e-300: "2e-300",
        float("inf"): "inf",
        float("-inf"): "-inf",
        float("nan"): "NaN",
    },
}


def test_numbers_have_three_digits_and_logged_values_five() -> None:
    assert {
        name: {value: getattr(shown, name)(value) for value in values}
        for name, values in WRITTEN.items()
    } == WRITTEN
    assert {getattr(shown, name)(None) for name in WRITTEN} == {"-"}
    points = [{"value": None}, {"value": math.nan}, {"value": 0.5}, {"value": "x"}, {}, None]
    assert [*map(shown.logged, points)] == ["NaN", "NaN", "0.5", "-", "-", "-"]


def test_the_page_writes_numbers_as_commands_do() -> None:
    code = resources.files("otel_ddp.history.page") / "static" / "shown.js"
    asked = [(name, value) for name, values in WRITTEN.items() for value in (*values, None)]

    with chromium() as browser:
        said = browser.new_page().evaluate(
            """async ([code, asked]) => {
                const shown = await import(`data:text/javascript,${encodeURIComponent(code)}`);
                return asked.map(([name, value]) => shown[name](value));
            }""",
            [code.read_text(), asked],
        )

    assert said == [getattr(shown, name)(value) for name, value in asked]
