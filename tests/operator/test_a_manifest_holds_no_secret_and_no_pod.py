"""What a manifest can never say: a secret itself, a pod of one's own, an argument, another namespace."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry_operator.api.crds import crds
from kvferry_operator.plan.effects import Apply, Create
from tests.operator.cluster import KEYS, make_found, make_objects
from tests.operator.fake_cluster import FakeCluster
from tests.operator.profiles import PROFILES

Schema = dict[str, Any]
SECRETIVE = re.compile(r"token|secret|passw|credential|key|cert|private", re.IGNORECASE)
# Names that only sound so, and why each is none.
HARMLESS = {
    "topologyKey": "a label of nodes",
    "key": "of a taint",
    "keysFile": "a path of one machine; a cluster refuses it",
    "tokenBudget": "a number of tokens",
    "minUncachedTokens": "a number of tokens",
}
# Fields by which a manifest could reach beyond the pods that the operator makes.
NEVER = {
    "args", "command", "containers", "initContainers", "ephemeralContainers", "podTemplate", "podSpec", "template",
    "securityContext", "privileged", "capabilities", "hostPath", "hostNetwork", "hostPID", "hostIPC", "hostPort",
    "volumes", "volumeMounts", "serviceAccountName", "serviceAccount", "automountServiceAccountToken", "lifecycle",
    "shareProcessNamespace", "runtimeClassName", "valueFrom", "envFrom", "finalizers", "trustRemoteCode", "extraArgs",
}  # fmt: skip
OPEN = {
    f"spec.{role}.affinity.{field}"
    for role in ("prefill", "decode", "router")
    for field in ("nodeAffinity", "podAffinity", "podAntiAffinity")
}


def fields(schema: Schema, place: str = "") -> Iterator[tuple[str, str, Schema]]:
    """Path, name and schema of every field."""
    for name, inner in schema.get("properties", {}).items():
        path = f"{place}.{name}" if place else name
        yield path, name, inner
        yield from fields(inner, path)
    if "items" in schema:
        yield from fields(schema["items"], f"{place}[]")


def spec_fields() -> list[tuple[str, str, Schema]]:
    """Of both kinds, as the API server has them."""
    found = []
    for crd in crds().values():
        (version,) = crd["spec"]["versions"]
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        found += list(fields(spec, "spec"))
    assert len(found) > 100
    return found


def test_a_secret_is_only_ever_referred_to() -> None:
    """Whatever is called like a secret is an object with the name of a Secret and nothing beside."""
    for path, name, schema in spec_fields():
        if not SECRETIVE.search(name) or name in HARMLESS:
            continue
        if name == "apiKeys":
            assert set(schema["properties"]) == {"secretRef", "keysFile"}
            continue
        assert schema["type"] == "object", path
        assert set(schema["properties"]) == {"name"}, path


def test_a_manifest_shapes_no_pod_of_its_own() -> None:
    """No free-form pod, no privileged field, no argument, no volume, no account, no reference into the environment."""
    named = {name: path for path, name, _ in spec_fields()}
    assert not named.keys() & NEVER
    unknown = {path for path, _, schema in spec_fields() if schema.get("x-kubernetes-preserve-unknown-fields")}
    assert unknown == OPEN, "the API server reads affinity itself; nothing else may hold what is not declared"
    namespaces = {path for path, name, _ in spec_fields() if "namespace" in name.lower()}
    assert namespaces == {"spec.router.httpRoute.gatewayNamespace"}, "to which an HTTPRoute refers, and writes nothing"


@pytest.mark.parametrize("name", PROFILES)
def test_everything_that_is_made_is_in_the_services_namespace(name: str) -> None:
    """And refers to no other: no object is of the cluster, whatever the manifest says."""
    for one in make_objects(**PROFILES[name]):
        assert one["metadata"]["namespace"] == "ns"
        assert one["kind"] not in ("Namespace", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "Secret")


def test_no_key_is_anywhere_but_in_its_secret() -> None:
    """Through a whole life: not in an annotation, an argument, the environment, a ConfigMap, a label or the status."""
    cluster = FakeCluster(make_found())
    cluster.settle()
    cluster.found = make_found(generation=2, status=cluster.found["status"], spec__engine={"dtype": "float32"})
    cluster.settle()
    written = [effect.object for effect in cluster.log if isinstance(effect, Apply | Create)]
    (secret,) = [one for one in written if one["kind"] == "Secret"]
    shown = str([one for one in written if one is not secret]) + str(cluster.found["status"])
    for key, encoded in zip(KEYS.values(), secret["data"].values(), strict=True):
        assert key.hex() not in shown
        assert encoded not in shown
    assert "annotations" not in secret["metadata"]
