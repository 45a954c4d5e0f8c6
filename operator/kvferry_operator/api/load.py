"""Reads a manifest's text: safely, and with the line of every field.

YAML is composed into nodes, never constructed into objects: only mappings, lists and plain scalars exist here. Size,
depth and number of values are capped (also through aliases), duplicate keys and further documents are refused.
"""

from collections.abc import Iterator
from typing import Any

import yaml

from kvferry_operator.api.faults import Fault, LineLookup, ManifestError, Path, dotted, given
from kvferry_operator.api.service import API_VERSION, KIND, InferenceService
from kvferry_operator.api.validate import validated

MAX_MANIFEST_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_VALUES = 10_000

_MAP, _SEQ, _STR = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:str"
_SCALARS = {
    "tag:yaml.org,2002:int": yaml.constructor.SafeConstructor.construct_yaml_int,
    "tag:yaml.org,2002:float": yaml.constructor.SafeConstructor.construct_yaml_float,
    "tag:yaml.org,2002:bool": yaml.constructor.SafeConstructor.construct_yaml_bool,
    "tag:yaml.org,2002:null": yaml.constructor.SafeConstructor.construct_yaml_null,
}
# What YAML 1.1 makes a date or a merge is plain text in a manifest, as it is for kubectl.
_TEXT_TAGS = {_STR, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value", "tag:yaml.org,2002:merge"}


def load_manifest(text: str, filename: str) -> InferenceService:
    """Parse and check a manifest.

    Args:
        text: the YAML (or JSON) of one ``InferenceService``.
        filename: how faults name the file; it is not opened.

    Raises:
        ManifestError: with every fault found.
    """
    root = _compose(text, filename)
    reader = _Reader()
    data = reader.value(root, (), 0)
    if reader.faults:
        raise ManifestError(filename, reader.faults)
    line_of = LineLookup(reader.lines)
    if not isinstance(data, dict):
        raise ManifestError(filename, [Fault(line_of(()), "", f"got {given(data)}; accepts one {KIND}")])
    if (foreign := _foreign(data)) is not None:
        raise ManifestError(filename, [Fault(line_of((foreign,)), foreign, _foreign_text(foreign, data))])
    return validated(data, filename, line_of)


def _foreign(data: dict[str, Any]) -> str | None:
    """The field that shows a document to be of another kind altogether, whose fields would all be faults."""
    version, kind = data.get("apiVersion"), data.get("kind")
    if kind != KIND and version != API_VERSION:
        return "kind" if "kind" in data else "apiVersion"
    return None


def _foreign_text(field: str, data: dict[str, Any]) -> str:
    what = f"got {given(data[field])}" if field in data else "missing"
    return f"{what}; accepts apiVersion {API_VERSION} with kind {KIND}"


def _compose(text: str, filename: str) -> yaml.Node:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_MANIFEST_BYTES:
        raise ManifestError(filename, [Fault(1, "", f"{size} bytes; accepts at most {MAX_MANIFEST_BYTES}")])
    try:
        _check_events(text, filename)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise ManifestError(filename, [Fault(mark.line + 1 if mark else 1, "", f"not YAML: {problem}")]) from None
    except yaml.YAMLError as error:  # a character that YAML does not allow: no mark, but a position
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        reason = getattr(error, "reason", "unreadable")
        raise ManifestError(filename, [Fault(line, "", f"not YAML: {reason}")]) from None
    assert root is not None, "a text without a document was refused above"
    return root


def _check_events(text: str, filename: str) -> None:
    """Refuse what composing (which recurses) must not see: deep nesting, several documents, none."""
    depth = documents = values = 0
    for event in _events(text):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                told = f"a second document begins here; accepts one {KIND} per file"
                raise ManifestError(filename, [Fault(line, "", told)])
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise ManifestError(filename, [Fault(line, "", f"nested deeper than {MAX_DEPTH} levels")])
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        values += isinstance(event, yaml.NodeEvent)
        if values > 2 * MAX_VALUES:
            raise ManifestError(filename, [Fault(line, "", f"more than {MAX_VALUES} values")])
    if not documents:
        raise ManifestError(filename, [Fault(1, "", f"empty; accepts one {KIND}")])


def _events(text: str) -> Iterator[yaml.Event]:
    yield from yaml.parse(text, Loader=yaml.SafeLoader)


class _Reader:
    """Turns nodes into dicts, lists and scalars, and keeps the line of each."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.faults: list[Fault] = []
        self._scalars = yaml.constructor.SafeConstructor()
        self._values = 0

    def value(self, node: yaml.Node, path: Path, depth: int) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        self._values += 1
        if self._values > MAX_VALUES or depth > MAX_DEPTH:
            if not self._overflowed():
                limit = f"{MAX_VALUES} values" if self._values > MAX_VALUES else f"{MAX_DEPTH} levels"
                self.faults.append(Fault(line, "", f"the document grows beyond {limit} through its aliases"))
            return None
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            return [self.value(item, (*path, index), depth + 1) for index, item in enumerate(self._bounded(node.value))]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path, line)
        return self._bad_tag(node, path, line)

    def _overflowed(self) -> bool:
        return any("through its aliases" in fault.text for fault in self.faults)

    def _bounded(self, items: list[Any]) -> Iterator[Any]:
        """The items until the document has grown too large."""
        for item in items:
            if self._overflowed():
                return
            yield item

    def _mapping(self, node: yaml.MappingNode, path: Path, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in self._bounded(node.value):
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in _TEXT_TAGS:
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a collection"
                self.faults.append(Fault(line, dotted(path), f"got the key {shown!r}; keys are strings (quote it)"))
                continue
            key = key_node.value
            below = (*path, key)
            if key in found:
                told = f"given twice, first on line {self.lines[below]}"
                self.faults.append(Fault(line, dotted(below), told))
                continue
            self.lines[below] = line
            found[key] = self.value(value_node, below, depth + 1)
        return found

    def _scalar(self, node: yaml.ScalarNode, path: Path, line: int) -> Any:
        if node.tag in _TEXT_TAGS:
            return node.value
        construct = _SCALARS.get(node.tag)
        if construct is None:
            return self._bad_tag(node, path, line)
        try:
            return construct(self._scalars, node)
        except (ValueError, KeyError):  # an explicit tag that the text does not fit; an integer of too many digits
            told = f"got {given(node.value)}; the text does not fit its YAML type"
            self.faults.append(Fault(line, dotted(path), told))
            return None

    def _bad_tag(self, node: yaml.Node, path: Path, line: int) -> None:
        self.faults.append(Fault(line, dotted(path), f"got the YAML tag {node.tag!r}; accepts plain values only"))
