"""Every pod that is made: restricted, holding what it may hold and nothing else, with probes that tell the truth."""

from typing import Any

import pytest

from kvferry_cli.main import build_parser
from kvferry_operator.api.source import parse_source
from kvferry_operator.plan.manifests.pod import KEYS_FOLDER
from kvferry_operator.plan.manifests.router import API_KEYS_FOLDER
from kvferry_operator.plan.manifests.settings import ClusterSettings
from kvferry_operator.plan.models import DEMO_MODELS
from kvferry_wire.fetch import FETCHED_NAME
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.operator.cluster import DEMO, SETTINGS, container_of, make_objects, pod_of
from tests.operator.pod_security import beyond, violations

ROLES = ("prefill", "decode", "router")
ENDS_S = 10.0  # for a process's own end, once it has drained
MANIFESTS: dict[str, dict[str, Any]] = {
    "toy": {},
    "demo": {"spec__model__source": DEMO, "metadata__name": "a" * 63},
    "hub": {"spec__model": {"name": "m", "source": "org/m", "size": "3Gi", "tokenSecretRef": {"name": "hub"}}},
    "web": {
        "spec__model": {"name": "m", "source": "https://models.example.com:8443/m/", "tokenSecretRef": {"name": "web"}}
    },
    "s3": {
        "spec__model": {
            "name": "m",
            "source": "s3://models/m",
            "size": "1Gi",
            "s3": {"endpoint": "http://minio.store:9000", "region": "eu-west-3", "secretRef": {"name": "s3"}},
        }
    },
    "pvc": {"spec__model__source": "pvc://claim/a/b"},
    "image": {"spec__model__source": "image://registry/model:1"},
    "keys": {"spec__router": {"apiKeys": {"secretRef": {"name": "clients"}}}},
    "alone": {"spec__prefill": ...},
    "full": {
        "metadata__name": "7b",
        "spec__decode": {
            "nodeSelector": {"a": "b"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}},
            "topologySpreadConstraints": [{"topologyKey": "zone"}],
            "priorityClassName": "high",
            "labels": {"team": "x"},
            "annotations": {"note": "y"},
            "env": [{"name": "A", "value": "$(HOME) $$"}, {"name": "HOME", "value": "/models"}],
            "image": "registry/other:2",
            "resources": {"limits": {"cpu": 2, "memory": "4Gi"}},
        },
    },
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_pod_is_restricted(name: str) -> None:
    """No pod breaks the standard `restricted`, whatever the manifest; and none asks for less than we demand."""
    for made in make_objects(**MANIFESTS[name]):
        if made["kind"] == "Deployment":
            spec = made["spec"]["template"]["spec"]
            assert not [*violations(spec), *beyond(spec)], made["metadata"]["name"]


def container(**changes: Any) -> dict[str, Any]:
    """A pod's spec with one container."""
    return {"containers": [{"name": "c", **changes}]}


BREACHES: list[tuple[dict[str, Any], str]] = [
    ({"hostNetwork": True}, "hostNetwork"),
    ({"hostPID": True}, "hostPID"),
    ({"hostIPC": True}, "hostIPC"),
    ({"volumes": [{"name": "x", "hostPath": {}}]}, "volume x: hostPath"),
    ({"volumes": [{"name": "x", "nfs": {}}]}, "volume x: nfs"),
    ({"securityContext": {}}, "c: runAsNonRoot is not true"),
    ({"securityContext": {"sysctls": [{"name": "a", "value": "b"}]}}, "sysctls"),
    ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "seccomp is unconfined"),
    ({"securityContext": {"appArmorProfile": {"type": "Unconfined"}}}, "no AppArmor profile"),
    ({"securityContext": {"seLinuxOptions": {"user": "system_u"}}}, "seLinuxOptions"),
    ({"securityContext": {"windowsOptions": {"hostProcess": True}}}, "windowsOptions"),
    (container(), "c: capabilities are not dropped"),
    (container(), "c: no seccomp profile"),
    (container(), "c: allowPrivilegeEscalation is not false"),
    (container(securityContext={"privileged": True}), "c: privileged"),
    (container(securityContext={"runAsUser": 0}), "c: runAsUser is 0"),
    (container(securityContext={"procMount": "Unmasked"}), "c: procMount"),
    (container(securityContext={"capabilities": {"add": ["IPC_LOCK"]}}), "c: capabilities are added"),
    (container(securityContext={"seccompProfile": {"type": "Unconfined"}}), "c: seccomp is unconfined"),
    (container(securityContext={"seLinuxOptions": {"type": "spc_t"}}), "c: seLinuxOptions"),
    (container(ports=[{"hostPort": 1}]), "c: hostPort"),
    (container(livenessProbe={"tcpSocket": {"host": "10.0.0.1"}}), "c: livenessProbe names a host"),
    (container(lifecycle={"preStop": {"httpGet": {"host": "10.0.0.1"}}}), "c: preStop names a host"),
    ({"initContainers": [{"name": "i"}]}, "i: capabilities are not dropped"),
    ({"ephemeralContainers": [{"name": "e"}]}, "e: capabilities are not dropped"),
]


