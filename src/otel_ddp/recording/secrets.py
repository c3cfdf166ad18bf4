"""Finds secrets in users' texts and settings by name and form, to keep them out of the journal.

SECURITY.md describes which secrets are found, and which are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

HIDDEN = "[hidden]"
# Compiles patterns at first use: many runs never need them.
_compiled = cache(re.compile)

_OPENS = (
    r"api|access|secret|private|ssh|auth|account|encryption|signing|license|hub|hf|huggingface"
    r"|openai|anthropic|wandb|swanlab|neptune|comet|mlflow|clearml|kaggle|aws|azure|gcp"
)
# Matches secret names. Separators are removed from a name first: passWord, aws_access_key_id.
_SECRET = (
    rf"password|passwd|passphrase|accesssignature|(?:{_OPENS})key|git(?:hub|lab)pat$"
    rf"|(?:{_OPENS}|github|gitlab|session|security|refresh|bearer|sas|oauth|jwt|slack)tokens?(?!i)"
)
# Matches names of webhook addresses and of exporter headers. These are secret too, as anyone who
# has such a value can send data there.
_SENDS = r"webhook|apprise|otelddpnotify|otelexporterotlp\w*headers"
# A name with one of these words hides its value, and all values nested below it.
_HEADERS = frozenset({"authorization", "cookie", "cookies"})
_SECRET_WORDS = frozenset({"secret", "secrets", "credential", "credentials"}) | _HEADERS
# After one of these names, an unquoted value extends to the end of the line. An example is
# `Authorization: Bearer x`.
_LINES = _HEADERS | {"headers", "notify"}
# A name that ends with one of these words followed by `pass` is a password: db_pass.
_ACCOUNTS = frozenset({"db", "smtp", "user", "mail", "email", "mysql", "postgres", "redis", "ftp"})
# `pad.token` and similar are special tokens of a tokenizer, not secrets.
_OF_VOCABULARY = frozenset({"bos", "eos", "pad", "unk", "mask", "sep", "cls"})
# A name that starts or ends with a word of _COUNTS is a number, and one that ends with a word of
# _PLACES is a path. Neither is a secret.
_COUNTS = frozenset({"num", "n", "count", "max", "min"})
_PLACES = frozenset({"file", "path", "dir", "directory"})
_WORD = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+"
# Matches a random token: at least 20 characters, with letters and digits, and at most one
# separator. A name of a column in a table would have more separators.
_RANDOM = r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])(?=.{20})[A-Za-z0-9+=]*[-_]?[A-Za-z0-9+=]{16,}"
# At most this many characters of a name, or of a value, are examined to decide if it is secret.
_LONGEST = 200


def is_secret(name: str, value: Any) -> bool:
    """Whether this setting is a secret, which must not be recorded."""
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, str) and not value):
        return False
    hides = _hides(name[:_LONGEST])
    return hides(value) if callable(hides) else hides


# Cached, as a text usually repeats a few names.
@lru_cache(maxsize=512)
def _hides(name: str) -> bool | Callable[[Any], bool]:
    """True if the value of this name is always secret, False if never; else a function that tells
    it from the value."""
    words = [_words(part) for part in name.split(".")]
    last = words[-1]
    if not last or last[0] in _COUNTS or last[-1] in _COUNTS | _PLACES:
        return False
    if any(_says_so(each) or not _SECRET_WORDS.isdisjoint(each) for each in words):
        return True
    if any(_compiled(_SENDS).search("".join(each)) for each in words):
        return lambda value: not isinstance(value, int)
    *before, word = last
    if word == "pwd":
        return lambda value: isinstance(value, str) and not value.startswith("/")
    plainly = (word == "pass" and (not before or before[-1] in _ACCOUNTS)) or (
        # `X-Token` is a header with a secret. But `pad.token` names a token of a tokenizer's
        # vocabulary.
        word == "token"
        and before in ([], ["x"])
        and _OF_VOCABULARY.isdisjoint(words[-2] if len(words) > 1 else ())
    )
    if plainly:
        return lambda value: isinstance(value, str)
    return _is_random if word in ("token", "key") else False


def _is_random(value: Any) -> bool:
    return isinstance(value, str) and bool(_compiled(_RANDOM).fullmatch(value[:_LONGEST]))


def _words(name: str) -> list[str]:
    return [word.lower() for word in _compiled(_WORD).findall(name)]


def _says_so(words: list[str]) -> bool:
    return bool(_compiled(_SECRET).search("".join(words)))


# Matches a name in a text, up to where its value begins. The text may be anything, so the search
# must take linear time: few places can begin a match, and no repetition is nested in another.
_NAMED = r"""(?x)
    (?<![\w.-])(?P<option>-+)?(?P<name>[\w.][\w.-]*)
    (?:
        (?P<quote>\\*["'])?\]?\s*
        # A type annotation, in a line of Python source.
        (?::\s*(?:str|bytes|Optional\[str\])(?:\s*\|\s*None)?\s*(?==))?
        (?P<sign>=>|:=|[=!]?=|:|\((?=["'])|(?(quote),|(?!)))
        | (?(option)(?=\s)|(?!))
    )\s*
"""
# Matches a value: within quotes, which may be escaped, or up to white space or punctuation.
_VALUE = r"""(?xs)
    (?:(?:[bBrRfFuU]{1,2}|[\w.]*[(\[{]+)?(?:
        "(?:"")?(?P<double>[^"\\]*(?:\\.[^"\\]*)*)
        | '(?:'')?(?P<single>[^'\\]*(?:\\.[^'\\]*)*)
        | \\+["'](?P<escaped>[^"'\\]*)
    ))
    | (?P<plain>[^\s"',;&)\]}\\]+)
"""
_REST_OF_LINE = r"[^\"'\n]*"
# How a tuple of a name and its value begins.
_TUPLES = ("('", '("', "(b'", '(b"')
# Values that are no secrets: null and booleans, and types in annotations of parameters.
_NO_VALUES = frozenset({"none", "null", "true", "false", "str", "bytes", "int", "bool"})

# A character of a URL.
_REST = r"[^\s\"'<>]"
# How the secret part of a webhook's path begins: at Feishu and Teams, Discord, Mattermost.
_IN_PATH = r"[0-9a-f]{8}-[0-9a-f]{4}-|\d{17}|(?=[a-z]{0,15}\d)[a-z0-9]{16}"
# Secrets that are recognized by their form, whatever their name. Each entry has a substring of it,
# which is searched first, as that is cheap; the pattern; and the replacement.
_FORMS = (
    # User and password in a URL, or in an option of curl.
    ("@", r"//[^\s/\"'<>]*@", "//"),
    (
        ":",
        r"((?<![\w-])-(?:[uU]|-(?:proxy-)?user)(?:[\"'],\s{0,3}[\"']|=|\s{1,3}[\"']?)"
        r"[\w.@+-]{1,100}:)(?!\d+\b|//)[^\s\"']+",
        rf"\1{HIDDEN}",
    ),
    # The URL of a webhook; or only its path, which is all that error messages of urllib3 show.
    (
        "://",
        rf"(?i)(https?://(?:hooks\.|{_REST}{{0,200}}?webhook)[^\s/?\"'<>]{{0,100}}[/?]){_REST}+",
        rf"\1{HIDDEN}",
    ),
    ("/T", rf"(/(?:services|workflows|triggers)/)(?=T[A-Z0-9]{{6,20}}/){_REST}+", rf"\1{HIDDEN}"),
    (
        "hook",
        rf"(?i)(/(?:web)?hooks?(?:b2)?/(?:send\?key=)?)(?={_IN_PATH}){_REST}+",
        rf"\1{HIDDEN}",
    ),
    ("/bot", rf"(/bot)\d{{6,}}:{_REST}+", rf"\1{HIDDEN}"),
    # Query parameters of a signed URL.
    ("=", r"(?i)([?&][\w-]{0,40}(?:token|signature|sig)=)[^\s&\"'<>]+", rf"\1{HIDDEN}"),
    ("", r"(?i)\b(bearer(?:\s|%20))(?=[^\s\d]{0,200}\d)[\w+/=.~-]{16,}", rf"\1{HIDDEN}"),
    # Tokens with a known prefix; private keys.
    (
        "",
        r"(?<![\w-])(?:hf_\w{20,}|sk-(?=[\w-]{0,80}\d)(?=[\w-]{0,80}[A-Z])[\w-]{20,}"
        r"|sk_live_\w{16,}|gh[pousr]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
        r"|nvapi-[\w-]{20,}|wandb_v1_\w{20,}|AIza[\w-]{30,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
        r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,1000}\.[\w-]{8,}\.[\w-]{8,})",
        HIDDEN,
    ),
    ("-----BEGIN", r"(?s)-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*", HIDDEN),
)


def without_secrets(text: str) -> str:
    """The text with likely secrets replaced."""
    for part, pattern, instead in _FORMS:
        if part in text:
            text = _compiled(pattern).sub(instead, text)
    kept: list[str] = []
    end = 0
    for named in _compiled(_NAMED).finditer(text):
        # Skip this name if it lies inside a value that is already hidden, or if its value is never
        # secret.
        if named.start() < end or not _hides(named["name"][-_LONGEST:]):
            continue
        # To decide whether a value is secret, its first _LONGEST characters suffice. Only a secret
        # is matched to its end.
        value = _compiled(_VALUE).match(text, named.end(), named.end() + _LONGEST)
        if value and _is_named_secret(text, named, value):
            at = value.start(value.lastgroup or 0)
            whole = _compiled(_VALUE).match(text, named.end())
            if value["plain"] and not _LINES.isdisjoint(_words(named["name"])):
                whole = _compiled(_REST_OF_LINE).match(text, at)
            kept += text[end:at], HIDDEN
            end = whole.end() if whole else at
    return "".join(kept) + text[end:]


def _is_named_secret(text: str, named: re.Match[str], value: re.Match[str]) -> bool:
    """Whether this value is secret because of the name before it."""
    name, sign, plain = named["name"][-_LONGEST:], named["sign"], value["plain"]
    found = value[value.lastgroup or 0]
    if found.startswith(HIDDEN[:-1]) or (plain and plain.lower() in _NO_VALUES):
        return False
    if sign is None:
        return not found.startswith("-") and is_secret(name, found)
    if sign == ",":
        # A comma separates a name from its value only in ["--token", "x"] and ("token", "x").
        # Elsewhere it separates words of a list.
        opened = named["option"] or text.endswith(_TUPLES, 0, named.start())
        return bool(opened) and plain is None and is_secret(name, found)
    if not is_secret(name, int(found) if plain and plain.isdecimal() else found):
        return False
    if sign == ":" and plain and not named["quote"]:
        # In prose, a colon may follow any word. So hide the value only if the word is clearly a
        # secret's name, or if the value looks random.
        words = _words(name)
        is_made = len(plain) >= 8 and plain.isalnum() and not (plain.isalpha() or plain.isdecimal())
        return len(words) > 1 or _says_so(words) or words[0] in _HEADERS or is_made
    return True
