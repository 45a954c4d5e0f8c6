"""Why a pod does not answer: from what the API server knows of it to one reason and words to act on.

Classified first, acted on later: the reason that a user reads is the value that the operator branches on.
"""

import re
from typing import Any

import msgspec

from kvferry_operator.plan.effects import ApplyFault
from kvferry_operator.plan.manifests.meta import COMPONENT, Object
from kvferry_operator.plan.manifests.model import FETCH
from kvferry_wire.fetch import reason_of

# Reasons in the order in which they are told, most telling first. Those after LOADING are no faults, only waits.
REASONS = (
    "RBACRefused",
    "QuotaExceeded",
    "AdmissionRefused",
    "AccountMissing",
    "ApplyRefused",
    "NameTaken",
    "ImageMissing",
    "ModelMissing",
    "ModelAccessDenied",
    "RemoteCodeRefused",
    "DiskFull",
    "ModelFetchFailed",
    "ModelRefused",
    "SettingsRefused",
    "KeysRefused",
    "OutOfMemory",
    "ConfigMissing",
    "NodePressure",
    "NoRoom",
    "CrashLoop",
    "ProbeFailing",
    "NodeLost",
    "PodsRefused",
    "ApiUnavailable",
    "VolumesPending",
    "FetchingModel",
    "Loading",
    "Starting",
)
WAITS = frozenset({"VolumesPending", "FetchingModel", "Loading", "Starting", "ApiUnavailable"})
IMAGE_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
CONFIG_REASONS = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"}
CREATING = {"ContainerCreating", "PodInitializing"}
REFUSED_EXIT = 2  # of our processes: something that the user has to change
SIGNALS = {137: "SIGKILL", 143: "SIGTERM"}
MAX_LINE = 600

