"""Every setting in one table: its variables, its default, and what it does."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from otel_ddp.errors import ConfigError
from otel_ddp.identity.identity import VARIABLES
from otel_ddp.identity.run_names import INHERITED_RUN
from otel_ddp.journal import layout
from otel_ddp.journal.private_directories import default_root

MIB = 1024 * 1024
SOURCES = ("gpu", "host", "process")
_ADVICE = "Correct it, or unset it for the default."

# What the official exporters take for a header.
_HEADER = re.compile(r"[!#-'*+\-.0-9A-Z^-z|~]+[ \t]*=[ !#-+\--:<-\[\]-~]*")
# W3C Trace Context: version, trace, span, flags. Versions to come may add fields.
_TRACEPARENT = re.compile(
    "(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)

# Variables of other trackers; `offline` means the same here.
_MODES = ("SWANLAB_MODE", "WANDB_MODE")

_OTLP = "OTEL_EXPORTER_OTLP_"
# The parts of the names of OTLP's variables: for all signals, then for one each.
SIGNALS = ("", "METRICS_", "TRACES_", "LOGS_")


def _no_doubt(variable: str, text: str, env: Mapping[str, str]) -> Iterator[str]:
    yield from ()


class Setting(NamedTuple):
    """One row of the table."""

    name: str
    variables: tuple[str, ...]
    default: Any
    parse: Callable[[str, str], Any]
    meaning: str
    doubt: Callable[[str, str, Mapping[str, str]], Iterator[str]] = _no_doubt


class Settings(NamedTuple):
    """The settings in force, one field a row of TABLE."""

    disabled: bool
    agent: str
    strategy: str
    directory: str
    node: str
    journal_bytes: int
    max_names: int
    max_name_length: int
    hidden_names: frozenset[str]
    logs: str
    say: str
    sample_steps: int
    baseline: str
    stall_timeout_s: float
    sources: frozenset[str]
    linger_s: float
    interval_s: float
    timeout_s: float
    protocol: str
    endpoint: str
    scrape_host: str
    scrape_port: int
    web_config: str
    spool_directory: str
    spool_bytes: int
    postmortem_directory: str
    history_directory: str
    history_bytes: int
    grafana_url: str
    artifact_sink: str
    artifact_roots: tuple[str, ...]
    artifact_rate_bytes: int

    @property
    def offline(self) -> bool:
        """Whether an agent keeps everything on disk and sends nothing."""
        return self.agent == "offline"

    @property
    def starts_agent(self) -> bool:
        """Whether the first process of a run starts the node agent."""
        return self.agent in ("auto", "offline")

    @property
    def spools(self) -> str:
        """The directory in which spools lie."""
        named = self.spool_directory
        return os.path.abspath(named) if named else str(default_root())


def _text(variable: str, text: str) -> str:
    return text


def _directory(variable: str, text: str) -> str:
    # In a file of variables, no shell replaces the `~`.
    return os.path.expanduser(text)


def _meeting_place(variable: str, text: str) -> str:
    path = _directory(variable, text)
    # The agent and `otel-ddp status` have other working directories than the ranks.
    if not os.path.isabs(path):
        raise ConfigError(
            f"{variable} must be a path that begins with / or ~, got {text!r}. {_ADVICE}"
        )
    return path


def _directories(variable: str, text: str) -> tuple[str, ...]:
    return tuple(_meeting_place(variable, each) for each in text.split(":") if each)


def _sink(variable: str, text: str) -> str:
    return text if "://" in text else _meeting_place(variable, text)


def _web_config(variable: str, text: str) -> str:
    # The agent has another working directory.
    return text if text.lower() == "insecure" else _meeting_place(variable, text)


def _web_page(variable: str, text: str) -> str:
    # It is shown to everybody, so it may not have a password.
    if not re.fullmatch(r"https?://[^/@\s]+(/[^@\s]*)?", text, re.IGNORECASE):
        raise ConfigError(
            f"{variable} must be an address that begins with http:// or https://, without user "
            f"and password, got {text.rpartition('@')[2]!r}. {_ADVICE}"
        )
    return text


def _host(variable: str, text: str) -> str:
    # An address may have it in brackets: [::1].
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    # Imported here: few processes need it.
    import ipaddress

    try:
        ipaddress.ip_address(host)
    except ValueError:
        # No name server is asked: it may be slow, and a name of another machine cannot be served.
        name = os.uname().nodename.lower().partition(".")[0]
        if "/" in host or ":" in host or host.lower().partition(".")[0] not in ("localhost", name):
            raise ConfigError(
                f"{variable} must be an address of this machine, such as 127.0.0.1 or 0.0.0.0, or "
                f"its name, got {text!r}. {_ADVICE}"
            ) from None
    return host


def _seconds(variable: str, text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1e9:
        raise ConfigError(
            f"{variable} must be a number of seconds, 0 or more, got {text!r}. {_ADVICE}"
        )
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _milliseconds(variable: str, text: str) -> float:
    # The specification counts in milliseconds; the Python exporters read seconds, so we pass
    # them the number ourselves.
    value = _number(text)
    if not 0 < value < 1e12:
        raise ConfigError(
            f"{variable} must be a number of milliseconds above 0, got {text!r}. {_ADVICE}"
        )
    return value / 1000.0


def _count(low: int, high: int) -> Callable[[str, str], int]:
    def parse(variable: str, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise ConfigError(
                f"{variable} must be a whole number from {low} to {high}, got {text!r}. {_ADVICE}"
            )
        return value

    return parse


def _bytes(low: int, high: int = 2**63) -> Callable[[str, str], int]:
    units = {"": 1, "k": 1024, "m": MIB, "g": 1024 * MIB}

    def parse(variable: str, text: str) -> int:
        word = text.strip().lower().removesuffix("b").removesuffix("i")
        unit = word[-1:] if word[-1:] in units else ""
        try:
            value = int(float(word.removesuffix(unit)) * units[unit])
        except (ValueError, OverflowError):
            value = -1
        if not low <= value <= high:
            most = f" and at most {high}" if high < 2**63 else ""
            raise ConfigError(
                f"{variable} must be a number of bytes, at least {low}{most} "
                f"(64k, 2M and 1G are understood), got {text!r}. {_ADVICE}"
            )
        return value

    return parse


def _some_of(*words: str) -> Callable[[str, str], frozenset[str]]:
    def parse(variable: str, text: str) -> frozenset[str]:
        chosen = {word.strip().lower() for word in text.split(",")} - {""}
        if chosen == {"none"}:
            return frozenset()
        if not chosen or not chosen <= set(words):
            raise ConfigError(
                f"{variable} must be some of {', '.join(words)}, with commas between them, or "
                f"none; got {text!r}. {_ADVICE}"
            )
        return frozenset(chosen)

    return parse


def _names(variable: str, text: str) -> frozenset[str]:
    return frozenset(word.strip().lower() for word in text.split(",")) - {""}


def _one_of(*words: str) -> Callable[[str, str], str]:
    def parse(variable: str, text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ConfigError(
                f"{variable} must be one of {', '.join(words)}, got {text!r}. {_ADVICE}"
            )
        return word

    return parse


def log_level(level: object) -> int | None:
    """The number of a level of Python's logging, by its name or as it is; None if it is none."""
    if isinstance(level, int) and not isinstance(level, bool):
        return level if level >= 0 else None
    # Imported here: not every process needs it.
    import logging

    word = str(level).strip().upper()
    found = logging.getLevelName({"WARN": "WARNING", "FATAL": "CRITICAL"}.get(word, word))
    return found if isinstance(found, int) else None


