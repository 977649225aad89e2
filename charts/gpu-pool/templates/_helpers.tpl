{{- define "gpu-pool.labels" -}}
app.kubernetes.io/name: gpu-pool
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "gpu-pool.selector" -}}
app.kubernetes.io/name: gpu-pool
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpu-pool.courses" -}}
{{ .Values.coursesConfigMap | default (printf "%s-courses" .Values.name) }}
{{- end }}

{{/* Names of cluster-wide objects end with the namespace: another Hub's differ. */}}
{{- define "gpu-pool.clusterName" -}}
{{ printf "%s-%s" .Values.name .Release.Namespace }}
{{- end }}

{{/* Where node agents are: a namespace that is theirs alone, and another Hub's differs. */}}
{{- define "gpu-pool.agentNamespace" -}}
{{- $namespace := .Values.nodeAgent.namespace | default (printf "%s-agents" (include "gpu-pool.clusterName" .)) -}}
{{- if eq $namespace .Release.Namespace -}}
{{- fail "nodeAgent.namespace is that of the service. Pods there are others', too: choose one that is the agents' alone." -}}
{{- end -}}
{{ $namespace }}
{{- end }}

{{/* How the cluster shares its GPUs, as far as the settings say it. */}}
{{- define "gpu-pool.dialect" -}}
{{ get (index .Values.config "KubernetesSettings" | default dict) "dialect" | default "auto" }}
{{- end }}

{{/* Where names are looked up, as an entry of "egress". */}}
{{- define "gpu-pool.dns" -}}
- to:
    {{- toYaml .Values.networkPolicy.dns.to | nindent 4 }}
  ports:
    {{- range .Values.networkPolicy.dns.ports }}
    - port: {{ . }}
      protocol: UDP
    - port: {{ . }}
    {{- end }}
{{- end }}

{{/* The settings, as gpu_pool_config.json. The rights and Kueue go together. */}}
{{- define "gpu-pool.config" -}}
{{- range $class, $names := dict
      "ServeApp" (list "bind" "store" "socket")
      "PoolSettings" (list "courses_dir")
      "KubernetesSettings" (list "kueue" "node_agent") }}
{{- range $names }}
{{- if hasKey (index $.Values.config $class | default dict) . }}
{{- fail (printf "config.%s.%s is the chart's own%s. Take it out of \"config\"." $class . (get (dict "kueue" ": set rbac.kueue" "node_agent" ": set nodeAgent.enabled") . )) }}
{{- end }}
{{- end }}
{{- end }}
{{- $fixed := dict
      "ServeApp" (dict "bind" "0.0.0.0:8888")
      "PoolSettings" (dict "courses_dir" "/etc/gpu-pool/courses")
      "KubernetesSettings" (dict "kueue" .Values.rbac.kueue) -}}
{{- if .Values.nodeAgent.enabled }}
{{- $_ := set $fixed.KubernetesSettings "node_agent" (printf "%s/%s-node-agent" (include "gpu-pool.agentNamespace" .) .Values.name) }}
{{- end }}
{{- mergeOverwrite (deepCopy .Values.config) $fixed | toPrettyJson -}}
{{- end }}
