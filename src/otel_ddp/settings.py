"""Defines every setting once: its variable, default, parser and documentation."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from otel_ddp import files
from otel_ddp.errors import ConfigError
from otel_ddp.identity.identity import VARIABLES
from otel_ddp.identity.run_names import INHERITED_RUN
from otel_ddp.journal import layout

MIB = 1024 * 1024
SOURCES = ("gpu", "host", "process")
_ADVICE = "Correct it, or unset it for the default."

# The format of TRACEPARENT (W3C Trace Context): version, trace, span and flags. A future version
# may add fields at the end.
_TRACEPARENT = re.compile(
    "(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)

_OURS = "OTEL_DDP_"
_OTLP = "OTEL_EXPORTER_OTLP_"
# What follows OTEL_EXPORTER_OTLP_ in the names of variables: nothing for all signals, or a signal.
SIGNALS = ("", "METRICS_", "TRACES_", "LOGS_")

_Parse = Callable[[str, str], Any]
_T = TypeVar("_T")


# -- parsers


def _parsed(wanted: str, convert: Callable[[str], Any]) -> _Parse:
    """A parser for the text of a variable. Its ConfigError says that *wanted* was expected.

    *convert* raises ValueError or OverflowError for an invalid text.
    """

    def parse(variable: str, text: str) -> Any:
        try:
            return convert(text)
        except (ValueError, OverflowError):
            raise ConfigError(f"{variable} must be {wanted}, got {text!r}. {_ADVICE}") from None

    return parse


def _within(
    low: float, high: float, number: Callable[[str], float] = float
) -> Callable[[str], Any]:
    def convert(text: str) -> float:
        if not low <= (value := number(text)) <= high:
            raise ValueError
        return value

    return convert


def _text(variable: str, text: str) -> str:
    return text


def _path(or_else: str = "") -> _Parse:
    """A parser for a path, or for a text that matches the pattern *or_else*."""

    def convert(text: str) -> str:
        if or_else and re.fullmatch(or_else, text, re.IGNORECASE):
            return text
        # Relative paths are refused, as the agent and the CLI have other working directories than
        # the ranks. `~` is expanded here, as no shell does so in a file of variables.
        if not os.path.isabs(path := os.path.expanduser(text)):
            raise ValueError
        return path

    return _parsed("a path that begins with / or ~", convert)


def _addresses(variable: str, text: str) -> tuple[str, ...]:
    found = tuple(text.split())
    for number, each in enumerate(found, start=1):
        if not re.match(r"[A-Za-z][\w+.-]*://.", each):
            # The message omits the entry, as all of it may be a secret.
            raise ConfigError(
                f"{variable}: entry {number} must begin with its kind, as in https://, mailto:// "
                f"or slack://. {_ADVICE}"
            )
    return found


def _as_host(text: str) -> str:
    # Imported here, as few processes need it.
    import ipaddress

    # An IPv6 address may be in brackets: [::1].
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return str(ipaddress.ip_address("127.0.0.1" if host.lower() == "localhost" else host))


_host = _parsed("an address of this machine, such as 127.0.0.1 or 0.0.0.0", _as_host)
_seconds = _parsed("a number of seconds, 0 or more", _within(0, 1e9))
# The OpenTelemetry specification defines these variables in milliseconds. The fields are in
# seconds.
_milliseconds = _parsed(
    "a number of milliseconds above 0", lambda text: _within(1e-9, 1e12)(text) / 1000
)
_share_or_all = _parsed(
    "all, or a share from 0.0001 to 1, as in 0.005",
    lambda text: math.inf if text.lower() == "all" else _within(0.0001, 1.0)(text),
)


def _count(low: int, high: int) -> _Parse:
    return _parsed(f"a whole number from {low} to {high}", _within(low, high, int))


def _bytes(low: int, high: int = 2**63) -> _Parse:
    units = {"": 1, "k": 1024, "m": MIB, "g": 1024 * MIB}

    def number(text: str) -> int:
        word = text.lower().removesuffix("b").removesuffix("i")
        unit = word[-1:] if word[-1:] in units else ""
        return int(float(word.removesuffix(unit)) * units[unit])

    most = f" and at most {high}" if high < 2**63 else ""
    wanted = f"a number of bytes, at least {low}{most} (64k, 2M and 1G are understood)"
    return _parsed(wanted, _within(low, high, number))


def _some_of(*words: str) -> _Parse:
    def convert(text: str) -> frozenset[str]:
        chosen = frozenset(word.strip().lower() for word in text.split(",")) - {""}
        if chosen == {"none"}:
            return frozenset()
        if not chosen or not chosen <= set(words):
            raise ValueError
        return chosen

    return _parsed(f"none, or some of {', '.join(words)} with commas between them", convert)


def _one_of(*words: str) -> _Parse:
    def convert(text: str) -> str:
        if (word := text.strip().lower()) not in words:
            raise ValueError
        return word

    return _parsed(f"one of {', '.join(words)}", convert)


def _truth(variable: str, text: str) -> bool:
    # By the OpenTelemetry specification, only "true" counts as true, not "1" or "yes".
    return bool(_one_of("true", "false")(variable, text) == "true")


def _exporters(variable: str, text: str) -> str:
    # Accept all exporters of the OpenTelemetry specification, also those that we lack: the variable
    # may be meant for other programs.
    for word in text.split(","):
        _one_of("otlp", "none", "prometheus", "console", "logging", "zipkin")(variable, word)
    return text.strip().lower()


def _as_traceparent(text: str) -> str:
    if not _TRACEPARENT.fullmatch(text):
        raise ValueError
    return text


# -- the settings


def _setting(variable: str, default: _T, parse: _Parse = _text) -> _T:
    metadata = {"variable": variable, "parse": parse}
    found: _T = field(default=default, metadata=metadata)
    return found


@dataclass(frozen=True)
class Settings:
    """The settings in effect."""

    # The text below each field is its row in docs/settings.md.

    disabled: bool = _setting("OTEL_SDK_DISABLED", False, _truth)
    """`true`: no journal, no agent; every call does nothing."""
    agent: str = _setting("OTEL_DDP_AGENT", "auto", _one_of("auto", "offline", "external", "off"))
    """Who starts the node's agent. `auto`: the run's first process; `offline`: the same, but data
    stays on disk for `otel-ddp replay`; `external`: the platform; `off`: nobody."""
    strategy: str = _setting("OTEL_DDP_STRATEGY", "all")
    """Ranks whose training series leave the node: `all`, `node` (local rank 0), `main` (rank 0).
    `init` also takes a function: `lambda who: who.global_rank in (0, 8)`."""
    directory: str = _setting("OTEL_DDP_DIR", "", _path())
    """Directory of the journals and the agent's file; no other user may write to it. Unset: a
    private one on tmpfs."""
    node: str = _setting("OTEL_DDP_NODE", "")
    """Name of this node, instead of its host name; on Kubernetes `spec.nodeName`."""
    journal_bytes: int = _setting(
        "OTEL_DDP_JOURNAL_BYTES", 2 * MIB, _bytes(layout.SMALLEST_FILE, layout.LARGEST_FILE)
    )
    """Size of a process's journal. A larger one loses no data if the agent pauses for longer."""
    say: str = _setting("OTEL_DDP_SAY", "auto", _one_of("auto", "all", "nothing"))
    """What the first rank prints on stderr. `auto`: where to see the run, and a summary of a run
    of 10 s or more; `all`: both for each run; `nothing`: neither."""
    lead: str = _setting("OTEL_DDP_LEAD", "auto", _one_of("auto", "off"))
    """`auto`: rank 0's agent leads a run on several nodes. `off`: each agent judges its own
    ranks."""
    sample_steps: int = _setting("OTEL_DDP_SAMPLE_STEPS", 100, _count(0, 1_000_000_000))
    """Interval in steps: one step in each interval sends spans and records its gradient norm. Some
    slow steps send spans too."""
    overhead: float = _setting("OTEL_DDP_OVERHEAD", 0.005, _share_or_all)
    """Share of a training thread's time that hooks may take. If they would take more, only one of
    2, 4, 8, ... steps is measured. `all`: every step is measured."""
    stall_timeout_s: float = _setting("OTEL_DDP_STALL_TIMEOUT_S", 60.0, _seconds)
    """After this time without progress a rank counts as stalled, or
    [later](diagnosis.md#hangs-no-rank-moves) if its steps or phases are long."""
    sources: frozenset[str] = _setting("OTEL_DDP_SOURCES", frozenset(SOURCES), _some_of(*SOURCES))
    """What the agent measures on its node, or `none`. Leave out `host` if another agent sends
    `system.*`."""
    linger_s: float = _setting("OTEL_DDP_LINGER_S", 300.0, _seconds)
    """How long the agent serves the final state after the last process ended."""
    interval_s: float = _setting("OTEL_METRIC_EXPORT_INTERVAL", 5.0, _milliseconds)
    """How often the agent exports, in milliseconds."""
    timeout_s: float = _setting("OTEL_EXPORTER_OTLP_TIMEOUT", 10.0, _milliseconds)
    """How long one export may take, in milliseconds."""
    protocol: str = _setting(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", _one_of("http/protobuf", "grpc")
    )
    """`http/protobuf` or `grpc`."""
    endpoint: str = _setting("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    """Address of the collector. Unset: nothing is sent. A user and password in the address are sent
    as `Authorization` and never shown."""
    scrape_host: str = _setting("OTEL_EXPORTER_PROMETHEUS_HOST", "127.0.0.1", _host)
    """Address on which the agent serves `/metrics`."""
    scrape_port: int = _setting("OTEL_EXPORTER_PROMETHEUS_PORT", 9464, _count(0, 65535))
    """Port of `/metrics` and the page, or the next free one. 0: the system chooses."""
    scrape_token_file: str = _setting("OTEL_DDP_SCRAPE_TOKEN_FILE", "", _path(or_else="insecure"))
    """File with the token for `/metrics` and the page, or `insecure`: everyone may read `/metrics`.
    Unset: both are served on loopback only ([how](page.md#scrape-metrics))."""
    spool_directory: str = _setting("OTEL_DDP_SPOOL_DIR", "", _path())
    """Directory for undelivered data and offline runs. By default a private one in /var/tmp."""
    spool_bytes: int = _setting("OTEL_DDP_SPOOL_BYTES", 256 * MIB, _bytes(MIB))
    """Limit of undelivered data. Above it, the agent drops the oldest data, and counts it."""
    history_directory: str = _setting("OTEL_DDP_HISTORY_DIR", "", _path())
    """Directory for histories and post-mortems. By default a private one in /var/tmp."""
    history_bytes: int = _setting("OTEL_DDP_HISTORY_BYTES", 1024 * MIB, _bytes(MIB))
    """Limit of all histories together; above it, the agent deletes the oldest run."""
    notify: tuple[str, ...] = _setting("OTEL_DDP_NOTIFY", (), _addresses)
    """Addresses of [notifications](notifications.md), separated by spaces: `https://` or `http://`
    for webhooks, other forms as in the library apprise."""
    artifact_sink: str = _setting("OTEL_DDP_ARTIFACTS", "", _path(or_else=".*://.*"))
    """Where the agent stores a copy of each output of `run.artifact`: a directory or an fsspec
    address, such as `s3://bucket/runs`."""

    @property
    def offline(self) -> bool:
        """Whether the agent stores all data on disk for a later replay, and sends nothing."""
        return self.agent == "offline"

    @property
    def starts_agent(self) -> bool:
        """Whether the run's first process starts the node agent."""
        return self.agent in ("auto", "offline")

    @property
    def spools(self) -> str:
        """The directory of the spools, which hold data that was not delivered yet."""
        return self.spool_directory or str(files.default_root())


def _own(name: str, *parts: str) -> tuple[str, ...]:
    return tuple(f"{_OTLP}{each}{name}" for each in (*SIGNALS[1:], *parts))


# OpenTelemetry's standard variables that are no fields of `Settings`, but that we check: the parser
# of each.
STANDARD: Mapping[tuple[str, ...], _Parse] = {
    _own("ENDPOINT"): _text,
    _own("PROTOCOL"): _one_of("http/protobuf", "grpc"),
    _own("TIMEOUT"): _milliseconds,
    _own("HEADERS", ""): _text,
    _own("COMPRESSION", ""): _one_of("none", "gzip"),
    _own("INSECURE", ""): _truth,
    _own("CERTIFICATE", ""): _path(),
    _own("CLIENT_CERTIFICATE", ""): _path(),
    _own("CLIENT_KEY", ""): _path(),
    ("OTEL_METRICS_EXPORTER", "OTEL_TRACES_EXPORTER", "OTEL_LOGS_EXPORTER"): _exporters,
    ("TRACEPARENT",): _parsed("a span as W3C Trace Context writes it", _as_traceparent),
    ("OTEL_SERVICE_NAME",): _text,
    ("OTEL_RESOURCE_ATTRIBUTES",): _text,
}

_PARSERS: Mapping[str, _Parse] = {
    **{name: _text for names in VARIABLES.values() for name in names},
    **{each.metadata["variable"]: each.metadata["parse"] for each in fields(Settings)},
    **{name: parse for names, parse in STANDARD.items() for name in names},
}


# -- reading


def read(env: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
    """The current settings. *arguments*: values that replace those of the variables.

    Raises ConfigError if one of our own variables has an invalid value.
    """
    env = os.environ if env is None else env
    values = {name: given for name, given in arguments.items() if given is not None}
    for each in fields(Settings):
        if each.name not in values and (found := value(each.metadata["variable"], env)) is not None:
            values[each.name] = found
    return Settings(**values)


def value(variable: str, env: Mapping[str, str]) -> Any:
    """The value of a variable.

    None if it is unset, or a standard variable with an invalid value.
    """
    # By the OpenTelemetry specification, an empty variable counts as unset.
    if not (text := env.get(variable, "").strip()):
        return None
    try:
        return _PARSERS[variable](variable, text)
    except ConfigError:
        # An invalid standard variable is no error, since it may be meant for other programs.
        if variable.startswith(_OURS):
            raise
        return None


def names() -> set[str]:
    """The names of all variables that we read."""
    return set(_PARSERS)


def unknown(env: Mapping[str, str] | None = None) -> Iterator[str]:
    """A sentence for each variable that begins with OTEL_DDP_ but is unknown."""
    env = os.environ if env is None else env
    for name in sorted(env.keys() - names() - {INHERITED_RUN}):
        if name.startswith(_OURS):
            yield f"{name} is not known and has no effect: docs/settings.md lists all"


def refused(env: Mapping[str, str]) -> dict[str, str]:
    """For each of our variables with an invalid value, why: a training would not start with it."""
    return {name: why for name, why in _invalid(env) if name.startswith(_OURS)}


def doubts(env: Mapping[str, str] | None = None, exports: bool = True) -> Iterator[str]:
    """A sentence for each standard variable with an invalid value, which counts as unset.

    Such a variable raises no error, because it may be meant for another program. *exports*: whether
    our agent sends data; if not, it ignores OTLP's variables, and so does this function.
    """
    for name, why in _invalid(os.environ if env is None else env):
        unused = name.startswith(_OTLP) and not exports
        if not unused and not name.startswith(_OURS):
            yield f"{why.removesuffix(f'. {_ADVICE}')}; it counts as unset"


def _invalid(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, parse in _PARSERS.items():
        if text := env.get(name, "").strip():
            try:
                parse(name, text)
            except ConfigError as error:
                yield name, str(error)