@pytest.mark.parametrize(("change", "expected"), BREACHES, ids=[expected for _, expected in BREACHES])
def test_the_evaluator_finds_breaches(change: dict[str, Any], expected: str) -> None:
    """The evaluator itself is tried on one breach of each kind."""
    assert expected in list(violations({**container(), **change}))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "enableServiceLinks is not False"),
        ({}, "automountServiceAccountToken is not False"),
        ({}, "no fixed user"),
        ({}, "c: the root file system can be written"),
        ({}, "c: asks for nothing"),
        (
            container(resources={"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}}),
            "c: asks for less memory than it may use",
        ),
        ({"volumes": [{"name": "x", "emptyDir": {}}]}, "volume x has no size"),
    ],
)
def test_the_evaluator_finds_what_we_ask_beyond_the_standard(change: dict[str, Any], expected: str) -> None:
    """One lack of each kind."""
    assert expected in list(beyond({**container(), **change}))


def test_the_router_holds_no_kv_key_and_engines_no_token() -> None:
    """Key files by role; the API's token is in the router alone, as a volume of its own; clients' keys likewise."""
    made = make_objects(**MANIFESTS["keys"])
    files = {}
    for role in ROLES:
        (keys,) = [volume["secret"] for volume in pod_of(made, role)["volumes"] if volume["name"] == "keys"]
        files[role] = {item["path"] for item in keys["items"]}
        assert keys["defaultMode"] == 0o440
        assert "--keys-dir" in container_of(made, role)["args"]
        assert KEYS_FOLDER in container_of(made, role)["args"]
    assert files == {role: {"http", "state", "hash"} | ({"kv"} if role != "router" else set()) for role in ROLES}
    projected = {role: [v for v in pod_of(made, role)["volumes"] if "projected" in v] for role in ROLES}
    assert {role: len(found) for role, found in projected.items()} == {"prefill": 0, "decode": 0, "router": 1}
    token = projected["router"][0]["projected"]["sources"][0]["serviceAccountToken"]
    assert token["expirationSeconds"] <= 3600
    assert pod_of(made, "router")["serviceAccountName"] == "kvferry-router"
    assert pod_of(made, "decode")["serviceAccountName"] == "demo-engine"
    mounts = {mount["mountPath"]: mount["name"] for mount in container_of(made, "router")["volumeMounts"]}
    assert mounts[API_KEYS_FOLDER] == "api-keys"
    assert not [mount for mount in container_of(made, "router")["volumeMounts"] if "subPath" in mount]


def test_the_fetching_container_alone_holds_the_hubs_token() -> None:
    """The engine beside it mounts the model read-only and no token; nobody has it in the environment."""
    for role in ("prefill", "decode"):
        spec = pod_of(make_objects(**MANIFESTS["hub"]), role)
        (fetch,) = spec["initContainers"]
        assert "hub-token" in {mount["name"] for mount in fetch["volumeMounts"]}
        assert fetch["args"][-1] == "hf://org/m"
        engine = spec["containers"][0]
        mounts = {mount["name"]: mount for mount in engine["volumeMounts"]}
        assert "hub-token" not in mounts
        assert mounts["models"]["readOnly"] is True
        assert "TOKEN" not in str(engine["env"])
        assert not [variable for variable in fetch["env"] if "secretKeyRef" in variable.get("valueFrom", {})]
        assert "--model /models/model " in " ".join(engine["args"])
    assert "initContainers" not in pod_of(make_objects(), "decode")


@pytest.mark.parametrize(
    ("name", "argument", "volume"),
    [
        ("toy", "toy", None),
        ("demo", "/models/model", {"emptyDir": {"sizeLimit": "422Mi"}}),
        ("web", "/models/model", {"emptyDir": {"sizeLimit": "262144Mi"}}),
        ("s3", "/models/model", {"emptyDir": {"sizeLimit": "1344Mi"}}),
        ("pvc", "/models/a/b", {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}}),
        ("image", "/models", {"image": {"reference": "registry/model:1", "pullPolicy": "IfNotPresent"}}),
    ],
)
def test_models_lie_where_the_manifest_says(name: str, argument: str, volume: dict[str, Any] | None) -> None:
    """A volume of the pod for what is fetched, a claim or an image that the user names, nothing for the toy."""
    made = make_objects(**MANIFESTS[name])
    args = container_of(made, "decode")["args"]
    assert args[args.index("--model") + 1] == argument
    volumes = [found for found in pod_of(made, "decode")["volumes"] if found["name"] == "models"]
    assert volumes == ([] if volume is None else [{"name": "models", **volume}])


