"""deploy/compose.yaml: pinned, on loopback, and its services find each other."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from deploy.files import DEPLOY, SERVICES, documents


def test_compose_publishes_loopback_only() -> None:
    published = [port for each in SERVICES.values() for port in each.get("ports", ())]

    assert sorted(published) == [
        "127.0.0.1:3000:3000",
        "127.0.0.1:4317:4317",
        "127.0.0.1:4318:4318",
        "127.0.0.1:9090:9090",
    ]
    assert not any("network_mode" in each or each.get("privileged") for each in SERVICES.values())


def test_compose_holds_no_secret_and_grafana_lets_nobody_in() -> None:
    environment = {
        k: v for each in SERVICES.values() for k, v in each.get("environment", {}).items()
    }

    assert not [key for key in environment if re.search("PASSWORD|TOKEN|SECRET|_KEY", key)]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    # Else there is admin with the password that everybody knows.
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"


def test_every_address_in_compose_is_one_that_listens() -> None:
    tempo = documents(DEPLOY / "compose" / "tempo.yaml")[0]
    loki = documents(DEPLOY / "compose" / "loki.yaml")[0]
    receivers = tempo["distributor"]["receivers"]["otlp"]["protocols"].values()
    listening = {
        "prometheus": {9090},
        "loki": {loki["server"]["http_listen_port"]},
        "tempo": {
            tempo["server"]["http_listen_port"],
            *(int(each["endpoint"].rpartition(":")[2]) for each in receivers),
        },
    }
    urls = [
        urlsplit(value)
        for each in SERVICES.values()
        for value in each.get("environment", {}).values()
        if "://" in value
    ]

    assert {url.hostname for url in urls} == {"prometheus", "tempo", "loki"}
    assert all(url.port in listening[str(url.hostname)] for url in urls)