def _log_words(variable: str, text: str) -> str:
    words = [word.strip() for word in text.split(",")]
    if log_level(words[0]) is None or "" in words:
        raise ConfigError(
            f"{variable} must begin with a level of logging, such as info, and may go on with the "
            f"other ranks' level and names of loggers, as in info,warning,root; got {text!r}. "
            f"{_ADVICE}"
        )
    return ",".join(words)


def _truth(variable: str, text: str) -> bool:
    # By the specification only "true" is true.
    return _one_of("true", "false")(variable, text) == "true"


def _exporters(variable: str, text: str) -> str:
    # Those that the specification knows are meant for others where they are not ours.
    for word in text.split(","):
        _one_of("otlp", "none", "prometheus", "console", "logging", "zipkin")(variable, word)
    return text.strip().lower()


def _traceparent(variable: str, text: str) -> str:
    if not _TRACEPARENT.fullmatch(text):
        raise ConfigError(
            f"{variable} must be a span as W3C Trace Context writes it, got {text!r}. {_ADVICE}"
        )
    return text


# What is wrong with an address or a file leaves no default: what is logged waits on disk meanwhile.
_LOST = "nothing can be sent that way"


def _doubt_endpoint(variable: str, text: str, env: Mapping[str, str]) -> Iterator[str]:
    protocols = (variable.replace("ENDPOINT", "PROTOCOL"), f"{_OTLP}PROTOCOL")
    grpc = next(filter(None, (value(each, env) for each in protocols)), "") == "grpc"
    if not grpc and not re.match("https?://", text, re.IGNORECASE):
        # Without the part that may be a password.
        host = text.rpartition("@")[2]
        yield f"{variable} must begin with http:// or https://, got {host!r}: {_LOST}"


