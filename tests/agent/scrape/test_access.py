"""Who may read the endpoint: a token, and files that hold none."""

from __future__ import annotations

import base64
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from agent.scrape.serving import serving
from otel_ddp.agent.scrape import access


def status(url: str, authorization: str = "") -> int:
    headers = {"Authorization": authorization} if authorization else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def test_the_token_is_let_in_and_nothing_else() -> None:
    expected = {
        "": 401,
        "Bearer abc": 200,
        "bearer abc": 200,
        "Bearer abd": 401,
        "Bearer": 401,
        "Digest abc": 401,
        # As a browser shows it, under any name.
        basic("anyone", "abc"): 200,
        basic("abc", ""): 401,
        basic("anyone", "abd"): 401,
        "Basic abc": 401,
    }
    with serving(token=b"abc") as endpoint:
        for path in ("", "metrics"):
            url = endpoint.url.replace("metrics", path)
            assert {each: status(url, each) for each in expected} == expected
        # A probe has no token.
        assert status(endpoint.url.replace("metrics", "healthz")) == 200
    assert not any(access.admits(b"abc", f"{kind} \u00fc") for kind in ("Bearer", "Basic"))


def test_loopback_is_open_and_other_addresses_need_a_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("abc\n")

    assert access.find_token("", "127.0.0.1") == access.find_token("", "::1") == b""
    assert access.find_token("insecure", "0.0.0.0") == b""
    for host in ("127.0.0.1", "0.0.0.0"):
        assert access.find_token(str(path), host) == b"abc"
    for host in ("0.0.0.0", "::", "10.1.2.3"):
        with pytest.raises(access.Refused, match=f"^{host} is reached from other machines: set "):
            access.find_token("", host)


def test_a_file_without_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")

    for name, why in {"empty": "is empty", "nope": "cannot be read: No such file"}.items():
        path = tmp_path / name
        with pytest.raises(
            access.Refused, match=f"^OTEL_DDP_SCRAPE_TOKEN_FILE names {path}, which {why}"
        ):
            access.find_token(str(path), "127.0.0.1")
