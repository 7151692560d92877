{{- define "paramd.fullname" -}}
{{- $name := .Chart.Name -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "paramd.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "paramd.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "paramd.selector" . }}
{{- end -}}

{{/* The name under which the cluster finds the Service. */}}
{{- define "paramd.host" -}}
{{- printf "%s.%s.svc" (include "paramd.fullname" .) .Release.Namespace -}}
{{- end -}}

{{- define "paramd.image" -}}
{{- $repository := required "image.repository: name the image built from deploy/Dockerfile" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "paramd.tlsSecret" -}}
{{- $manager := .Values.tls.certManager.enabled -}}
{{- if and $manager .Values.tls.existingSecret -}}
{{- fail "tls: set one of tls.existingSecret and tls.certManager.enabled, not both" -}}
{{- end -}}
{{- if $manager -}}
{{- printf "%s-tls" (include "paramd.fullname" .) -}}
{{- else -}}
{{- required "tls: set tls.existingSecret, or tls.certManager.enabled; without a certificate the control plane does not listen beyond loopback" .Values.tls.existingSecret -}}
{{- end -}}
{{- end -}}

{{- define "paramd.tokenSecret" -}}
{{- .Values.token.existingSecret | default (printf "%s-token" (include "paramd.fullname" .)) -}}
{{- end -}}

{{/* A probe's request. The server answers to its own names only; a kubelet would name the pod's address. */}}
{{- define "paramd.probe" -}}
httpGet:
  scheme: HTTPS
  port: https
  path: {{ . }}
  httpHeaders: [{name: Host, value: localhost}]
{{- end -}}

{{- define "paramd.listenHost" -}}
{{- $host := .Values.listenHost -}}
{{- contains ":" $host | ternary (printf "[%s]" $host) $host -}}
{{- end -}}
