"""Each thing that keeps a service from answering: its reason, and words that a person can act on."""

from pathlib import Path
from typing import Any

import pytest

from kvferry_operator.api.crds import service_crd
from kvferry_operator.plan.causes import REASONS, WAITS, Cause, apply_cause, deployment_cause, last_line, pod_cause
from kvferry_operator.plan.effects import ApplyFault
from kvferry_operator.plan.events import events
from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.plan.observed import Seen
from kvferry_operator.plan.status import Condition, status, timed
from tests.operator.cluster import LATER, NOW, make_context, make_pod
from tests.operator.structural import refusals

STATUS_SCHEMA = service_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
REVISION = make_context().plan.revision
ALL = {"prefill": 1, "decode": 1, "router": 1}


def waiting(reason: str, message: str = "", name: str = "decode", **last: Any) -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"name": name, "ready": False, "started": False, "state": state, "restartCount": 4, **last}


def ended(code: int, message: str = "", reason: str = "Error") -> Object:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def crashed(code: int, message: str = "", reason: str = "Error", name: str = "decode") -> list[Object]:
    return [waiting("CrashLoopBackOff", "back-off 40s", name=name, lastState=ended(code, message, reason))]


def decode_pod(**changes: Any) -> Object:
    return make_pod("decode", REVISION, **changes)


def unscheduled(message: str) -> list[Object]:
    return [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]


CASES: list[tuple[str, Object, str, str]] = [
    (
        "image",
        decode_pod(containers=[waiting("ImagePullBackOff", "Back-off pulling image")]),
        "ImageMissing",
        "image registry/kvferry-runtime:1: Back-off pulling image",
    ),
    (
        "image of the init container",
        decode_pod(
            init=[waiting("ErrImagePull", "not found", name="fetch-model")], containers=[waiting("PodInitializing")]
        ),
        "ImageMissing",
        "not found",
    ),
    (
        "no such model",
        decode_pod(
            init=crashed(10, "x\nkvferry: hf://a/b: the hub has no public model of this name", name="fetch-model"),
            containers=[waiting("PodInitializing")],
        ),
        "ModelMissing",
        "demo-decode-x, fetch-model: kvferry: hf://a/b: the hub has no public model of this name",
    ),
    (
        "gated model",
        decode_pod(init=crashed(11, "access denied", name="fetch-model"), containers=[waiting("PodInitializing")]),
        "ModelAccessDenied",
        "access denied",
    ),
    (
        "fetch ended by its own reason",
        decode_pod(
            init=crashed(11, "hf://a/b: access denied: ask for it", name="fetch-model"),
            containers=[waiting("PodInitializing")],
        ),
        "ModelAccessDenied",
        "ask for it",
    ),
    (
        "no such claim",
        decode_pod(conditions=unscheduled('0/2 nodes are available: persistentvolumeclaim "none" not found.')),
        "VolumesPending",
        'persistentvolumeclaim "none" not found',
    ),
    (
        "fetch cut off",
        decode_pod(init=crashed(1, "connection reset", name="fetch-model"), containers=[waiting("PodInitializing")]),
        "ModelFetchFailed",
        "connection reset",
    ),
    (
        "fetch ran out of disk",
        decode_pod(
            init=crashed(13, "No space left on device", name="fetch-model"), containers=[waiting("PodInitializing")]
        ),
        "DiskFull",
        "No space left",
    ),
    (
        "fetch refused",
        decode_pod(init=crashed(14, "too short", name="fetch-model"), containers=[waiting("PodInitializing")]),
        "ModelRefused",
        "too short",
    ),
    (
        "fetch of a model with code",
        decode_pod(init=crashed(15, "auto_map", name="fetch-model"), containers=[waiting("PodInitializing")]),
        "RemoteCodeRefused",
        "auto_map",
    ),
    (
        "fetch ended by a signal",
        decode_pod(init=crashed(143, "", name="fetch-model"), containers=[waiting("PodInitializing")]),
        "ModelFetchFailed",
        "exit status 143",
    ),
    (
        "model with code",
        decode_pod(containers=crashed(2, "kvferry serve: model /models/x: its config names auto_map code")),
        "RemoteCodeRefused",
        "auto_map",
    ),
    (
        "model not supported",
        decode_pod(containers=crashed(2, "kvferry serve: model /models/x: architecture Foo is not supported")),
        "ModelRefused",
        "architecture Foo",
    ),
    (
        "KV does not fit",
        decode_pod(containers=crashed(2, "kvferry serve: KV memory (--kv-memory): 9 blocks need 900 MiB")),
        "SettingsRefused",
        "need 900 MiB",
    ),
    (
        "out of memory",
        decode_pod(containers=crashed(137, reason="OOMKilled")),
        "OutOfMemory",
        "more memory than it may (2Gi); raise spec.decode.resources.limits.memory",
    ),
    (
        "out of memory, starting again",
        decode_pod(
            containers=[
                {
                    "name": "decode",
                    "ready": False,
                    "started": False,
                    "restartCount": 1,
                    "state": {"running": {}},
                    "lastState": ended(137, reason="OOMKilled"),
                }
            ]
        ),
        "OutOfMemory",
        "more memory than it may",
    ),
    (
        "crash loop",
        decode_pod(containers=crashed(1, "Traceback\n  line\nRuntimeError: boom\n")),
        "CrashLoop",
        "ended 4 times, last with exit status 1: RuntimeError: boom",
    ),
    ("probe killed it", decode_pod(containers=crashed(137)), "ProbeFailing", "ended by SIGKILL"),
    ("runs and would not answer", decode_pod(started=True), "ProbeFailing", "`kubectl logs demo-decode-x` says why"),
    (
        "no room",
        decode_pod(
            phase="Pending", containers=[], conditions=unscheduled("0/2 nodes are available: 2 Insufficient memory.")
        ),
        "NoRoom",
        "0/2 nodes are available: 2 Insufficient memory.. It asks for 1 cpu, 2Gi memory",
    ),
    (
        "missing config",
        decode_pod(containers=[waiting("CreateContainerConfigError", 'secret "x" not found')]),
        "ConfigMissing",
        'secret "x" not found',
    ),
    (
        "volumes",
        decode_pod(containers=[waiting("ContainerCreating")]),
        "VolumesPending",
        "it needs Secret demo-keys",
    ),
    (
        "volumes of a pod that fetches",
        decode_pod(
            init=[waiting("PodInitializing", name="fetch-model")],
            containers=[waiting("PodInitializing")],
        ),
        "VolumesPending",
        "it needs Secret demo-keys",
    ),
    (
        "fetched",
        decode_pod(
            init=[{"name": "fetch-model", "ready": True, "state": {"terminated": {"exitCode": 0}}}],
            containers=[waiting("PodInitializing")],
        ),
        "Starting",
        "being started",
    ),
    (
        "fetching",
        decode_pod(
            init=[{"name": "fetch-model", "ready": False, "state": {"running": {}}}],
            containers=[waiting("PodInitializing")],
        ),
        "FetchingModel",
        "fetching the model",
    ),
    ("loading", decode_pod(), "Loading", "loading the model"),
    ("evicted", decode_pod(phase="Failed", reason="Evicted", message="low on disk"), "NodePressure", "low on disk"),
    ("node lost", decode_pod(reason="NodeLost"), "NodeLost", "its node does not answer"),
]