# Of an engine that ends with REFUSED_EXIT: what its last line is about.
_REFUSED_WORDS = (
    (re.compile(r"hex digits|key file|no such folder; a folder with the key", re.I), "KeysRefused"),
    (re.compile(r"(^|\s)--[a-z]|KV memory", re.I), "SettingsRefused"),
    (re.compile(r"no such|there is no|not exist|no model: ", re.I), "ModelMissing"),
    (re.compile(r"auto_map", re.I), "RemoteCodeRefused"),
    (re.compile(r"no space left", re.I), "DiskFull"),
)


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One reason, and what to tell people."""

    reason: str
    message: str

    @property
    def rank(self) -> int:
        return REASONS.index(self.reason)

    @property
    def waits(self) -> bool:
        """Whether time alone may mend it."""
        return self.reason in WAITS


def pod_cause(pod: Object) -> Cause | None:
    """Why a pod does not answer; ``None`` where it does, or is leaving anyway."""
    if pod["metadata"].get("deletionTimestamp") or is_ready(pod):
        return None
    name, status = pod["metadata"]["name"], pod.get("status", {})
    if status.get("reason") == "NodeLost":
        return _cause("NodeLost", f"{name}: its node does not answer")
    if status.get("phase") == "Failed" and status.get("reason"):
        return _cause("NodePressure", f"{name}: {status['reason']}: {status.get('message', 'ended by its node')}")
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        told = scheduled.get("message") or scheduled.get("reason") or "not placed on a node yet"
        if "persistentvolumeclaim" in told.lower():
            return _cause("VolumesPending", f"{name}: waits for a claim: {told}")
        return _cause("NoRoom", f"{name}: no node takes it: {told}. It asks for {asks(pod)}")
    specs = {spec["name"]: spec for spec in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])}
    found = [
        cause
        for state in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
        if (cause := _container_cause(pod, state, specs.get(state["name"], {}))) is not None
    ]
    return min(found, key=lambda cause: cause.rank) if found else _cause("Starting", f"{name}: being started")


def unstarted(pod: Object) -> tuple[str, ...]:
    """The containers with which a pod begins, where it has not: it waits for its volumes or an image.

    Of a pod with init containers the kubelet says `PodInitializing` of all, also of those that are to run first.
    """
    status = pod.get("status", {})
    states = status.get("initContainerStatuses") or status.get("containerStatuses") or ()
    waits = [state["name"] for state in states if state.get("state", {}).get("waiting", {}).get("reason") in CREATING]
    return tuple(waits) if len(waits) == len(states) else ()


def deployment_cause(deployment: Object) -> Cause | None:
    """Why a Deployment cannot even make its pods."""
    failure = _condition(deployment.get("status", {}), "ReplicaFailure")
    if failure.get("status") != "True":
        return None
    message = str(failure.get("message", ""))
    where = deployment["metadata"]["name"]
    if "exceeded quota" in message or "must specify" in message:
        return _cause("QuotaExceeded", f"{where}: a quota of the namespace is in the way: {message}")
    if "serviceaccount" in message and "not found" in message:
        return _cause(
            "AccountMissing",
            f"{where}: {message}. The chart makes the routers' account in the namespaces of its watchNamespaces",
        )
    if "admission webhook" in message or "violates PodSecurity" in message or "denied" in message:
        return _cause("AdmissionRefused", f"{where}: admission refuses its pods: {message}")
    return _cause("PodsRefused", f"{where}: its pods are refused: {message}")


def apply_cause(fault: ApplyFault) -> Cause:
    """Why an object could not be written."""
    where = f"{fault.kind} {fault.name}"
    if "exceeded quota" in fault.message:
        return _cause("QuotaExceeded", f"{where}: a quota of the namespace is in the way: {fault.message}")
    if "admission webhook" in fault.message or "ValidatingAdmissionPolicy" in fault.message:
        return _cause("AdmissionRefused", f"{where}: admission refuses it: {fault.message}")
    if fault.code in (401, 403):
        return _cause(
            "RBACRefused",
            f"{where}: the operator may not write it: {fault.message}. Is the namespace among the chart's"
            " watchNamespaces?",
        )
    if fault.code in (0, 429) or fault.code >= 500:
        return _cause("ApiUnavailable", f"{where}: the API server did not take it (tried again): {fault.message}")
    return _cause("ApplyRefused", f"{where}: the API server refuses it ({fault.code}): {fault.message}")


def is_ready(pod: Object) -> bool:
    """Whether a pod would answer a request now."""
    leaving = bool(pod["metadata"].get("deletionTimestamp"))
    return not leaving and _condition(pod.get("status", {}), "Ready").get("status") == "True"


def asks(pod: Object) -> str:
    """What a pod asks of its node, in words."""
    containers = pod["spec"]["containers"]
    requests = containers[0].get("resources", {}).get("requests", {}) if containers else {}
    return ", ".join(f"{value} {name}" for name, value in sorted(requests.items())) or "nothing"


def _container_cause(pod: Object, state: Object, spec: Object) -> Cause | None:
    name, container = pod["metadata"]["name"], state["name"]
    where = f"{name}, {container}"
    now, before = state.get("state", {}), state.get("lastState", {})
    waiting = now.get("waiting", {})
    reason, told = waiting.get("reason", ""), waiting.get("message", "")
    if reason in IMAGE_REASONS:
        return _cause("ImageMissing", f"{where}: image {spec.get('image', '')}: {told or reason}")
    if reason in CONFIG_REASONS:
        return _cause("ConfigMissing", f"{where}: {told or reason}")
    # How it ended before says why it is not there now; once it has started again it does not.
    ended = now.get("terminated") or (None if state.get("started") else before.get("terminated"))
    if ended and (ended.get("exitCode", 0) != 0 or reason == "CrashLoopBackOff"):
        return _ended(pod, state, spec, ended)
    if now.get("terminated"):
        return None  # an init container that has done its work
    if reason in CREATING:
        return _creating(pod, container)
    if "running" in now and not state.get("ready"):
        if container == FETCH:
            return _cause("FetchingModel", f"{name}: fetching the model")
        if not state.get("started"):
            if pod["metadata"].get("labels", {}).get(COMPONENT) == "router":
                return _cause("Starting", f"{name}: starting, or waiting for pods to send requests to")
            return _cause("Loading", f"{name}: loading the model")
        if _was_not_ready_yet(pod, now["running"]):
            return _cause("Starting", f"{name}: started; if it stays so, `kubectl logs {name}` says why")
        return _cause(
            "ProbeFailing", f"{where}: runs, but says that it would not answer; `kubectl logs {name}` says why"
        )
    return None


def _was_not_ready_yet(pod: Object, running: Object) -> bool:
    """Whether a container that has started is about to be called ready for the first time.

    The kubelet tells of a start before it tells of readiness: each start looks for a moment like a probe that fails.
    """
    began, since = running.get("startedAt"), _condition(pod["status"], "Ready").get("lastTransitionTime")
    return bool(began and since and since <= began)  # both RFC 3339 in UTC to the second


def _creating(pod: Object, container: str) -> Cause | None:
    if container not in unstarted(pod):
        return None  # another one runs before it, and tells more
    name = pod["metadata"]["name"]
    needed = sorted(_references(pod["spec"].get("volumes", ())))
    listed = f"; it needs {', '.join(needed)}" if needed else ""
    return _cause("VolumesPending", f"{name}, {container}: waits for its volumes or image{listed}")


def _references(volumes: Any) -> set[str]:
    """Objects that volumes need and that others make."""
    found = set()
    for volume in volumes:
        if "secret" in volume:
            found.add(f"Secret {volume['secret']['secretName']}")
        elif "persistentVolumeClaim" in volume:
            found.add(f"PersistentVolumeClaim {volume['persistentVolumeClaim']['claimName']}")
        elif "image" in volume:
            found.add(f"image {volume['image']['reference']}")
    return found


def _ended(pod: Object, state: Object, spec: Object, ended: Object) -> Cause:
    """Why a container ended, from its exit status and its last line."""
    where = f"{pod['metadata']['name']}, {state['name']}"
    code, line = int(ended.get("exitCode", 0)), last_line(str(ended.get("message", "")))
    if ended.get("reason") == "OOMKilled":
        limit = spec.get("resources", {}).get("limits", {}).get("memory", "no limit of its own")
        role = pod["metadata"].get("labels", {}).get(COMPONENT, "decode")
        return _cause(
            "OutOfMemory",
            f"{where}: ended ({code}, OOMKilled) for using more memory than it may ({limit}); raise"
            f" spec.{role}.resources.limits.memory or lower spec.engine.kvMemory",
        )
    if state["name"] == FETCH:
        return _cause(str(reason_of(code)), f"{where}: {line or f'exit status {code}'}")
    if code == REFUSED_EXIT and line:
        return _cause(_by_words(line, _REFUSED_WORDS, "ModelRefused"), f"{where}: {line}")
    times = int(state.get("restartCount", 0)) + (1 if "terminated" in state.get("state", {}) else 0)
    if code in SIGNALS:
        return _cause(
            "ProbeFailing",
            f"{where}: ended by {SIGNALS[code]} {times} times: a probe failed, or its node stopped it"
            + (f"; last line: {line}" if line else ""),
        )
    return _cause("CrashLoop", f"{where}: ended {times} times, last with exit status {code}: {line or 'no last line'}")


def last_line(text: str) -> str:
    """The last line of a log's end; of a JSON line its message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    line = lines[-1]
    if line.startswith("{"):
        try:
            decoded = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            return line[:MAX_LINE]
        parts = [str(decoded[key]) for key in ("message", "msg", "reason") if key in decoded]
        line = ": ".join(parts) or line
    return line[:MAX_LINE]


def _by_words(line: str, table: tuple[tuple[re.Pattern[str], str], ...], default: str) -> str:
    return next((reason for pattern, reason in table if pattern.search(line)), default)


def _condition(status: Object, kind: str) -> Object:
    found: list[Object] = [condition for condition in status.get("conditions", ()) if condition.get("type") == kind]
    return found[0] if found else {}


def _cause(reason: str, message: str) -> Cause:
    return Cause(reason=reason, message=" ".join(message.split()))
