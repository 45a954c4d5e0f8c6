{{- define "kvferry.fullname" -}}
{{- if contains "kvferry" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-kvferry" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The Lease by which one operator of a release works: two releases in one namespace do not share it. */}}
{{- define "kvferry.leaseName" -}}
{{ include "kvferry.fullname" . }}-operator
{{- end -}}

{{- define "kvferry.selectorLabels" -}}
app.kubernetes.io/name: kvferry-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvferry.labels" -}}
{{ include "kvferry.selectorLabels" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: kvferry
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* An image reference: (dict "image" VALUE "root" $) */}}
{{- define "kvferry.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Namespaces in which routers may run, as a JSON list. */}}
{{- define "kvferry.routerNamespaces" -}}
{{- ternary .Values.routerNamespaces .Values.watchNamespaces .Values.watchAllNamespaces | toJson -}}
{{- end -}}

{{/* The operator's rules in a namespace. */}}
{{- define "kvferry.rules" -}}
{{ .Files.Get "files/rbac/operator.yaml" }}
{{- if .Values.ingresses.enabled }}
{{ .Files.Get "files/rbac/ingresses.yaml" }}
{{- end }}
{{- if .Values.httpRoutes.enabled }}
{{ .Files.Get "files/rbac/httproutes.yaml" }}
{{- end }}
{{- end -}}

{{/* What the operator is told about the objects that it makes. */}}
{{- define "kvferry.settings" -}}
{{- $made := dict
  "runtimeImage" (include "kvferry.image" (dict "image" .Values.images.runtime "root" $))
  "routerImage" (include "kvferry.image" (dict "image" .Values.images.router "root" $))
  "imagePullPolicy" .Values.imagePullPolicy
  "imagePullSecrets" .Values.imagePullSecrets
  "ingresses" .Values.ingresses.enabled
  "httpRoutes" .Values.httpRoutes.enabled -}}
{{- merge $made .Values.settings | toJson -}}
{{- end -}}