def test_demo_models_are_those_that_can_be_fetched() -> None:
    """What the plan knows sizes of is what the command line fetches."""
    from kvferry_runtime.model.fetch.demo import DEMO_MODELS as FETCHED

    assert all(f"demo:{name}" in FETCHED for name in DEMO_MODELS)


def fetcher_of(name: str) -> dict[str, Any]:
    """The container that fetches, in decode pods."""
    fetch: dict[str, Any]
    (fetch,) = pod_of(make_objects(**MANIFESTS[name]), "decode")["initContainers"]
    return fetch


@pytest.mark.parametrize("name", ["demo", "hub", "web", "s3"])
def test_the_fetching_container_runs_what_the_command_line_takes(name: str) -> None:
    """Its arguments are the command's, the link is where the engine looks, and the cap is below the volume's size."""
    fetch = fetcher_of(name)
    assert fetch["command"] == ["python", "-P", "-m", "kvferry_cli"]
    args = build_parser().parse_args(fetch["args"])
    assert args.name == str(parse_source(args.name))
    assert (args.link, str(args.report)) == (FETCHED_NAME, fetch["terminationMessagePath"])
    (volume,) = [
        found for found in pod_of(make_objects(**MANIFESTS[name]), "decode")["volumes"] if found["name"] == "models"
    ]
    assert args.max_bytes < int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi")) * 2**20
    assert args.max_bytes > {"hub": 3 * 2**30, "s3": 2**30}.get(name, 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hub", {"HF_TOKEN_PATH": "/var/run/kvferry/hub/token"}),
        ("web", {"KVFERRY_TOKEN_FILE": "/var/run/kvferry/hub/token"}),
        (
            "s3",
            {
                "KVFERRY_S3_CREDENTIALS": "/var/run/kvferry/s3",
                "AWS_ENDPOINT_URL_S3": "http://minio.store:9000",
                "AWS_REGION": "eu-west-3",
            },
        ),
    ],
)
def test_credentials_come_as_files_to_the_fetching_container_alone(name: str, expected: dict[str, str]) -> None:
    """Its environment names them and holds none; the engine mounts no volume of a Secret but its keys."""
    fetch = fetcher_of(name)
    env = {variable["name"]: variable.get("value") for variable in fetch["env"]}
    assert env.items() >= expected.items()
    spec = pod_of(make_objects(**MANIFESTS[name]), "decode")
    secrets = {volume["name"] for volume in spec["volumes"] if "secret" in volume} - {"keys"}
    assert secrets
    assert secrets <= {mount["name"] for mount in fetch["volumeMounts"]}
    assert not secrets & {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("deadline", [None, "1.5s", "2h"])
def test_a_pod_that_ends_is_given_the_time_that_its_answers_may_take(role: str, deadline: str | None) -> None:
    """Nobody takes an answer over from a router: it waits as long as a request may last. Engines have one grace."""
    changes = {} if deadline is None else {"spec__router__requestDeadline": deadline}
    made = make_objects(**changes)
    spec, argv = pod_of(made, role), container_of(made, role)["args"]
    drain = float(argv[argv.index("--drain") + 1])
    asked = {None: 600.0, "1.5s": 1.5, "2h": 7200.0}[deadline]
    assert drain == (asked if role == "router" else 600.0)
    linger = container_of(made, role)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert linger + drain + 8 <= spec["terminationGracePeriodSeconds"] <= linger + drain + 30


@pytest.mark.parametrize("role", ROLES)
def test_probes_hit_real_endpoints_and_wait_for_the_load(role: str) -> None:
    """Startup waits as long as a load may take, readiness asks each second, liveness /healthz patiently."""
    container = container_of(make_objects(**MANIFESTS["hub"]), role)
    start, ready, live = (container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))
    traffic = "/readyz/router" if role == "router" else "/readyz"
    assert [probe["httpGet"]["path"] for probe in (start, ready, live)] == [traffic, traffic, "/healthz"]
    assert {probe["httpGet"]["port"] for probe in (start, ready, live)} == {"http"}
    assert "http" in {port["name"] for port in container["ports"]}
    assert ready["periodSeconds"] * ready["failureThreshold"] <= 1
    # The pod heals a wedged engine itself; the kubelet comes after it.
    assert live["periodSeconds"] * live["failureThreshold"] > DEFAULT_LIMITS.engine_kill_s
    waits = start["periodSeconds"] * start["failureThreshold"]
    assert waits >= (60 if role == "router" else 300 + 3 * 2**30 / (50 * 2**20))
    assert waits <= DEFAULT_LIMITS.engine_start_s


