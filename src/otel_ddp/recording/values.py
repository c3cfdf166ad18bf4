"""Converts logged values and names to plain floats and clean text, or explains why not."""

from __future__ import annotations

import re
import reprlib
import sys
from collections import deque
from collections.abc import Mapping
from functools import partial
from hashlib import blake2s
from itertools import islice
from math import isfinite, prod
from typing import Any

from otel_ddp import errors
from otel_ddp.recording.secrets import HIDDEN, is_secret, without_secrets

_SPLITS = {
    "training": "train",
    "validate": "val",
    "validation": "val",
    "eval": "val",
    "evaluation": "val",
    "valid": "val",
    "testing": "test",
}
_KNOWN_SPLITS = ("train", "val", "test")
# In characters. Longer names are cut, and get a digest of the whole name to stay distinct.
LONGEST_NAME = 200
# The most settings in a configuration, and the longest text of one. If settings are long, the
# journal may have room for fewer.
MOST_SETTINGS = 2000
LONGEST_SETTING = 1000
COMPLEX = "a complex number has no place on a curve; log its parts"
_CONTROLS = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]+")
# Matches the memory address of an object. It is removed, as it would make the same configuration
# look different in each run.
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")
_CONTAINERS = (list, tuple, set, frozenset, dict, deque, bytes, bytearray)


class Refused(Exception):
    """A value or name that cannot be recorded. The text gives the reason, and completes "... was
    not recorded: "."""


def number(value: Any) -> float:
    """One number as a float. A device tensor is refused, as reading it would wait for the
    device."""
    kind = type(value)
    if kind is float or kind is bool:
        return float(value)
    # Converting any other value may run user code, which may raise anything.
    found = errors.attempt(lambda: _number(value), None)
    if found is None:
        raise Refused(f"a number was expected, got {shown(value)}")
    if isinstance(found, str):
        raise Refused(found)
    return found


def _number(value: Any) -> float | str | None:
    """The value as a float; or a text on why it cannot be one; or None if it is nothing like a
    number."""
    if is_device_tensor(value):
        return f"a number was expected, got {shown(value)}"
    if _is_array(value):
        if why := no_scalar(value):
            return why
        value = value.item()
    if isinstance(value, complex):
        return COMPLEX
    # Refuse text and buffers, which float() would accept.
    if not hasattr(type(value), "__float__") and not hasattr(type(value), "__index__"):
        return None
    try:
        return float(value)
    except OverflowError:
        return "it is larger than any float"


def no_scalar(array: Any) -> str:
    """Why this is not a single number; empty if it is one."""
    if is_spread(array):
        return "its parts are spread over ranks; log what full_tensor() gives"
    shape = tuple(int(length) for length in array.shape)
    if prod(shape) != 1:
        return f"one number was expected, got {prod(shape)} (shape {shape})"
    return ""


def _is_array(value: Any) -> bool:
    return hasattr(value, "item") and hasattr(value, "shape")


def is_device_tensor(value: Any) -> bool:
    """Whether this is a torch tensor on a device."""
    # While torch is being imported, it has no Tensor yet.
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    if kind is None or kind not in type(value).__mro__:
        return False
    return errors.attempt(lambda: bool(value.device.type != "cpu"), True)


def is_spread(tensor: Any) -> bool:
    """Whether the tensor is spread over ranks (a sharded DTensor), so that reading it needs a
    collective."""
    placements = getattr(tensor, "placements", None)
    return placements is not None and not all(each.is_replicate() for each in placements)


def text(name: Any, longest: int) -> str:
    """A name as clean text of bounded length."""
    clean = ""
    if isinstance(name, str):
        clean = str.__str__(name)  # a subclass may return another text
    elif isinstance(name, (int, float)):
        # str() of an int with thousands of digits raises.
        clean = errors.attempt(lambda: str(name), "")
    if not clean:
        raise Refused(f"a name must be text, got {shown(name)}")
    # Shorten the name first, as cleaning a megabyte takes time.
    if len(clean) > longest:
        digest = blake2s(clean.encode("utf-8", "replace"), digest_size=4).hexdigest()
        clean = f"{clean[: longest - 9]}~{digest}"
    return clean.encode("utf-8", "replace").decode().replace("\0", "?")


def one_line(words: str, longest: int) -> str:
    """Text for one line: line breaks and control characters become spaces."""
    # Shorten the text first, as cleaning a long one takes time.
    return _CONTROLS.sub(" ", words[: 4 * longest]).strip()[:longest]


def split_of(name: str, split: str | None) -> str:
    """The split of a value: *split* if given, else the one with which its name begins, else
    `train`."""
    if split is not None:
        return known_split(split) or split
    return split_in(name) or "train"


def split_in(name: str) -> str:
    """The split at the start of a name, as in `val/loss`; empty without one."""
    return known_split(name.replace("_", "/").replace(".", "/").split("/", 1)[0])


def known_split(word: str) -> str:
    """The split that a word means: `train`, `val` or `test`; empty for any other word."""
    word = _SPLITS.get(word.lower(), word.lower())
    return word if word in _KNOWN_SPLITS else ""


