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
    if pod.get("sysctls") or pod.get("windowsOptions") or pod.get("seLinuxOptions"):
        yield "sysctls, windowsOptions or seLinuxOptions"
    containers = [*spec.get("initContainers", ()), *spec["containers"], *spec.get("ephemeralContainers", ())]
    for container in containers:
        yield from (f"{container['name']}: {told}" for told in _of_container(container, pod))


def _of_container(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
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
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        if "host" in container.get(probe, {}).get("httpGet", {}):
            yield f"{probe} names a host"


def beyond(spec: dict[str, Any]) -> Iterator[str]:
    """What we ask of every pod beyond the standard."""
    for field, value in (("enableServiceLinks", False), ("automountServiceAccountToken", False)):
        if spec.get(field) is not value:
            yield f"{field} is not {value}"
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        if container.get("securityContext", {}).get("readOnlyRootFilesystem") is not True:
            yield f"{container['name']}: the root file system can be written"
        asked = container.get("resources", {})
        if not (asked.get("requests") or asked.get("limits")):
            yield f"{container['name']}: asks for nothing"
    for volume in spec.get("volumes", ()):
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"volume {volume['name']} has no size"
    if not spec.get("securityContext", {}).get("runAsUser"):
        yield "no fixed user"
