"""What counts as a secret, and what a configuration may be full of without being one."""

from __future__ import annotations

import pytest

from otel_ddp.recording import values
from otel_ddp.recording.secrets import HIDDEN, is_secret, without_secrets


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("password", "x"),
        ("db.password", 1234),
        ("dbPassword", "x"),
        ("DB_PASSWD", "x"),
        ("secrets.user", "x"),
        ("aws_credentials", ["x"]),
        ("token", "x"),
        ("hf_token", "x"),
        ("hubToken", "x"),
        ("key", "x"),
        ("api_key", "x"),
        ("WANDB_API_KEY", "x"),
        ("apiKey", "x"),
        ("service.key", "x"),
        ("my_key", "d41d8cd98f00b204e9800998ecf8427e"),
        ("http.authorization", "Basic x"),
    ],
)
def test_these_settings_are_hidden(name: str, value: object) -> None:
    assert is_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.1),
        ("max_tokens", 4096),
        ("tokenizer", "gpt2"),
        ("pad_token", "<pad>"),
        ("eosToken", "</s>"),
        ("token_dropout", True),
        ("num_tokens_per_batch", "1M"),
        ("key_dim", 64),
        ("num_key_value_heads", 8),
        ("sort_key", "val/loss"),
        ("image_key", "jpg"),
        ("keyframe", "x"),
        ("monkey", "x"),
        ("use_auth_token", True),
        ("hub_token", None),
        ("password", ""),
        ("git_sha", "d41d8cd98f00b204e9800998ecf8427e00000000"),
    ],
)
def test_these_settings_are_not(name: str, value: object) -> None:
    assert not is_secret(name, value)


def test_further_names_may_be_hidden() -> None:
    config = {"data": {"source": "s3", "rows": 3}, "internal_url": "x", "lr": 0.1}

    assert values.flat(config, hidden={"internal_*", "data.source"}) == {
        "data.source": HIDDEN,
        "data.rows": 3,
        "internal_url": HIDDEN,
        "lr": 0.1,
    }


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://me:pw@host/a?b=c", "https://host/a?b=c"),
        (
            "no way to postgresql://u:p@ss@db:5432/x (timeout)",
            "no way to postgresql://db:5432/x (timeout)",
        ),
        ("https://token@host", "https://host"),
        ("https://h/a?X-Amz-Signature=abc&x=1", f"https://h/a?X-Amz-Signature={HIDDEN}&x=1"),
        ("https://h/a?access_token=abc", f"https://h/a?access_token={HIDDEN}"),
        ("refused: password=hunter2, user=me", f"refused: password={HIDDEN}, user=me"),
        ('{"api_key": "abc", "a": 1}', f'{{"api_key": "{HIDDEN}", "a": 1}}'),
        ("Authorization: Bearer abcdefgh.ijk", f"Authorization: Bearer {HIDDEN}"),
        ("hf_" + "a1" * 17, HIDDEN),
        ("401 for sk-" + "a1" * 12, f"401 for {HIDDEN}"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n", HIDDEN),
    ],
)
def test_texts_lose_what_looks_like_a_secret(text: str, clean: str) -> None:
    assert without_secrets(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "mail me@example.org",
        "https://example.org/a?page=2&key_dim=3",
        "the token at position 3 is 'a'",
        "loss: 0.25",
        "expected key 'weight', got 'bias'",
        "a basic block of 64 channels",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert without_secrets(text) == text


def test_settings_attributes_and_errors_go_through_it() -> None:
    url = "https://me:pw@host/data"
    long = "x" * 980 + " https://me:" + "pw" * 50 + "@host"

    assert values.flat({"a": {"url": url, "token": "t"}, "urls": [url], "long": long}) == {
        "a.url": "https://host/data",
        "a.token": HIDDEN,
        "urls": "['https://host/data']",
        "long": "x" * 980 + " https://host",
    }
    assert values.attributes({"path": url, "api_key": "k"}) == {
        "path": "https://host/data",
        "api_key": HIDDEN,
    }
    assert values.error_line(OSError(f"no way to {url}")) == "OSError: no way to https://host/data"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece",
    [
        *("a", "a-", "a+a.", "://", "a://b", "x://y ", "@", "?a&", "?-", "_", "api_", "api-"),
        *("password=", "password'", "secret ", "bearer ", "bearer", "eyJ", "eyJ-", "eyJaaaaaaaa."),
        *("sk-", "hf_", "-----BEGIN ", "-----BEGIN A PRIVATE KEY", " ", "\n", "ü"),
    ],
)
def test_no_text_keeps_the_search_busy(piece: str) -> None:
    # With a repetition inside of another one, a single search took 14 s.
    text = (piece * 4000)[:4000]
    for _ in range(20):
        without_secrets(text)
        is_secret(text[:1000], text)
