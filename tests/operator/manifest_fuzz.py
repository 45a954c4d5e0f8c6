"""Random manifests: a good one, changed at a few places to values that are at, beside, or far from what is accepted."""

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

from kvferry_operator.api.crds import service_crd
from tests.operator.manifests import make_manifest
from tests.operator.profiles import PROFILES

SCHEMA: dict[str, Any] = service_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
Path = tuple[str, ...]

ANYTHING: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63 - 1, 1.5, 2.0, -0.0, "", "0", "1", "true", "null", " ", "a",
    "é", "a\nb", [], {}, [1], [None], ["a"], {"a": "b"}, {"a": None}, {"": ""}, [{}], [[]], "x" * 64,
    "x" * 254, "x" * 2000,
)  # fmt: skip
TEXTS = (
    "0s", "1s", "10m", "601s", "600.5s", "1.5m", "999ms", "1000ms", "24h", "24h1ms", "1m30s", "1d", "-1s",
    "1s ", "1e3s", "s", "0.5h", "00001s", "1s\n", "1.s", ".5m", "9" * 31 + "s", "2", "500m", "1.5", "1.5Gi",
    "0.1Ki", "0", "-1", "1e3", "1E", "1Pi", "4Gi", "0Gi", "007", "0.0", "1 Gi", "1gi", "1Gi\n", "9" * 32,
    "9" * 33, "toy", "toy:", "toy:vocab=9", "toy:é", "demo:smollm2", "demo:", "demo:A", "org/name",
    "org/name@rev", "hf://org/name@a/b", "org/na..me", "org/", "/org/name", "./m", "~", "~/m", "..",
    "pvc://c", "pvc://c/", "pvc://c/a/b", "pvc://c/../b", "pvc://c-", "pvc://C/a", "image://r/i:1",
    "image://", "image://a@b", "s3://b/k", "https://h/x", "name", "Name", "a.b", "a_b", "-a", "a-", "a--b",
    "1a", "a:b", "a/b", "a@b", "*.a.b", "*", "a.", ".a", "a..b", "app.kubernetes.io/name",
    "serving.kvferry.dev/x", "example.com/x", "UPPER_case", "A", "_", "A=B", "Exists", "Equal", "NoSchedule",
    "auto", "always", "never", "none", "apiKeys", "tcp", "nixl", "float32", "recompute", "ClusterIP",
)  # fmt: skip
# What one side might read otherwise than the other: digits, letters, spaces and marks beyond ASCII, what nobody sees.
UNICODE = (
    "\u0661s", "\uff11Gi", "\u00b2", "\u0665\u0660\u0660m", "\uff41", "\u212a", "na\u0131ve", "\u0130", "\u00df",
    "e\u0301", "\u540d\u524d", "\U0001f389", "\u202eevil", "\u200b", "a\u200db", "a\u00a0b", "\u3000", "a\u0000b",
    "\x1b[31m", "a\u2028b", "a\u0085b", "\ufeffa", "\ufffd", "\U0010ffff", "a\tb", "a\rb", "1s\u2028", "toy:\u0661",
    "org/\u540d\u524d", "pvc://c/\U0001f389", "\u00e9" * 512,
)  # fmt: skip
KEYS = (
    "team", "example.com/team", "a b", "", "-a", "app.kubernetes.io/x", "cpu", "memory", "nvidia.com/gpu",
    "x" * 254, "é", "A/b",
)  # fmt: skip


def paths(schema: dict[str, Any] = SCHEMA, at: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every field of the manifest; ``[]`` stands for an item of a list, ``*`` for an entry of a mapping."""
    for name, inner in schema.get("properties", {}).items():
        if at or name == "spec":
            yield (*at, name), inner
            yield from paths(inner, (*at, name))
    if "items" in schema:
        yield (*at, "[]"), schema["items"]
        yield from paths(schema["items"], (*at, "[]"))
    if isinstance(schema.get("additionalProperties"), dict):
        yield (*at, "*"), schema["additionalProperties"]


PLACES = [(path, schema) for path, schema in paths() if path != ("spec",)]


def put(manifest: dict[str, Any], path: Path, value: Any) -> None:
    """Set a value at one of ``PLACES``."""
    *parents, leaf = path
    holder = _within(manifest, parents)
    if isinstance(holder, list):
        holder.insert(0, value)
    elif holder is not None:
        holder[KEYS[0] if leaf == "*" else leaf] = value


def _within(holder: Any, parents: Sequence[str]) -> Any:
    """The mapping or list at the end of a path, made where it is not there; ``None`` where a plain value is."""
    for part in parents:
        if isinstance(holder, list):
            if not holder:
                holder.append({})
            holder = holder[0]
        elif isinstance(holder, dict):
            if not isinstance(holder.get(part), dict | list):
                holder[part] = [] if part in LISTS else {}
            holder = holder[part]
    return holder if isinstance(holder, dict | list) else None


class Fuzz:
    """A stream of manifests; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def manifest(self) -> dict[str, Any]:
        """The next one: as often good as bad, or nearly so."""
        made = make_manifest(**self._random.choice(list(PROFILES.values())))
        for _ in range(self._random.choice((0, 0, 1, 1, 1, 2, 3))):
            path, schema = self._random.choice(PLACES)
            self._set(made, path, schema)
        if self._random.random() < 0.05:
            made["metadata"]["name"] = self._random.choice(TEXTS)
        return made

    def _set(self, holder: Any, path: Path, schema: dict[str, Any]) -> None:
        *parents, leaf = path
        holder = _within(holder, parents)
        if holder is None:
            return
        if isinstance(holder, list):
            holder.insert(0, self._value(schema))
        elif leaf == "*":
            holder[self._random.choice(KEYS)] = self._value(schema)
        elif self._random.random() < 0.1:
            holder.pop(leaf, None)
        elif self._random.random() < 0.05:
            holder[leaf + "s"] = self._value(schema)
        else:
            holder[leaf] = self._value(schema)

    def _value(self, schema: dict[str, Any]) -> Any:
        chance = self._random.random()
        kind = "text" if schema.get("x-kubernetes-int-or-string") else schema.get("type")
        if chance < 0.15:
            return copy.deepcopy(self._random.choice(ANYTHING))
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        if kind in ("integer", "number"):
            least, most = schema.get("minimum", 0), schema.get("maximum", 10)
            step = 1 if kind == "integer" else 0.5
            return self._random.choice((least, most, least - step, most + step, least + step, (least + most) // 2))
        if kind == "boolean":
            return self._random.random() < 0.5
        if kind in ("string", "text"):
            filled = self._random.choice(("x", "x", "\u540d", "\U0001f389")) * self._random.choice(
                (1, 63, 64, 128, 253, 1024)
            )
            return self._random.choice((self._random.choice(TEXTS), self._random.choice(UNICODE), filled))
        if kind == "array":
            return [self._value(schema["items"]) for _ in range(self._random.choice((0, 1, 1, 2, 17)))]
        if "properties" in schema:
            chosen = [name for name in schema["properties"] if self._random.random() < 0.4]
            needed = [name for name in schema.get("required", ()) if self._random.random() < 0.8]
            return {name: self._value(schema["properties"][name]) for name in sorted({*chosen, *needed})}
        if "additionalProperties" in schema:
            return {self._random.choice(KEYS): self._value(schema["additionalProperties"]) for _ in range(2)}
        return self._random.choice(({}, {"a": 1}, {"a": {"b": [None, "é"]}}))


LISTS = {path[-2] for path, _ in PLACES if path[-1] == "[]"}
