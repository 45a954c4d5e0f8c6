"""The Pod Security Standard ``restricted``, as a function of a pod's spec: what an admission with it would refuse."""

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret", "image",
}  # fmt: skip
SECCOMP = ("RuntimeDefault", "Localhost")


def violations(spec: dict[str, Any]) -> Iterator[str]:
    """Every breach of ``restricted`` (and so of ``baseline``)."""
    pod = spec.get("securityContext", {})
    yield from (field for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field))
    for volume in spec.get("volumes", ()):
        yield from (f"volume {volume['name']}: {kind}" for kind in volume.keys() - {"name"} - VOLUMES)
    if pod.get("sysctls"):
        yield "sysctls"
    yield from _of_context(pod)
    containers = [*spec.get("initContainers", ()), *spec["containers"], *spec.get("ephemeralContainers", ())]
    for container in containers:
        yield from (f"{container['name']}: {told}" for told in _of_container(container, pod))


def _of_context(context: dict[str, Any]) -> Iterator[str]:
    """What the standard bars of a pod and of a container; some of it would be allowed in part, and we use none."""
    yield from (field for field in ("windowsOptions", "seLinuxOptions") if context.get(field))
    if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in SECCOMP:
        yield "no AppArmor profile"
    if context.get("seccompProfile", {}).get("type", "RuntimeDefault") not in SECCOMP:
        yield "seccomp is unconfined"


def _of_container(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    yield from _of_context(own)
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot is not true"
    if own.get("runAsUser", pod.get("runAsUser")) == 0:
        yield "runAsUser is 0"
    if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in SECCOMP:
        yield "no seccomp profile"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities are not dropped"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort"
    hooks = {name: container.get(name, {}) for name in ("livenessProbe", "readinessProbe", "startupProbe")}
    hooks |= container.get("lifecycle", {})
    for name, hook in hooks.items():
        if any(hook.get(way, {}).get("host") for way in ("httpGet", "tcpSocket")):
            yield f"{name} names a host"


def beyond(spec: dict[str, Any]) -> Iterator[str]:
    """What we ask of every pod beyond the standard."""
    for field, value in (("enableServiceLinks", False), ("automountServiceAccountToken", False)):
        if spec.get(field) is not value:
            yield f"{field} is not {value}"
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        if container.get("securityContext", {}).get("readOnlyRootFilesystem") is not True:
            yield f"{container['name']}: the root file system can be written"
        asked = container.get("resources", {})
        requests, limits = asked.get("requests", {}), asked.get("limits", {})
        if not (requests or limits):
            yield f"{container['name']}: asks for nothing"
        if {"memory"} <= requests.keys() & limits.keys() and requests["memory"] != limits["memory"]:
            yield f"{container['name']}: asks for less memory than it may use"
    for volume in spec.get("volumes", ()):
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"volume {volume['name']} has no size"
    if not spec.get("securityContext", {}).get("runAsUser"):
        yield "no fixed user"
