"""Finds secrets in what users hand over, by names and forms, so that they never reach the journal.

SECURITY.md says what is found, and what is not.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

HIDDEN = "[hidden]"

_OPENS = (
    r"api|access|secret|private|ssh|auth|account|encryption|signing|license|hub|hf|huggingface"
    r"|openai|anthropic|wandb|swanlab|neptune|comet|mlflow|clearml|kaggle|aws|azure|gcp"
)
# In the letters of one part of a name, wherever they stand: passWord, aws_access_key_id.
_SECRET = re.compile(
    rf"password|passwd|passphrase|(?:{_OPENS})key|git(?:hub|lab)pat$"
    rf"|(?:{_OPENS}|github|gitlab|session|refresh|bearer|sas|oauth|jwt|slack)tokens?(?!i)"
)
# Words of a name that hide it, and each name below it.
_SECRET_WORDS = frozenset(
    {"secret", "secrets", "credential", "credentials", "authorization", "cookie", "cookies"}
)
# Before `pass` at the end of a name, and before `token` alone below another name.
_ACCOUNTS = frozenset({"db", "smtp", "user", "mail", "email", "mysql", "postgres", "redis", "ftp"})
_OF_VOCABULARY = frozenset({"bos", "eos", "pad", "unk", "mask", "sep", "cls"})
# A name that begins or ends so has a count, or the place of a file.
_COUNTS = frozenset({"num", "n", "count", "max", "min"})
_PLACES = frozenset({"file", "path", "dir", "directory"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Letters and digits almost without a separator: a column has no such name.
_RANDOM = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9+=]*[-_]?[A-Za-z0-9+=]{16,}")
_LONGEST_NAME = 200
_LONGEST_VALUE = 200


def is_secret(name: str, value: Any, more: Collection[str] = ()) -> bool:
    """Whether this setting must not be recorded. *more*: further names, with `*` as wildcard."""
    parts = name[:_LONGEST_NAME].split(".")
    if more and _is_among(parts, more):
        return True
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, str) and not value):
        return False
    words = [[word.lower() for word in _WORD.findall(part)] for part in parts]
    last = words[-1]
    if not last or last[0] in _COUNTS or last[-1] in _PLACES:
        return False
    if any(_SECRET.search("".join(each)) or not _SECRET_WORDS.isdisjoint(each) for each in words):
        return True
    if not isinstance(value, str):
        return False
    return _opens(words, value[:_LONGEST_VALUE])


def _opens(words: list[list[str]], value: str) -> bool:
    """Whether a name that ends in a word of many meanings has a secret as its value."""
    *before, word = words[-1]
    if word == "pwd":
        return not value.startswith("/")
    if word == "pass":
        return not before or before[-1] in _ACCOUNTS
    if word == "token" and not before:
        above = words[-2] if len(words) > 1 else []
        return _OF_VOCABULARY.isdisjoint(above)
    return word in ("token", "key") and len(value) >= 20 and bool(_RANDOM.fullmatch(value))


def _is_among(parts: list[str], patterns: Collection[str]) -> bool:
    lower = [part.lower() for part in parts]
    names = {*lower, *(".".join(lower[:count]) for count in range(1, len(lower) + 1))}
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


# Each repetition is bounded, or begins at few places: a text may be anything.
_NAME = r"(?<![\w.])(-{0,2}([A-Za-z][\w.-]{0,60})[\"']?\s{0,3}"
_QUOTED = r"\"[^\"]{1,300}\"|'[^']{1,300}'"
_PLAIN = r"[^\s\"',;&)\]}]{1,2000}"
_ASSIGNED = re.compile(rf"{_NAME}=\s{{0,3}})({_QUOTED}|{_PLAIN})")
_MAPPED = re.compile(rf"{_NAME}:\s{{0,3}})({_QUOTED})")
# In a sentence a colon follows many words: there a name must say clearly what it is.
_SAID = re.compile(rf"{_NAME}:\s{{0,3}})({_PLAIN})")
_OPTION = re.compile(
    r"(?<![\w.])(--([A-Za-z][\w.-]{0,60})[\"']?,?\s{1,3}[\"']?)([^\s\"',\]-][^\s\"',\]]*)"
)
_IN_TEXT = (
    # The user information of an address, and parameters of one that is signed.
    (re.compile(r"((?:\b[a-z][a-z0-9+.-]{0,30}:)?//)[^\s/\"'<>]{0,2000}@", re.I), r"\1"),
    (
        re.compile(
            r"([?&][\w-]{0,40}(?:token|signature|sig|secret|credential)=)[^\s&\"'<>]+", re.I
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(
            r"(\b(?:authorization|cookie)[\"']?\s{0,3}[=:]\s{0,3}[\"']?(?:\w{1,20}(?:\s|%20))?)"
            r"[^\s\"',;]+",
            re.I,
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"\b(bearer(?:\s|%20))(?=[^\s\d]{0,200}\d)[\w+/=.~-]{16,}", re.I), rf"\1{HIDDEN}"),
    # Tokens of services that one sees by their beginning; private keys.
    (
        re.compile(
            r"(?<![\w-])(?:hf_\w{20,}|sk-(?=[\w-]{0,80}\d)(?=[\w-]{0,80}[A-Z])[\w-]{20,}"
            r"|sk_live_\w{16,}|gh[pousr]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
            r"|nvapi-[\w-]{20,}|wandb_v1_\w{20,}|AIza[\w-]{30,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
            r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,1000}\.[\w-]{8,}\.[\w-]{8,})"
        ),
        HIDDEN,
    ),
    (re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*", re.DOTALL), HIDDEN),
)


def without_secrets(text: str) -> str:
    """This text without what looks like a secret."""
    for pattern, instead in _IN_TEXT:
        text = pattern.sub(instead, text)
    for setting in (_ASSIGNED, _MAPPED):
        text = setting.sub(_hide_setting, text)
    for said in (_SAID, _OPTION):
        text = said.sub(_hide_said, text)
    return text


def _hide_setting(found: re.Match[str]) -> str:
    before, name, value = found.groups()
    quote = value[0] if value[0] in "\"'" else ""
    # The closing bracket of what is hidden already ends a value.
    if HIDDEN[:-1] in value or not is_secret(name, value.strip(quote) if quote else value):
        return found[0]
    return f"{before}{quote}{HIDDEN}{quote}"


def _hide_said(found: re.Match[str]) -> str:
    before, name, value = found.groups()
    says_so = HIDDEN[:-1] not in value and _SECRET.search(_letters(name))
    return f"{before}{HIDDEN}" if says_so else found[0]


def _letters(name: str) -> str:
    return "".join(_WORD.findall(name)).lower()
