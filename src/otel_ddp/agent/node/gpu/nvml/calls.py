"""Calls NVML for one device, and interprets its error codes, texts and fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from otel_ddp.agent.node.gpu.driver import DeviceLost, NotSupported
from otel_ddp.agent.node.gpu.nvml.table import U32, Field

# Numbers of the binary interface: an older nvidia-ml-py lacks some of the names.
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

# The member of the union for each value type.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
NARROW_TYPE = 1  # unsigned, 32 bits

# All ones mean that a number is not available, in these widths.
_NOT_AVAILABLE = {NARROW_TYPE: U32, 2: 2**64 - 1, 3: 2**64 - 1, 4: -1, 5: -1}
LONGEST_TEXT = 100


class FieldValue(NamedTuple):
    value: float
    narrow: bool
    """Whether it has only 32 bits."""


def printable(text: str | bytes) -> str:
    """A driver's text, made fit for a label."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    text = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(text.split())[:LONGEST_TEXT]


def words(ask: Callable[[], str | bytes]) -> str:
    try:
        return printable(ask())
    except UnicodeDecodeError as error:
        # nvidia-ml-py insists on UTF-8; the vendor of a board may not.
        return printable(error.object)


class Calls:
    """One device of NVML: calls functions by name, and raises our own exceptions."""

    def __init__(self, lib: Any, handle: Any) -> None:
        self.lib = lib
        self.handle = handle

    def ask(self, function: str, *arguments: Any) -> Any:
        call = getattr(self.lib, function, None)
        if call is None:
            raise NotSupported(f"this nvidia-ml-py has no {function}")
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
        """Raise our exception for a code; return if only this attempt failed."""
        if code in ABSENT:
            raise NotSupported(printable(str(error))) from error
        if code in LOST:
            raise DeviceLost(printable(str(error))) from error
        if code == INVALID_ARGUMENT:
            # Either this device has no such number, or a driver reload made the handle invalid.
            try:
                self.lib.nvmlDeviceGetUUID(self.handle)
            except self.lib.NVMLError:
                raise DeviceLost("the driver no longer knows the device") from error
            raise NotSupported(printable(str(error))) from error

    def supported(self, fields: Sequence[Field]) -> set[Field]:
        """The fields among these that the device may have."""
        try:
            answers = self.ask("nvmlDeviceGetFieldValues", [tuple(each) for each in fields])
        except NotSupported:
            return set()
        # A driver older than a field answers that the argument is invalid.
        refusals = {*ABSENT, INVALID_ARGUMENT}
        return {
            field
            for field, answer in zip(fields, answers, strict=True)
            if answer.nvmlReturn not in refusals
        }

    def fields(self, fields: Sequence[Field]) -> dict[Field, FieldValue]:
        """The fields that could be read, in one call."""
        answers = self.ask("nvmlDeviceGetFieldValues", [tuple(each) for each in fields])
        found = {}
        for field, answer in zip(fields, answers, strict=True):
            if answer.nvmlReturn in LOST:
                raise DeviceLost(printable(str(self.lib.NVMLError(answer.nvmlReturn))))
            if answer.nvmlReturn == SUCCESS and 0 <= answer.valueType < len(_MEMBERS):
                kind = answer.valueType
                value = getattr(answer.value, _MEMBERS[kind])
                # Infinity is beyond the bounds of every metric.
                known = math.inf if value == _NOT_AVAILABLE.get(kind) else float(value)
                found[field] = FieldValue(known, narrow=kind == NARROW_TYPE)
        return found
