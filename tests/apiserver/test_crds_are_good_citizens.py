"""The CRDs on a real API server: accepted as they are, documented, defaulted, with their subresources."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry_operator.api.crds import crds
from kvferry_operator.api.service import API_VERSION
from tests.operator.manifests import make_manifest
from tests.support.api_server import ApiServer
from tests.support.kube_client import Object, Refused

ROOT = Path(__file__).parents[2]
CRDS = {crd["spec"]["names"]["kind"]: crd for crd in crds().values()}
SCHEMAS = [crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for crd in CRDS.values()]
SHORT = {"InferenceService": "infsvc", "InferenceServiceRole": "infsvcrole"}
ROLE: Object = {
    "apiVersion": API_VERSION,
    "kind": "InferenceServiceRole",
    "spec": {"service": "demo", "role": "decode"},
}


def named(wanted: Object, namespace: str, name: str = "demo") -> Object:
    return {**wanted, "metadata": {"name": name, "namespace": namespace}}


@pytest.mark.parametrize("kind", sorted(CRDS))
def test_the_server_has_nothing_against_it(api_server: ApiServer, kind: str) -> None:
    """Established under its names, structural, every rule compiled and within the cost budget: a server that found a
    fault would have refused it, or would say so in a condition."""
    found = api_server.client.get(CRDS[kind])
    conditions = {one["type"]: one["status"] for one in found["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}


def objects_in(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object with fields of its own below a schema, by its path."""
    for name, inner in schema.get("properties", {}).items():
        below = inner.get("items", inner)
        if "properties" in below and name != "metadata":
            yield f"{path}.{name}", below
            yield from objects_in(below, f"{path}.{name}")


def explained() -> list[tuple[str, dict[str, Any]]]:
    """What `kubectl explain` is asked for: each kind, and each object in it."""
    found = []
    for kind, crd in CRDS.items():
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        found += [(SHORT[kind], schema), *objects_in(schema, SHORT[kind])]
    return found


@pytest.mark.parametrize(("path", "schema"), explained(), ids=[path for path, _ in explained()])
def test_explain_reads_like_documentation(api_server: ApiServer, path: str, schema: dict[str, Any]) -> None:
    """`kubectl explain` shows, of the object and of each field in it, a sentence that was written for people."""
    told = " ".join(api_server.kubectl("explain", path).stdout.split())
    assert "<no description>" not in told
    for name, inner in schema["properties"].items():
        if schema in SCHEMAS and name in ("apiVersion", "kind", "metadata"):
            continue  # the server has its own words for these
        text = inner["description"]
        assert text in told, f"{path}.{name}"
        assert text[0].isupper() or text.startswith("`"), f"{path}.{name}: {text}"
        assert text.rstrip(")").endswith("."), f"{path}.{name}: {text}"
        assert f"{name} <" in told


def test_short_names_and_category(api_server: ApiServer, namespace: str) -> None:
    """`infsvc`, `infsvcrole`, and `kvferry` for both."""
    api_server.client.create(named(make_manifest(), namespace))
    api_server.client.create(named(ROLE, namespace, "demo-decode"))
    listed = api_server.kubectl("get", "kvferry", "-n", namespace, "-o", "name").stdout.split()
    assert sorted(listed) == [
        "inferenceservice.serving.kvferry.dev/demo",
        "inferenceservicerole.serving.kvferry.dev/demo-decode",
    ]
    for short in SHORT.values():
        assert api_server.kubectl("get", short, "-n", namespace, "-o", "name").stdout


def test_columns(api_server: ApiServer, namespace: str) -> None:
    """`kubectl get infsvc` tells how it is; `-o wide` also which revision, which path, and why."""
    made = api_server.client.create(named(make_manifest(), namespace))
    status = {
        "url": "http://demo-router.ns.svc:8000/v1",
        "revision": "0123456789",
        "path": "disaggregated",
        "conditions": [
            {"type": "Progressing", "status": "True", "message": "not this one"},
            {"type": "Ready", "status": "False", "message": "decode: no node has room"},
        ],
        "roles": [{"name": "decode", "ready": "0/2"}, {"name": "prefill", "ready": "1/1"}],
    }
    api_server.client.apply({**named(make_manifest(), namespace), "status": status}, "operator", "status")
    table = api_server.kubectl("get", "infsvc", "-n", namespace).stdout.splitlines()
    assert table[0].split() == ["NAME", "MODEL", "PREFILL", "DECODE", "READY", "URL", "AGE"]
    assert table[1].split()[:6] == ["demo", "tiny", "1/1", "0/2", "False", "http://demo-router.ns.svc:8000/v1"]
    head, row = api_server.kubectl("get", "infsvc", "-n", namespace, "-o", "wide").stdout.splitlines()
    assert head.split()[-3:] == ["REVISION", "PATH", "WHY"]
    assert row.endswith("decode: no node has room")
    assert "0123456789" in row
    assert "disaggregated" in row
    assert made["metadata"]["generation"] == 1


def test_columns_of_a_role(api_server: ApiServer, namespace: str) -> None:
    """Service, role, and how many pods are wanted and ready."""
    api_server.client.create(named(ROLE, namespace, "demo-decode"))
    api_server.client.apply(
        {**named(ROLE, namespace, "demo-decode"), "status": {"readyReplicas": 1}}, "operator", "status"
    )
    head, row = api_server.kubectl("get", "infsvcrole", "-n", namespace).stdout.splitlines()
    assert head.split() == ["NAME", "SERVICE", "ROLE", "REPLICAS", "READY", "AGE"]
    assert row.split()[:5] == ["demo-decode", "demo", "decode", "1", "1"]


