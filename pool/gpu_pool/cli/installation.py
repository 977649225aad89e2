"""What an installation in a cluster lacks, step by step: for ``doctor --cluster --namespace``.

It looks with the rights of whoever asks, an administrator, and changes nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from gpu_pool.cli.checks import Check, check_prepared
from gpu_pool.cli.cluster_checks import FETCHED, check_images, longest_fetches, prepared_of
from gpu_pool.cli.formatting import safe
from gpu_pool.cluster.api import Api, ApiAway, ApiRefused, connect
from gpu_pool.cluster.dialects.objects import mapping
from gpu_pool.cluster.export import images_of
from gpu_pool.cluster.snapshot import NODES, list_all
from gpu_pool.courses import CourseFile
from gpu_pool.courses.reading import parse_course
from gpu_pool.courses.text import BadCourseFile

#: By which the service is found, whatever it is called.
_LABEL: Final = "app.kubernetes.io/name=gpu-pool"
#: Characters of a message of the cluster that are shown.
_LONG: Final = 400
_HUB_LABELS: Final = "app=jupyterhub,component=hub"
#: What the service does in the cluster, as in examples/kubernetes/service/rbac.yaml: verbs, group, resource,
#: and whether everywhere or in its namespace only.
RIGHTS: Final = (
    ("list watch", "", "nodes", True),
    ("list watch", "", "pods", True),
    ("list watch", "apiextensions.k8s.io", "customresourcedefinitions", True),
    ("list watch", "node.k8s.io", "runtimeclasses", True),
    ("create delete get", "", "pods", False),
    ("create", "", "secrets", False),
    ("create", "", "configmaps", False),
    ("list", "", "events", False),
    ("get", "", "persistentvolumeclaims", False),
)
#: And where the cluster has dynamic resource allocation.
DRA_RIGHTS: Final = (
    ("list watch", "resource.k8s.io", "deviceclasses", True),
    ("list watch", "resource.k8s.io", "resourceslices", True),
    ("list watch", "resource.k8s.io", "resourceclaims", True),
    ("list watch", "resource.k8s.io", "devicetaintrules", True),
    ("create", "resource.k8s.io", "resourceclaimtemplates", False),
)
#: And where the pool claims whole GPUs and divides them itself.
SHARED_RIGHTS: Final = (
    ("create delete get", "resource.k8s.io", "resourceclaims", False),
    ("patch", "", "pods", False),
)
#: How settings say that, in Python and in JSON.
_IS_SHARED: Final = re.compile(r"""\bdialect["']?\s*[:=]\s*["']shared["']""")
_APPLY: Final = "kubectl apply -k . in your copy of examples/kubernetes, or helm upgrade --install gpu-pool"
_HUB: Final = "helm upgrade --install hub jupyterhub/jupyterhub, with values.yaml of examples/kubernetes"
_VARIABLE: Final = "JUPYTERHUB_API_TOKEN"
_DNS: Final = 53
_NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"
#: The cache for names that many clusters have on each node, beside the DNS itself.
_NODE_CACHE: Final = {"ipBlock": {"cidr": "169.254.20.10/32"}}


async def check_installation(namespace: str, gpu_nodes: Collection[str] = ()) -> list[Check]:
    """Return what was found of the installation in a namespace. Raises ``PoolUnreachable``.

    ``gpu_nodes`` are the nodes on which kernels start.
    """
    api = await connect()
    try:
        return [check async for check in _Installation(api, namespace, gpu_nodes).checks()]
    except (ApiRefused, ApiAway) as error:
        return [Check("installation", "broken", f"it cannot be read: {safe(str(error), _LONG)}")]
    finally:
        await api.close()


class _Installation:
    """The service and the Hub of one namespace."""

    def __init__(self, api: Api, namespace: str, gpu_nodes: Collection[str]) -> None:
        self._api, self._namespace, self._gpu_nodes = api, namespace, gpu_nodes

    async def checks(self) -> AsyncIterator[Check]:
        """Yield one check after the other, as the steps of an installation follow each other."""
        if await self._core("") is None:
            yield Check(
                "namespace",
                "broken",
                f"there is no namespace {safe(self._namespace)}",
                f"kubectl create namespace {self._namespace}, or name yours with --namespace",
            )
            return
        yield Check("namespace", "ok", safe(self._namespace))
        found = (await self._apps("deployments", labelSelector=_LABEL))["items"]
        if not found:
            yield Check("service", "broken", f"there is no Deployment with the label {_LABEL}", _APPLY)
            yield await self._hub()
            return
        deployment, name = found[0], found[0]["metadata"]["name"]
        pod = deployment["spec"]["template"]["spec"]
        yield await self._courses(pod)
        for check in await self._images(pod):
            yield check
        yield await self._store(pod)
        yield await self._rights(pod)
        yield await self._admission(pod)
        yield await self._policies(name)
        for check in await self._names(name):
            yield check
        yield await self._hub()
        yield await self._token(pod)
        yield await self._running(deployment)
        for check in await self._prepared(deployment):
            yield check

    async def _courses(self, pod: Mapping[str, Any]) -> Check:
        name = _volume(pod, "courses", "configMap", "name")
        if not name:
            return Check("courses", "note", "the service mounts no ConfigMap as courses: not looked at")
        found = await self._core(f"configmaps/{name}")
        if found is None:
            return Check("courses", "broken", f"there is no ConfigMap {safe(name)}", _APPLY)
        files = sorted(found.get("data") or {})
        if not files:
            remedy = "name the files in kustomization.yaml, or to helm with --set-file courses.NAME=FILE"
            return Check("courses", "broken", f"{safe(name)} has no course: nobody gets a slice", remedy)
        return Check("courses", "ok", safe(", ".join(files)))

    async def _images(self, pod: Mapping[str, Any]) -> list[Check]:
        """Look where the images of courses are already, and how long it took to fetch them."""
        name = _volume(pod, "courses", "configMap", "name")
        found = await self._core(f"configmaps/{name}") if name else None
        images = _images_of(found or {})
        if not images or not self._gpu_nodes:
            return []
        nodes = [each for each in await list_all(self._api, NODES) if _name(each) in self._gpu_nodes]
        try:
            events = (await self._core("events", fieldSelector=FETCHED))["items"]
        except ApiRefused:
            events = []
        return list(check_images(images, nodes, longest_fetches(events)))

    async def _prepared(self, deployment: Mapping[str, Any]) -> list[Check]:
        """Look what there is of prepared pods, for the courses that may have some."""
        pod = deployment["spec"]["template"]["spec"]
        name = _volume(pod, "courses", "configMap", "name")
        found = await self._core(f"configmaps/{name}") if name else None
        most = {
            course: file.kubernetes.prepared_pods
            for course, file in _files_of(found or {})
            if file.kubernetes.prepared_pods
        }
        if not most:
            return []
        pods, is_shared = (await self._core("pods"))["items"], await self._is_shared(pod)
        service = self._namespace, deployment["metadata"]["name"]
        return list(check_prepared(prepared_of(most, pods, *service, is_shared=is_shared)))

    async def _store(self, pod: Mapping[str, Any]) -> Check:
        name = _volume(pod, "store", "persistentVolumeClaim", "claimName")
        if not name:
            words = "the service has no volume store with a claim: its leases may be lost when its pod ends"
            return Check("store", "note", words, _APPLY)
        found = await self._core(f"persistentvolumeclaims/{name}")
        if found is None:
            return Check("store", "broken", f"there is no claim {safe(name)}", _APPLY)
        phase = found.get("status", {}).get("phase", "Pending")
        if phase == "Bound":
            return Check("store", "ok", f"{safe(name)} is bound")
        chosen = found["spec"].get("storageClassName")
        if phase == "Pending" and not chosen:
            words = f"{safe(name)} names no storage class, and the cluster has no default"
            remedy = "kubectl get storageclass, then name one in service/store.yaml, or in store.storageClass"
            return Check("store", "broken", words, remedy)
        words = f"{safe(name)} is {phase}, of the storage class {safe(chosen or '(none)')}"
        remedy = f"if the service does not start: kubectl -n {self._namespace} describe pvc {name}"
        return Check("store", "note", words, remedy)

    async def _rights(self, pod: Mapping[str, Any]) -> Check:
        account = pod.get("serviceAccountName") or "default"
        rights = RIGHTS + (DRA_RIGHTS if await self._has_claims() else ())
        rights += SHARED_RIGHTS if await self._is_shared(pod) else ()
        asked = [
            (verb, group, resource, everywhere)
            for verbs, group, resource, everywhere in rights
            for verb in verbs.split()
        ]
        answers = await asyncio.gather(*(self._may(account, *each) for each in asked))
        if None in answers:
            words = "you may not ask which rights the service has (create subjectaccessreviews)"
            return Check("rights", "note", words)
        missing = [
            f"{verb} {resource}{'' if everywhere else ' here'}"
            for (verb, _, resource, everywhere), answer in zip(asked, answers, strict=True)
            if not answer
        ]
        if missing:
            words = f"the service account {safe(account)} may not {', '.join(missing)}"
            remedy = f"{_APPLY}; the namespace in namespace.yaml must be {self._namespace}"
            return Check("rights", "broken", words, remedy)
        return Check("rights", "ok", f"the service account {safe(account)} has all {len(asked)}")

    async def _admission(self, pod: Mapping[str, Any]) -> Check:
        """Look whether a policy keeps the service to such pods, Secrets and ConfigMaps as it makes."""
        account = f"system:serviceaccount:{self._namespace}:{pod.get('serviceAccountName') or 'default'}"
        group = "/apis/admissionregistration.k8s.io/v1"
        try:
            policies = await self._ask(f"{group}/validatingadmissionpolicies")
            bindings = await self._ask(f"{group}/validatingadmissionpolicybindings")
        except ApiRefused:
            return Check("admission", "note", "you may not read the cluster's admission policies")
        bound = {
            each["spec"].get("policyName")
            for each in (bindings or {}).get("items", ())
            if "Deny" in each["spec"].get("validationActions", ())
        }
        about = [each for each in (policies or {}).get("items", ()) if _is_about(each["spec"], account)]
        kept = {
            resource
            for each in about
            if each["metadata"]["name"] in bound
            for rule in each["spec"].get("matchConstraints", {}).get("resourceRules", ())
            for resource in rule.get("resources", ())
        }
        missing = [each for each in ("pods", "secrets", "configmaps") if each not in kept]
        if missing:
            does = "decides what runs in kernels' pods"
            does = does if missing == ["configmaps"] else "reads every Secret of its namespaces"
            words = (
                f"no admission policy keeps the service to {' and '.join(missing)} such as it makes itself: "
                f"whoever takes it over {does}"
            )
            return Check("admission", "note", words, _APPLY)
        return Check(
            "admission",
            "ok",
            "the service may create what it makes, and no other pods, Secrets and ConfigMaps",
        )

    async def _hub(self) -> Check:
        items = (await self._apps("deployments", labelSelector=_HUB_LABELS))["items"]
        if not items:
            return Check("hub", "broken", "there is no JupyterHub in this namespace", _HUB)
        if not items[0].get("status", {}).get("readyReplicas"):
            why = await self._trouble(_HUB_LABELS)
            return Check("hub", "broken", f"the Hub does not run: {why}", self._describe("deploy/hub"))
        return Check("hub", "ok", "the Hub runs")

    async def _token(self, pod: Mapping[str, Any]) -> Check:
        variables = [each for container in pod["containers"] for each in container.get("env", [])]
        sources = [each.get("valueFrom", {}) for each in variables if each["name"] == _VARIABLE]
        wanted = sources[0].get("secretKeyRef") if sources else None
        if not wanted:
            return Check("token", "note", f"the service's {_VARIABLE} does not come from a Secret")
        try:
            found = await self._core(f"secrets/{wanted['name']}")
        except ApiRefused:
            return Check("token", "note", f"you may not read the Secret {safe(wanted['name'])}")
        if found is None:
            words = f"there is no Secret {safe(wanted['name'])}, which JupyterHub's chart makes"
            return Check("token", "broken", words, _HUB)
        if not (found.get("data") or {}).get(wanted["key"]):
            words = f"the Secret {safe(wanted['name'])} has no {safe(wanted['key'])}"
            remedy = f"JupyterHub's values lack the service gpu-pool (hub.services): {_HUB}"
            return Check("token", "broken", words, remedy)
        return Check("token", "ok", f"in the Secret {safe(wanted['name'])}")

    async def _policies(self, name: str) -> Check:
        path = f"/apis/networking.k8s.io/v1/namespaces/{self._namespace}/networkpolicies"
        names = {each["metadata"]["name"] for each in (await self._ask(path))["items"]}
        missing = sorted({name, f"{name}-kernels"} - names)
        if missing:
            words = f"there is no NetworkPolicy {safe(' and no '.join(missing))}: any pod reaches kernels"
            return Check("network", "note", words, _APPLY)
        return Check("network", "ok", "there are policies; whether the network enforces them cannot be seen")

    async def _names(self, name: str) -> list[Check]:
        """Look whether the cluster's DNS is where the service's policy lets names be looked up."""
        path = f"/apis/networking.k8s.io/v1/namespaces/{self._namespace}/networkpolicies/{name}"
        policy = await self._ask(path)
        allowed = list(_peers_of_port((policy or {}).get("spec", {}), _DNS))
        pods = [each for each in map(_pods_of, allowed) if each is not None]
        if not pods or any(each != _NODE_CACHE for each in allowed if _pods_of(each) is None):
            return []  # no such policy, or somebody has named a DNS of their own
        where = " or ".join(f"{safe(labels)} of {safe(namespace)}" for namespace, labels in pods)
        try:
            there = [await self._count(*each) for each in pods]
        except ApiRefused:
            return [Check("names", "note", f"you may not see whether there are pods {where}")]
        if any(there):
            return [Check("names", "ok", f"may be looked up in the pods {where}: {sum(there)}")]
        words = (
            f"may be looked up in the pods {where} only, and there are none: where policies are enforced "
            "servers do not find the Hub, and their start is given up"
        )
        remedy = "name the cluster's DNS in the policies: see docs/administrator/kubernetes, Who reaches whom"
        return [Check("names", "note", words, remedy)]

    async def _count(self, namespace: str, labels: str) -> int:
        path = f"/api/v1/namespaces/{namespace}/pods"
        return len((await self._ask(path, {"labelSelector": labels}) or {}).get("items", ()))

    async def _running(self, deployment: Mapping[str, Any]) -> Check:
        name = deployment["metadata"]["name"]
        if deployment.get("status", {}).get("readyReplicas"):
            image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
            return Check("service", "ok", f"runs, of the image {safe(image)}")
        if deployment["spec"].get("replicas") == 0:
            remedy = f"kubectl -n {self._namespace} scale deploy/{name} --replicas=1"
            return Check("service", "broken", "is scaled to none", remedy)
        labels = deployment["spec"]["selector"]["matchLabels"]
        why = await self._trouble(",".join(f"{key}={value}" for key, value in labels.items()))
        return Check("service", "broken", f"does not run: {why}", self._describe(f"deploy/{name}"))

    def _describe(self, what: str) -> str:
        return f"kubectl -n {self._namespace} logs {what}, and describe pod"

    async def _trouble(self, selector: str) -> str:
        """Say why the pods with these labels do not run, in the cluster's words."""
        found = await self._core("pods", labelSelector=selector)
        troubles = [safe(each, _LONG) for pod in found["items"] for each in _troubles(pod)]
        return "; ".join(dict.fromkeys(troubles)) or "it has no pod yet, or is just starting"

    async def _is_shared(self, pod: Mapping[str, Any]) -> bool:
        """Whether the service's settings say that it divides whole GPUs itself."""
        name = _volume(pod, "settings", "configMap", "name")
        found = await self._core(f"configmaps/{name}") if name else None
        return any(map(_IS_SHARED.search, map(str, mapping((found or {}).get("data")).values())))

    async def _has_claims(self) -> bool:
        try:
            return bool(await self._api.ask("GET", "/apis/resource.k8s.io/v1"))
        except ApiRefused:
            return False

    async def _may(self, account: str, verb: str, group: str, resource: str, everywhere: bool) -> bool | None:
        """Ask whether a service account of this namespace may do something; None where nobody says."""
        user = f"system:serviceaccount:{self._namespace}:{account}"
        groups = ["system:authenticated", "system:serviceaccounts"]
        groups.append(f"system:serviceaccounts:{self._namespace}")
        what = {"verb": verb, "group": group, "resource": resource}
        if not everywhere:
            what["namespace"] = self._namespace
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "groups": groups, "resourceAttributes": what},
        }
        try:
            answer = await self._api.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
        except ApiRefused:
            return None
        return bool(answer["status"]["allowed"])

    async def _core(self, what: str, **query: str) -> Any:
        return await self._ask(f"/api/v1/namespaces/{self._namespace}/{what}".rstrip("/"), query)

    async def _apps(self, what: str, **query: str) -> Any:
        return await self._ask(f"/apis/apps/v1/namespaces/{self._namespace}/{what}", query)

    async def _ask(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Return what is there; None if it is not."""
        try:
            return await self._api.ask("GET", path, query=query)
        except ApiRefused as refused:
            if refused.status == 404:
                return None
            raise


def _images_of(courses: Mapping[str, Any]) -> set[str]:
    """Return the images that the course files of a ConfigMap name, as far as they can be read."""
    return {image for _, course in _files_of(courses) for image in images_of(course)}


def _files_of(courses: Mapping[str, Any]) -> Iterator[tuple[str, CourseFile]]:
    """Yield the courses whose files a ConfigMap has, as far as they can be read, by name."""
    for file, text in (courses.get("data") or {}).items():
        with suppress(BadCourseFile):  # the service's log says what is wrong with it
            yield file.rpartition(".")[0] or file, parse_course(file, text.encode())


def _name(manifest: Mapping[str, Any]) -> str:
    return str(manifest["metadata"]["name"])


def _peers_of_port(policy: Mapping[str, Any], port: int) -> Iterator[Mapping[str, Any]]:
    """Yield whom a policy lets its pods ask at a port that it names."""
    for rule in policy.get("egress") or ():
        if any(each.get("port") == port for each in rule.get("ports") or ()):
            yield from rule.get("to") or ()


def _pods_of(peer: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return which pods of one namespace these are, by their labels; None where they are told otherwise."""
    namespace = mapping(mapping(peer.get("namespaceSelector")).get("matchLabels")).get(_NAMESPACE_LABEL)
    labels = mapping(mapping(peer.get("podSelector")).get("matchLabels"))
    if not namespace or not labels:
        return None
    return str(namespace), ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _volume(pod: Mapping[str, Any], volume: str, kind: str, key: str) -> str:
    """Return which object a volume of a pod is; nothing if there is no such volume."""
    found = [each for each in pod.get("volumes", []) if each["name"] == volume]
    return str(found[0].get(kind, {}).get(key, "")) if found else ""


def _is_about(policy: Mapping[str, Any], account: str) -> bool:
    """Whether an admission policy names this account in a condition."""
    return any(f'"{account}"' in each.get("expression", "") for each in policy.get("matchConditions", ()))


def _troubles(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yield what keeps a pod from running."""
    status = pod.get("status", {})
    for container in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in ("ContainerCreating", "PodInitializing"):
            yield ": ".join(filter(None, (waiting.get("reason"), waiting.get("message"))))
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield str(condition.get("message") or condition.get("reason"))
