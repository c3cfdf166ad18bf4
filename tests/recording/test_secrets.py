"""What counts as a secret, and what a configuration may be full of without being one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_ddp.recording import values
from otel_ddp.recording.secrets import HIDDEN, is_secret, without_secrets


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("password", "x"),
        ("dbPassword", "x"),
        ("aws_credentials", ["x"]),
        ("token", "x"),
        ("key", "d41d8cd98f00b204e9800998ecf8427e"),
        ("api_key.openai", "x"),
        ("db_pass", "x"),
        ("GITHUB_PAT", "x"),
        ("pwd", "x"),
        ("http.authorization", "Basic x"),
        ("OTEL_DDP_NOTIFY", "https://example.org/x"),
        ("alerts.webhooks.team", ["https://example.org/x"]),
    ],
)
def test_these_settings_are_hidden(name: str, value: object) -> None:
    assert is_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.1),
        ("max_tokens", 4096),
        ("token_dropout", True),
        ("num_key_value_heads", 8),
        ("cache_key", "tokenized-c4-en-2024-v2-seq4096"),
        ("bos.token", "<s>"),
        ("PWD", "/home/me"),
        ("password_file", "/run/secrets/db"),
        ("forward_pass", "x"),
        ("use_auth_token", True),
        ("hub_token", None),
        ("git_sha", "d41d8cd98f00b204e9800998ecf8427e00000000"),
        ("webhook_timeout_s", 5),
    ],
)
def test_these_settings_are_not(name: str, value: object) -> None:
    assert not is_secret(name, value)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://me:pw@host/a?b=c", "https://host/a?b=c"),
        (
            "no way to postgresql://u:p@ss@db:5432/x (timeout)",
            "no way to postgresql://db:5432/x (timeout)",
        ),
        ("https://h/a?X-Amz-Signature=abc&x=1", f"https://h/a?X-Amz-Signature={HIDDEN}&x=1"),
        ("Authorization: Bearer abcdefgh.ijk", f"Authorization: {HIDDEN}"),
        ("401 for sk-" + "aB1" * 8, f"401 for {HIDDEN}"),
        ('password="correct horse" x=1', f'password="{HIDDEN}" x=1'),
        ("refused: 'password=hunter2'", f"refused: 'password={HIDDEN}'"),
        ("['--hub_token=S', 'a.token=S']", f"['--hub_token={HIDDEN}', 'a.token={HIDDEN}']"),
        ("AccountKey=abc;Pwd=def", f"AccountKey={HIDDEN};Pwd={HIDDEN}"),
        ("{'Cookie': 'a=S; b=S', 'n': 1}", f"{{'Cookie': '{HIDDEN}', 'n': 1}}"),
        ("OTEL_EXPORTER_OTLP_HEADERS=a=S,b=S", f"OTEL_EXPORTER_OTLP_HEADERS={HIDDEN}"),
        ("token: S1234567", f"token: {HIDDEN}"),
        ('["--secret",\n "S"]', f'["--secret",\n "{HIDDEN}"]'),
        ('password="""S"""', f'password="""{HIDDEN}"""'),
        ('password="' + "S " * 500, f'password="{HIDDEN}'),
        (r"{\"password\": \"S\"}", rf"{{\"password\": \"{HIDDEN}\"}}"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n", HIDDEN),
    ],
)
def test_texts_lose_what_looks_like_a_secret(text: str, clean: str) -> None:
    assert without_secrets(text) == clean


_UUID = "0a1b2c3d-0a1b-0a1b-0a1b-0a1b2c3d4e5f"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://hooks.slack.com/services/T01/B01/S", "https://hooks.slack.com/"),
        ("https://discord.com/api/v10/webhooks/1/S", "https://discord.com/api/v10/webhooks/"),
        ("https://x.webhook.office.com/webhookb2/S@S/I", "https://x.webhook.office.com/"),
        (f"https://open.feishu.cn/open-apis/bot/v2/hook/{_UUID}", "https://open.feishu.cn/open-apis/bot/v2/hook/"),
        ("https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=S", "https://qyapi.weixin.qq.com/cgi-bin/webhook/"),
        ("https://api.telegram.org/bot123456789:S/sendMessage", "https://api.telegram.org/bot"),
        ("https://chat.example.org/hooks/abcdefgh12345678S", "https://chat.example.org/hooks/"),
        # As urllib3 and requests have it in an error.
        ("with url: /services/T0123456/B0123456/S", "with url: /services/"),
        ("with url: /api/webhooks/123456789012345678/S", "with url: /api/webhooks/"),
        ("with url: /bot123456789:S/sendMessage", "with url: /bot"),
    ],
)  # fmt: skip
def test_the_address_of_a_webhook_ends_where_its_secret_begins(text: str, clean: str) -> None:
    for before, after in (("", ""), ("refused: ", " (timeout)"), ("['", "', 1]")):
        assert without_secrets(f"{before}{text}{after}") == f"{before}{clean}{HIDDEN}{after}"


@pytest.mark.parametrize(
    "text",
    [
        "mail me@example.org",
        "https://example.org/a?page=2&key_dim=3",
        "the token at position 3 is 'a'",
        "a basic transformer, a bearer of 64 channels",
        "https://example.org/a?sort_key=date",
        "sk-resnet-imagenet-pretrained",
        "--lr 0.1 --data /data/key: x",
        "max_tokens=512, token_count: 5, num_key_value_heads=8, tokens/s: 1200",
        "AddedToken('<pad>'), pad_token='<pad>', eos_token: </s>, tokenizer('a')",
        "columns: ['token', 'label'], keys: ['tokens', 'mask']",
        "past_key_values=None, password: str, password=None",
        "def train(self, token: str, lr: float) -> None:",
        'File "/src/otel_ddp/torch/hooks/model.py", line 3, and /hooks/test_1.py',
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
    assert values.attributes({"path": url, "api_key": "k", "headers": {"token": "S"}}) == {
        "path": "https://host/data",
        "api_key": HIDDEN,
        "headers": f"{{'token': '{HIDDEN}'}}",
    }
    assert values.error_line(OSError(f"no way to {url}")) == "OSError: no way to https://host/data"


# Where a secret stands in a text, by its name and its value.
FORMS = (
    *("{}={}", "{}={} b", "{}='{}'", '{}="{}"', "{} = '{}'", "{} => '{}'", "{} := {}", "{}=['{}'"),
    *("{{'{}': '{}'}}", '{{"{}": "{}", "b": 1}}', "{}: '{}'", "d['{}'] = '{}'", "{}('{}')"),
    *("--{} {}", "--{}={}", "['--{}', '{}']", '["--{}","{}"]', "-{} {}", "https://h/?a=1&{}={}"),
    *("{}=b'{}'", "{}=f('{}')", "('{}', '{}')", '("{}", "{}")', "({}: str | None = '{}')"),
)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20)
@given(
    name=st.sampled_from(
        ["token", "secret", "password", "hf_token", "apiKey", "X-Token", "client_secret"]
    ),
    before=st.text(max_size=20).filter(lambda text: not text[-1:].isalnum()),
    after=st.text(max_size=20),
)
def test_every_form_hides_the_same_names(form: str, name: str, before: str, after: str) -> None:
    # Neither a longer word nor one more dash is the same name.
    text = f"{before} {form.format(name, 'canary7x')} {after}"

    clean = without_secrets(text)

    assert "canary7x" not in clean
    assert without_secrets(clean) == clean


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece",
    [
        *("a", "a-", "://", "a://b", "//a", "@", "?a&", "_", "api_", "x.", " ", "\n", '"', "\\"),
        *("password=", "password'", "secret ", "bearer ", "eyJ-", "eyJaaaaaaaa.", "sk-", "hf_"),
        *("https://hooks.", "//hook/", "/hooks/1", "/services/T", "/bot1", "-----BEGIN "),
        *("token='", "x_token=", "--token ", "password=(", "key=a(", "cookie=", "&sig", "-u a:"),
    ],
)
def test_no_text_keeps_the_search_busy(piece: str) -> None:
    # With a repetition inside of another one, this would take hours.
    text = f"{(piece * 200_000)[:200_000]}!"

    without_secrets(text)
    is_secret(text, text)