def attributes(given: Mapping[str, Any], longest: int = 1024, most: int = 64) -> dict[str, Any]:
    """The attributes of a span or an event: scalars unchanged, all else as short text."""
    clean: dict[str, Any] = {}
    for key, value in islice(given.items(), most):
        try:
            name = text(key, 200)
        except Refused:
            name = "?"
        clean[name] = _unless_secret(name, value, longest)
    return clean


def flat(given: Any, most: int = MOST_SETTINGS, longest: int = LONGEST_SETTING) -> dict[str, Any]:
    """Flatten a nested configuration to dotted names; depth, number and lengths are limited."""
    found: dict[str, Any] = {}
    # A stack instead of recursion, as a configuration may be deep or contain itself.
    stack: list[tuple[str, Any, int]] = [("", given, 0)]
    while stack and len(found) < most:
        prefix, value, depth = stack.pop()
        # Read only the first *most* items, as a mapping may be huge. If it is a user's own class,
        # reading may raise anything.
        look = partial(_inside, value, most)
        inner = errors.attempt(look, None) if depth < 16 else None
        # Record an empty mapping as a value of its own. It has no items that would show that it was
        # there.
        if inner is None or (not inner and prefix):
            if prefix:
                found[prefix] = _unless_secret(prefix, value, longest)
            continue
        for key, item in reversed(inner):
            words = str.__str__(key) if isinstance(key, str) else _words(key, 200)
            name = words[:200].encode("utf-8", "replace").decode()
            stack.append((f"{prefix}.{name}"[:1000] if prefix else name, item, depth + 1))
    return found


def _inside(value: Any, most: int) -> list[tuple[Any, Any]] | None:
    """The items of a mapping or of a plain data object; None for anything else."""
    if isinstance(value, Mapping):
        return list(islice(value.items(), most))
    if isinstance(value, type):
        return None
    # Treat argparse.Namespace, dataclasses and similar objects like mappings.
    if hasattr(value, "__dataclass_fields__"):
        fields = islice(value.__dataclass_fields__, most)
        return [(name, errors.attempt(partial(getattr, value, name), None)) for name in fields]
    if type(value).__name__ in ("Namespace", "SimpleNamespace"):
        return list(islice(vars(value).items(), most))
    return None


def _unless_secret(name: str, value: Any, longest: int) -> Any:
    # If the check raises, as it may for a user's own subclass of str, hide the value.
    secret = errors.attempt(lambda: is_secret(name, value), True)
    return HIDDEN if secret else plain(value, longest)


def plain(value: Any, longest: int) -> Any:
    """A value for JSON: scalars unchanged, all else as short text."""
    return errors.attempt(lambda: _plain(value, longest), f"<{type(value).__name__}>")


def _plain(value: Any, longest: int) -> Any:
    if not isinstance(value, str) and not is_device_tensor(value) and _is_array(value):
        shape = value.shape
        if not is_spread(value) and len(shape) == 0:
            value = value.item()  # NumPy's integers are no int
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**53:
        return int(value)
    if isinstance(value, float):
        # JSON has no infinity and no NaN.
        return float(value) if isfinite(value) else str(float(value))
    if isinstance(value, str):
        # Hide secrets first and shorten the text then: a secret cut in half would not be
        # recognized.
        return _short(without_secrets(str.__str__(value[: 4 * longest])), longest)
    return without_secrets(_words(value, longest))


def _words(value: Any, longest: int) -> str:
    """Any value as text, as `print` shows it; only the first items of a container are read."""
    if is_device_tensor(value) or isinstance(value, _CONTAINERS):
        return shown(value, longest)
    words = errors.attempt(lambda: str(value), "")
    if not isinstance(words, str) or not words:
        return shown(value, longest)
    return _short(_ADDRESS.sub("", words[: 2 * longest]), longest)


def _short(words: str, longest: int) -> str:
    words = words[: longest + 1].encode("utf-8", "replace").decode()
    return words if len(words) <= longest else f"{words[: longest - 1]}…"


class _Shown(reprlib.Repr):
    """Makes a short text of any value without reading all of it, and never waits for a device."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 20
        self.maxdeque = self.maxarray = 20
        self.maxstring = self.maxlong = self.maxother = max(longest, 16)

    def repr1(self, x: Any, level: int) -> str:
        if is_device_tensor(x):
            return f"a tensor on {x.device}"  # its repr would synchronize
        if isinstance(x, (bytes, bytearray)):
            return repr(x[: self.maxstring])
        return super().repr1(x, level)

    def repr_instance(self, x: Any, level: int) -> str:
        return errors.attempt(lambda: repr(x), f"<{type(x).__name__}>")


def shown(value: Any, longest: int = 60) -> str:
    """A value in a few characters, for a warning."""
    # `repr` may run user code, which may raise anything.
    words = errors.attempt(lambda: _Shown(longest).repr(value), f"<{type(value).__name__}>")
    return _short(words, longest)


def exception_names(error: BaseException) -> tuple[str, str]:
    """An exception's class name (`error.type`), and the same with its module (`exception.type`)."""
    kind = type(error)
    module = str(kind.__module__)
    return kind.__qualname__, (
        kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"
    )


def error_line(error: BaseException) -> str:
    """An exception in one line."""
    message = errors.attempt(lambda: str(error), "")
    message = one_line(without_secrets(message[:4000]), 1000)
    return f"{type(error).__name__}: {message}"[:1000] if message else type(error).__name__
