"""Colours and words of states and phases, the same on every board."""

from __future__ import annotations

from collections.abc import Mapping

from grafana_foundation_sdk.models.dashboard import (
    DynamicConfigValue,
    Threshold,
    ValueMap,
    ValueMappingResult,
)

from otel_ddp.vocabulary.words import PHASE, PHASES, STATES

PHASE_COLOURS: Mapping[str, str] = {word: phase.colour for word, phase in PHASE.items()}
STATE_COLOURS: Mapping[str, str] = {
    "starting": "#FADE2A",
    "running": "#73BF69",
    "finished": "#5794F2",
    "failed": "#F2495C",
    "killed": "#A352CC",
}

# Neutral by default: green means checked and good.
NEUTRAL, GOOD, WARN, BAD = "text", "green", "orange", "red"

# Grafana's unit "h" converts hours to days and weeks, but prices and quotas are in hours.
HOURS = "suffix:h"

# Not by name, which may give two runs similar colours.
PALETTE = "palette-classic"


def steps(*levels: tuple[float, str], base: str = NEUTRAL) -> list[Threshold]:
    """Thresholds: `base` below the first of them."""
    return [Threshold(value=None, color=base), *(Threshold(value=v, color=c) for v, c in levels)]


ABOVE_0_IS_BAD = steps((1, BAD))
ABOVE_0_IS_ODD = steps((1, WARN))


def words(codes: Mapping[str, int], colours: Mapping[str, str]) -> ValueMap:
    """Shows the codes of a metric as words in their colours."""
    return ValueMap(
        options={
            str(code): ValueMappingResult(text=word, color=colours[word], index=index)
            for index, (word, code) in enumerate(codes.items())
        }
    )


PHASE_WORDS = words(PHASES, PHASE_COLOURS)
STATE_WORDS = words(STATES, STATE_COLOURS)


def fixed(colour: str) -> DynamicConfigValue:
    return DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})


LATE_WORDS = ValueMap(
    options={
        "0": ValueMappingResult(text="on time", color="transparent", index=0),
        "1": ValueMappingResult(text="late", color="#F2495C", index=1),
    }
)
STALLED_WORDS = ValueMap(
    options={"1": ValueMappingResult(text="stalled", color="#F2495C", index=0)}
)
HELD_BACK_WORDS = ValueMap(
    options={
        "0": ValueMappingResult(text="no", index=0),
        "1": ValueMappingResult(text="yes", color="#F2495C", index=1),
    }
)
HOLDS_UP_WORDS = ValueMap(
    options={"1": ValueMappingResult(text="holds up", color="#F2495C", index=0)}
)

# Loki's words for severities.
SEVERITY_COLOURS = {
    **dict.fromkeys(("trace", "debug", "unknown"), "text"),
    "info": "green",
    "warn": "orange",
    **dict.fromkeys(("error", "critical", "fatal"), "red"),
}
