{{/* Removes the entries of these names from a list of a manifest. */}}
{{- define "otel-ddp.remove" -}}
{{- $rest := list }}
{{- range index .of .key }}{{ if not (has .name $.names) }}{{ $rest = append $rest . }}{{ end }}{{ end }}
{{- $_ := set .of .key $rest }}
{{- end }}

{{/* Gives a container variables, also in place of those that it has. */}}
{{- define "otel-ddp.set-variables" -}}
{{- include "otel-ddp.remove" (dict "of" .container "key" "env" "names" (keys .variables)) }}
{{- range $name := keys .variables | sortAlpha }}
{{- $variable := dict "name" $name "value" (index $.variables $name) }}
{{- $_ := set $.container "env" (append $.container.env $variable) }}
{{- end }}
{{- end }}

{{/* Gives a pod the fields of `pod`; one that is empty is taken away. */}}
{{- define "otel-ddp.set-fields" -}}
{{- range $field, $value := .fields }}
{{- if $value }}{{ $_ := set $.spec $field $value }}{{ else }}{{ $_ := unset $.spec $field }}{{ end }}
{{- end }}
{{- end }}

{{/* What of an agent's container and pod is the chart's values. */}}
{{- define "otel-ddp.set-agent" -}}
{{- $values := .root.Values }}
{{- $endpoint := $values.agent.endpoint }}
{{- if $values.collector.enabled }}
{{- if $endpoint }}{{ fail "agent.endpoint and collector.enabled: agents send to one collector. Leave the endpoint empty, or set collector.enabled=false." }}{{ end }}
{{- $endpoint = printf "https://otel-ddp-gateway.%s.svc:4318" .root.Release.Namespace }}
{{- else if not (or $endpoint $values.agent.env.OTEL_EXPORTER_PROMETHEUS_HOST) }}
{{- fail "Nothing takes what the agents measure: set agent.endpoint to your collector, or collector.enabled=true, or agent.env.OTEL_EXPORTER_PROMETHEUS_HOST to be scraped." }}
{{- end }}
{{- with $values.agent.image }}{{ $_ := set $.container "image" . }}{{ end }}
{{- with $values.agent.resources }}{{ $_ := set $.container "resources" . }}{{ end }}
{{- if hasPrefix "https://" $endpoint }}
{{- include "otel-ddp.set-variables" (dict "container" .container "variables" (dict "OTEL_EXPORTER_OTLP_ENDPOINT" $endpoint)) }}
{{- else }}
{{- $names := list "OTEL_EXPORTER_OTLP_CERTIFICATE" "OTEL_EXPORTER_OTLP_HEADERS" "GATEWAY_TOKEN" }}
{{- if not $endpoint }}{{ $names = append $names "OTEL_EXPORTER_OTLP_ENDPOINT" }}{{ end }}
{{- include "otel-ddp.remove" (dict "of" .container "key" "env" "names" $names) }}
{{- include "otel-ddp.remove" (dict "of" .container "key" "volumeMounts" "names" (list "gateway-ca")) }}
{{- include "otel-ddp.remove" (dict "of" .spec "key" "volumes" "names" (list "gateway-ca")) }}
{{- with $endpoint }}
{{- include "otel-ddp.set-variables" (dict "container" $.container "variables" (dict "OTEL_EXPORTER_OTLP_ENDPOINT" .)) }}
{{- end }}
{{- end }}
{{- include "otel-ddp.set-variables" (dict "container" .container "variables" $values.agent.env) }}
{{- end }}

{{/*
What a training's pod needs beside its own container, as fields of its spec. A chart that depends on this one
includes it with the values of this one: {{ include "otel-ddp.sidecar" (index .Subcharts "otel-ddp") }}
*/}}
{{- define "otel-ddp.sidecar" -}}
{{- $spec := dict }}
{{- range splitList "\n---\n" (include "otel-ddp.file" (dict "root" . "name" "training-job.yaml")) }}
{{- $manifest := fromYaml . }}
{{- if eq $manifest.kind "Job" }}{{ $spec = $manifest.spec.template.spec }}{{ end }}
{{- end }}
{{- $agent := first $spec.initContainers }}
{{- include "otel-ddp.set-agent" (dict "root" . "container" $agent "spec" $spec) }}
{{- $mounted := list }}
{{- range $agent.volumeMounts }}{{ $mounted = append $mounted .name }}{{ end }}
{{- $volumes := list }}
{{- range $spec.volumes }}{{ if has .name $mounted }}{{ $volumes = append $volumes . }}{{ end }}{{ end }}
{{- $_ := set $spec "volumes" $volumes }}
{{- toYaml (pick $spec "initContainers" "runtimeClassName" "securityContext" "shareProcessNamespace" "volumes") }}
{{- end }}

{{/* A manifest with an agent, for the user that it runs as: a part of names and paths. */}}
{{- define "otel-ddp.file" -}}
{{- $text := .root.Files.Get (printf "kubernetes/%s" .name) }}
{{- regexReplaceAll "\\b1000\\b" $text (toString .root.Values.agent.user) }}
{{- end }}
