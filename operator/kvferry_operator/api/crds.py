"""The CRDs, from the types: ``python -m kvferry_operator.api.crds FOLDER...`` writes one YAML file each."""

import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from kvferry_operator.api.base import DNS_LABEL
from kvferry_operator.api.faults import SchemaView
from kvferry_operator.api.role import ROLE_KIND, InferenceServiceRole
from kvferry_operator.api.schema import VALIDATIONS, structural
from kvferry_operator.api.service import API_VERSION, KIND, InferenceService, InferenceServiceSpec
from kvferry_operator.api.status import InferenceServiceStatus

GROUP, VERSION = API_VERSION.split("/")
PLURAL, ROLE_PLURAL = "inferenceservices", "inferenceserviceroles"
HEAD = """\
# Written by `make crds` from operator/kvferry_operator/api; a test fails when it is stale.
"""
MAX_NAME = 63
_READY = '.status.conditions[?(@.type=="Ready")]'


def service_crd() -> dict[str, Any]:
    """The CRD of ``InferenceService``."""
    view = SchemaView(InferenceService.model_json_schema(by_alias=True))
    properties = {
        "spec": _described(structural(InferenceServiceSpec), "What is asked for."),
        "status": _described(structural(InferenceServiceStatus), "What is. Written by the operator."),
    }
    schema = _root(InferenceService, KIND, properties)
    schema["properties"]["metadata"]["properties"] = {"name": {"type": "string", "maxLength": MAX_NAME}}
    # Names of pods, Services and labels are made from the name, so that it must be a label itself.
    rule = f"self.metadata.name.size() <= {MAX_NAME} && self.metadata.name.matches(r'{DNS_LABEL}')"
    accepts = f"accepts {view.accepts(('metadata', 'name'))}"
    schema[VALIDATIONS] = [{"rule": rule, "message": accepts, "fieldPath": ".metadata.name"}]
    columns = [
        _column("Model", ".spec.model.name", "The name that clients ask for"),
        _column("Prefill", '.status.roles[?(@.name=="prefill")].ready', "Ready prefill pods of those wanted"),
        _column("Decode", '.status.roles[?(@.name=="decode")].ready', "Ready decode pods of those wanted"),
        _column("Ready", f"{_READY}.status", "Whether a request would be answered now"),
        _column("URL", ".status.url", "The endpoint inside the cluster"),
        _column("Age", ".metadata.creationTimestamp", kind="date"),
        _column("Revision", ".status.revision", "Hash of what changes the engines' work", wide=True),
        _column("Path", ".status.path", "How prompts are computed", wide=True),
        _column("Why", f"{_READY}.message", "Why it is ready or not", wide=True),
    ]
    names = {"plural": PLURAL, "singular": "inferenceservice", "shortNames": ["infsvc"]}
    return _crd(KIND, names, schema, columns, {"status": {}})


def role_crd() -> dict[str, Any]:
    """The CRD of ``InferenceServiceRole``."""
    whole = structural(InferenceServiceRole)["properties"]
    schema = _root(InferenceServiceRole, ROLE_KIND, {"spec": whole["spec"], "status": whole["status"]})
    columns = [
        _column("Service", ".spec.service", "The InferenceService"),
        _column("Role", ".spec.role", "The role"),
        _column("Replicas", ".spec.replicas", "Pods that are wanted", kind="integer"),
        _column("Ready", ".status.readyReplicas", "Pods that would answer a request now", kind="integer"),
        _column("Age", ".metadata.creationTimestamp", kind="date"),
    ]
    names = {"plural": ROLE_PLURAL, "singular": "inferenceservicerole", "shortNames": ["infsvcrole"]}
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return _crd(ROLE_KIND, names, schema, columns, {"status": {}, "scale": scale})


def crds() -> dict[str, dict[str, Any]]:
    """All CRDs by file name."""
    return {f"{GROUP}_{crd['spec']['names']['plural']}.yaml": crd for crd in (service_crd(), role_crd())}


def crd_files() -> dict[str, str]:
    """The text of each file."""
    return {name: HEAD + _dumped(crd) for name, crd in crds().items()}


class _PlainDumper(yaml.SafeDumper):
    """Writes equal parts out each time, where YAML would refer to the first."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _dumped(crd: dict[str, Any]) -> str:
    return str(yaml.dump(crd, Dumper=_PlainDumper, sort_keys=False, width=120))


def _crd(
    kind: str, names: dict[str, Any], schema: dict[str, Any], columns: list[dict[str, Any]], subresources: Any
) -> dict[str, Any]:
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": subresources,
        "additionalPrinterColumns": columns,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names['plural']}.{GROUP}",
            "labels": {"app.kubernetes.io/name": "kvferry", "app.kubernetes.io/part-of": "kvferry"},
            # Uninstalling the chart would else delete every service of the cluster.
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {**names, "kind": kind, "listKind": f"{kind}List", "categories": ["kvferry"]},
            "versions": [version],
        },
    }


def _root(model: type[BaseModel], kind: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": " ".join((model.__doc__ or "").split()),
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"The version of this object: {API_VERSION}."},
            "kind": {"type": "string", "description": f"The kind of this object: {kind}."},
            "metadata": {"type": "object"},
            **properties,
        },
    }


def _described(schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {**schema, "description": text}


def _column(name: str, path: str, text: str = "", *, kind: str = "string", wide: bool = False) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path}
    if text:
        column["description"] = text
    return column | ({"priority": 1} if wide else {})


def main(folders: list[str]) -> int:
    """Write the files into each folder, and remove what other CRDs lie there."""
    for folder in map(Path, folders):
        folder.mkdir(parents=True, exist_ok=True)
        files = crd_files()
        for stale in set(folder.glob(f"{GROUP}_*.yaml")) - {folder / name for name in files}:
            stale.unlink()
        for name, text in files.items():
            (folder / name).write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["crds", "charts/kvferry/files/crds"]))
