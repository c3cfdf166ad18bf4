"""What the answers of NVML mean: its error codes, its words and its fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp.agent.node.gpu.driver import Absent, Lost

# Numbers of the binary interface, written out: an older nvidia-ml-py lacks some of the names.
SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25

ABSENT = {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH}
LOST = {UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED}

# Which member of the union a value type fills.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
NARROW_TYPE = 1  # unsigned, 32 bits

U32 = 0xFFFF_FFFF
ALL_LINKS = U32
# In these widths all ones mean that a number is not available.
_NOT_AVAILABLE = {NARROW_TYPE: U32, 2: 2**64 - 1, 3: 2**64 - 1, 4: -1, 5: -1}
LONGEST_TEXT = 100


class Field(NamedTuple):
    """A number that is read in a batch; `scope` is a link where there are several."""

    number: int
    scope: int = 0


class FieldValue(NamedTuple):
    value: float
    narrow: bool
    """Whether it has but 32 bits."""


def printable(text: str | bytes) -> str:
    """What a driver says in words, fit for a label."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    text = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(text.split())[:LONGEST_TEXT]


def words(ask: Callable[[], str | bytes]) -> str:
    try:
        return printable(ask())
    except UnicodeDecodeError as error:
        # nvidia-ml-py insists on UTF-8; the maker of a board need not.
        return printable(error.object)


class Calls:
    """One device of NVML, asked by name of the function; failures are told in our own words."""

    def __init__(self, lib: Any, handle: Any) -> None:
        self.lib = lib
        self.handle = handle

    def ask(self, function: str, *arguments: Any) -> Any:
        call = getattr(self.lib, function, None)
        if call is None:
            raise Absent(f"this nvidia-ml-py has no {function}")
        return self.guarded(lambda: call(self.handle, *arguments))

    def words(self, function: str) -> str:
        return words(lambda: self.ask(function))

    def guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except self.lib.NVMLError as error:
            self._fail(error.value, error)
            raise

    def _fail(self, code: int, error: Exception) -> None:
        """Raise what a code stands for; nothing for those that are one attempt's."""
        if code in ABSENT:
            raise Absent(printable(str(error))) from error
        if code in LOST:
            raise Lost(printable(str(error))) from error
        if code == INVALID_ARGUMENT:
            # Either the question suits no such device, or a driver reload has made the handle void.
            try:
                self.lib.nvmlDeviceGetUUID(self.handle)
            except self.lib.NVMLError:
                raise Lost("the driver no longer knows the device") from error
            raise Absent(printable(str(error))) from error

    def supported(self, fields: Sequence[Field]) -> set[Field]:
        """Those of these fields that the device may have."""
        try:
            answers = self.ask("nvmlDeviceGetFieldValues", [tuple(each) for each in fields])
        except Absent:
            return set()
        # A driver that is older than a field says that the argument is invalid.
        refusals = {*ABSENT, INVALID_ARGUMENT}
        return {
            field
            for field, answer in zip(fields, answers, strict=True)
            if answer.nvmlReturn not in refusals
        }

    def fields(self, fields: Sequence[Field]) -> Mapping[Field, FieldValue]:
        """What could be read of them, in one call."""
        answers = self.ask("nvmlDeviceGetFieldValues", [tuple(each) for each in fields])
        found = {}
        for field, answer in zip(fields, answers, strict=True):
            if answer.nvmlReturn in LOST:
                raise Lost(printable(str(self.lib.NVMLError(answer.nvmlReturn))))
            if answer.nvmlReturn == SUCCESS and 0 <= answer.valueType < len(_MEMBERS):
                kind = answer.valueType
                value = getattr(answer.value, _MEMBERS[kind])
                # Beyond the bounds of whatever it is.
                known = math.inf if value == _NOT_AVAILABLE.get(kind) else float(value)
                found[field] = FieldValue(known, narrow=kind == NARROW_TYPE)
        return found
