"""What differs between an object as it should be and as it is, in words; and what need not be written again.

The API server fills in defaults and writes quantities its own way: only what we ask for is compared, and an empty value
equals an absent one.
"""

import hashlib
from typing import Any

import msgspec

from kvferry_operator.api.quantities import parse_quantity
from kvferry_operator.plan.manifests.meta import APPLIED, Object

MAX_SHOWN = 60


def stamped(wanted: Object) -> Object:
    """The object with the hash of itself, by which a field that is no longer asked for is noticed."""
    canonical = msgspec.json.encode(wanted, order="deterministic")
    mark = hashlib.sha256(canonical).hexdigest()[:16]
    metadata = wanted["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED: mark}
    return {**wanted, "metadata": {**metadata, "annotations": annotations}}


def first_difference(wanted: Object, found: Object) -> str | None:
    """The first difference in words; ``None`` where nothing is to be written. Both are objects of one name."""
    made = stamped(wanted)
    # Nearly always nothing differs: words are looked for where something does.
    return None if same(made, found) else _differs(made, found, "", hidden=False)


def same(wanted: Any, found: Any) -> bool:
    """Whether everything that is asked for is there."""
    if wanted == found or (_empty(wanted) and _empty(found)):
        return True
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(same(inner, found.get(key)) for key, inner in wanted.items())
    if isinstance(wanted, list):
        return isinstance(found, list) and len(wanted) == len(found) and all(map(same, wanted, found))
    return _same_quantity(wanted, found)


def _differs(wanted: Any, found: Any, path: str, *, hidden: bool) -> str | None:
    if _empty(wanted) and _empty(found):
        return None
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return f"{path}: missing"
        # The hash of the whole comes last: any other difference says more.
        for key in sorted(wanted, key=lambda key: (key in ("annotations", APPLIED), key == "metadata")):
            inner = f"{path}.{key}" if path else key
            told = _differs(wanted[key], found.get(key), inner, hidden=hidden or key == "env")
            if told is not None:
                return told
        return None
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(wanted) != len(found):
            there = len(found) if isinstance(found, list) else 0
            return f"{path}: {len(wanted)} items are wanted, {there} are there"
        for index, (ours, theirs) in enumerate(zip(wanted, found, strict=True)):
            name = ours.get("name", index) if isinstance(ours, dict) else index
            told = _differs(ours, theirs, f"{path}[{name}]", hidden=hidden)
            if told is not None:
                return told
        return None
    if wanted == found or _same_quantity(wanted, found):
        return None
    if path.endswith(APPLIED):
        return "not applied before" if found is None else "a field that was asked for before is not any more"
    if hidden:
        return f"{path}: another value is wanted"
    return f"{path}: {_shown(wanted)} is wanted, {_shown(found)} is there"


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def _same_quantity(wanted: Any, found: Any) -> bool:
    if not isinstance(wanted, str) or not isinstance(found, str):
        return False
    try:
        return parse_quantity(_plain(wanted)) == parse_quantity(_plain(found))
    except ValueError:
        return False


def _plain(quantity: str) -> str:
    """A quantity whose unit only the API server writes (1Pi for 1024Ti) in the largest unit that a manifest has."""
    for unit, smaller in (("Pi", "Ti"), ("P", "T")):
        number = quantity.removesuffix(unit)
        if number != quantity and number.isdigit():
            return f"{int(number) * (1024 if unit == 'Pi' else 1000)}{smaller}"
    return quantity


def _shown(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
