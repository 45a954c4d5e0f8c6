"""The chart as far as it can be judged without Helm: rights, values, settings, and the operator's own pod."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry_operator.plan.effects import Apply, Create, Delete, Effect, Patch
from kvferry_operator.plan.manifests.settings import ClusterSettings, decode_settings
from tests.operator.cluster import make_found
from tests.operator.fake_cluster import FakeCluster
from tests.operator.pod_security import beyond, violations

CHART = Path(__file__).parents[2] / "charts" / "kvferry"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = sorted(CHART.glob("templates/*"))
SIX = {"get", "list", "watch", "create", "patch", "delete"}
KVFERRY = "serving.kvferry.dev"

# The whole list, as the project's hardening bar has it.
OPERATOR_RIGHTS: dict[tuple[str, str], set[str]] = {
    (KVFERRY, "inferenceservices"): {"get", "list", "watch", "patch"},
    (KVFERRY, "inferenceservices/status"): {"get", "patch"},
    (KVFERRY, "inferenceservices/finalizers"): {"update"},
    (KVFERRY, "inferenceserviceroles"): SIX,
    (KVFERRY, "inferenceserviceroles/status"): SIX,
    (KVFERRY, "inferenceserviceroles/scale"): SIX,
    ("apps", "deployments"): SIX,
    ("", "services"): SIX,
    ("", "configmaps"): SIX,
    ("", "serviceaccounts"): SIX,
    ("policy", "poddisruptionbudgets"): SIX,
    ("networking.k8s.io", "networkpolicies"): SIX,
    ("", "pods"): {"get", "list", "watch"},
    ("", "events"): {"create", "patch"},
    ("events.k8s.io", "events"): {"create", "patch"},
    ("", "secrets"): {"create"},
}
OPTIONAL_RIGHTS = {
    "ingresses": {("networking.k8s.io", "ingresses"): SIX},
    "httproutes": {("gateway.networking.k8s.io", "httproutes"): SIX},
}


def rules(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((CHART / "files" / "rbac" / f"{name}.yaml").read_text())
    return found


def rights(name: str) -> dict[tuple[str, str], set[str]]:
    """Verbs by group and resource."""
    out: dict[tuple[str, str], set[str]] = {}
    for rule in rules(name):
        assert rule.keys() <= {"apiGroups", "resources", "verbs"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                out.setdefault((group, resource), set()).update(rule["verbs"])
    return out


def test_the_operators_rights_are_the_list_and_nothing_more() -> None:
    """No Secret is read, no role is written, nothing is a wildcard."""
    assert rights("operator") == OPERATOR_RIGHTS
    for name, expected in OPTIONAL_RIGHTS.items():
        assert rights(name) == expected
    assert rights("router") == {("discovery.k8s.io", "endpointslices"): {"get", "list", "watch"}}
    leases = rules("leases")
    assert [(rule["verbs"], rule.get("resourceNames")) for rule in leases] == [
        (["create"], None),
        (["get", "update", "patch"], ["kvferry-operator"]),
    ]
    for name in ("operator", "ingresses", "httproutes", "leases", "router"):
        assert "*" not in str(rules(name))


def needed(effect: Effect) -> tuple[tuple[str, str], set[str]]:
    """The right that an effect takes. An apply creates what is missing."""
    if isinstance(effect, Create | Apply):
        api_version, kind = effect.object["apiVersion"], effect.object["kind"]
    else:
        api_version, kind = effect.api_version, effect.kind
    group = api_version.rpartition("/")[0]
    noun = kind.lower()
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + ("es" if noun.endswith("s") else "s")
    verbs = {Create: {"create"}, Apply: {"create", "patch"}, Patch: {"patch"}, Delete: {"delete"}}
    return (group, plural), verbs[type(effect)]


def test_every_effect_is_allowed() -> None:
    """Made, scaled, rolled out, and shrunk: whatever the operator decides, it may do."""
    router = {"auth": "none", "ingress": {"host": "a.b"}, "httpRoute": {"gateway": "g"}}
    cluster = FakeCluster(make_found(spec__router=router))
    cluster.settle()
    for changes in ({"spec__engine": {"dtype": "float32"}}, {"spec__prefill": ..., "spec__decode__replicas": 3}):
        cluster.found = make_found(generation=2, status=cluster.found["status"], **changes)
        cluster.settle()
    allowed = rights("operator") | rights("ingresses") | rights("httproutes")
    assert {type(effect) for effect in cluster.log} == {Create, Apply, Patch, Delete}
    for effect in cluster.log:
        resource, verbs = needed(effect)
        assert verbs <= allowed.get(resource, set()), effect


def faults(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """What the values' schema refuses: the keywords that it uses."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    if not isinstance(value, types[schema["type"]]) or (isinstance(value, bool) and schema["type"] == "integer"):
        return [f"{place}: not of type {schema['type']}"]
    found = []
    if isinstance(value, dict):
        open_to = schema.get("additionalProperties", True)
        found += [f"{place}.{name}: missing" for name in schema.get("required", ()) if name not in value]
        for name, inner in value.items():
            below = schema.get("properties", {}).get(name, open_to)
            if below is False:
                found.append(f"{place}.{name}: unknown")
            elif isinstance(below, dict):
                found += faults(inner, below, f"{place}.{name}")
    elif isinstance(value, list):
        found += [fault for item in value for fault in faults(item, schema["items"], f"{place}[]")]
        found += [f"{place}: too few"] * (len(value) < schema.get("minItems", 0))
    elif isinstance(value, str):
        found += [f"{place}: pattern"] * (not re.search(schema.get("pattern", ""), value))
        found += [f"{place}: enum"] * (value not in schema.get("enum", [value]))
    elif not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        found.append(f"{place}: range")
    return found


