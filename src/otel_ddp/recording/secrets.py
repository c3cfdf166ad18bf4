"""Finds secrets in what users hand over, by names and forms, so that they never reach the journal.

docs/settings.md says what is found, and what is not.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

HIDDEN = "[hidden]"

# Words of a name, and each name below it: whatever the value is.
_SECRET = frozenset(
    {
        *("password", "passwords", "passwd", "passphrase", "pwd", "secret", "secrets"),
        *("credential", "credentials", "apikey", "apitoken", "authtoken", "accesstoken"),
        *("accesskey", "secretkey", "privatekey", "authorization", "bearer", "cookie", "cookies"),
    }
)
# Before `token` at the end of a name: the tokens of a vocabulary.
_OF_VOCABULARY = frozenset(
    {
        *("pad", "eos", "bos", "unk", "mask", "sep", "cls", "image", "video", "audio", "start"),
        *("end", "stop", "special", "decoder", "newline", "boi", "eoi", "user", "assistant"),
        *("system", "per", "prompt", "trigger", "placeholder", "class", "query", "register"),
    }
)
# Before `key` at the end of a name: what opens something, rather than what things are sorted by.
_OPENS = frozenset(
    {
        *("api", "access", "secret", "private", "ssh", "account", "auth", "license", "encryption"),
        *("signing", "service", "session", "shared", "master", "storage", "hub", "aws", "azure"),
        *("gcp", "s3", "openai", "anthropic", "hf", "huggingface", "wandb", "swanlab", "neptune"),
        *("comet", "mlflow", "clearml", "kaggle"),
    }
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Letters and digits without a pause, as nobody names a column.
_RANDOM = re.compile(r"(?=[^\s]*\d)(?=[^\s]*[A-Za-z])[\w+/=.~-]{20,}")

_LONG_NAME = (
    r"password|passwd|passphrase|secret|credentials?|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|(?:auth|access|api|hf|bearer)[_-]?token"
)
# Each repetition is bounded, or cannot begin at many places: a text may be anything.
_IN_TEXT = (
    # The user information of an address.
    (re.compile(r"\b([a-z][a-z0-9+.-]{0,30}://)[^\s/\"'<>]{0,2000}@", re.IGNORECASE), r"\1"),
    # Parameters of an address; `password=...` and the like in a sentence.
    (
        re.compile(
            r"([?&][\w-]{0,40}(?:token|signature|sig|key|secret|credential)=)[^\s&\"'<>]+", re.I
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(rf"((?:{_LONG_NAME})[\"']?\s{{0,3}}[=:]\s{{0,3}}[\"']?)[^\s\"',;&]+", re.I),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"\b(bearer|basic)\s+[\w+/=.~-]{8,}", re.IGNORECASE), rf"\1 {HIDDEN}"),
    # Tokens of services that one sees by their beginning; private keys.
    (
        re.compile(
            r"\b(?:hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
            r"|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,1000}\.[\w-]{8,}\.[\w-]{8,})"
        ),
        HIDDEN,
    ),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*", re.DOTALL), HIDDEN),
)


def is_secret(name: str, value: Any, more: Collection[str] = ()) -> bool:
    """Whether this setting must not be recorded. *more*: further names, with `*` as wildcard."""
    if value is None or isinstance(value, bool) or (isinstance(value, str) and not value):
        return False
    words = [word.lower() for word in _WORDS.findall(name)]
    if not _SECRET.isdisjoint(words):
        return True
    last_name = name.rpartition(".")[2]
    names = (last_name.lower(), name.lower())
    if any(fnmatchcase(each, pattern) for pattern in more for each in names):
        return True
    if not words or not isinstance(value, str):
        return False
    before = words[-2] if len(_WORDS.findall(last_name)) > 1 else ""
    if words[-1] == "token":
        return before not in _OF_VOCABULARY
    if words[-1] == "key":
        return not before or before in _OPENS or _RANDOM.fullmatch(value) is not None
    return False


def without_secrets(text: str) -> str:
    """This text without what looks like a secret."""
    for pattern, instead in _IN_TEXT:
        text = pattern.sub(instead, text)
    return text