def _doubt_headers(variable: str, text: str, env: Mapping[str, str]) -> Iterator[str]:
    for number, entry in enumerate(text.split(","), start=1):
        if entry.strip() and not _HEADER.fullmatch(entry.strip()):
            # Never the entry itself: it may be a token that lost its name.
            yield f"{variable}: entry {number} is not name=value and is left out"


def _doubt_attributes(variable: str, text: str, env: Mapping[str, str]) -> Iterator[str]:
    for number, entry in enumerate(text.split(","), start=1):
        if entry.strip() and "=" not in entry:
            sentence = f"{variable}: entry {number} is not key=value and is left out"
            yield f"{sentence}; in a value, a comma is %2C"


def _doubt_file(variable: str, text: str, env: Mapping[str, str]) -> Iterator[str]:
    try:
        os.close(os.open(text, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        signals = [each for each in SIGNALS if each and variable.startswith(f"{_OTLP}{each}")]
        endpoints = (
            env.get(f"{_OTLP}{each}ENDPOINT", "").strip() or env.get(f"{_OTLP}ENDPOINT", "").strip()
            for each in signals or SIGNALS
        )
        # Nothing named is this machine's own collector, which needs none.
        needed = any(each and not each.lower().startswith("http://") for each in endpoints)
        then = _LOST if needed else "nothing is sent that needs it"
        yield f"{variable} cannot be read: {text}: {error.strerror}: {then}"


TABLE: tuple[Setting, ...] = (
    Setting(
        "disabled",
        ("OTEL_SDK_DISABLED",),
        False,
        _truth,
        "`true`: no journal, no agent; every call does nothing.",
    ),
    Setting(
        "agent",
        ("OTEL_DDP_AGENT",),
        "auto",
        _one_of("auto", "offline", "external", "off"),
        "Who runs the node agent: `auto` the first process of a run starts one; `offline` the "
        "same, but it sends nothing and keeps everything on disk for `otel-ddp replay`; "
        "`external` the platform does; with `off` none runs, and each journal holds only the "
        "latest.",
    ),
    Setting(
        "strategy",
        ("OTEL_DDP_STRATEGY",),
        "all",
        _text,
        "Which ranks' training series leave the node: `all`, `node` (local rank 0 of each), "
        "`main` (rank 0), or a share such as `0.1`.",
    ),
    Setting(
        "directory",
        ("OTEL_DDP_DIR",),
        "",
        _meeting_place,
        "Where journals and the agent meet. By default a private directory on tmpfs.",
    ),
    Setting(
        "node",
        VARIABLES["node"],
        "",
        _text,
        "The name of this node, where the host name is not it (a DaemonSet, say).",
    ),
    Setting(
        "journal_bytes",
        ("OTEL_DDP_JOURNAL_BYTES",),
        2 * MIB,
        _bytes(layout.SMALLEST_FILE, layout.LARGEST_FILE),
        "Size of a process's journal. More bridges a longer absence of the agent.",
    ),
    Setting(
        "max_names",
        ("OTEL_DDP_MAX_NAMES",),
        1000,
        _count(1, 1_000_000),
        "How many different names one process may log; further ones are refused and counted.",
    ),
    Setting(
        "max_name_length",
        ("OTEL_DDP_MAX_NAME_LENGTH",),
        200,
        _count(32, 4096),
        "Characters of a logged name; a longer one is shortened and counted.",
    ),
    Setting(
        "hidden_names",
        ("OTEL_DDP_HIDE",),
        frozenset(),
        _names,
        "Further names of a configuration whose values are never recorded, with commas between "
        "them and `*` as wildcard: `internal_*,data.source`. SECURITY.md says which are hidden in "
        "any case.",
    ),
    Setting(
        "logs",
        ("OTEL_DDP_LOGS",),
        "",
        _log_words,
        "Record what the program logs by Python's `logging`, from this level on: `info`. It is the "
        "level of rank 0; the others begin at `warning`, or at a second level: `info,info`. "
        "Further words are names of loggers, `root` among them: `info,root`. By default those of "
        "the program ([logs](logs.md)).",
    ),
    Setting(
        "say",
        ("OTEL_DDP_SAY",),
        "auto",
        _one_of("auto", "all", "nothing"),
        "What the first rank says on stderr. `auto`: at the beginning where to look, at the end "
        "of a run of 10 seconds or more how it went; `all`: both of each run; `nothing`: neither.",
    ),
    Setting(
        "sample_steps",
        ("OTEL_DDP_SAMPLE_STEPS",),
        100,
        _count(0, 1_000_000_000),
        "Every so many steps one is looked at closely: its spans are sent, the norm of its "
        "gradients is taken. Steps out of the ordinary are sent in any case. 0: only those.",
    ),
    Setting(
        "baseline",
        ("OTEL_DDP_BASELINE",),
        "",
        _text,
        "The run that this one is measured against on the board Run: its samples per rank and "
        "second count as 1. Mostly the same training on one GPU, or on one node.",
    ),
    Setting(
        "stall_timeout_s",
        ("OTEL_DDP_STALL_TIMEOUT_S",),
        60.0,
        _seconds,
        "How long a rank stands still at least before it may count as stalled; more where its own "
        "steps and phases are longer.",
    ),
    Setting(
        "sources",
        ("OTEL_DDP_SOURCES",),
        frozenset(SOURCES),
        _some_of(*SOURCES),
        "What the agent reads of its node by itself: any of `gpu`, `host`, `process`, or `none`. "
        "Leave `host` out where an agent of the host already sends `system.*`.",
    ),
    Setting(
        "linger_s",
        ("OTEL_DDP_LINGER_S",),
        300.0,
        _seconds,
        "How long the agent serves the final state after the last process ended; 0: not at all.",
    ),
    Setting(
        "interval_s",
        ("OTEL_METRIC_EXPORT_INTERVAL",),
        5.0,
        _milliseconds,
        "How often the agent exports. In milliseconds, as the specification says; 5000.",
    ),
    Setting(
        "timeout_s",
        ("OTEL_EXPORTER_OTLP_TIMEOUT",),
        10.0,
        _milliseconds,
        "How long one export may take. In milliseconds, as the specification says; 10000.",
    ),
    Setting(
        "protocol",
        ("OTEL_EXPORTER_OTLP_PROTOCOL",),
        "http/protobuf",
        _one_of("http/protobuf", "grpc"),
        "How the agent speaks OTLP: `http/protobuf` or `grpc`.",
    ),
    Setting(
        "endpoint",
        ("OTEL_EXPORTER_OTLP_ENDPOINT",),
        "",
        _text,
        "The collector. Nothing set: one that answers on loopback's standard port is used, if it "
        "is run by root or by this user; else there is the scrape endpoint only. To its path, HTTP "
        "adds `/v1/metrics` and so on. A user and password in it are sent as `Authorization`, "
        "unless the headers have one, and are never shown.",
        _doubt_endpoint,
    ),
    Setting(
        "scrape_host",
        ("OTEL_EXPORTER_PROMETHEUS_HOST",),
        "127.0.0.1",
        _host,
        "The address `/metrics` is served on.",
    ),
    Setting(
        "scrape_port",
        ("OTEL_EXPORTER_PROMETHEUS_PORT",),
        9464,
        _count(0, 65535),
        "The port of `/metrics`; taken, the next free one is used. 0 lets the system choose.",
    ),
    Setting(
        "web_config",
        ("OTEL_DDP_WEB_CONFIG",),
        "",
        _web_config,
        "Who may read `/metrics` from other machines: a web configuration file as of Prometheus' "
        "exporters (TLS, a token), or `insecure`: everyone, unencrypted. Without either it "
        "is served on loopback only.",
    ),
    Setting(
        "spool_directory",
        ("OTEL_DDP_SPOOL_DIR",),
        "",
        _directory,
        "Where what could not be delivered waits, and what offline runs leave. By default a "
        "private directory in /var/tmp.",
    ),
    Setting(
        "spool_bytes",
        ("OTEL_DDP_SPOOL_BYTES",),
        256 * MIB,
        _bytes(MIB),
        "How much may wait there, for each agent; beyond it the oldest goes first, and is counted.",
    ),
    Setting(
        "postmortem_directory",
        ("OTEL_DDP_POSTMORTEM_DIR",),
        "",
        _directory,
        "Where a post-mortem is written when ranks die or stand still. By default a private "
        "directory in /var/tmp.",
    ),
    Setting(
        "history_directory",
        ("OTEL_DDP_HISTORY_DIR",),
        "",
        _directory,
        "Where the agent keeps the history of each run, a file each, for its page and for reports. "
        "By default a private directory in /var/tmp.",
    ),
    Setting(
        "history_bytes",
        ("OTEL_DDP_HISTORY_BYTES",),
        1024 * MIB,
        _bytes(0),
        "How much these files may take together; beyond it the oldest run goes first. 0: none is "
        "kept.",
    ),
    Setting(
        "grafana_url",
        ("OTEL_DDP_GRAFANA_URL",),
        "",
        _web_page,
        "The Grafana with the boards, as a browser reaches it: `https://grafana.example.org`. "
        "`run.url`, `otel-ddp status` and every verdict then have the address of the board.",
    ),
    Setting(
        "artifact_sink",
        ("OTEL_DDP_ARTIFACTS",),
        "",
        _sink,
        "Where the agent stores a copy of each output that `run.artifact` names: a directory, or "
        "an address that fsspec knows, such as `s3://bucket/runs`. By default nowhere.",
    ),
    Setting(
        "artifact_roots",
        ("OTEL_DDP_ARTIFACT_ROOTS",),
        (),
        _directories,
        "Below which directories an agent of the platform (`otel-ddp agent`) may read artifacts, "
        "with colons between them. By default none. An agent that a run has started reads what its "
        "user can read.",
    ),
    Setting(
        "artifact_rate_bytes",
        ("OTEL_DDP_ARTIFACT_RATE",),
        200 * MIB,
        _bytes(MIB),
        "How many bytes of artifacts the agent reads in a second at most.",
    ),
)


def read(env: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
    """The settings in force now; raises ConfigError for a value of ours that means nothing."""
    env = os.environ if env is None else env
    values: dict[str, Any] = {}
    for row in TABLE:
        given = arguments.pop(row.name, None)
        if given is None:
            given = next((found for each in row.variables for found in _valid(each, env)), None)
        values[row.name] = row.default if given is None else given
        if row.name == "agent" and offline_by(env):
            values["agent"] = "offline"
    if arguments:
        raise TypeError(f"unknown settings: {', '.join(arguments)}")
    return Settings(**values)


def value(variable: str, env: Mapping[str, str]) -> Any:
    """What a variable of a table says; None if it is unset, or standard and means nothing."""
    return next(_valid(variable, env), None)


def _valid(variable: str, env: Mapping[str, str]) -> Iterator[Any]:
    # An empty variable counts as unset, as the specification asks.
    if text := env.get(variable, "").strip():
        try:
            yield _ROWS[variable].parse(variable, text)
        except ConfigError:
            # A standard variable may be meant for other programs; ours are meant for us.
            if variable.startswith("OTEL_DDP_"):
                raise


def offline_by(env: Mapping[str, str] | None = None) -> str:
    """The variable of another tracker that keeps everything offline; empty if there is none.

    OTEL_DDP_AGENT takes precedence, and so does an endpoint: a user who names one wants to send.
    """
    env = os.environ if env is None else env
    ours = ("OTEL_DDP_AGENT", *(f"{_OTLP}{each}ENDPOINT" for each in SIGNALS))
    if any(env.get(name, "").strip() for name in ours):
        return ""
    modes = (name for name in _MODES if env.get(name, "").strip().lower() == "offline")
    return next(modes, "")


def names() -> set[str]:
    """All variables that are ours or that we read."""
    return set(_ROWS)


def unknown(env: Mapping[str, str] | None = None) -> Iterator[str]:
    """One sentence for each variable that looks like ours but is none."""
    env = os.environ if env is None else env
    known = names()
    ours = [name for name in sorted(env) if name.startswith("OTEL_DDP_")]
    for name in (name for name in ours if name not in known and name != INHERITED_RUN):
        # Imported here: every process imports this module, and few need difflib.
        import difflib

        near = difflib.get_close_matches(name, known, 1, cutoff=0.75)
        meant = f"is {near[0]} meant?" if near else "docs/settings.md lists those that there are"
        yield f"{name} is not known and has no effect: {meant}"


def doubts(env: Mapping[str, str] | None = None, exports: bool = True) -> Iterator[str]:
    """One sentence for each value of a standard variable that cannot be meant.

    These are no errors: a job must not end over them. *exports*: whether an agent of ours sends, so
    that the variables of OTLP count.
    """
    env = os.environ if env is None else env
    for variable, row in _ROWS.items():
        text = env.get(variable, "").strip()
        unused = variable.startswith(_OTLP) and not exports
        if text and not unused and not variable.startswith("OTEL_DDP_"):
            yield from row.doubt(variable, text, env)
            try:
                row.parse(variable, text)
            except ConfigError as error:
                yield f"{str(error).removesuffix(f'. {_ADVICE}')}; it counts as unset"


class Variable(NamedTuple):
    """Variables that other modules read; the first one that is set counts."""

    names: tuple[str, ...]
    meaning: str
    parse: Callable[[str, str], Any] = _text
    doubt: Callable[[str, str, Mapping[str, str]], Iterator[str]] = _no_doubt


# Read by `identity`, which has their names.
IDENTITY: tuple[Variable, ...] = (
    Variable(
        VARIABLES["group"],
        "`group`: what ties several processes or runs of one experiment together.",
    ),
    Variable(
        VARIABLES["run"],
        "`run`: the name of this launch, the same on all its ranks. By default the launcher's. "
        "A resumed run that has the same name again goes on as the same run.",
    ),
    Variable(
        VARIABLES["job_type"],
        "`job_type`: the role of this process; `train`.",
    ),
    Variable(
        VARIABLES["project"],
        "`project`: the `service.name` of what is exported.",
    ),
    Variable(
        VARIABLES["name"],
        "`name`: what people call the run; in its info.",
    ),
    Variable(
        VARIABLES["description"],
        "`description`: what the run is about, in 1,000 characters at most; in its info.",
    ),
    Variable(
        VARIABLES["tags"],
        "`tags`: words with commas between them, in code a list as well; in its info, sorted.",
    ),
    Variable(VARIABLES["global_rank"], "`global_rank`, counted from 0."),
    Variable(VARIABLES["local_rank"], "`local_rank`: the number on its node."),
    Variable(VARIABLES["world_size"], "`world_size`: how many ranks there are."),
    Variable(VARIABLES["node_rank"], "The number of this node among the run's."),
)


# Variables of other trackers. Those that name something are read with the identity.
OTHERS: tuple[Variable, ...] = (
    Variable(
        _MODES,
        "`offline`: as `OTEL_DDP_AGENT=offline`, unless that variable or an endpoint "
        "(`OTEL_EXPORTER_OTLP_ENDPOINT`, or a signal's own) is set: to name one is to want to "
        "send. One line says so. No other value has an effect.",
    ),
    Variable(
        ("SWANLAB_MODE=disabled", "WANDB_MODE=disabled", "WANDB_DISABLED"),
        "No effect: they are set to switch the other tracker off, often by who moves here. "
        "`OTEL_SDK_DISABLED=true` switches us off.",
    ),
    Variable(
        ("SWANLAB_RESUME", "WANDB_RESUME"),
        "No effect, and none is needed: a run goes on where its name comes again.",
    ),
)


def _otlp(name: str, *parts: str) -> tuple[str, ...]:
    """The own variable of each signal, which takes precedence; and the general one."""
    return tuple(f"{_OTLP}{each}{name}" for each in (*SIGNALS[1:], *parts))


# Read in `agent/`, or by the official exporters and the resource detector there.
EXPORT: tuple[Variable, ...] = (
    Variable(_otlp("ENDPOINT"), "Where one signal goes; used as it is.", doubt=_doubt_endpoint),
    Variable(_otlp("PROTOCOL"), "How one signal is sent.", _one_of("http/protobuf", "grpc")),
    Variable(_otlp("TIMEOUT"), "How long one export of a signal may take.", _milliseconds),
    Variable(
        _otlp("HEADERS", ""),
        "`name=value,name=value`, sent along: a token, say. Only a collector that an endpoint "
        "names gets them.",
        doubt=_doubt_headers,
    ),
    Variable(
        _otlp("COMPRESSION", ""),
        "`none`, `gzip` or `deflate`; by default `gzip` to other machines, and `none` on this one.",
        _one_of("none", "gzip", "deflate"),
    ),
    Variable(
        _otlp("INSECURE", ""),
        "`true`: gRPC to an address without a scheme is not encrypted.",
        _truth,
    ),
    Variable(
        _otlp("CERTIFICATE", ""),
        "A file: whom to trust, instead of the system's authorities.",
        doubt=_doubt_file,
    ),
    Variable(
        _otlp("CLIENT_CERTIFICATE", ""), "A file: the certificate that we show.", doubt=_doubt_file
    ),
    Variable(_otlp("CLIENT_KEY", ""), "A file: its key.", doubt=_doubt_file),
    Variable(
        ("OTEL_METRICS_EXPORTER", "OTEL_TRACES_EXPORTER", "OTEL_LOGS_EXPORTER"),
        "`none`: this signal is not exported. `/metrics` is served all the same.",
        _exporters,
    ),
    Variable(
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",),
        "`cumulative`, `delta` or `lowmemory`: how counters and histograms are exported.",
        _one_of("cumulative", "delta", "lowmemory"),
    ),
    Variable(
        ("TRACEPARENT",),
        "The launcher's span, as W3C Trace Context writes it: the run's span is below it.",
        _traceparent,
    ),
    Variable(("OTEL_SERVICE_NAME",), "`service.name`; the project, or `otel-ddp`."),
    Variable(
        ("OTEL_RESOURCE_ATTRIBUTES",),
        "`key=value,key=value`: further attributes of the resource; they win over ours.",
        doubt=_doubt_attributes,
    ),
)

_ROWS: dict[str, Setting | Variable] = {
    **{name: row for row in TABLE for name in row.variables},
    **{name: each for each in (*IDENTITY, *EXPORT) for name in each.names},
}


def markdown() -> str:
    """docs/settings.md, whole."""
    lines = [
        "# Settings",
        "",
        "An argument wins over the variable, the variable over the default. Variables are read",
        "when `init` or `instrument` is called and when the agent starts, not at import. This page",
        "is generated from `src/otel_ddp/settings.py` by `make docs`.",
        "",
        "| variable | default | what it does |",
        "|---|---|---|",
    ]
    for row in TABLE:
        shown = f"`{text}`" if (text := _shown(row)) else ""
        names = ", ".join(f"`{name}`" for name in row.variables)
        lines.append(f"| {names} | {shown} | {row.meaning} |")
    lines += [
        "",
        "A value that means nothing stops `init` with a sentence. Where a standard variable",
        "(`OTEL_*`, not `OTEL_DDP_*`) holds it, it may be meant for others: then it counts as",
        "unset, and one rank of a node says so. An address or a file that cannot be used has no",
        "default: what would be sent waits on disk.",
        "",
        "## Who a process is",
        "",
        "Of several variables the first that is set counts, an argument of `init` before them, and",
        "what torchrun, Slurm, MPI and their like set after them. `RANK` without `WORLD_SIZE` is a",
        "rank of an unknown number: its run waits for a process group, for a minute at most.",
        *_table(IDENTITY),
        "",
        "## Variables of other trackers",
        "",
        "Who comes from SwanLab or W&B may leave them set. Those that name something are above.",
        *_table(OTHERS),
        "",
        "## Export",
        "",
        "Standard variables, read when the agent starts. A signal's own wins over the general one,",
        "in the first table or here.",
        *_table(EXPORT),
    ]
    return "\n".join(lines) + "\n"


def _table(variables: tuple[Variable, ...]) -> Iterator[str]:
    yield from ("", "| variable | what it says |", "|---|---|")
    for each in variables:
        yield f"| {', '.join(f'`{name}`' for name in each.names)} | {each.meaning} |"


def _shown(row: Setting) -> str:
    if row.parse is _milliseconds:
        return f"{row.default * 1000:g}"
    if isinstance(row.default, tuple):
        return ":".join(row.default)
    if row.name.endswith("_bytes"):
        return f"{row.default // MIB}M"
    if isinstance(row.default, bool):
        return str(row.default).lower()
    if isinstance(row.default, frozenset):
        return ",".join(sorted(row.default))
    return f"{row.default:g}" if isinstance(row.default, float) else str(row.default)
