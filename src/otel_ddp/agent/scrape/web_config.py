"""Who may read the endpoint: a web configuration file in the form of Prometheus' exporters.

    tls_server_config: {cert_file, key_file, client_ca_file, client_auth_type, min_version}
    basic_auth_users: {name: bcrypt hash}
    bearer_token_file: a file with one token (ours: the form of Prometheus has none)

Names of files are relative to the file itself. It is read again when it or a file it names changes.
"""

from __future__ import annotations

import base64
import hmac
import logging
import os
import re
import ssl
import threading
from collections.abc import Mapping
from hashlib import blake2s
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp.errors import containment

log = logging.getLogger("otel_ddp.agent")

_TLS_KEYS = {"cert_file", "key_file", "client_ca_file", "client_auth_type", "min_version"}
_KEYS = {"tls_server_config", "basic_auth_users", "bearer_token_file"}
_CLIENTS = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
INSECURE = "insecure"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_EXTRA = "pip install 'otel_ddp[web]'"
_HASH = re.compile(r"\$2[aby]\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")


class Refused(Exception):
    """This file cannot be used; the text says why."""


class _Rules(NamedTuple):
    """What the file says."""

    tls: ssl.SSLContext | None
    users: Mapping[str, bytes]
    token: bytes
    files: Mapping[Path, tuple[int, int]]
    """The files that were read, and their state at that time."""


def find(setting: str, host: str) -> WebConfig | None:
    """The rules for an endpoint on this host; None: everyone may read it. Raises Refused."""
    if setting.lower() == INSECURE:
        return None
    if setting:
        return WebConfig(Path(setting))
    if host in _LOOPBACK:
        return None
    raise Refused(
        f"{host} is reached from other machines: set OTEL_DDP_WEB_CONFIG to a file with TLS, users "
        f"or a token (docs/endpoint.md), or to {INSECURE} where everyone may read what is served"
    )