def test_the_default_values_pass_their_schema_which_knows_them_all() -> None:
    """And each top-level value is in both."""
    assert not faults(VALUES, SCHEMA)
    assert SCHEMA["properties"].keys() - {"global"} == VALUES.keys()
    assert SCHEMA["additionalProperties"] is False


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"watchNamespace": "a"}, ".watchNamespace: unknown"),
        ({"watchNamespaces": "default"}, ".watchNamespaces: not of type array"),
        ({"replicas": "2"}, ".replicas: not of type integer"),
        ({"replicas": 9}, ".replicas: range"),
        ({"imagePullPolicy": "Sometimes"}, ".imagePullPolicy: enum"),
        ({"images": {"operator": {"repository": "a", "digest": "md5"}}}, ".images.operator.digest: pattern"),
        ({"settings": {"dnsNamspace": "x"}}, ".settings.dnsNamspace: unknown"),
    ],
)
def test_wrong_values_are_refused(change: dict[str, Any], expected: str) -> None:
    """A misspelt name, a wrong type, a value out of range."""
    assert expected in faults({**VALUES, **change}, SCHEMA)


def readme_rows() -> list[tuple[str, str]]:
    """Path and default of each row of the README's table of values."""
    text = (CHART / "README.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \| `([^|`]+)` \| ", text, re.MULTILINE)
    return [(path, default) for paths, default in rows for path in re.findall(r"`([^`]+)`", paths)]


def test_the_readme_tells_the_defaults_that_hold() -> None:
    """Each value of its table exists and has the default that stands there."""
    checked = 0
    for path, default in readme_rows():
        if "*" in path or ("." not in path and path not in VALUES):
            continue  # one row for all images
        value: Any = VALUES
        for part in path.split("."):
            assert part in value, path
            value = value[part]
        assert value == yaml.safe_load(default), path
        checked += 1
    assert checked >= 8


def test_the_settings_are_those_that_the_operator_reads() -> None:
    """The chart's settings and what its helper adds decode as ClusterSettings; none of its fields is missing."""
    helper = (CHART / "templates" / "_helpers.tpl").read_text()
    added = set(re.findall(r'^  "(\w+)" ', helper, re.MULTILINE))
    fields = set(ClusterSettings.__struct_encode_fields__)
    assert added | VALUES["settings"].keys() == fields
    assert not added & VALUES["settings"].keys()
    whole = {"runtimeImage": "r", "routerImage": "s", **VALUES["settings"]}
    bare = ClusterSettings(runtime_image="r", router_image="s")
    assert decode_settings(json.dumps(whole).encode()) == bare
    assert VALUES["imagePullPolicy"] == bare.image_pull_policy


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_templates_name_values_that_exist_and_close_what_they_open(template: Path) -> None:
    """Every `.Values` path has a default; every block has its end."""
    text = template.read_text()
    for path in re.findall(r"\.Values\.([\w.]+)", text):
        value: Any = VALUES
        for part in path.split("."):
            assert part in value, f"{template.name}: {path}"
            value = value[part]
    assert text.count("{{") == text.count("}}")
    blocks = re.findall(r"\{\{-?\s*(if|range|with|define|end)\b", text)
    assert blocks.count("end") == len(blocks) - blocks.count("end")
    used = set(re.findall(r'include "([\w.]+)"', text))
    defined = set(re.findall(r'define "([\w.]+)"', (CHART / "templates" / "_helpers.tpl").read_text()))
    assert used <= defined


def skeleton(name: str) -> list[dict[str, Any]]:
    """A template's documents with its control lines left out and a word in the place of each value."""
    lines = []
    for line in re.sub(
        r"\{\{/\*.*?\*/\}\}", "", (CHART / "templates" / name).read_text(), flags=re.DOTALL
    ).splitlines():
        if not re.fullmatch(r"\s*\{\{.*\}\}\s*", line):
            lines.append(re.sub(r"\{\{.*?\}\}", "x", line))
    return [document for document in yaml.safe_load_all("\n".join(lines)) if document]


def test_the_operators_pod_is_restricted() -> None:
    """As the pods that it makes; its token is a volume of its own, its resources come from the values."""
    (deployment,) = skeleton("deployment.yaml")
    spec = deployment["spec"]["template"]["spec"]
    spec["containers"][0]["resources"] = VALUES["resources"]
    assert not [*violations(spec), *beyond(spec)]
    assert {probe for probe in spec["containers"][0] if probe.endswith("Probe")} == {
        "livenessProbe", "readinessProbe", "startupProbe",
    }  # fmt: skip


@pytest.mark.parametrize("template", [path.name for path in TEMPLATES if path.suffix == ".yaml"])
def test_templates_are_yaml_and_stay_in_their_namespaces(template: str) -> None:
    """Every object of a namespace says which; only the CRDs and the rights of all namespaces have none."""
    for document in skeleton(template):
        assert {"apiVersion", "kind", "metadata"} <= document.keys()
        cluster_wide = document["kind"] in ("ClusterRole", "ClusterRoleBinding")
        assert ("namespace" in document["metadata"]) is not cluster_wide
        assert document["kind"] not in ("ValidatingWebhookConfiguration", "MutatingWebhookConfiguration", "Secret")


def test_crds_stay_when_the_chart_goes() -> None:
    """They are templates, so that an upgrade brings new ones; uninstalling must not take users' services along."""
    for path in (CHART / "files" / "crds").glob("*.yaml"):
        crd = yaml.safe_load(path.read_text())
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not (CHART / "crds").exists()


def test_chart_and_package_have_one_version() -> None:
    """The chart's appVersion is the release whose images it names."""
    import importlib.metadata

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == importlib.metadata.version("kvferry")
