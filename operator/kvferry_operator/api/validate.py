"""Checks a manifest's values: fields first, rules between fields beside them, every fault in one go.

Pydantic runs a rule between fields only where the fields themselves are right. So each wrong field is replaced by a
harmless value once its fault is noted, and the manifest is checked again until nothing new is found.
"""

import copy
from functools import cache
from typing import Any

from pydantic import ValidationError

from kvferry_operator.api.faults import Fault, LineLookup, ManifestError, Path, SchemaView, faults_of
from kvferry_operator.api.normalize import normalized
from kvferry_operator.api.service import API_VERSION, KIND, InferenceService

MAX_ROUNDS = 16

# What stands in for a required field that is missing or wrong, by the last names of its path.
STAND_INS: dict[tuple[str, ...], Any] = {
    ("apiVersion",): API_VERSION,
    ("kind",): KIND,
    ("metadata",): {"name": "x"},
    ("metadata", "name"): "x",
    ("spec",): {"model": {"name": "x", "source": "demo:x"}, "decode": {}, "router": {"auth": "none"}},
    ("spec", "model"): {"name": "x", "source": "demo:x"},
    ("model", "name"): "x",
    ("model", "source"): "demo:x",
    ("spec", "decode"): {},
    ("spec", "router"): {"auth": "none"},
    ("secretRef", "name"): "x",
    ("tokenSecretRef", "name"): "x",
    ("tlsSecretRef", "name"): "x",
    ("ingress", "host"): "x",
    ("httpRoute", "gateway"): "x",
    ("router", "auth"): "none",
    ("router", "apiKeys"): {"keysFile": "x"},
    ("env", "name"): "KVFERRY_STAND_IN_",
    ("env", "value"): "",
    ("topologySpreadConstraints", "topologyKey"): "x",
}

OPTIONAL = {"apiKeys"}  # of those: taken away where given and not wanted
# Fields that say nothing without the one that is wrong: they go with it.
FOLLOWERS: dict[tuple[str, ...], str] = {("router", "auth"): "apiKeys"}


@cache
def manifest_schema() -> SchemaView:
    """The JSON schema of the manifest."""
    return SchemaView(InferenceService.model_json_schema(by_alias=True))


def validated(data: dict[str, Any], filename: str, line_of: LineLookup) -> InferenceService:
    """The manifest's typed form. Raises ``ManifestError`` with every fault."""
    found: set[Fault] = set()
    view = manifest_schema()
    # The caller's data, and YAML aliases within it, stay as they are.
    data = copy.deepcopy(normalized(data, view.root, view))
    for _ in range(MAX_ROUNDS):
        try:
            service = InferenceService.model_validate(data)
        except ValidationError as error:
            faults = faults_of(error, view, line_of)
            if found.issuperset(fault for _, fault in faults):
                break
            found.update(fault for _, fault in faults)
            for path, _ in sorted(faults, key=lambda item: len(item[0]), reverse=True):
                _neutralize(data, path)
        else:
            if not found:
                return service
            break
    raise ManifestError(filename, sorted(found))


def _neutralize(data: Any, path: Path) -> None:
    """Replace the value at a path by its stand-in; without one, take the field (or the list it is in) away."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    holder = data
    for part in path[:-1]:
        inside = part in holder if isinstance(holder, dict) else isinstance(holder, list) and isinstance(part, int)
        if not inside:
            return
        holder = holder[part]
    if not path or not isinstance(holder, dict):
        return
    names = tuple(part for part in path if isinstance(part, str))
    stand_in = STAND_INS.get(names) if len(names) == 1 else STAND_INS.get(names[-2:])
    present = path[-1] in holder
    unwanted = present and names[-1] in OPTIONAL and holder.get("auth") == "none"
    if stand_in is not None and not unwanted:
        # A name is made unique, or two stand-ins would break the rule against names given twice.
        holder[path[-1]] = f"{stand_in}{path[-2]}" if names[-2:] == ("env", "name") else copy.deepcopy(stand_in)
    elif present:
        del holder[path[-1]]
    if (follower := FOLLOWERS.get(names[-2:])) is not None:
        holder.pop(follower, None)