@pytest.mark.parametrize(("pod", "reason", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_pods_state_has_one_reason_and_words(pod: Object, reason: str, words: str) -> None:
    """What a pod's status holds becomes the reason of DecodeReady and of Ready, with the words of whoever refused."""
    cause = pod_cause(pod)
    assert cause is not None
    assert (cause.reason, cause.waits) == (reason, reason in WAITS)
    assert words in cause.message
    told = make_status(pods=(pod, *others()))
    assert not list(refusals(told, STATUS_SCHEMA))
    said = conditions(told)
    assert (said["DecodeReady"]["status"], said["DecodeReady"]["reason"]) == ("False", reason)
    assert (said["Ready"]["status"], said["Ready"]["reason"]) == ("False", reason)
    assert words in said["Ready"]["message"]
    assert said["Progressing"]["status"] == ("True" if reason in WAITS else "False")


def others() -> tuple[Object, ...]:
    """The pods beside decode, ready."""
    return make_pod("prefill", REVISION, ready=True), make_pod("router", None, ready=True)


def make_status(pods: tuple[Object, ...] = (), before: Object | None = None, now: str = NOW, **seen: Any) -> Object:
    return status(make_context(), ALL, Seen(pods=pods, **seen), before or {}, now)


def conditions(told: Object) -> dict[str, Object]:
    return {condition["type"]: condition for condition in told["conditions"]}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            'pods "x" is forbidden: exceeded quota: small, requested: pods=1, used: pods=2, limited: pods=2',
            "QuotaExceeded",
        ),
        ('pods "x" is forbidden: failed quota: q: must specify limits.cpu for: decode', "QuotaExceeded"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest"', "AdmissionRefused"),
        ('admission webhook "policy.example" denied the request: no', "AdmissionRefused"),
        (
            'error looking up service account ns/kvferry-router: serviceaccount "kvferry-router" not found',
            "AccountMissing",
        ),
        ("something else", "PodsRefused"),
    ],
)
def test_pods_that_cannot_even_be_made(message: str, reason: str) -> None:
    """The Deployment's own condition tells quotas, admission and a missing account apart."""
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    cause = deployment_cause({"metadata": {"name": "demo-decode-1"}, "status": {"conditions": [failure]}})
    assert cause is not None
    assert cause.reason == reason
    assert message in cause.message
    assert deployment_cause({"metadata": {"name": "x"}, "status": {}}) is None


