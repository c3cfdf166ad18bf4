"""Files of rules and their cases: the names in a query, and the rules that a case needs."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_WORDS = {"and", "or", "unless", "offset", "bool", "Inf", "NaN"}
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"|#[^\n]*')
# In braces, or behind a word that takes labels.
_LABELS = re.compile(
    r"\{([^}]*)\}|\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)"
)
_Rule = dict[str, Any]


@cache
def load(path: Path) -> Any:
    # In Python it takes seconds.
    return yaml.load(path.read_text(), Loader=yaml.CSafeLoader)


def rules(paths: list[Path]) -> list[_Rule]:
    return [rule for path in paths for group in load(path)["groups"] for rule in group["rules"]]


def names_in(query: str) -> tuple[set[str], set[str]]:
    """The metrics and the labels that a query names."""
    bare = _TEXT.sub('""', query)
    labels = re.findall(r"[a-zA-Z_]\w*", " ".join(a + b for a, b in _LABELS.findall(bare)))
    # A word before a bracket is a function.
    words = re.findall(r"\b[a-zA-Z_][\w:]*\b(?!\s*\()", _LABELS.sub(" ", bare))
    patterns = re.findall(r'__name__=~"([^"]*)"', query)
    return ({*words} - _WORDS).union(*map(spelt_out, patterns)), {*labels}


def spelt_out(pattern: str) -> set[str]:
    """Every name that a pattern of choices in brackets may mean."""
    parts = re.split(r"(\([^()]*\)\??)", pattern)
    choices = [
        [*each.strip("()?").split("|"), *([""] if each.endswith("?") else [])] for each in parts
    ]
    return {"".join(each) for each in itertools.product(*choices)}


def queries_of(rule: _Rule) -> list[str]:
    """What a rule asks, in its text too."""
    text = rule.get("annotations", {}).get("description", "")
    return [
        rule["expr"],
        *(
            re.sub(r"%q", '"x"', each.replace('\\"', '"'))
            for each in re.findall(r'printf "((?:[^"\\]|\\.)*)"', text)
        ),
    ]


def with_needed_rules(case: Path, folder: Path) -> list[Path]:
    """The same tests, each beside only those rules that what it asks for is made of.

    At each moment of a test promtool evaluates every rule that it has loaded: most of its time goes
    into rules that the test does not look at.
    """
    head, text = case.read_text().split("\ntests:\n")
    settings = yaml.safe_load(head)
    files = [path for each in settings["rule_files"] for path in sorted(case.parent.glob(each))]
    known = rules(files)
    texts = re.findall(r"^  - (?:.*\n|\n)+?(?=^  - |\Z)", text, re.MULTILINE)
    by_names: dict[frozenset[str], list[str]] = {}
    for test, its_text in zip(load(case)["tests"], texts, strict=True):
        by_names.setdefault(frozenset(_needed(_asked(test), known)), []).append(its_text)
    written = []
    for number, (needed, tests) in enumerate(by_names.items()):
        groups = [
            {**group, "rules": [each for each in group["rules"] if _name(each) in needed]}
            for path in files
            for group in load(path)["groups"]
        ]
        found = folder / f"{case.stem}-{number}.rules.yml"
        found.write_text(yaml.safe_dump({"groups": groups}))
        written.append(folder / f"{case.stem}-{number}.yml")
        with_found = yaml.safe_dump({**settings, "rule_files": [found.name]})
        written[-1].write_text(f"{with_found}\ntests:\n{''.join(tests)}")
    return written


def _asked(test: dict[str, Any]) -> set[str]:
    alerts = {str(each["alertname"]) for each in test.get("alert_rule_test", [])}
    asked = (names_in(each["expr"])[0] for each in test.get("promql_expr_test", []))
    return alerts.union(*asked)


def _needed(asked: set[str], known: list[_Rule]) -> set[str]:
    needed: set[str] = set()
    left = asked
    while left:
        needed |= left
        more = [query for rule in known if _name(rule) in left for query in queries_of(rule)]
        left = set().union(*(names_in(query)[0] for query in more)) - needed
    return needed


def _name(rule: _Rule) -> str:
    return str(rule.get("record") or rule["alert"])