class WebConfig:
    """The rules of one file. Threads of the endpoint ask; one of them reads the file again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._rules = _read(path)
        self._refused = ""
        # A bcrypt hash takes as long as a scrape: what was right once is kept, under a digest.
        self._known: set[bytes] = set()
        self._salt = os.urandom(16)

    def tls(self) -> ssl.SSLContext | None:
        """The context for a new connection; None without TLS."""
        return self._present().tls

    def asks_for_names(self) -> bool:
        """Whether a request needs a password or a token."""
        rules = self._present()
        return bool(rules.users or rules.token)

    def admits(self, authorization: str) -> bool:
        """Whether a request with this header may be answered."""
        rules = self._present()
        if not rules.users and not rules.token:
            return True
        kind, _, given = authorization.strip().partition(" ")
        if kind.lower() == "bearer":
            return bool(rules.token) and hmac.compare_digest(given.strip().encode(), rules.token)
        if kind.lower() == "basic" and rules.users:
            return self._is_user(rules, given.strip())
        return False

    def _is_user(self, rules: _Rules, given: str) -> bool:
        import bcrypt

        try:
            name, _, password = base64.b64decode(given, validate=True).decode().partition(":")
        except ValueError:
            return False
        # An unknown name is compared with the hash of another user: its answer takes as long.
        hashed = rules.users.get(name) or next(iter(rules.users.values()))
        digest = blake2s(given.encode() + hashed, key=self._salt).digest()
        if digest in self._known:
            return name in rules.users
        # One at a time: each takes a core for a moment, and trainings need them. Passwords of more
        # than 72 bytes are an error in new versions of bcrypt, and cut in old ones.
        with self._asking:
            matches = bcrypt.checkpw(password.encode()[:72], hashed)
        if matches:
            self._known.add(digest)
        return matches and name in rules.users

    def _present(self) -> _Rules:
        """The rules as they are now; a file that cannot be used any more leaves the last ones."""
        with self._lock:
            if any(_state(path) != state for path, state in self._rules.files.items()):
                try:
                    self._rules = _read(self._path)
                    self._known.clear()
                    self._refused = ""
                except Refused as why:
                    if str(why) != self._refused:
                        self._refused = str(why)
                        log.warning("%s: the endpoint goes on by what it said before", why)
            return self._rules


def _read(path: Path) -> _Rules:
    try:
        return _parse(path)
    except Refused:
        raise
    except containment.ANY_ERROR as error:
        # A value of an unexpected type must not end the agent.
        raise Refused(f"{path} cannot be used: {_short(error)}") from None


def _parse(path: Path) -> _Rules:
    try:
        import yaml
    except ImportError:
        raise Refused(f"{path} needs PyYAML: {_EXTRA}") from None
    files = {path: _state(path)}
    try:
        said = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refused(f"{path} cannot be read: {_short(error)}") from None
    if not isinstance(said, dict):
        said = {}
    _check_keys(path, said, _KEYS)
    users = said.get("basic_auth_users") or {}
    if not isinstance(users, dict) or not all(_is_hash(each) for each in users.values()):
        raise Refused(f"{path}: basic_auth_users must be names with bcrypt hashes")
    if users:
        try:
            import bcrypt  # noqa: F401
        except ImportError:
            raise Refused(f"{path}: basic_auth_users needs bcrypt: {_EXTRA}") from None
    tls, token = None, b""
    if "tls_server_config" in said:
        tls = _context(path, said["tls_server_config"], files)
    if "bearer_token_file" in said:
        token_path = _file(path, said, "bearer_token_file", files)
        try:
            token = token_path.read_bytes().strip()
        except OSError as error:
            raise Refused(f"{token_path} cannot be read: {_short(error)}") from None
        if not token:
            raise Refused(f"{token_path} is empty")
    if tls is None and not users and not token:
        raise Refused(f"{path} protects nothing: name some of {', '.join(sorted(_KEYS))}")
    hashes = {str(name): str(each).encode() for name, each in users.items()}
    return _Rules(tls, hashes, token, files)


def _context(path: Path, said: Any, files: dict[Path, tuple[int, int]]) -> ssl.SSLContext:
    if not isinstance(said, dict):
        raise Refused(f"{path}: tls_server_config must have cert_file and key_file")
    _check_keys(path, said, _TLS_KEYS)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    clients = said.get("client_auth_type") or (
        "RequireAndVerifyClientCert" if "client_ca_file" in said else "NoClientCert"
    )
    version = said.get("min_version") or "TLS12"
    if clients not in _CLIENTS:
        raise Refused(f"{path}: client_auth_type must be one of {', '.join(_CLIENTS)}")
    if version not in _VERSIONS:
        raise Refused(f"{path}: min_version must be one of {', '.join(_VERSIONS)}")
    if (clients != "NoClientCert") != ("client_ca_file" in said):
        raise Refused(f"{path}: {clients} and client_ca_file contradict each other")
    context.minimum_version = _VERSIONS[version]
    context.verify_mode = _CLIENTS[clients]
    try:
        context.load_cert_chain(
            _file(path, said, "cert_file", files),
            _file(path, said, "key_file", files),
            # A key with a passphrase would ask for it at the terminal.
            password="",
        )
        if "client_ca_file" in said:
            context.load_verify_locations(_file(path, said, "client_ca_file", files))
    except (OSError, ssl.SSLError) as error:
        raise Refused(f"{path}: a certificate or key cannot be read: {_short(error)}") from None
    return context


def _file(
    path: Path, said: Mapping[str, Any], key: str, files: dict[Path, tuple[int, int]]
) -> Path:
    name = said.get(key)
    if not isinstance(name, str) or not name:
        raise Refused(f"{path}: {key} must name a file")
    found = path.parent / name
    files[found] = _state(found)
    return found


def _check_keys(path: Path, said: Mapping[Any, Any], known: set[str]) -> None:
    # A rule with a wrong letter must not be a rule that is missing.
    if unknown := [str(key) for key in said if key not in known]:
        raise Refused(f"{path}: {', '.join(unknown)} is not known: {', '.join(sorted(known))} are")


def _is_hash(said: Any) -> bool:
    return isinstance(said, str) and _HASH.fullmatch(said) is not None


def _state(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino


def _short(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).split("\n")[0]
