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
        ("db.password", 1234),
        ("dbPassword", "x"),
        ("secrets.user", "x"),
        ("aws_credentials", ["x"]),
        ("token", "x"),
        ("hubToken", "x"),
        ("key", "d41d8cd98f00b204e9800998ecf8427e"),
        ("api_key.openai", "x"),
        ("aws_access_key_id", "x"),
        ("private_key_pem", b"x"),
        ("PGPASSWORD", "x"),
        ("db_pass", "x"),
        ("OpenAIKey", "x"),
        ("GITHUB_PAT", "x"),
        ("pwd", "x"),
        ("apiKey", "x"),
        ("my_key", "d41d8cd98f00b204e9800998ecf8427e"),
        ("http.authorization", "Basic x"),
        ("OTEL_DDP_NOTIFY", "https://example.org/x"),
        ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "x-team=x"),
        ("SLACK_WEBHOOK_URL", "https://example.org/x"),
        ("alerts.webhooks.team", ["https://example.org/x"]),
        ("apprise_urls", "json://example.org/x"),
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
        ("token_dropout", True),
        ("num_tokens_per_batch", "1M"),
        ("num_key_value_heads", 8),
        ("image_key", "observation.images.cam_1"),
        ("cache_key", "tokenized-c4-en-2024-v2-seq4096"),
        ("model_key", "meta-llama/Llama-3.1-8B-Instruct"),
        ("bos.token", "<s>"),
        ("initializer_token", "cat"),
        ("PWD", "/home/me"),
        ("num_secrets", 3),
        ("password_file", "/run/secrets/db"),
        ("forward_pass", "x"),
        ("monkey", "x"),
        ("use_auth_token", True),
        ("hub_token", None),
        ("password", ""),
        ("git_sha", "d41d8cd98f00b204e9800998ecf8427e00000000"),
        ("webhook_timeout_s", 5),
        ("notify", "never"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318"),
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
        ("https://token@host", "https://host"),
        ("https://h/a?X-Amz-Signature=abc&x=1", f"https://h/a?X-Amz-Signature={HIDDEN}&x=1"),
        ("https://h/a?access_token=abc", f"https://h/a?access_token={HIDDEN}"),
        ("Authorization: Bearer abcdefgh.ijk", f"Authorization: {HIDDEN}"),
        ("hf_" + "a1" * 17, HIDDEN),
        ("401 for sk-" + "aB1" * 8, f"401 for {HIDDEN}"),
        ('password="correct horse" x=1', f'password="{HIDDEN}" x=1'),
        ("refused: 'password=hunter2'", f"refused: 'password={HIDDEN}'"),
        ("[{'name': 'wandb', 'token': 'S'}]", f"[{{'name': 'wandb', 'token': '{HIDDEN}'}}]"),
        ("['--hub_token=S', 'a.token=S']", f"['--hub_token={HIDDEN}', 'a.token={HIDDEN}']"),
        ("AccountKey=abc;Pwd=def", f"AccountKey={HIDDEN};Pwd={HIDDEN}"),
        ("authorization=Basic%20dTpw", f"authorization={HIDDEN}"),
        ("Cookie: a=S; b=S", f"Cookie: {HIDDEN}"),
        ("{'Cookie': 'a=S; b=S', 'n': 1}", f"{{'Cookie': '{HIDDEN}', 'n': 1}}"),
        ("OTEL_DDP_NOTIFY=https://a/S https://b/S", f"OTEL_DDP_NOTIFY={HIDDEN}"),
        ("OTEL_EXPORTER_OTLP_HEADERS=a=S,b=S", f"OTEL_EXPORTER_OTLP_HEADERS={HIDDEN}"),
        ("X-Token: S", f"X-Token: {HIDDEN}"),
        ("token: S1234567", f"token: {HIDDEN}"),
        ("SharedAccessSignature=S", f"SharedAccessSignature={HIDDEN}"),
        ("curl -u me:S https://host", f"curl -u me:{HIDDEN} https://host"),
        ("['curl', '--user', 'me:S']", f"['curl', '--user', 'me:{HIDDEN}']"),
        ('["--secret",\n "S"]', f'["--secret",\n "{HIDDEN}"]'),
        ("(b'x-token', b'S')", f"(b'x-token', b'{HIDDEN}')"),
        (r'password="a\"S" b', f'password="{HIDDEN}" b'),
        ('password="""S"""', f'password="""{HIDDEN}"""'),
        ('password="' + "S " * 500, f'password="{HIDDEN}'),
        (r"{\"password\": \"S\"}", rf"{{\"password\": \"{HIDDEN}\"}}"),
        ('def f(password: str | None = "S")', f'def f(password: str | None = "{HIDDEN}")'),
        ("if password != 'S':", f"if password != '{HIDDEN}':"),
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
        ("404 for url: https://hooks.zapier.com/hooks/catch/1/S", "404 for url: https://hooks.zapier.com/"),
        ("https://discord.com/api/v10/webhooks/1/S", "https://discord.com/api/v10/webhooks/"),
        ("https://x.webhook.office.com/webhookb2/S@S/I", "https://x.webhook.office.com/"),
        (f"https://open.feishu.cn/open-apis/bot/v2/hook/{_UUID}", "https://open.feishu.cn/open-apis/bot/v2/hook/"),
        ("https://oapi.dingtalk.com/robot/send?access_token=S", "https://oapi.dingtalk.com/robot/send?access_token="),
        ("https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=S", "https://qyapi.weixin.qq.com/cgi-bin/webhook/"),
        ("https://api.telegram.org/bot123456789:S/sendMessage", "https://api.telegram.org/bot"),
        ("https://chat.example.org/hooks/abcdefgh12345678S", "https://chat.example.org/hooks/"),
        # As urllib3 and requests have it in an error.
        ("with url: /services/T0123456/B0123456/S", "with url: /services/"),
        ("with url: /api/webhooks/123456789012345678/S", "with url: /api/webhooks/"),
        (f"with url: /webhookb2/{_UUID}@S/I", "with url: /webhookb2/"),
        (f"with url: /open-apis/bot/v2/hook/{_UUID}", "with url: /open-apis/bot/v2/hook/"),
        (f"with url: /cgi-bin/webhook/send?key={_UUID}", "with url: /cgi-bin/webhook/send?key="),
        ("with url: /bot123456789:S/sendMessage", "with url: /bot"),
        # As apprise takes them.
        ("slack://S/S/S", "slack://"),
        ("discord://1/S", "discord://"),
        ("feishu://S", "feishu://"),
        ("dingtalk://S", "dingtalk://"),
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
        "loss: 0.25",
        "expected key 'weight', got 'bias'",
        "a basic transformer, a bearer of 64 channels",
        "Basic configuration of the model",
        "the secret: more data",
        "https://example.org/a?sort_key=date",
        "sk-resnet-imagenet-pretrained",
        "--lr 0.1 --data /data/key: x",
        "--max-tokens 512 --num-key-value-heads 8 --token-count 5 --tokenizer gpt2",
        "max_tokens=512, token_count: 5, num_key_value_heads=8, tokens/s: 1200",
        "AddedToken('<pad>'), pad_token='<pad>', eos_token: </s>, tokenizer('a')",
        "{'token': 5, 'key': 'weight'} and token=5",
        "columns: ['token', 'label'], keys: ['tokens', 'mask']",
        "KeyError: 'token'",
        "past_key_values=None, password: str, password=None",
        "docker run -u 1000:1000 image",
        "python -u train.py --password-file /run/secrets/db",
        "def train(self, token: str, lr: float) -> None:",
        'File "/src/otel_ddp/torch/hooks/model.py", line 3, and /hooks/test_1.py',
        "https://github.com/x/y/blob/main/hooks/a.py and s3://line/services/T/1",
        "the webhook: timed out after 5 s",
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
    *("{{'{}': '{}'}}", '{{"{}": "{}", "b": 1}}', "{}: '{}'", "('{}', '{}')", '("{}", "{}")'),
    *("--{} {}", "--{}={}", "['--{}', '{}']", '["--{}","{}"]', "-{} {}", "https://h/?a=1&{}={}"),
    *("d['{}'] = '{}'", "f('{}', '{}')", "{}('{}')", "({}: str = '{}')", "{}=b'{}'", "{}=f('{}')"),
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
        *("a", "a-", "a+a.", "://", "a://b", "x://y ", "//a", "@", "?a&", "?-", "_", "api_", "x."),
        *("password=", "password'", "secret ", "bearer ", "bearer", "eyJ", "eyJ-", "eyJaaaaaaaa."),
        *("https://", "https://hooks.", "//hook/", "/hooks/1", "/services/T", "slack://", "/bot1"),
        *("sk-", "hf_", "-----BEGIN ", "-----BEGIN A PRIVATE KEY", " ", "\n", "ü", '"', "'", "\\"),
        *("token='", "token=", "x_token=", "key=", "'token', ", "('token', '", "--token ", "-u "),
        *(
            "-u a",
            "-u a:",
            "--user=",
            "password=(",
            "key=a(",
            "a:str|None ",
            "a\\",
            "cookie=",
            "&sig",
        ),
    ],
)
def test_no_text_keeps_the_search_busy(piece: str) -> None:
    # With a repetition inside of another one, this would take hours.
    text = f"{(piece * 200_000)[:200_000]}!"

    without_secrets(text)
    is_secret(text, text)