def test_status_is_apart_from_the_spec(api_server: ApiServer, namespace: str) -> None:
    """A write of the object does not touch the status, one of the status does not touch the spec or its generation; a
    first status may hold one field only."""
    client, wanted = api_server.client, named(make_manifest(), namespace)
    client.create({**wanted, "status": {"revision": "theirs"}})
    assert "status" not in client.get(wanted)
    client.apply({**wanted, "status": {"revision": "ours"}, "spec": wanted["spec"]}, "operator", "status")
    changed = client.patch(wanted, {"spec": {"decode": {"replicas": 5}}}, "status")
    assert changed["spec"]["decode"]["replicas"] == 1
    assert changed["metadata"]["generation"] == 1
    changed = client.patch(wanted, {"status": {"revision": "theirs"}, "spec": {"decode": {"replicas": 5}}})
    assert changed["status"] == {"revision": "ours"}
    assert changed["metadata"]["generation"] == 2


def test_conditions_merge_by_their_type(api_server: ApiServer, namespace: str) -> None:
    """Two writers with a condition each: both stay, and either can take its own away."""
    client, wanted = api_server.client, named(make_manifest(), namespace)
    client.create(wanted)
    bare = {key: wanted[key] for key in ("apiVersion", "kind", "metadata")}

    def write(manager: str, *types: str) -> list[str]:
        conditions = [{"type": one, "status": "True"} for one in types]
        found = client.apply({**bare, "status": {"conditions": conditions}}, manager, "status")
        return sorted(one["type"] for one in found["status"].get("conditions", ()))

    assert write("one", "Ready") == ["Ready"]
    assert write("two", "RouterReady") == ["Ready", "RouterReady"]
    assert write("one") == ["RouterReady"]


def test_scale_is_what_autoscalers_read_and_write(api_server: ApiServer, namespace: str) -> None:
    """/scale of a role object tells wanted and current pods and their selector; `kubectl scale` writes it."""
    client, wanted = api_server.client, named(ROLE, namespace, "demo-decode")
    client.create(wanted)
    client.apply({**wanted, "status": {"replicas": 1, "selector": "a=b,c=d"}}, "operator", "status")
    path = f"/apis/{API_VERSION}/namespaces/{namespace}/inferenceserviceroles/demo-decode/scale"
    scale = client.call("GET", path)
    assert (scale["spec"], scale["status"]) == ({"replicas": 1}, {"replicas": 1, "selector": "a=b,c=d"})
    api_server.kubectl("scale", "infsvcrole", "demo-decode", "-n", namespace, "--replicas=7")
    assert client.get(wanted)["spec"]["replicas"] == 7
    told = api_server.kubectl("scale", "infsvcrole", "demo-decode", "-n", namespace, "--replicas=65", check=False)
    assert "less than or equal to 64" in told.stderr


def test_a_router_is_never_scaled_to_nothing(api_server: ApiServer, namespace: str) -> None:
    """The endpoint stays: /scale of a router's role object refuses 0 in words."""
    wanted = {**ROLE, "spec": {"service": "demo", "role": "router"}}
    api_server.client.create(named(wanted, namespace, "demo-router"))
    told = api_server.kubectl("scale", "infsvcrole", "demo-router", "-n", namespace, "--replicas=0", check=False)
    assert told.returncode != 0
    assert "a service has at least 1 router" in told.stderr


@pytest.mark.parametrize(("field", "other"), [("service", "other"), ("role", "prefill")])
def test_a_role_object_stays_what_it_is(api_server: ApiServer, namespace: str, field: str, other: str) -> None:
    """Service and role of a role object cannot be changed."""
    wanted = named(ROLE, namespace, "demo-decode")
    api_server.client.create(wanted)
    with pytest.raises(Refused) as caught:
        api_server.client.patch(wanted, {"spec": {field: other}})
    assert caught.value.fields == ((f"spec.{field}", "Invalid value: cannot be changed"),)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_accepted(api_server: ApiServer, namespace: str, example: Path) -> None:
    """`kubectl apply -f` of each example, as it is."""
    api_server.kubectl("apply", "-n", namespace, "-f", str(example))
    again = api_server.kubectl("apply", "-n", namespace, "-f", str(example))
    assert "unchanged" in again.stdout


def test_an_autoscaler_can_be_pointed_at_a_role(api_server: ApiServer, namespace: str) -> None:
    """The example of an HPA names kinds and versions that exist."""
    path = ROOT / "examples" / "kubernetes" / "autoscale.yaml"
    api_server.kubectl("apply", "-n", namespace, "-f", str(path))
    (wanted,) = [one for one in yaml.safe_load_all(path.read_text("utf-8")) if one]
    target = wanted["spec"]["scaleTargetRef"]
    served = api_server.client.call("GET", f"/apis/{target['apiVersion']}")["resources"]
    assert f"{target['kind']}" in {one["kind"] for one in served}
    assert "inferenceserviceroles/scale" in {one["name"] for one in served}


def test_open_api_is_published(api_server: ApiServer) -> None:
    """Editors and `kubectl` read the schema from the server: it holds our fields with their descriptions."""
    document = api_server.client.call("GET", f"/openapi/v3/apis/{API_VERSION}")
    schema = document["components"]["schemas"]["dev.kvferry.serving.v1alpha1.InferenceService"]
    ours = CRDS["InferenceService"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    theirs = schema["properties"]["spec"]["properties"]["model"]["properties"]["name"]["description"]
    assert theirs == ours["properties"]["spec"]["properties"]["model"]["properties"]["name"]["description"]
    assert json.dumps(schema["properties"]["spec"]["properties"]["router"]).count("description") > 30
