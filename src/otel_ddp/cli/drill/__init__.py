"""otel-ddp drill: plays a late rank, a hang and a death, and checks that the alarms work."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

from otel_ddp import settings
from otel_ddp.cli.drill.checks import Check, Drill
from otel_ddp.cli.drill.collector import collector
from otel_ddp.cli.drill.http_api import HttpApi
from otel_ddp.cli.drill.plays import Stage, three_plays
from otel_ddp.cli.drill.prometheus import Prometheus
from otel_ddp.cli.temporary_place import end_by_signals
from otel_ddp.cli.text import cell, print_answer
from otel_ddp.errors import ConfigError

_PROMETHEUS = "http://127.0.0.1:9090"
_NO_TORCH = (
    "The drill trains with PyTorch, which is not installed for this Python: pip install '.[torch]' "
    "in the folder of otel_ddp, or pip install 'torch>=2.4'."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Play a late rank, a hang and a death with small trainings of its own on this machine, and "
        "check that the deployed servers see them: series, alerts, boards. The alerts are real "
        "ones, of the group `drill`."
    )
    parser.add_argument(
        "--prometheus",
        type=_url,
        metavar="URL",
        help=f"the Prometheus with the alerts (default: PROMETHEUS_URL, else {_PROMETHEUS})",
    )
    parser.add_argument(
        "--prometheus-token-file",
        type=Path,
        metavar="FILE",
        help="a bearer token for it (default: PROMETHEUS_TOKEN; a user: http://user:password@host)",
    )
    parser.add_argument(
        "--grafana",
        type=_url,
        metavar="URL",
        help="ask what its boards ask, through it (default: OTEL_DDP_GRAFANA_URL, else the boards "
        "of this version are asked of Prometheus)",
    )
    parser.add_argument(
        "--grafana-token-file",
        type=Path,
        metavar="FILE",
        help="the token of a viewer (default: GRAFANA_TOKEN)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=300.0,
        help="how long to wait for the alerts (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, for programs")


def run(options: argparse.Namespace) -> int:
    env = os.environ
    try:
        disabled = settings.read().disabled
        prometheus = HttpApi(
            options.prometheus or _url(env.get("PROMETHEUS_URL") or _PROMETHEUS),
            _token(options.prometheus_token_file, "PROMETHEUS_TOKEN"),
        )
        grafana_url = options.grafana or _url(env.get("OTEL_DDP_GRAFANA_URL", ""))
        grafana = (
            HttpApi(grafana_url, _token(options.grafana_token_file, "GRAFANA_TOKEN"))
            if grafana_url
            else None
        )
    except (ConfigError, argparse.ArgumentTypeError) as why:
        print(why, file=sys.stderr)
        return 2
    if disabled:
        print("Nothing would be recorded: OTEL_SDK_DISABLED is set; unset it.", file=sys.stderr)
        return 2
    if importlib.util.find_spec("torch") is None:
        print(_NO_TORCH, file=sys.stderr)
        return 2
    for server in (prometheus, grafana):
        if server is not None and server.tells_secrets:
            print(f"! {server.name} gets its token or password unencrypted", file=sys.stderr)
    end_by_signals()
    drill = Drill(Prometheus(prometheus), grafana, options.seconds)
    done = []
    # Closed here, however this ends: its processes end with it.
    with contextlib.closing(_checks(drill, options.seconds, tell=not options.json)) as checks:
        for check in checks:
            done.append(check)
            if not options.json and (status := print_answer(line(check))):
                return status
    red = [each for each in done if not each.ok]
    if options.json:
        print_answer(json.dumps(answer(done), indent=2))
    elif red:
        print_answer(f"{len(red)} of {len(done)} checks failed.")
    else:
        print_answer(f"All {len(done)} checks passed: the alarms work.")
    return 1 if red else 0


def _checks(drill: Drill, seconds: float, *, tell: bool) -> Generator[Check, None, None]:
    servers = list(drill.servers(collector()))
    yield from servers
    if not all(each.ok for each in servers):
        # Nothing would arrive, or nothing could be seen of it.
        return
    yield drill.rules()
    plays = three_plays()
    runs = [each.run for each in plays]
    if tell:
        print(f"Playing {', '.join(runs)}: at most {seconds:g} s ...", flush=True)
    with Stage(plays, os.environ):
        yield from drill.plays(plays)
        yield from drill.boards(runs)


def line(check: Check) -> str:
    """One check, for a terminal."""
    state = "ok  " if check.ok else "FAIL"
    return f"{state} {check.seconds:5.0f} s  {check.what}: {cell(check.sentence)}"


def answer(checks: Sequence[Check]) -> dict[str, object]:
    """All checks as JSON. Programs read these keys."""
    return {
        "ok": all(each.ok for each in checks),
        "checks": [{**each._asdict(), "seconds": round(each.seconds, 1)} for each in checks],
    }


def _url(text: str) -> str:
    if text and not text.lower().startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"an address begins with http:// or https://, got {text!r}"
        )
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if 0 < seconds < math.inf:
        return seconds
    raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")


def _token(file: Path | None, variable: str) -> str:
    if file is None:
        return os.environ.get(variable, "").strip()
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