@pytest.mark.parametrize(
    ("code", "message", "reason"),
    [
        (403, 'User "system:serviceaccount:a:b" cannot patch resource', "RBACRefused"),
        (401, "Unauthorized", "RBACRefused"),
        (403, "exceeded quota: q, requested: services=1", "QuotaExceeded"),
        (400, 'admission webhook "w" denied the request: no', "AdmissionRefused"),
        (422, "spec.replicas: Invalid value", "ApplyRefused"),
        (500, "etcdserver: request timed out", "ApiUnavailable"),
        (429, "too many requests", "ApiUnavailable"),
        (0, "connection refused", "ApiUnavailable"),
    ],
)
def test_writes_that_are_refused(code: int, message: str, reason: str) -> None:
    """RBAC, quota, admission and an API server that is away are different things to do."""
    fault = ApplyFault(kind="Deployment", name="demo-decode-1", code=code, message=message)
    assert apply_cause(fault).reason == reason
    said = conditions(make_status(pods=others(), faults=(fault,)))
    assert said["DecodeReady"]["reason"] == reason
    assert "Deployment demo-decode-1: " in said["Ready"]["message"]
    assert said["Progressing"]["status"] == ("True" if reason in WAITS else "False")


def test_ready_needs_every_role_at_the_wanted_revision() -> None:
    """Ready follows from the roles; pods of another revision do not count, and are told of."""
    good = make_pod("decode", REVISION, ready=True)
    assert conditions(make_status(pods=(good, *others())))["Ready"]["status"] == "True"
    old = make_pod("decode", "old", name="old", ready=True)
    told = make_status(pods=(old, *others()))
    assert conditions(told)["Ready"]["status"] == "False"
    assert "pods of an earlier revision" in conditions(told)["Ready"]["message"]
    (decode,) = [role for role in told["roles"] if role["name"] == "decode"]
    assert decode == {"name": "decode", "ready": "0/1", "replicas": 1, "readyReplicas": 0, "oldReplicas": 1}


def test_a_role_with_some_ready_pods_works_and_says_what_is_missing() -> None:
    """One pod of two answers: the role does its work, and the cause of the other is in its message."""
    pods = (
        make_pod("decode", REVISION, name="a", ready=True),
        decode_pod(containers=crashed(1, "boom")),
        *others(),
    )
    told = status(make_context(), {**ALL, "decode": 2}, Seen(pods=pods), {}, NOW)
    said = conditions(told)
    assert (said["DecodeReady"]["status"], said["DecodeReady"]["reason"]) == ("True", "SomeReady")
    assert said["DecodeReady"]["message"].startswith("1/2 ready: demo-decode-x, decode: ended 4 times")
    assert said["Ready"]["status"] == "True"
    assert (said["Progressing"]["status"], said["Progressing"]["reason"]) == ("False", "CrashLoop")


def test_leaving_pods_are_no_cause() -> None:
    """A pod that is being deleted neither counts nor complains."""
    pod = decode_pod(containers=crashed(1, "boom"))
    pod["metadata"]["deletionTimestamp"] = NOW
    assert pod_cause(pod) is None
    assert conditions(make_status(pods=(pod, *others())))["DecodeReady"]["reason"] == "Starting"


@pytest.mark.parametrize(
    ("since", "reason"),
    [
        ("2026-01-01T10:00:00Z", "Starting"),
        ("2026-01-01T10:00:05Z", "Starting"),
        ("2026-01-01T10:00:09Z", "ProbeFailing"),
    ],
)
def test_an_ordinary_start_is_no_failing_probe(since: str, reason: str) -> None:
    """Between a start and the first word of readiness there is no fault; who was ready and is not any more has one."""
    state = {
        "name": "decode",
        "ready": False,
        "started": True,
        "state": {"running": {"startedAt": "2026-01-01T10:00:05Z"}},
    }
    pod = decode_pod(containers=[state])
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False", "lastTransitionTime": since}]
    cause = pod_cause(pod)
    assert cause is not None
    assert cause.reason == reason


