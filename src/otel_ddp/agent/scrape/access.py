"""Who may read the endpoint: on loopback everyone, beyond it whoever has the token."""

from __future__ import annotations

import base64
import contextlib
import hmac
from ipaddress import ip_address
from pathlib import Path

INSECURE = "insecure"


class Refused(Exception):
    """The endpoint cannot be served like this; the text says why."""


def find_token(setting: str, host: str) -> bytes:
    """The token that an endpoint on this host asks for, empty if none. Raises Refused."""
    if setting.lower() == INSECURE:
        return b""
    if setting:
        return _read_token(Path(setting))
    if ip_address(host).is_loopback:
        return b""
    raise Refused(
        f"{host} is reached from other machines: set OTEL_DDP_SCRAPE_TOKEN_FILE to a file with a "
        f"token (docs/endpoint.md), or to {INSECURE} if everyone may read what is served"
    )


def _read_token(path: Path) -> bytes:
    try:
        token = path.read_bytes().strip()
        why = "" if token else "is empty"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    if why:
        raise Refused(f"OTEL_DDP_SCRAPE_TOKEN_FILE names {path}, which {why}")
    return token


def admits(token: bytes, authorization: str) -> bool:
    """Whether a request with this header may be answered."""
    kind, _, given = authorization.partition(" ")
    return not token or hmac.compare_digest(_given_token(kind.lower(), given), token)


def _given_token(kind: str, given: str) -> bytes:
    if kind == "bearer":
        return given.strip().encode()
    # A browser asks a person for a name and a password: the token is the password.
    if kind == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    return b""
