"""Who may read the endpoint: a web configuration file in the form of Prometheus' exporters.

    tls_server_config: {cert_file, key_file}
    bearer_token_file: a file with one token (ours: the form of Prometheus has none)

Names of files are relative to the file itself. It is read once, when the agent starts.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_ddp import errors

INSECURE = "insecure"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Refused(Exception):
    """This file cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class WebConfig:
    """What the file says."""

    tls: ssl.SSLContext | None
    token: bytes
    """Empty: none is asked for."""
    certificate: str
    """Its file; empty without TLS."""

    def admits(self, authorization: str) -> bool:
        """Whether a request with this header may be answered."""
        kind, _, given = authorization.partition(" ")
        return not self.token or hmac.compare_digest(_token(kind.lower(), given), self.token)


def _token(kind: str, given: str) -> bytes:
    if kind == "bearer":
        return given.strip().encode()
    # A browser asks a person for a name and a password: the token is the password.
    if kind == "basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    return b""


def find(setting: str, host: str) -> WebConfig | None:
    """The rules for an endpoint on this host; None: everyone may read it. Raises Refused."""
    if setting.lower() == INSECURE:
        return None
    if setting:
        return read(Path(setting))
    if host in _LOOPBACK:
        return None
    raise Refused(
        f"{host} is reached from other machines: set OTEL_DDP_WEB_CONFIG to a file with TLS or a "
        f"token (docs/endpoint.md), or to {INSECURE} where everyone may read what is served"
    )


def read(path: Path) -> WebConfig:
    """Raises Refused."""
    try:
        import yaml

        return _understood(path, yaml.safe_load(path.read_text()) or {})
    except Refused:
        raise
    except ImportError:
        raise Refused(f"{path} needs PyYAML: pip install 'otel_ddp[web]'") from None
    except errors.ANY_ERROR as error:
        # A value of an unexpected type must not end the agent.
        raise Refused(f"{path} cannot be used: {_short(error)}") from None


def _understood(path: Path, said: Any) -> WebConfig:
    _check_keys(path, said, "bearer_token_file", "tls_server_config")
    tls, token, certificate = None, b"", ""
    if "tls_server_config" in said:
        tls = _context(path, of_tls := said["tls_server_config"] or {})
        certificate = str(_file(path, of_tls, "cert_file"))
    if "bearer_token_file" in said:
        found = _file(path, said, "bearer_token_file")
        try:
            token = found.read_bytes().strip()
        except OSError as error:
            raise Refused(f"{found} cannot be read: {_short(error)}") from None
        if not token:
            raise Refused(f"{found} is empty")
    if tls is None and not token:
        raise Refused(f"{path} protects nothing: name tls_server_config or bearer_token_file")
    return WebConfig(tls, token, certificate)


def _context(path: Path, said: Any) -> ssl.SSLContext:
    _check_keys(path, said, "cert_file", "key_file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    certificate, key = _file(path, said, "cert_file"), _file(path, said, "key_file")
    try:
        # A key with a passphrase would ask for it at the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise Refused(f"{path}: a certificate or key cannot be read: {_short(error)}") from None
    return context


def _check_keys(path: Path, said: Any, *known: str) -> None:
    if not isinstance(said, dict):
        raise Refused(f"{path} must have settings with a name: {', '.join(known)}")
    # A rule with a wrong letter must not be a rule that is missing.
    if unknown := [str(key) for key in said if key not in known]:
        raise Refused(
            f"{path}: {', '.join(unknown)} is not supported: {', '.join(known)} are. For users or "
            "certificates of clients, use a token, or put a proxy in front (docs/endpoint.md)"
        )


def _file(path: Path, said: Mapping[str, Any], key: str) -> Path:
    name = said.get(key)
    if not isinstance(name, str) or not name:
        raise Refused(f"{path}: {key} must name a file")
    return path.parent / name


def _short(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).split("\n")[0]