def test_a_crash_of_long_ago_is_no_cause() -> None:
    """A pod that started again and now would not answer is told by what it is now."""
    state = {"name": "decode", "ready": False, "started": True, "restartCount": 1, "state": {"running": {}}}
    cause = pod_cause(decode_pod(containers=[{**state, "lastState": ended(137, reason="OOMKilled")}]))
    assert cause is not None
    assert cause.reason == "ProbeFailing"


def test_scaled_to_zero_is_said_so() -> None:
    """No decode pods are wanted: not Ready, and not as a fault; no prefill pods: all is well."""
    said = conditions(status(make_context(), {"prefill": 0, "decode": 0, "router": 1}, Seen(pods=others()), {}, NOW))
    assert (said["DecodeReady"]["status"], said["DecodeReady"]["reason"]) == ("False", "ScaledToZero")
    assert (said["PrefillReady"]["status"], said["PrefillReady"]["reason"]) == ("True", "NotWanted")
    assert said["Ready"]["reason"] == "ScaledToZero"
    assert said["KVTransferEffective"]["reason"] == "NotUsed"


def test_times_change_with_the_status_only() -> None:
    """Another reason or message is no transition; another status is."""
    first = make_status(pods=others())
    again = make_status(pods=(decode_pod(), *others()), before=first, now=LATER)
    assert conditions(again)["Ready"]["lastTransitionTime"] == NOW
    good = make_status(pods=(make_pod("decode", REVISION, ready=True), *others()), before=again, now=LATER)
    assert conditions(good)["Ready"]["lastTransitionTime"] == LATER
    assert conditions(good)["RouterReady"]["lastTransitionTime"] == NOW
    assert {one["observedGeneration"] for one in good["conditions"]} == {1}


def test_long_messages_are_cut() -> None:
    """A status stays small whatever a log's last line was."""
    (made,) = timed([Condition(type="Ready", status="False", reason="X", message="y" * 10_000)], {}, 1, NOW)
    assert len(made["message"]) == 2000
    assert len(last_line("z" * 5000)) == 600


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("a\n\nb\n\n", "b"),
        ('{"level": "error", "message": "cannot bind", "reason": "in use"}', "cannot bind: in use"),
        ('{"level": "error"}', '{"level": "error"}'),
        ("{not json", "{not json"),
    ],
)
def test_the_last_line_is_what_a_person_would_read(text: str, line: str) -> None:
    """Blank lines are skipped; of a JSON line the message is taken."""
    assert last_line(text) == line


def test_events_tell_each_change_of_reason_once() -> None:
    """A fault is a Warning; Ready and Progressing with one cause make one Event; nothing new makes none."""
    first = make_status(pods=(decode_pod(containers=crashed(1, "boom")), *others()))
    made = events({}, first)
    assert [(event.type, event.reason) for event in made] == [("Warning", "CrashLoop")]
    assert events(first, first) == ()
    good = make_status(pods=(make_pod("decode", REVISION, ready=True), *others()), before=first)
    told = [(event.type, event.reason) for event in events(first, good)]
    assert told[0] == ("Normal", "Answering")


def test_the_most_telling_cause_comes_first() -> None:
    """Of several causes the one that has to be mended first is the reason."""
    pods = (decode_pod(), decode_pod(name="b", containers=[waiting("ErrImagePull", "no")]), *others())
    told = status(make_context(), {**ALL, "decode": 2}, Seen(pods=pods), {}, NOW)
    assert conditions(told)["DecodeReady"]["reason"] == "ImageMissing"
    assert "loading the model" in conditions(told)["DecodeReady"]["message"]


def test_reasons_are_words_for_programs() -> None:
    """CamelCase and unique; waits are among them."""
    assert len(set(REASONS)) == len(REASONS)
    assert set(REASONS) >= WAITS
    assert all(reason.isalnum() and reason[0].isupper() for reason in REASONS)
    assert Cause(reason="NoRoom", message="").rank > Cause(reason="ImageMissing", message="").rank


def test_every_reason_is_explained() -> None:
    """docs/kubernetes.md tells what each reason means and what to do."""
    page = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    told = (
        *REASONS,
        "InvalidSpec",
        "ScaledToZero",
        "SomeReady",
        "AllReady",
        "SomeDiffer",
        "CompatDiffers",
        "SameRevision",
    )
    assert not [reason for reason in told if f"`{reason}`" not in page]
