"""The pool's settings in a cluster: docs/reference/settings.md, docs/administrator/kubernetes.md."""

c = get_config()  # type: ignore[name-defined]  # noqa: F821 - the service gives it to this file

c.ServeApp.bind = "0.0.0.0:8888"

# Who may use what is in the course files.
c.PoolSettings.courses_dir = "/etc/gpu-pool/courses"
c.PoolSettings.course_required = True

# How the cluster shares its GPUs. "auto" detects it; "gpu-pool doctor --cluster" says what it finds.
c.KubernetesSettings.dialect = "auto"
# Of the server's home and of kernels: the chart's singleuser.storage.homeMountPath, .uid and .fsGid.
c.KubernetesSettings.home = "/home/jovyan"
c.KubernetesSettings.uid = 1000
c.KubernetesSettings.gid = 100
# For kernels whose course sets none.
c.KubernetesSettings.memory_mib = 4096

# Agents of nodes, which say what kernels use: see docs/administrator/node-agent.md.
# c.KubernetesSettings.node_agent = "gpu-pool-jupyterhub-agents/gpu-pool-node-agent"

# Nodes that an autoscaler starts: see docs/kubernetes/kernel-pods.md, "Where an autoscaler starts nodes".
# c.KubernetesSettings.node_groups = {
#     "v100": {
#         "example": "/etc/gpu-pool/settings/v100.json",
#         "select": {"cloud.google.com/gke-nodepool": "v100"},
#         "most": 4,
#     },
# }