def test_a_model_of_unknown_size_may_take_as_long_as_the_engine_waits() -> None:
    """Nothing is killed for loading slowly."""
    start = container_of(make_objects(spec__model__source="org/m"), "decode")["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] == DEFAULT_LIMITS.engine_start_s


def test_pods_leave_in_order() -> None:
    """A pod goes on as before while its removal spreads; then it has time to end its streams."""
    for role in ROLES:
        spec = pod_of(make_objects(), role)
        linger = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        args = spec["containers"][0]["args"]
        drains = float(args[args.index("--drain") + 1])
        assert linger > 0
        assert linger + drains + ENDS_S <= spec["terminationGracePeriodSeconds"]
        assert spec["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_what_the_manifest_says_of_pods_reaches_them() -> None:
    """Placement, marks, image, resources and environment; the operator's own labels and address cannot be replaced."""
    made = make_objects(**MANIFESTS["full"])
    spec, container = pod_of(made, "decode"), container_of(made, "decode")
    assert spec["nodeSelector"] == {"a": "b"}
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["affinity"] == {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}
    assert spec["priorityClassName"] == "high"
    assert [constraint["topologyKey"] for constraint in spec["topologySpreadConstraints"]] == ["zone"]
    assert container["image"] == "registry/other:2"
    assert container["resources"] == {"limits": {"cpu": "2", "memory": "4Gi"}}
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert env["A"] == "$$(HOME) $$"
    assert env["HOME"] == "/models"
    assert env["OMP_NUM_THREADS"] == "2"
    (decode,) = [one for one in made if one["kind"] == "Deployment" and "decode" in one["metadata"]["name"]]
    metadata = decode["spec"]["template"]["metadata"]
    assert metadata["labels"]["team"] == "x"
    assert metadata["labels"]["app.kubernetes.io/component"] == "decode"
    assert metadata["annotations"] == {"note": "y"}


def test_pods_bind_their_own_address() -> None:
    """Not every interface: the address that the kubelet gives, on the fixed ports."""
    for role, ports in (("decode", {"8000", "5600", "5601", "5557"}), ("router", {"8000"})):
        container = container_of(make_objects(), role)
        args = container["args"]
        assert args[args.index("--host") + 1] == "$(POD_IP)"
        assert container["env"][0]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert ports <= set(args)
        assert {str(port["containerPort"]) for port in container["ports"]} == ports


def test_pools_spread_over_nodes_by_default() -> None:
    """As far as that goes: it never keeps a pod from running."""
    (spread,) = pod_of(make_objects(), "decode")["topologySpreadConstraints"]
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "decode"


def test_installation_settings_reach_every_pod() -> None:
    """Images, pull policy and pull secrets of the chart's values; a manifest's image wins."""
    settings = ClusterSettings(
        runtime_image="r:1", router_image="s:1", image_pull_policy="Always", image_pull_secrets=("pull",)
    )
    made = make_objects(settings)
    assert [container_of(made, role)["image"] for role in ROLES] == ["r:1", "r:1", "s:1"]
    assert {container_of(made, role)["imagePullPolicy"] for role in ROLES} == {"Always"}
    assert {str(pod_of(made, role)["imagePullSecrets"]) for role in ROLES} == {"[{'name': 'pull'}]"}
    assert "imagePullSecrets" not in pod_of(make_objects(SETTINGS), "decode")


def test_the_engines_parser_takes_the_rendered_command_line() -> None:
    """The arguments are free of faults once the kubelet has put the address in."""
    from kvferry_runtime.server.config import parse

    for role in ("prefill", "decode"):
        container = container_of(make_objects(**MANIFESTS["demo"]), role)
        assert container["command"] == ["python", "-P", "-m", "kvferry_runtime.server"]
        config = parse([argument.replace("$(POD_IP)", "10.0.0.1") for argument in container["args"]])
        assert (config.host, config.port, config.role) == ("10.0.0.1", 8000, role)


def test_the_router_watches_the_pools_services() -> None:
    """In place of the pods file of one machine."""
    args = container_of(make_objects(), "router")["args"]
    assert "--pods-file" not in args
    assert "--watch-prefill=ns/demo-prefill" in args
    assert "--watch-decode=ns/demo-decode" in args
