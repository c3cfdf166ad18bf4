"""Takes addresses of collectors apart: what is shown of them, and what is a secret."""

from __future__ import annotations

import base64
from ipaddress import ip_address
from urllib.parse import unquote, urlsplit


def without_credentials(url: str, with_path: bool = False) -> str:
    """An address that may be shown: credentials in it are left out."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the endpoint"
    if not parts.netloc:
        return url.split("?")[0].rpartition("@")[2]
    # A password with a slash ends the host too early.
    behind = url.split("?")[0].rpartition("@")[2] if "@" in url else parts.netloc
    host = behind.partition("/")[0]
    return f"{parts.scheme}://{host}{parts.path if with_path else ''}"


def take_user(url: str) -> tuple[str, str]:
    """An address without its user and password, and the Authorization that they make; or ""."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url, ""
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, ""
    pair = unquote(user) if ":" in user else f"{unquote(user)}:"
    packed = base64.b64encode(pair.encode()).decode()
    return parts._replace(netloc=host).geturl(), f"Basic {packed}"


def with_path(url: str, path: str) -> str:
    """An address with more of a path, before its query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"{url.rstrip('/')}{path}"
    if not parts.netloc:
        return f"{url.rstrip('/')}{path}"
    return parts._replace(path=f"{parts.path.rstrip('/')}{path}", fragment="").geturl()


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine."""
    host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
